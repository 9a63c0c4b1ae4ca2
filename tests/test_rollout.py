"""`TRACETrainer.rollout`: episodes with the present policy, outside of training."""

import math
import re

import pytest
import torch
from datasets import Dataset

from tests.hostile_programs import HOSTILE
from tests.toys import call, make_model, make_tokenizer, make_trainer, speak
from trace_trl import StepResult
from trace_trl.environments.bfcl import bfcl_env
from trace_trl.environments.math_answers import math_accuracy
from trace_trl.environments.python import PythonTool, python_env


def chat(text, **columns):
    return {"prompt": [{"role": "user", "content": text}], **columns}


def talking(tmp_path, say, rows, **kwargs):
    model, tokenizer = make_model(max_position_embeddings=8192), make_tokenizer()
    speak(model, tokenizer, say)
    return make_trainer(
        tmp_path,
        model=model,
        tokenizer=tokenizer,
        dataset=Dataset.from_list(rows),
        max_completion_length=kwargs.pop("max_completion_length", 2000),
        **kwargs,
    )


def test_one_scored_tree_per_row_in_their_order(tmp_path):
    def env_step(state, action, messages):
        state["turns"] = state.get("turns", 0) + 1
        done = state["turns"] == state["number"]
        return StepResult(None if done else "on", done, float(done), info={"turns": state["turns"]})

    rows = [chat("go", number=number) for number in (3, 1, 2, 2)]
    trainer = talking(tmp_path, lambda history: "x", rows, env_step=env_step, reward_funcs=None)
    trainer.model.train()
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trees = trainer.rollout(rows + rows[:1])
    assert trainer.model.training
    leaves = [tree.leaves() for tree in trees]
    assert [len(group) for group in leaves] == [1] * 5
    assert [group[0].depth for group in leaves] == [3, 1, 2, 2, 3]
    assert [group[0].leaf.reward for group in leaves] == [1.0] * 5
    assert [group[0].leaf.info for group in leaves] == [{"turns": n} for n in (3.0, 1.0, 2.0, 2.0, 3.0)]
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    assert trainer.state.global_step == 0 and not trainer._metrics["eval"]
    assert rows[0] == chat("go", number=3)
    trainer.model.eval()
    trainer.rollout(rows[:1])
    assert not trainer.model.training


def test_without_rows(tmp_path):
    trainer = talking(tmp_path, lambda history: "x", [chat("go")] * 2)
    with pytest.raises(ValueError, match="at least one row"):
        trainer.rollout([])


def test_python_programs_in_text_and_the_answer_checked(tmp_path):
    def say(history):
        if "```output\n" not in history:
            return "```python\nprint(6 * 7)\n```"
        return "The answer is \\boxed{" + re.findall(r"```output\n(\d+)", history)[-1] + "}."

    env_reset, env_step = python_env()
    rows = [chat("6 * 7?", answer="42"), chat("6 * 7?", answer="41")]
    trainer = talking(tmp_path, say, rows, env_reset=env_reset, env_step=env_step, reward_funcs=math_accuracy)
    trees = trainer.rollout(rows)
    assert [tree.leaves()[0].leaf.reward for tree in trees] == [1.0, 0.0]
    assert [tree.leaves()[0].leaf.info["programs"] for tree in trees] == [1.0, 1.0]
    assert env_reset.__self__.sessions.idle == 0  # states are closed behind the scores
    env_reset.__self__.close()


def test_python_as_a_native_tool_in_training(tmp_path):
    turns = iter(range(10**6))

    def say(history):
        if "<tool_response>" not in history:
            return call("python", code=f"x = {next(turns)}\nx + 1")
        if history.count("<tool_response>") == 1:
            return call("python", code="x")
        first, second = re.findall(r"<tool_response>\n(\d+)", history)
        return f"\\boxed{{{int(first) - int(second)}}}"

    rows = [chat(f"count {n}", answer=str(n % 2)) for n in range(8)]
    trainer = talking(
        tmp_path,
        say,
        rows,
        environment_factory=PythonTool,
        reward_funcs=math_accuracy,
        num_generations=4,
        per_device_train_batch_size=12,
        continuations_per_root=2,
        max_steps=1,
    )
    trainer.train()
    # Every branch read its own variable, continuations included: x + 1 - x is always 1
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    assert len(rewards) == 1 and math.isfinite(rewards[0])
    trees = trainer.rollout(rows[:2])
    assert [tree.leaves()[0].leaf.reward for tree in trees] == [0.0, 1.0]


def test_bfcl_dialogue_with_tool_messages(tmp_path):
    """Ground truth through a whole trainer, in Qwen3's format, with its chat template."""
    env_reset, env_step = bfcl_env(call_format="json", docs="brief")
    environment = env_reset.__self__
    rows = [row for row in environment.rows(["base"]) if row["id"] in ("multi_turn_base_1", "multi_turn_base_4")]
    from trace_trl.environments.bfcl_calls import format_calls

    scripts = {
        row["prompt"][1]["content"]: [
            turn
            for calls in environment.ground_truth(row)
            for turn in filter(None, (format_calls(calls, "json") if calls else "", "Done."))
        ]
        for row in rows
    }

    def say(history):
        script = next(turns for question, turns in scripts.items() if question in history)
        return script[history.count("<|im_start|>assistant") - 1]

    trainer = talking(
        tmp_path, say, rows, env_reset=env_reset, env_step=env_step, reward_funcs=None, max_completion_length=6000
    )
    for tree, row in zip(trainer.rollout(rows), rows, strict=True):
        leaf = tree.leaves()[0]
        assert (leaf.leaf.reward, leaf.leaf.reason) == (1.0, "final"), leaf.leaf.environment.error
        assert leaf.depth == len(scripts[row["prompt"][1]["content"]])
        assert leaf.leaf.info["user_turns"] == len(environment.ground_truth(row))


def test_a_training_goes_on_whatever_its_programs_do(tmp_path):
    names = ["fork bomb", "memory hog", "endless loop", "huge output", "socket", "exit at once", "two answers"]
    names.append("binary garbage")
    said = []

    def say(history):
        if "```output\n" in history:
            return "\\boxed{5}" if len(said) % 2 else "\\boxed{6}"
        said.append(names[len(said) % len(names)])
        return f"```python\n{HOSTILE[said[-1]]}\n```"

    env_reset, env_step = python_env(timeout=0.3, wall_timeout=1.0, memory_mb=128, max_observation_chars=200)
    rows = [chat(f"problem {n}", answer="5") for n in range(8)]
    trainer = talking(
        tmp_path,
        say,
        rows,
        env_reset=env_reset,
        env_step=env_step,
        reward_funcs=math_accuracy,
        num_generations=4,
        per_device_train_batch_size=12,
        continuations_per_root=2,
        max_steps=2,
        max_completion_length=6000,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 2 and all(math.isfinite(log["loss"]) for log in logs)
    assert set(said) == set(names)
    assert all(log["rollout/environment_failures"] == 0 for log in logs)  # each was answered, none given up
    assert env_reset.__self__.sessions.idle == 0
    env_reset.__self__.close()
