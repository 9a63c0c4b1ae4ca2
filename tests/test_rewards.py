"""What reward functions may return, and what is said of those that return something else, or exit."""

import threading

import numpy as np
import pytest
import torch

from toys import generation_batch, make_model, make_tokenizer, make_trainer, usual


TOKENIZER = make_tokenizer()


def scored(tmp_path, *reward_funcs, **kwargs):
    """The rewards of one batch whose rollouts all say "red"."""
    ids = [*usual(TOKENIZER, "red"), TOKENIZER.eos_token_id]
    trainer = make_trainer(tmp_path, lambda request: ids, reward_funcs=list(reward_funcs), **kwargs)
    seen = []
    score = trainer._engine.score

    def watched(leaves):
        score(leaves)
        seen.extend(turn.leaf.rewards for _, turn in leaves)

    trainer._engine.score = watched
    generation_batch(trainer)
    return seen


def says(tmp_path, function, *parts):
    with pytest.raises(ValueError) as error:
        scored(tmp_path, function)
    message = str(error.value)
    assert message.startswith("The reward function 'reward' returned ") and message.endswith(".")
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


ITERABLES = {
    "list": list,
    "tuple": tuple,
    "generator": lambda rewards: (reward for reward in rewards),
    "map": lambda rewards: map(float, rewards),
    "numpy": np.array,
    "tensor": torch.tensor,
    "column": lambda rewards: torch.tensor(rewards).unsqueeze(1),
}


@pytest.mark.parametrize("kind", ITERABLES)
@pytest.mark.parametrize("is_async", [False, True])
def test_rewards_may_be_anything_that_gives_one_number_per_completion(tmp_path, kind, is_async):
    def reward(completions, **kwargs):
        return ITERABLES[kind]([0.5] * len(completions))

    async def async_reward(completions, **kwargs):
        return reward(completions)

    rewards = scored(tmp_path, async_reward if is_async else reward)
    assert rewards == [[0.5]] * 4


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda count: None, "returned None:"),
        (lambda count: 1.0, "returned an object of type float:"),
        (lambda count: torch.tensor(1.0), "returned an object of type Tensor:"),
        (lambda count: dict.fromkeys(range(count), 1.0), "returned an object of type dict:"),
        (lambda count: {0.5, 1.0}, "returned an object of type set:"),
        (lambda count: "1" * count, "returned an object of type str:"),
        (lambda count: [1.0], "returned 1 rewards, but"),
        (lambda count: (1.0 for _ in range(count + 1)), "rewards, but"),
        (lambda count: [[1.0]] * count, "returned an object of type list as one of its rewards:"),
        (lambda count: [torch.ones(2)] * count, "returned an object of type Tensor as one of its rewards:"),
        (lambda count: ["good"] * count, "returned an object of type str as one of its rewards:"),
        (lambda count: [10**400] * count, "returned an object of type int as one of its rewards:"),
    ],
)
def test_what_is_no_list_of_rewards_is_refused_by_name(tmp_path, answer, told):
    def reward(completions, **kwargs):
        return answer(len(completions))

    says(tmp_path, reward, told)


def test_what_an_async_function_returns_is_refused_by_name(tmp_path):
    async def reward(completions, **kwargs):
        return None

    says(tmp_path, reward, "returned None:")


def test_a_coroutine_that_nobody_can_see_is_refused_by_name(tmp_path):
    async def later(count):
        return [1.0] * count

    def reward(completions, **kwargs):
        coroutine = later(len(completions))
        coroutine.close()
        return coroutine

    says(tmp_path, reward, "returned an object of type coroutine:")


def test_what_a_generator_of_rewards_raises_is_its_own(tmp_path):
    def reward(completions, **kwargs):
        for _ in completions:
            raise TypeError("of the reward function")
            yield

    with pytest.raises(TypeError, match="^of the reward function$"):
        scored(tmp_path, reward)


def test_logging_a_column_of_another_length_names_the_column(tmp_path):
    def reward(completions, log_extra, **kwargs):
        log_extra("x", [1])
        return [1.0] * len(completions)

    with pytest.raises(ValueError) as error:
        scored(tmp_path, reward, continuations_per_root=0)
    assert str(error.value) == (
        "`log_extra` was given 1 values for the column 'x', but 4 were expected: give it one value per completion."
    )


def test_an_async_reward_function_that_exits_ends_the_run_and_not_the_event_loop(tmp_path):
    async def reward(completions, **kwargs):
        raise SystemExit(3)

    async def other(completions, **kwargs):
        return [1.0] * len(completions)

    trainer = make_trainer(tmp_path, model=make_model(), reward_funcs=[reward, other])
    raised = []

    def train():
        try:
            trainer.train()
        except BaseException as error:
            raised.append(error)

    # It hung for good
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(240)
    assert not thread.is_alive()
    (error,) = raised
    assert isinstance(error, RuntimeError) and "SystemExit" in str(error)
    assert trainer.async_loop_thread.is_alive()
