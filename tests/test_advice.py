"""What a run is told once, because its numbers show a setting under which it can't learn."""

import logging
import math

import pytest

from toys import make_tokenizer, make_trainer
from trace_trl import StepResult
from trace_trl.advice import MOST_CUT, PATIENCE, OutcomeWatch, cut_leaves


END = make_tokenizer().eos_token_id


def shares(length=0.0, turns=0.0, overflow=0.0):
    return {"rollout/ended_length": length, "rollout/ended_turns": turns, "rollout/ended_overflow": overflow}


@pytest.mark.parametrize("success", [True, False])
def test_one_kind_of_outcome_with_different_rewards_is_said_once(success):
    watch = OutcomeWatch(0.5)
    said = [watch.see([success, success, None], [3.0, 7.0]) for _ in range(PATIENCE + 3)]
    assert [text is not None for text in said] == [number == PATIENCE - 1 for number in range(PATIENCE + 3)]
    text = said[PATIENCE - 1]
    assert "`success_threshold=0.5`" in text and "between 3 and 7" in text
    assert ("success by" if success else "failure by") in text
    assert watch.is_blind


def test_different_outcomes_end_it():
    watch = OutcomeWatch(0.5)
    for _ in range(PATIENCE):
        assert not watch.is_blind
        watch.see([True, True], [3.0, 7.0])
    assert watch.is_blind
    watch.see([True, False], [3.0, 0.0])
    assert not watch.is_blind and watch.generations == 0


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [], [2.0]])
def test_equal_rewards_are_no_sign_of_a_wrong_threshold(rewards):
    """All tasks are out of reach, or solved, or nothing was scored: that is no fault of the threshold."""
    watch = OutcomeWatch(0.5)
    for _ in range(PATIENCE + 1):
        assert watch.see([False for _ in rewards], rewards) is None
    assert not watch.is_blind


def test_cut_leaves_name_the_option_of_the_most_frequent_limit():
    assert cut_leaves(shares(length=MOST_CUT - 0.01)) is None
    assert "raise `max_completion_length` (or `max_turn_length`" in cut_leaves(shares(length=MOST_CUT))
    assert "raise `max_turns` (or `max_tool" in cut_leaves(shares(length=0.2, turns=0.7))
    assert "shorten the environment's answers" in cut_leaves(shares(length=0.3, turns=0.3, overflow=0.4))
    assert cut_leaves(shares(length=math.nan)) is None


def rewarding(rewards):
    """An `env_step` that ends each episode with the next of some rewards, again and again."""
    given = []

    def env_step(state, action, messages):
        given.append(rewards[len(given) % len(rewards)])
        return StepResult(done=True, reward=given[-1])

    return env_step


def trained(tmp_path, rewards, caplog, monkeypatch, **kwargs):
    """Bare rollouts of each candidate in every generation, whether by the values, and what was warned of."""
    from trace_trl import trainer as module

    generations = []

    def allocate(pool, args, seed, **options):
        counts = original(pool, args, seed, **options)
        generations.append((options["uniform"], counts))
        return counts

    original = module.allocate
    monkeypatch.setattr(module, "allocate", allocate)
    options = dict(per_device_train_batch_size=12, num_generations=6, env_max_workers=1, max_steps=6)
    options |= {"reward_funcs": None, "env_step": rewarding(rewards), "script": lambda request: [7, END]}
    trainer = make_trainer(tmp_path, **options | kwargs)
    with caplog.at_level(logging.WARNING, logger="trace_trl.trainer"):
        trainer.train()
    return trainer, generations, [record.getMessage() for record in caplog.records if record.name.endswith("trainer")]


@pytest.mark.parametrize("rewards", [[3.0, 4.0, 5.0, 6.0, 7.0], [-3.0, -1.0, -2.0, -5.0, -4.0]])
def test_case_50_rewards_on_one_side_of_the_threshold(tmp_path, caplog, monkeypatch, rewards):
    """Counts and penalties as rewards: one sentence names the option, and all prompts stay in play."""
    trainer, generations, said = trained(tmp_path, rewards, caplog, monkeypatch)
    assert [uniform for uniform, _ in generations] == [False] * PATIENCE + [True] * (6 - PATIENCE)
    assert [text for text in said if "success_threshold" in text] == [text for text in said if "uniformly" in text]
    assert sum("success_threshold" in text for text in said) == 1
    even = trainer.args.rollouts_per_group
    for uniform, counts in generations:
        assert sum(counts) == trainer.args.rollout_budget
        assert not uniform or set(counts) <= {0, even}
    assert not any("predictor/auroc" in entry for entry in trainer.state.log_history)
    assert trainer._engine.prefix_allocation == "uniform"


def test_outcomes_that_differ_leave_the_allocation_to_the_values(tmp_path, caplog, monkeypatch):
    _, generations, said = trained(tmp_path, [3.0, 0.0, 1.0, 0.2, 0.0], caplog, monkeypatch)
    assert [uniform for uniform, _ in generations] == [False] * 6
    assert not any("success_threshold" in text for text in said)


def test_a_resumed_run_has_seen_what_the_first_saw(tmp_path, caplog, monkeypatch):
    whole, _, _ = trained(tmp_path, [3.0, 4.0], caplog, monkeypatch, max_steps=2, save_steps=2, save_strategy="steps")
    assert whole._outcomes.generations == 2
    again = make_trainer(
        tmp_path,
        **dict(per_device_train_batch_size=12, num_generations=6, env_max_workers=1, max_steps=3),
        **dict(reward_funcs=None, env_step=rewarding([3.0, 4.0]), script=lambda request: [7, END]),
    )
    again.train(resume_from_checkpoint=True)
    assert again._outcomes.generations == 3


def test_case_52_leaves_that_a_limit_cut_are_counted_and_said(tmp_path, caplog, monkeypatch):
    """`max_turn_length=12` with answers of 40 tokens: every leaf is cut, which one sentence says, with the option."""
    options = dict(max_turn_length=12, max_completion_length=60, script=lambda request: [7] * 40)
    trainer, _, said = trained(tmp_path, [0.0], caplog, monkeypatch, max_steps=3, **options)
    assert sum("`max_turn_length`" in text for text in said) == 1
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["rollout/ended_length"] for entry in logs] == [1.0] * 3
    assert [entry["rollout/ended_turns"] + entry["rollout/ended_overflow"] for entry in logs] == [0.0] * 3
