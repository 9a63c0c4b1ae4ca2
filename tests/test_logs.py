"""What a run tells: metrics, tables, the progress display, the tree log, the model card, and saved value heads."""

import fcntl
import io
import itertools
import json
import math
import os
import pty
import random
import re
import struct
import sys
import termios
import threading
from collections import Counter
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import base_trainer

from toys import QUESTIONS, chat_dataset, length_reward, make_config, make_model, make_tokenizer, speak, string_dataset
from trace_trl import StepResult, SuccessPredictor, TRACEConfig, TRACETrainer
from trace_trl.engine import Stats
from trace_trl.model_card import base_model_id
from trace_trl.progress import RolloutProgress, step_line
from trace_trl.tree_log import tree_from_dict


ROOT = Path(__file__).parent.parent


def trainer(output_dir, train_dataset=None, reward_funcs=length_reward, model=None, **kwargs):
    """A trainer on string prompts; keyword arguments of the trainer are told from those of its configuration."""
    names = ("eval_dataset", "env_step", "env_reset", "tools", "environment_factory", "peft_config", "callbacks")
    arguments = {name: kwargs.pop(name) for name in names if name in kwargs}
    options = dict(gradient_accumulation_steps=3, max_completion_length=10) | kwargs
    return TRACETrainer(
        model=make_model() if model is None else model,
        reward_funcs=reward_funcs,
        args=make_config(output_dir, **options),
        train_dataset=string_dataset() if train_dataset is None else train_dataset,
        processing_class=make_tokenizer(),
        **arguments,
    )


def logged(run, key: str) -> list[dict]:
    return [entry for entry in run.state.log_history if key in entry]


# Evaluation


@pytest.mark.parametrize("generations", [1, 3])
def test_case_36_evaluation_before_and_in_the_middle(tmp_path, generations):
    calls = []

    def reward(prompts, completions, **kwargs):
        calls.extend((run.model.training, *pair) for pair in zip(prompts, completions, strict=True))
        return length_reward(completions)

    run = trainer(
        tmp_path,
        reward_funcs=reward,
        eval_dataset=string_dataset(4),
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        num_generations_eval=generations,
        per_device_eval_batch_size=6,
    )
    run.train()
    evaluations = logged(run, "eval_reward")
    assert [entry["step"] for entry in evaluations] == [0, 1, 2]
    # Training is untouched: 2 steps of 12 leaves
    assert sum(training for training, *_ in calls) == 24
    # Each prompt is rolled out so often, each rollout scored once
    rollouts = [(prompt, completion) for training, prompt, completion in calls if not training]
    size = 4 * generations
    assert len(rollouts) == 3 * size
    for number, entry in enumerate(evaluations):
        part = rollouts[number * size : (number + 1) * size]
        assert Counter(prompt for prompt, _ in part) == dict.fromkeys(QUESTIONS[:4], generations)
        batches = [part[start : start + 6] for start in range(0, size, 6)]
        means = [sum(length_reward([completion for _, completion in batch])) / len(batch) for batch in batches]
        assert entry["eval_reward"] == pytest.approx(sum(means) / len(means), abs=1e-6)
        assert entry["eval_rollout/turns_per_leaf"] == 1
        assert not any("effective" in key or "predictor/" in key for key in entry)
    # Nothing of an evaluation slips into the next training log, nor the other way round
    assert not any(key.startswith("eval_") for entry in logged(run, "loss") for key in entry)
    assert all({"reward", "effective_ratio"} <= set(entry) for entry in logged(run, "loss"))


# Model card


@pytest.mark.parametrize("with_peft", [False, True])
def test_case_37_model_card_offline_from_a_local_path(tmp_path, monkeypatch, with_peft):
    peft = pytest.importorskip("peft")
    make_model().save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    cards = []
    generate = base_trainer.generate_model_card
    monkeypatch.setattr(base_trainer, "generate_model_card", lambda **kw: cards.append(kw) or generate(**kw))
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if with_peft else None
    run = TRACETrainer(
        model=str(tmp_path / "base"),
        reward_funcs=length_reward,
        args=make_config(tmp_path / "run", save_strategy="steps", save_steps=1, save_only_model=True),
        train_dataset=string_dataset(),
        peft_config=lora,
    )
    run.train()
    assert len(cards) == 2  # at each of two checkpoints, once
    text = (tmp_path / "run" / "README.md").read_text()
    _, header, body = text.split("---", 2)
    assert {"trl", "grpo", "trace"} <= set(re.findall(r"^- (\S+)$", header, re.MULTILINE))
    assert "model_name: run" in header
    assert "TRACE: Tree Rollout Allocation for Contrastive Exploration" in body
    assert "2606.11119" in body and "@article{trace2026" in body
    assert str(tmp_path) not in body  # a path is no model of the Hub


def card_of(folder) -> tuple[dict, str]:
    """Metadata and text of a folder's model card."""
    card = ModelCard.load(folder / "README.md")
    return card.data.to_dict(), card.text


def saved_run(model, **kwargs):
    """A run that began with the model of a folder, saved at a checkpoint and at its end in `run`."""
    options = dict(save_strategy="steps", save_steps=1, max_steps=1, gradient_accumulation_steps=3)
    run = TRACETrainer(
        model=model,
        reward_funcs=length_reward,
        args=make_config("run", **options),
        train_dataset=string_dataset(),
        processing_class=make_tokenizer(),
        **kwargs,
    )
    run.train()
    run.save_model("run")
    return run


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A model in a folder that might be an id on the Hub, by its relative path."""
    monkeypatch.chdir(tmp_path)
    make_model().save_pretrained("models/base")
    make_tokenizer().save_pretrained("models/base")
    return "models/base"


@pytest.mark.parametrize("with_peft", [False, True])
def test_case_61_a_local_path_is_no_base_model(base, with_peft):
    """A model from a folder, of unknown Hub id: no link, no metadata, no "None", also after PEFT wrote its part."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if with_peft else None
    saved_run(base, peft_config=lora)
    data, text = card_of(Path("run"))
    assert "This model was fine-tuned." in text and "None" not in text and base not in text
    folders = ["run", "run/checkpoint-1"] if with_peft else ["run"]
    for data in (card_of(Path(folder))[0] for folder in folders):
        assert "base_model" not in data and not any("base_model" in tag for tag in data["tags"])


@pytest.mark.parametrize("known_by", ["configuration", "adapter"])
def test_case_61_the_hub_id_of_a_model_from_a_local_path(base, known_by):
    """Its configuration, or the adapter on it, tells which model of the Hub it is."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(base)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    if known_by == "configuration":
        model.config.base_model_name_or_path = "org/base"
        saved_run(model)
    else:
        model = peft.get_peft_model(model, lora)
        model.peft_config["default"].base_model_name_or_path = "org/base"
        saved_run(model)
    data, text = card_of(Path("run"))
    assert "fine-tuned version of [org/base](https://huggingface.co/org/base)." in text and base not in text
    assert data["base_model"] == "org/base"
    if known_by == "adapter":
        data, _ = card_of(Path("run/checkpoint-1"))
        assert data["base_model"] == "org/base" and "base_model:adapter:org/base" in data["tags"]
    else:
        # A run that begins with what was saved knows it too
        assert base_model_id(AutoModelForCausalLM.from_pretrained("run")) == "org/base"


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        ("org/name", "org/name"),
        ("gpt2", "gpt2"),
        ("", None),
        (None, None),
        ("models/base", None),
        ("runs/models/gone", None),
        ("/home/me/model", None),
        ("./model", None),
        ("/cache/hub/models--org--name-7B/snapshots/0123abcd", "org/name-7B"),
        ("/cache/hub/models--gpt2/snapshots/0123abcd/", "gpt2"),
    ],
)
def test_case_61_which_names_are_ids(base, name, model_id):
    model = SimpleNamespace(config=SimpleNamespace(_name_or_path=name))
    assert base_model_id(model) == model_id


@pytest.mark.parametrize("chat", [True, False])
def test_case_61_the_quick_start_runs(base, monkeypatch, capsys, chat):
    """The card's first snippet, run in the folder of the card: it loads what was saved and plays one episode."""
    peft = pytest.importorskip("peft")
    run = TRACETrainer(
        model=base,
        env_step=walk,
        args=make_config("run", max_turn_length=5, max_steps=1, gradient_accumulation_steps=3),
        train_dataset=chat_dataset() if chat else string_dataset(),
        processing_class=make_tokenizer(),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if chat else None,
    )
    run.train()
    run.create_model_card()
    # An adapter is loaded with its base model, found from here
    run.save_model("run")
    _, text = card_of(Path("run"))
    (snippet,) = re.findall(r"^## Quick start\n\n```python\n(.*?)```$", text, re.MULTILINE | re.DOTALL)
    assert "max_turn_length=5" in snippet and ("'role': 'user'" in snippet or '"role": "user"' in snippet) == chat
    capsys.readouterr()
    snippet = snippet.replace('"."', '"run"')
    scope = {}
    exec(snippet, scope)
    assert len(scope["tree"].leaves()) == 1 and len(scope["tree"].leaves()[0].path()) == 1
    assert scope["tree"].leaves()[0].text in capsys.readouterr().out


def test_case_37_other_processes_write_no_card(tmp_path, monkeypatch):
    run = trainer(tmp_path)
    monkeypatch.setattr(run, "is_world_process_zero", lambda: False)
    run.create_model_card(model_name="tiny")
    assert not (tmp_path / "README.md").exists()


# Table of completions


def agent(seed: int = 0):
    """Says `go` or `stop`, so that rollouts have one to four turns."""
    choose = random.Random(seed)

    def say(context: str) -> str:
        return "stop" if choose.random() < 0.4 else f"go {choose.randrange(10)}"

    return say


def walk(state, action, messages):
    steps = sum(message["role"] == "assistant" for message in messages)
    if action.startswith("stop") or steps == 4:
        return StepResult(done=True, reward=float(steps % 2), info={"steps": steps})
    return StepResult(observation=f"seen {steps}", info={"steps": steps})


def walking_trainer(output_dir, **kwargs):
    """Trees of several turns, of different size from step to step."""
    model = make_model()
    speak(model, make_tokenizer(), agent())
    options = dict(train_dataset=chat_dataset(), env_step=walk, reward_funcs=None, max_completion_length=200)
    return trainer(output_dir, model=model, **(options | kwargs))


def record_trees(run) -> list:
    """The trees of every generation, as they are once they have advantages."""
    generations = []
    assign = run._assign_advantages

    def recording(trees):
        assign(trees)
        generations.append(trees)

    run._assign_advantages = recording
    return generations


def as_rows(trees) -> list[tuple]:
    """What a table must hold of a generation, as text: prompt, completion, advantage of the last turn."""
    return [
        (tree.prompt[0]["content"], [m["content"] for t in leaf.path() for m in t.messages], leaf.advantage)
        for tree in trees
        for leaf in tree.leaves()
    ]


def scaled(budgets, pool, args) -> list[int]:
    """These bare rollouts of 4, as parts of the whole budget, padded to the pool."""
    factor = args.rollout_budget // 4
    return [budget * factor for budget in budgets] + [0] * (len(pool) - len(budgets))


@pytest.mark.parametrize("per_generation", [3, 6])
def test_case_38_every_rollout_is_in_the_table_once(tmp_path, monkeypatch, per_generation):
    def echo(prompts, completions, log_extra, **kwargs):
        pairs = zip(prompts, completions, strict=True)
        log_extra("echo", [f"{prompt[0]['content']}|{len(completion)}" for prompt, completion in pairs])
        return [0.0] * len(prompts)

    run = walking_trainer(
        tmp_path,
        reward_funcs=echo,
        log_completions=True,
        num_completions_to_print=0,
        max_steps=4,
        gradient_accumulation_steps=3,
        steps_per_generation=per_generation,
    )
    # Trees of other numbers and sizes in every generation
    budgets = itertools.cycle([[2, 2], [4], [0, 2, 2], [0, 0, 4]])
    monkeypatch.setattr("trace_trl.trainer.allocate", lambda pool, args, seed, **kw: scaled(next(budgets), pool, args))
    generations = record_trees(run)
    run.train()
    tables = [pd.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet") for step in range(1, 5)]
    # With 6 micro-batches a generation serves two optimizer steps of 3, and both tables show it
    assert len(generations) == 4 * 3 // per_generation
    for step, table in enumerate(tables):
        trees = generations[step * 3 // per_generation]
        rows = as_rows(trees)
        assert len(table) == len(rows) == 4 * per_generation
        found = [
            (prompt[0]["content"], [message["content"] for message in completion], advantage)
            for prompt, completion, advantage in zip(table.prompt, table.completion, table.advantage, strict=True)
        ]
        assert found == [(prompt, texts, pytest.approx(advantage, abs=1e-6)) for prompt, texts, advantage in rows]
        assert list(table.echo) == [f"{prompt}|{len(texts)}" for prompt, texts, _ in rows]
        assert list(table.env_step) == [leaf.leaf.rewards[1] for tree in trees for leaf in tree.leaves()]
        assert set(table.step) == {step + 1}


def test_case_38_columns_stay_aligned_when_they_come_and_go(tmp_path):
    def reward(prompts, completions, log_extra, trainer_state, **kwargs):
        step = trainer_state.global_step
        log_extra("always", list(completions))
        if step == 0:
            log_extra("early", list(completions))
        if step > 0:
            log_extra("late", list(completions))
        if any("red" in prompt for prompt in prompts):
            log_extra("some", [c if "red" in p else None for p, c in zip(prompts, completions, strict=True)])
        return length_reward(completions)

    run = trainer(
        tmp_path,
        reward_funcs=reward,
        log_completions=True,
        num_completions_to_print=0,
        max_steps=3,
        eval_dataset=string_dataset(2),
        eval_strategy="steps",
        eval_steps=2,
        num_generations_eval=1,
        per_device_eval_batch_size=2,
    )
    seen = []

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            logs = run._logs
            seen.append((state.global_step, sorted(logs["extra"])))
            columns = [logs["prompt"], logs["completion"], logs["advantages"], *logs["rewards"].values()]
            columns += logs["extra"].values()
            assert {len(column) for column in columns} == {12}
            completions = list(logs["completion"])
            assert list(logs["extra"]["always"]) == completions
            for name, column in logs["extra"].items():
                assert all(value in (None, text) for value, text in zip(column, completions, strict=True)), name
            if "some" in logs["extra"]:
                told = [value is not None for value in logs["extra"]["some"]]
                assert told == ["red" in prompt for prompt in logs["prompt"]]

    run.add_callback(Watch())
    run.train()
    # Trained twice, evaluated, trained again, evaluated at the end, and the summary
    assert [step for step, _ in seen] == [1, 2, 2, 3, 3, 3]
    assert set(seen[-1][1]) == {"always", "early", "late", "some"}


# Images


async def show() -> list:
    """
    Shows a picture.

    Returns:
        The picture.
    """
    return [{"type": "image", "image": "red.png"}]


class Gallery:
    def reset(self, **kwargs):
        return [{"type": "image", "image": "red.png"}]

    def look(self) -> str:
        """
        Looks.

        Returns:
            What is seen.
        """
        return "red"


class Camera(Gallery):
    def reset(self, **kwargs):
        return None

    def look(self) -> list:
        """
        Looks.

        Returns:
            A picture.
        """
        return [{"type": "text", "text": "see"}, {"type": "image", "image": "red.png"}]


def picture_step(state, action, messages):
    return StepResult(observation=[{"role": "user", "content": [{"type": "image", "image": "red.png"}]}])


@pytest.mark.parametrize(
    ("source", "call"),
    [
        (dict(tools=[show]), "show"),
        (dict(environment_factory=Camera), "look"),
        (dict(environment_factory=Gallery), None),
        (dict(env_step=picture_step), None),
    ],
    ids=["tool", "environment", "reset", "env_step"],
)
def test_case_39_images_from_an_environment_end_the_run_at_the_first_row(tmp_path, source, call):
    model = make_model()
    said = []

    def say(context):
        said.append(context)
        return "hello" if call is None else f'<tool_call>\n{{"name": "{call}", "arguments": {{}}}}\n</tool_call>'

    speak(model, make_tokenizer(), say)
    run = trainer(tmp_path, train_dataset=chat_dataset(), model=model, max_completion_length=200, **source)
    with pytest.raises(ValueError, match="content of type image: TRACETrainer trains on text only, so remove it"):
        run.train()
    # A reset is refused before anything is sampled, an answer in the round that brought it
    assert len(said) == (0 if source.get("environment_factory") is Gallery else run.args.rollout_budget)


# What a person sees


def test_step_line():
    logs = {
        "effective_ratio": 0.75,
        "mixed_anchor_ratio": 2 / 3,
        "reward": 0.4567,
        "predictor/brier": 0.2044,
        "predictor/auroc": None,
        "rollout/sampled_tokens": 12345.0,
        "rollout/saved_tokens": 678.0,
        "seconds/generation": 12.34,
        "seconds/environment": 0.06,
        "seconds/reward": 1.0,
        "seconds/total": 14.0,
        "step_time": 20.06,
        "loss": 0.1,
    }
    assert step_line(7, logs) == (
        "step    7  effective 0.75  mixed anchors 0.67  reward 0.457  brier 0.204  auroc -  tokens 12345  saved 678"
        "  seconds: generation 12.3 environment 0.1 reward 1.0 predictor 0.0 training 6.1"
    )
    # What goes wrong is shown where it does
    wrong = {"rollout/environment_failures": 12.0, "rollout/ended_length": 0.25, "rollout/ended_turns": 0.0}
    assert "saved 678  failures 12  cut by tokens 25%  seconds" in step_line(7, logs | wrong)
    assert step_line(123456, {}).startswith("step 123456  effective -  mixed anchors -")
    assert "training" not in step_line(1, {})
    # A generation of 14 s, trained on for 6 s in each of four steps
    assert step_line(7, logs | {"step_time": (14 + 4 * 6) / 4}, generations=1 / 4).endswith("training 6.0")


def test_one_line_per_logged_training_step(tmp_path, capsys):
    trainer(
        tmp_path,
        show_rollout_progress=True,
        disable_tqdm=False,
        max_steps=4,
        logging_steps=2,
        eval_dataset=string_dataset(2),
        eval_strategy="steps",
        eval_steps=2,
        num_generations_eval=1,
        per_device_eval_batch_size=2,
    ).train()
    output = capsys.readouterr()
    lines = [line for line in output.out.splitlines() if re.match(r"step +\d", line)]
    assert [int(line.split()[1]) for line in lines] == [2, 4]
    assert all(re.search(r"effective \d.\d\d .* tokens \d+ .* generation \d", line) for line in lines)
    # Where there is no terminal there is no bar
    assert "rollouts" not in output.err


@pytest.mark.parametrize("allocation", ["active", "uniform"])
def test_resets_are_seconds_of_the_environment(tmp_path, monkeypatch, allocation):
    """They were the predictor's, which is asked right behind them, or nobody's. Here no time passes elsewhere."""
    resets, lock = [], threading.Lock()

    def now():
        return 128.0 * len(resets)

    def slow_reset(row):
        with lock:
            resets.append(row)
        return {}

    for module in ("engine", "trainer"):
        monkeypatch.setattr(f"trace_trl.{module}.time", SimpleNamespace(perf_counter=now))
    run = walking_trainer(tmp_path, env_reset=slow_reset, root_allocation=allocation, max_steps=2)
    run.train()
    entries = logged(run, "seconds/total")
    assert len(entries) == 2
    for entry in entries:
        # None is counted twice: further rollouts of a prompt are reset within a run
        assert 0 < entry["seconds/environment"] == entry["seconds/total"]
        assert [entry[f"seconds/{stage}"] for stage in ("generation", "reward", "predictor")] == [0.0] * 3
    assert sum(entry["seconds/environment"] for entry in entries) == now()
    started = now()
    evaluation = run.evaluate(chat_dataset(1))
    assert evaluation["eval_seconds/environment"] == now() - started > 0


def test_no_line_where_progress_is_turned_off(tmp_path, capsys):
    trainer(tmp_path, show_rollout_progress=False).train()
    assert not re.search(r"^step +\d", capsys.readouterr().out, re.MULTILINE)


@contextmanager
def terminal():
    """Standard error is a terminal. Gives a function that returns what was written to it so far."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    os.set_blocking(reader, False)
    written = bytearray()

    def text() -> str:
        sys.stderr.flush()
        try:
            while chunk := os.read(reader, 65536):
                written.extend(chunk)
        except BlockingIOError:
            pass
        return written.decode()

    with open(writer, "w", buffering=1) as stream, redirect_stderr(stream):
        assert sys.stderr.isatty()
        yield text
    os.close(reader)


def test_bar_in_a_terminal(tmp_path):
    run = walking_trainer(tmp_path, show_rollout_progress=True, disable_tqdm=False, max_steps=1)
    updates = []
    update = run.progress.update
    run._engine.progress = lambda *args: (updates.append(args[1:]), update(*args))
    with terminal() as written:
        run.train()
        text = written()
    assert "rollouts" in text and "12/12" in text
    assert re.search(r"tokens=\d+, turns=\d+|turns=\d+, tokens=\d+", text)
    # Rollouts done of all, up to the end
    assert [wanted for _, wanted in updates] == [12] * len(updates)
    assert [done for done, _ in updates] == sorted(done for done, _ in updates)
    assert updates[-1][0] == 12


@pytest.mark.parametrize(
    "options", [dict(show_rollout_progress=False, disable_tqdm=False), dict(show_rollout_progress=True)]
)
def test_no_bar_in_a_terminal_where_it_is_turned_off(tmp_path, options):
    with terminal() as written:
        trainer(tmp_path, max_steps=1, **options).train()
        assert "rollouts" not in written()


def test_other_processes_show_no_bar():
    with terminal() as written:
        with RolloutProgress(enabled=False) as progress:
            progress.update(Stats(), 1, 2)
        assert written() == ""
        with RolloutProgress(enabled=True) as progress:
            progress.update(Stats(), 1, 2)
        assert "1/2" in written()


def test_bar_is_quiet_in_a_file(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with RolloutProgress(enabled=True) as progress:
        progress.update(Stats(), 1, 2)
    assert stream.getvalue() == ""


# Tree log


def test_tree_log_holds_every_tree_of_a_run(tmp_path):
    run = walking_trainer(tmp_path, log_trees=True, max_steps=3)
    generations = record_trees(run)
    run.train()
    lines = [line for path in sorted((tmp_path / "trees").iterdir()) for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [s for s, trees in enumerate(generations) for _ in trees]
    for record, tree in zip(records, (tree for trees in generations for tree in trees), strict=True):
        again = tree_from_dict(record)
        assert again.prompt == tree.prompt and again.budget == tree.budget and again.index == tree.index
        turns, originals = list(again.turns()), list(tree.turns())
        assert [turn.text for turn in turns] == [turn.text for turn in originals]
        assert [turn.value for turn in turns] == pytest.approx([turn.value for turn in originals], nan_ok=True)
        assert [turn.advantage for turn in turns] == pytest.approx([turn.advantage for turn in originals])
        assert [leaf.leaf.kind for leaf in again.leaves()] == [leaf.leaf.kind for leaf in tree.leaves()]
        assert [leaf.leaf.reward for leaf in again.leaves()] == [leaf.leaf.reward for leaf in tree.leaves()]
    kinds = Counter(turn["leaf"]["kind"] for record in records for turn in record["turns"] if turn["leaf"])
    assert sum(kinds.values()) == 36 and kinds["bare"] == 12 and kinds["continuation"] > 0


def test_no_tree_log_unless_asked_for(tmp_path):
    trainer(tmp_path).train()
    assert not (tmp_path / "trees").exists()


# Value head


def test_checkpoint_holds_the_value_head(tmp_path):
    run = trainer(tmp_path, save_strategy="steps", save_steps=1)
    run.train()
    run.save_model(tmp_path / "final")
    states = torch.randn(5, run.model.config.hidden_size)
    values = run.predictor(states)
    assert not torch.allclose(values, torch.full((5,), 0.5), atol=1e-6)  # trained
    for folder in ("checkpoint-2", "final"):
        assert (tmp_path / folder / "value_head.safetensors").exists()
        assert torch.equal(SuccessPredictor.from_pretrained(tmp_path / folder)(states), values)
    earlier = SuccessPredictor.from_pretrained(tmp_path / "checkpoint-1")(states)
    assert not torch.allclose(earlier, values, atol=1e-6)

    again = trainer(tmp_path, max_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(again.predictor(states), values)
    saved, loaded = run.predictor_trainer.state_dict(), again.predictor_trainer.state_dict()
    assert torch.equal(saved["features"], loaded["features"]) and len(loaded["features"])
    assert torch.equal(saved["targets"], loaded["targets"])
    assert torch.equal(saved["random"], loaded["random"])


def test_no_value_head_where_nothing_uses_one(tmp_path):
    run = trainer(tmp_path, root_allocation="uniform", prefix_allocation="random", save_strategy="steps", save_steps=2)
    run.train()
    assert run.predictor is None
    assert not list(tmp_path.rglob("value_head*"))


# Environments


class Tracked:
    """An environment that says when it is opened and closed."""

    open: list = []

    def __init__(self):
        self.closed = 0
        type(self).open.append(self)

    def reset(self, **kwargs):
        assert not self.closed

    def add(self, a: int, b: int) -> int:
        """
        Adds.

        Args:
            a: One number.
            b: Another.

        Returns:
            The sum.
        """
        assert not self.closed
        return a + b

    def close(self):
        self.closed += 1

    def __deepcopy__(self, memo):
        return type(self)()


def test_case_27_environments_are_closed_when_training_ends(tmp_path):
    class Mine(Tracked):
        open = []

    model = make_model()
    choose = random.Random(0)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    speak(model, make_tokenizer(), lambda context: call if choose.random() < 0.6 else "done")
    run = trainer(
        tmp_path,
        train_dataset=chat_dataset(),
        model=model,
        environment_factory=Mine,
        max_completion_length=200,
        eval_dataset=chat_dataset(2),
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=1,
        per_device_eval_batch_size=2,
    )
    run.train()
    assert len(Mine.open) > 12
    assert {environment.closed for environment in Mine.open} == {1}
    before = len(Mine.open)
    run.evaluate()
    assert len(Mine.open) > before  # made anew
    assert {environment.closed for environment in Mine.open} == {1}


def test_case_27_environments_are_closed_when_training_fails(tmp_path):
    class Mine(Tracked):
        open = []

    def reward(completions, **kwargs):
        raise RuntimeError("no reward today")

    run = trainer(
        tmp_path, train_dataset=chat_dataset(), reward_funcs=reward, environment_factory=Mine, max_completion_length=20
    )
    with pytest.raises(RuntimeError, match="no reward today"):
        run.train()
    assert len(Mine.open) >= run.args.candidate_pool_size
    assert {environment.closed for environment in Mine.open} == {1}


# Documentation of the metrics


def documented() -> dict[str, str]:
    """Documented names of our own metrics, and when they are logged."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    return dict(re.findall(r"^\| `([^`]+)` \| (\w+) \|", page, re.MULTILINE))


def test_every_logged_metric_is_documented_and_no_other(tmp_path):
    def theirs(**kwargs) -> set[str]:
        run = GRPOTrainer(
            model=make_model(),
            reward_funcs=length_reward,
            args=make_config(tmp_path / "trl", cls=GRPOConfig, **kwargs),
            train_dataset=string_dataset(),
            eval_dataset=string_dataset(2),
            processing_class=make_tokenizer(),
        )
        run.train()
        return {key for entry in run.state.log_history for key in entry}

    evaluation = dict(eval_strategy="steps", eval_steps=1, num_generations_eval=1, per_device_eval_batch_size=2)
    known = theirs(max_steps=1, **evaluation) | {"tools/call_frequency", "tools/failure_frequency"}
    known |= {"rewards/env_step/mean", "rewards/env_step/std"}
    training, evaluated = set(), set()
    for options in (dict(), dict(root_allocation="dapo")):
        run = walking_trainer(tmp_path / "ours", eval_dataset=chat_dataset(2), max_steps=3, **(options | evaluation))
        run.train()
        for entry in run.state.log_history:
            is_evaluation = any(key.startswith("eval_") for key in entry)
            for key in entry:
                name = key.removeprefix("eval_")
                if key not in known and name not in known:
                    name = re.sub(r"_depth_\d$", "_depth_<t>", name)
                    name = re.sub(r"^env/.*", "env/<key>", name)
                    (evaluated if is_evaluation else training).add(name)
    page = documented()
    assert training == set(page)
    assert evaluated == {name for name, when in page.items() if when == "always"}


def test_metrics_of_a_run_by_hand(tmp_path):
    run = walking_trainer(tmp_path, max_steps=1, gradient_accumulation_steps=6)
    generations = record_trees(run)
    run.train()
    (trees,), (entry,) = generations, logged(run, "loss")
    leaves = [turn for tree in trees for turn in tree.leaves()]
    assert entry["rollout/active_prompts"] == len(trees)
    assert entry["rollout/bare_leaves"] == sum(turn.leaf.kind == "bare" for turn in leaves) == 8
    assert entry["rollout/continuation_leaves"] + entry["rollout/extra_leaves"] == 16
    turns = [turn for tree in trees for turn in tree.turns()]
    assert entry["rollout/turns"] == entry["rollout/environment_calls"] == len(turns)
    assert entry["rollout/sampled_tokens"] == sum(len(turn.token_ids) for turn in turns)
    as_paths = sum(len(turn.token_ids) for leaf in leaves for turn in leaf.path())
    assert entry["rollout/saved_tokens"] == as_paths - entry["rollout/sampled_tokens"]
    assert entry["rollout/turns_per_leaf"] == pytest.approx(sum(leaf.depth for leaf in leaves) / 24)
    assert entry["env/steps"] == entry["rollout/turns_per_leaf"]
    rewards = [[leaf.leaf.reward for leaf in tree.leaves()] for tree in trees]
    assert entry["effective_ratio"] == pytest.approx(sum(len(set(group)) > 1 for group in rewards) / len(trees))
    assert entry["success_rate"] == pytest.approx(sum(map(sum, rewards)) / 24)
    alike = sum(len(group) for group in rewards if len(set(group)) == 1)
    assert entry["frac_reward_zero_std"] == pytest.approx(alike / 24)
    assert entry["completions/mean_length"] == pytest.approx(as_paths / 24)
    # An untrained predictor says 0.5 everywhere
    assert entry["predictor/brier"] == pytest.approx(0.25)
    assert math.isclose(entry["reward"], entry["success_rate"], abs_tol=1e-6)


def test_prompts_with_rewards_all_alike_are_counted_by_tree(tmp_path):
    rows = Dataset.from_dict({"prompt": ["0 1", "yes or no"]})
    run = trainer(
        tmp_path,
        train_dataset=rows,
        reward_funcs=lambda prompts, **kwargs: [float("yes" in prompt) for prompt in prompts],
        max_steps=1,
    )
    run.train()
    (entry,) = logged(run, "loss")
    assert entry["effective_ratio"] == 0 and entry["frac_reward_zero_std"] == 1
    assert isinstance(run.args, TRACEConfig)
