"""With uniform roots and no continuations, TRACETrainer is TRL's GRPOTrainer: to the bit where both sample alike."""

import asyncio
import collections
import random

import pytest
import torch
import transformers
from trl import GRPOConfig, GRPOTrainer

from toys import call, chat_dataset, few_words, length_reward, make_config, make_model, make_tokenizer, string_dataset
from trace_trl import TRACEConfig, TRACETrainer
from trace_trl.generation import Sample


TIMES = ("step_time", "_runtime", "_per_second")  # what differs between two runs of one script
FLAT = {"root_allocation": "uniform", "continuations_per_root": 0}


class Recorder(transformers.TrainerCallback):
    """Gradients before each optimizer step."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def run(cls, output_dir, dataset, patch=None, template="qwen3", **kwargs):
    """Trains 5 steps. Returns the trainer, the inputs of every loss, the losses, and the gradients."""
    names = ("tools", "environment_factory", "reward_processing_classes")
    trainer_kwargs = {key: kwargs.pop(key) for key in names if key in kwargs}
    reward_funcs = list(kwargs.pop("reward_funcs", [length_reward]))  # TRL appends to it
    config_cls = GRPOConfig if cls is GRPOTrainer else TRACEConfig
    flat = {} if cls is GRPOTrainer else FLAT
    recorder = Recorder()
    folder = output_dir / "model"  # TRL loads the reference model of `beta` by name
    if not folder.exists():
        make_model(max_position_embeddings=2048).save_pretrained(folder)
    trainer = cls(
        model=transformers.Qwen3ForCausalLM.from_pretrained(folder),
        reward_funcs=reward_funcs,
        args=make_config(output_dir / cls.__name__, cls=config_cls, **({"max_steps": 5} | flat | kwargs)),
        train_dataset=dataset,
        processing_class=make_tokenizer(template),
        callbacks=[recorder],
        **trainer_kwargs,
    )
    seen, losses = [], []
    compute_loss = trainer._compute_loss

    def recording(model, inputs):
        seen.append({key: value.clone() for key, value in inputs.items() if isinstance(value, torch.Tensor)})
        losses.append(compute_loss(model, inputs))
        return losses[-1]

    trainer._compute_loss = recording
    if patch is not None:
        patch(trainer)
    trainer.train()
    return trainer, seen, [loss.item() for loss in losses], recorder.gradients


def logged(trainer):
    return [{k: v for k, v in entry.items() if not k.endswith(TIMES)} for entry in trainer.state.log_history]


def loss_mask(inputs):
    return inputs["completion_mask"] * inputs.get("tool_mask", torch.ones_like(inputs["completion_mask"]))


def assert_same_run(ours, reference, but=()):
    """To the bit, and logs to 1e-6 (TRL takes means of integers in float32)."""
    trainer, seen, losses, gradients = ours
    trl_trainer, trl_seen, trl_losses, trl_gradients = reference
    assert len(seen) == len(trl_seen) >= trainer.state.max_steps > 0
    for inputs, expected in zip(seen, trl_seen, strict=True):
        mask = loss_mask(expected)
        assert loss_mask(inputs).tolist() == mask.tolist()
        # A mask may be split otherwise between the two masks, and an untrained token's log-prob is of no use
        assert inputs.keys() - {"tool_mask"} == expected.keys() - {"tool_mask"}
        for key, value in expected.items():
            if key.endswith("logps"):
                assert bool((inputs[key] * mask == value * mask).all()), key
            elif key in inputs:
                assert inputs[key].tolist() == value.tolist(), key
    assert losses == trl_losses
    assert len(gradients) == len(trl_gradients) == trainer.state.max_steps
    for found, expected in zip(gradients, trl_gradients, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    weights, expected = trainer.model.state_dict(), trl_trainer.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    start = make_model().state_dict()
    assert not all(torch.equal(weights[name], weight) for name, weight in start.items())
    for entry, expected in zip(logged(trainer), logged(trl_trainer), strict=True):
        expected = {key: value for key, value in expected.items() if not key.endswith(but)}
        assert {key: entry.get(key) for key in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    "dataset, kwargs",
    [
        (string_dataset, {"per_device_train_batch_size": 8, "multi_objective_aggregation": "normalize_then_sum"}),
        (chat_dataset, {"num_generations": 2}),
        (string_dataset, {"gradient_accumulation_steps": 2, "beta": 0.1, "loss_type": "grpo"}),
        (chat_dataset, {"num_iterations": 2, "gradient_accumulation_steps": 2, "scale_rewards": "batch"}),
        (string_dataset, {"steps_per_generation": 2, "mask_truncated_completions": True, "beta": 0.05}),
    ],
    ids=["string", "chat", "accumulation-beta", "iterations", "truncated"],
)
def test_parity_without_tools(tmp_path, dataset, kwargs):
    kwargs = kwargs | {"generation_kwargs": few_words()}
    reference = run(GRPOTrainer, tmp_path, dataset(), **kwargs)
    assert_same_run(run(TRACETrainer, tmp_path, dataset(), **kwargs), reference)
    lengths = {int(length) for inputs in reference[1] for length in inputs["completion_mask"].sum(dim=1)}
    assert len(lengths) > 3
    assert any(inputs["advantages"].abs().max() > 0.05 for inputs in reference[1])


@pytest.mark.parametrize("dataset", [string_dataset, chat_dataset], ids=["string", "chat"])
def test_parity_with_a_reward_model(tmp_path, dataset):
    torch.manual_seed(5)
    reward_model = transformers.Qwen3ForSequenceClassification(make_model(num_labels=1).config)
    kwargs = {
        "reward_funcs": [reward_model, length_reward],
        "reward_processing_classes": [make_tokenizer(), None],
        "reward_weights": [1.0, -0.5],
        "generation_kwargs": few_words(),
        "max_steps": 2,
    }
    reference = run(GRPOTrainer, tmp_path, dataset(), **kwargs)
    assert_same_run(run(TRACETrainer, tmp_path, dataset(), **kwargs), reference)
    spread = [v for k, v in logged(reference[0])[0].items() if k.startswith("rewards/") and k.endswith("/std")]
    assert len(spread) == 2 and min(spread) > 1e-3


# With tools and environments: both trainers are given the same turns


def add(a: int, b: int) -> int:
    """
    Adds.

    Args:
        a: One.
        b: Two.
    """
    return a + b


def divide(a: int, b: int) -> float:
    """
    Divides.

    Args:
        a: One.
        b: Two.
    """
    return a / b


async def slow_add(a: int, b: int) -> int:
    """
    Adds.

    Args:
        a: One.
        b: Two.
    """
    await asyncio.sleep(0)
    return a + b


CALLS = [
    call("add", a=1, b=2),
    "1 and 2: " + call("add", a=4, b=5),
    call("add", a=1, b=1) + "\n" + call("divide", a=6, b=3),
    call("divide", a=1, b=0),
    call("divide", a=1, b=0) + call("add", a=2, b=2),
    call("multiply", a=1, b=2),
    call("slow_add", a=3, b=4),
    call("slow_add", a=3, b=4) + "\n" + call("slow_add", a=5, b=6),
]
ANSWERS = ["", "red", "the answer is 3", "yes no yes no yes no"]


class SameTurns:
    """Turns that follow from the context and from how often it was continued before, whichever trainer asks."""

    def __init__(self, texts, weights, seed=0):
        tokenizer = make_tokenizer()
        self.turns = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        self.weights = weights
        self.seed = seed
        self.asked = collections.Counter()

    def turn(self, context):
        key = tuple(context)
        self.asked[key] += 1
        return random.Random(f"{self.seed} {key} {self.asked[key]}").choices(self.turns, self.weights)[0]

    def patch(self, trainer):
        if type(trainer) is GRPOTrainer:
            trainer._generate_single_turn = lambda prompt_ids, *args, **kwargs: (
                [self.turn(ids)[: trainer.max_completion_length] for ids in prompt_ids],
                None,
            )
        else:
            trainer._engine.generate = self.samples

    def samples(self, requests):
        turns = [(self.turn(request.context), request.max_new_tokens) for request in requests]
        return [Sample(ids[:limit], "eos" if len(ids) <= limit else "length") for ids, limit in turns]


def run_with_turns(cls, output_dir, dataset, turns, **kwargs):
    return run(cls, output_dir, dataset, patch=turns().patch, max_steps=3, **kwargs)


def tool_turns():
    return SameTurns(CALLS + ANSWERS, [2] * len(CALLS) + [1] * len(ANSWERS))


# TRL counts an episode as ended that a limit on rounds or an oversized answer cut behind the end of a turn
CUT = ("completions/clipped_ratio", "terminated_length")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_tool_calling_iterations": 2, "beta": 0.1, "loss_type": "grpo"},
        {"max_completion_length": 120, "per_device_train_batch_size": 8},
    ],
    ids=["rounds", "budget"],
)
def test_parity_with_tools(tmp_path, kwargs):
    kwargs = {"tools": [add, divide, slow_add], "max_completion_length": 400} | kwargs
    reference = run_with_turns(GRPOTrainer, tmp_path, chat_dataset(), tool_turns, **kwargs)
    ours = run_with_turns(TRACETrainer, tmp_path, chat_dataset(), tool_turns, **kwargs)
    assert_same_run(ours, reference, but=CUT)
    assert all("tool_mask" in inputs for inputs in ours[1])
    assert any(0.0 < entry["tools/failure_frequency"] < 1.0 for entry in logged(ours[0])[:-1])
    observed = [int(n) for i in ours[1] for n in (i["completion_mask"] * (1 - i["tool_mask"])).sum(dim=1)]
    assert 0 in observed and max(observed) > 20


class Counter:
    """A tally that starts at the row's number."""

    def reset(self, number, **kwargs):
        self.count = number
        return f" The tally is {number}."

    def increase(self, by: int) -> int:
        """
        Increases.

        Args:
            by: How much.
        """
        if by > 5:
            raise ValueError("That is too much.")
        self.count += by
        return self.count

    def get_reward(self):
        return self.count / 10


def tally(environments, completions, **kwargs):
    return [environment.count + len(messages) for environment, messages in zip(environments, completions, strict=True)]


def counter_turns():
    one, two, many = call("increase", by=1), call("increase", by=2), call("increase", by=7)
    return SameTurns([one, two + one, many + two, "the answer is 3"], [2, 2, 1, 3], seed=1)


def test_parity_with_an_environment(tmp_path):
    kwargs = {
        "environment_factory": Counter,
        "reward_funcs": [tally, length_reward],
        "reward_weights": [0.5, 2.0],  # `get_reward` has weight 1
        "max_completion_length": 300,
        "remove_unused_columns": False,
    }
    reference = run_with_turns(GRPOTrainer, tmp_path, chat_dataset(), counter_turns, **kwargs)
    ours = run_with_turns(TRACETrainer, tmp_path, chat_dataset(), counter_turns, **kwargs)
    assert_same_run(ours, reference, but=CUT)
    names = [f"rewards/{name}/mean" for name in ("tally", "length_reward", "Counter")]
    assert len({logged(ours[0])[0][name] for name in names}) == 3


def two_rewards():
    def parity_of_length(completion_ids, **kwargs):
        return [float(len(ids) % 2) if len(ids) % 5 else None for ids in completion_ids]

    return [length_reward, parity_of_length]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"scale_rewards": "group"},
        {"scale_rewards": "batch", "loss_type": "grpo", "turn_weighting": "on_policy"},
        {"scale_rewards": "none", "advantage_estimator": "treepo"},
        {"multi_objective_aggregation": "normalize_then_sum", "advantage_estimator": "leaf"},
        {"mask_truncated_completions": True, "advantage_estimator": "tree_grpo", "turn_weighting": "per_leaf"},
    ],
    ids=["group", "batch", "none", "normalized", "truncated"],
)
def test_trees_without_branches_give_trls_advantages(tmp_path, monkeypatch, kwargs):
    """TRL's own numbers stand where a setting is plain GRPO; those of the trees would be the same."""
    kwargs = kwargs | {
        "per_device_train_batch_size": 16,
        "generation_kwargs": few_words(),
        "reward_funcs": two_rewards(),
        "reward_weights": [0.5, 2.0],
        "max_steps": 1,
    }
    ours = {key: kwargs.pop(key) for key in ("advantage_estimator", "turn_weighting") if key in kwargs}

    def from_trees(trainer):
        monkeypatch.setattr(TRACETrainer, "_is_plain_grpo", False)

    _, seen, losses, gradients = run(TRACETrainer, tmp_path, string_dataset(), patch=from_trees, **kwargs, **ours)
    trl_trainer, trl_seen, trl_losses, trl_gradients = run(GRPOTrainer, tmp_path, string_dataset(), **kwargs)
    mask = loss_mask(trl_seen[0])
    assert seen[0]["completion_ids"].tolist() == trl_seen[0]["completion_ids"].tolist()
    assert loss_mask(seen[0]).tolist() == mask.tolist()
    expected = trl_seen[0]["advantages"].unsqueeze(1) * mask
    assert seen[0]["advantages"].shape == expected.shape
    torch.testing.assert_close(seen[0]["advantages"], expected, rtol=2e-6, atol=2e-6)
    assert expected.abs().max() > 0.1
    assert losses == pytest.approx(trl_losses, rel=1e-5, abs=1e-6)
    for name, gradient in trl_gradients[0].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-5, atol=1e-6)
