"""Environments that never work end a run; those that fail now and then cost branches."""

import traceback

import pytest

from toys import make_tokenizer, make_trainer
from trace_trl import StepResult
from trace_trl.environments.base import ContractError


END = make_tokenizer().eos_token_id


def trainer_of(tmp_path, env_step, **kwargs):
    options = dict(per_device_train_batch_size=6, num_generations=3, max_turns=3, max_completion_length=400)
    options |= dict(reward_funcs=None, script=lambda request: [7, END], env_step=env_step)
    return make_trainer(tmp_path, **options | kwargs)


@pytest.mark.parametrize(
    "answer", [None, {"observation": "x"}, ("x", 0.0, False, False, {})], ids=["none", "dict", "gym"]
)
def test_case_51_an_env_step_without_a_step_result_ends_the_run_at_once(tmp_path, answer):
    calls = []

    def env_step(state, action, messages):
        calls.append(action)
        return answer

    trainer = trainer_of(tmp_path, env_step)
    with pytest.raises(ContractError, match="return `trace_trl.StepResult"):
        trainer.train()
    assert 0 < len(calls) <= trainer.args.rollout_budget  # one round
    assert trainer.state.global_step == 0


def test_case_51_an_env_step_that_always_raises_ends_the_run_with_its_traceback(tmp_path):
    """Every call of a generation failed: the reward would be 0 for ever, and one warning the only sign."""

    def env_step(state, action, messages):
        return StepResult(observation=state["no such column"])

    trainer = trainer_of(tmp_path, env_step)
    with pytest.raises(
        RuntimeError, match="environment calls of this generation failed, first with KeyError"
    ) as error:
        trainer.train()
    shown = "".join(traceback.format_exception(error.value))
    assert 'state["no such column"]' in shown  # the line that is to be mended
    assert trainer.state.global_step == 0


def test_in_an_evaluation_too(tmp_path):
    trainer = trainer_of(tmp_path, lambda state, action, messages: 1 / 0)
    with pytest.raises(RuntimeError, match="failed, first with ZeroDivisionError"):
        trainer.rollout([dict(trainer.train_dataset[0])])


def test_one_call_that_works_is_enough(tmp_path):
    calls = []

    def env_step(state, action, messages):
        calls.append(action)
        if len(calls) % 6 != 1:
            raise ValueError("not now")
        return StepResult(done=True, reward=1.0)

    trainer = trainer_of(tmp_path, env_step, env_max_workers=1)
    trainer.train()
    assert trainer.state.global_step == 2
    failures = [entry["rollout/environment_failures"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(failures) == 2 and min(failures) > 0


def test_tools_that_the_policy_calls_wrongly_end_nothing(tmp_path):
    """An untrained policy may call every tool wrongly for a whole generation: that is what it has to unlearn."""

    def lookup(word: str) -> str:
        """
        Looks a word up.

        Args:
            word: what to look up.
        """
        raise KeyError(word)

    tokenizer = make_tokenizer()
    call = tokenizer.encode('<tool_call>\n{"name": "lookup", "arguments": {"word": "x"}}\n</tool_call>')
    options = dict(
        env_step=None, tools=[lookup], reward_funcs=[lambda completions, **kwargs: [1.0] * len(completions)]
    )
    trainer = trainer_of(tmp_path, script=lambda request: [*call, END], **options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["tools/failure_frequency"] for entry in logs] == [1.0, 1.0]
