"""Environments under a trainer: what the policy is shown in training, evaluation and after forking, what is closed."""

import asyncio
import copy
import functools
import json
import re
import shutil
import signal
import sys
import tempfile
import threading
import types
from pathlib import Path

import math_verify
import pytest
from datasets import Dataset

import toys
from toys import (
    AsyncCounterEnvironment,
    CounterEnvironment,
    Irreproducible,
    LockHolder,
    SocketOwner,
    call,
    chat_dataset,
    echo,
    make_config,
    make_model,
    make_tokenizer,
    speak,
    string_dataset,
    usual,
)
from trace_trl import StepResult, TRACETrainer


def turn_of(history):
    """1 for the first turn of an episode."""
    return history.count("<|im_start|>assistant")


def make_trainer(tmp_path, say, dataset, reward_funcs=None, eval_dataset=None, callbacks=None, **kwargs):
    """A trainer whose policy says `say(history)`. What it was asked stands in `trainer.histories`."""
    environment = {
        key: kwargs.pop(key) for key in ("tools", "environment_factory", "env_step", "env_reset") if key in kwargs
    }
    model, tokenizer = make_model(), make_tokenizer()
    histories = []

    def saying(history):
        histories.append(history)
        return say(history)

    speak(model, tokenizer, saying)
    options = dict(
        per_device_train_batch_size=12, num_generations=4, continuations_per_root=2, max_completion_length=300
    )
    trainer = TRACETrainer(
        model=model,
        reward_funcs=reward_funcs,
        args=make_config(tmp_path, **(options | kwargs)),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=callbacks,
        **environment,
    )
    trainer.histories = histories
    return trainer


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def add_twice(history):
    return call("add", amount=1) if turn_of(history) < 3 else "done"


@pytest.mark.parametrize("cls", [CounterEnvironment, LockHolder], ids=["copied", "replayed"])
def test_case_21_task_of_the_environment_is_in_every_prompt(tmp_path, cls):
    cls = cls.fresh()
    trees = []
    trainer = make_trainer(
        tmp_path, add_twice, chat_dataset(), eval_dataset=chat_dataset(2), environment_factory=cls, max_steps=1
    )
    score = trainer.scorer.__call__
    trainer._engine.score = lambda leaves: (score(leaves), trees.extend(tree for tree, _ in leaves))
    trainer.train()
    assert logged(trainer, "rollout/continuation_leaves") == [8]
    trained = len(trainer.histories)
    trainer.evaluate()
    assert len(trainer.histories) > trained
    questions = [row["prompt"][0]["content"] for row in chat_dataset()]
    for history in trainer.histories:
        user = history.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        question, number = user.removesuffix(".").split(" Task ")
        assert question == questions[int(number)]
    # Prompts of the rows that are trained on, not only what was sampled behind
    for tree in trees:
        number = tree.example["number"]
        assert tree.prompt[-1]["content"] == f"{questions[number]} Task {number}."
        assert tree.prompt[-1]["content"] in trainer.processing_class.decode(tree.prompt_ids)
        assert tree.example["prompt"] == [{"role": "user", "content": questions[number]}]


@pytest.mark.parametrize("cls", [CounterEnvironment, AsyncCounterEnvironment])
def test_environment_that_gives_the_reward(tmp_path, cls):
    cls = cls.fresh()
    trainer = make_trainer(tmp_path, add_twice, chat_dataset(), environment_factory=cls)
    trainer.train()
    # 2 of 10 in every leaf
    assert logged(trainer, f"rewards/{cls.__name__}/mean") == pytest.approx([0.2, 0.2])
    assert logged(trainer, "tools/call_frequency") and set(logged(trainer, "tools/failure_frequency")) == {0.0}


def test_environments_by_name_show_their_own_tools(tmp_path):
    counter = CounterEnvironment.fresh()

    class Shouting:
        def reset(self, **row):
            return " Shout!"

        def shout(self, word: str) -> str:
            """
            Shouts.

            Args:
                word: what to shout.
            """
            return word.upper()

        def get_reward(self):
            return 1.0

    def say(history):
        if turn_of(history) > 1:
            return "done"
        return call("shout", word="red") if '"name": "shout"' in history else call("add", amount=5)

    rows = [
        {"prompt": [{"role": "user", "content": f"question {i}"}], "environment": "count" if i % 2 else "shout"}
        for i in range(8)
    ]
    trainer = make_trainer(
        tmp_path, say, Dataset.from_list(rows), environment_factory={"count": counter, "shout": Shouting}
    )
    trainer.train()
    for history in trainer.histories:
        assert ('"name": "shout"' in history) == ("Shout!" in history)
        assert ('"name": "add"' in history) == ("Task 0." in history)
    assert set(logged(trainer, "tools/failure_frequency")) == {0.0}
    # No number where a generation had no such environment
    assert set(logged(trainer, "rewards/Shouting/mean")) - {None} == {1.0}
    assert set(logged(trainer, "rewards/CounterEnvironment/mean")) - {None} == {0.5}


def test_environment_that_is_not_there_stops_the_run(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "go"}], "environment": "chess"}] * 8
    trainer = make_trainer(
        tmp_path, add_twice, Dataset.from_list(rows), environment_factory={"count": CounterEnvironment.fresh()}
    )
    with pytest.raises(ValueError, match="`environment='chess'`.*Expected one of"):
        trainer.train()


@pytest.mark.parametrize("cls", [LockHolder, SocketOwner, Irreproducible])
def test_case_22_training_goes_on(tmp_path, cls, caplog):
    cls = cls.fresh()
    trainer = make_trainer(tmp_path, add_twice, chat_dataset(), environment_factory=cls)
    trainer.train()
    lost = cls.__name__ == "Irreproducible"
    # 4 rollouts with 2 prefixes each
    assert logged(trainer, "rollout/unforkable_prefixes") == [8 if lost else 0] * 2
    assert logged(trainer, "rollout/extra_leaves" if lost else "rollout/continuation_leaves") == [8, 8]
    assert sum("can't be restored" in record.getMessage() for record in caplog.records) == lost
    assert sorted(map(id, cls.closed)) == sorted(map(id, cls.instances))


def spoil(value):
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            spoil(item)
    value.clear()


@pytest.mark.parametrize("way", ["env_step", "environment_factory"])
def test_case_24_rows_reach_every_reset_and_reward_unchanged(tmp_path, way):
    # Two prompts, used in each of four steps and by several rollouts of a step
    rows = [
        {"prompt": [{"role": "user", "content": f"question {i}"}], "facts": [[{"text": "a", "numbers": [i]}]]}
        for i in range(2)
    ]
    seen = []

    def check(row):
        expected = [r for r in rows if r["prompt"] == row["prompt"]]
        assert row == expected[0]
        seen.append(row["facts"][0][0]["numbers"][0])

    def env_reset(example):
        check(copy.deepcopy(example))
        state = copy.deepcopy(example)
        spoil(example)
        return state

    def env_step(state, action, messages):
        spoil(state)
        spoil(messages)
        return StepResult("on", done="done" in action)

    class Spoils:
        def reset(self, **row):
            check(copy.deepcopy(row))
            spoil(row)

        def add(self, amount: int) -> str:
            """
            Adds.

            Args:
                amount: how much to add.
            """
            return "added"

    def reward(prompts, facts, completions, **kwargs):
        for prompt, fact in zip(prompts, facts, strict=True):
            check({"prompt": prompt, "facts": fact})
            spoil(fact)
            spoil(prompt)
        for completion in completions:
            # Continuations share turns with what was scored before them
            said = [message.get("tool_calls") or message["content"] for message in completion]
            assert all(said) and len(said) == 5
        rewards = [float(len(json.dumps(completion)) % 2) for completion in completions]
        spoil(completions)
        return rewards

    arguments = (
        {"env_step": env_step, "env_reset": env_reset} if way == "env_step" else {"environment_factory": Spoils}
    )
    trainer = make_trainer(
        tmp_path, add_twice, Dataset.from_list(rows), reward, max_steps=4, candidate_pool_factor=0.5, **arguments
    )
    before = Dataset.from_list(rows).to_list()
    trainer.train()
    assert set(seen) == {0, 1}
    assert trainer.train_dataset.to_list() == before


LOCK = None


async def guarded(text: str) -> str:
    """
    Repeats, one caller at a time.

    Args:
        text: what to repeat.
    """
    async with LOCK:
        # Others come to wait for the lock, which binds it to the loop they run on
        await asyncio.sleep(0.002)
    return text


class Guarded:
    def reset(self, **row):
        return None

    async def guarded(self, text: str) -> str:
        """
        Repeats, one caller at a time.

        Args:
            text: what to repeat.
        """
        return await guarded(text)


@pytest.mark.parametrize("way", ["tools", "environment_factory", "env_step"])
def test_case_26_one_lock_over_two_steps(tmp_path, way, monkeypatch):
    monkeypatch.setitem(globals(), "LOCK", asyncio.Lock())

    async def env_step(state, action, messages):
        return StepResult(await guarded("red"), done="done" in action)

    def say(history):
        return call("guarded", text="red") if turn_of(history) < 3 else "done"

    arguments = {
        "tools": {"tools": [guarded]},
        "environment_factory": {"environment_factory": Guarded},
        "env_step": {"env_step": env_step},
    }[way]
    trainer = make_trainer(
        tmp_path,
        say,
        chat_dataset(),
        reward_funcs=lambda completions, **kwargs: [float(len(c)) for c in completions],
        **arguments,
    )
    trainer.train()
    assert logged(trainer, "rollout/environment_failures") == [0, 0]
    assert min(logged(trainer, "rollout/environment_calls")) >= 4 * 2
    # Bare rollouts that used the lock twice, and continuations of them
    assert logged(trainer, "rollout/turns_per_leaf") == [3, 3]
    assert not LOCK.locked()


def alarmed(text: str) -> str:
    """
    Sets a timer for itself.

    Args:
        text: what to repeat.
    """
    signal.alarm(30)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(0)
    return text


def read_number(state, action, messages):
    # With its default time limit, which signals keep
    return StepResult(str(math_verify.parse(f"\\boxed{{{len(messages)}}}", raise_on_error=True)[0]), "done" in action)


@pytest.mark.parametrize("arguments", [{"tools": [alarmed]}, {"env_step": read_number}], ids=["tools", "env_step"])
def test_case_46_signals_work_in_the_main_thread(tmp_path, arguments, caplog):
    """A tool that uses `signal.alarm`, or math-verify with its own time limit in `env_step`: with `env_max_workers=1`
    every call succeeds; off the main thread each fails, and the error names the option. If the environment has nothing
    but such calls, that error ends the run."""

    def say(history):
        return call("alarmed", text="red") if turn_of(history) < 3 else "done"

    for workers, failures in ((1, 0), (4, 1)):
        trainer = make_trainer(
            tmp_path,
            say,
            chat_dataset(),
            reward_funcs=lambda completions, **kwargs: [float(len(c)) for c in completions],
            env_max_workers=workers,
            max_steps=1,
            **arguments,
        )
        if failures and "env_step" in arguments:
            with pytest.raises(RuntimeError, match="calls of this generation failed, .*`env_max_workers=1`"):
                trainer.train()
        else:
            trainer.train()
            assert (logged(trainer, "rollout/environment_failures")[0] > 0) is bool(failures)
        assert sum("`env_max_workers=1`" in record.message for record in caplog.records) == failures


class Ringing(CounterEnvironment):
    def reset(self, **row):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return super().reset(**row)


def test_case_46_a_reset_off_the_main_thread_names_the_option(tmp_path):
    """A `reset` that uses signals, in a thread: the run ends with an error that names `env_max_workers=1`."""
    trainer = make_trainer(tmp_path, add_twice, chat_dataset(), environment_factory=Ringing.fresh())
    with pytest.raises(RuntimeError, match="env_max_workers=1"):
        trainer.train()


class Folder(CounterEnvironment):
    """`reset` makes a folder; a call of `add` writes a line into it."""

    def reset(self, number=0, **row):
        super().reset(number, **row)
        self.path = Path(tempfile.mkdtemp(dir=self.root, prefix="folder-"))
        return f" Folder {self.path.name}."

    def add(self, amount: int) -> str:
        """
        Appends a line.

        Args:
            amount: what to write.
        """
        with open(self.path / "lines", "a") as file:
            file.write(f"{amount}\n")
        return f"{len(self._lines())} lines"

    def _lines(self):
        return (self.path / "lines").read_text().split()

    def get_reward(self):
        return len(self._lines()) / 10


class LockedFolder(Folder):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class ForkedFolder(Folder):
    def fork(self):
        copied = copy.copy(self)
        copied.path = Path(shutil.copytree(self.path, tempfile.mkdtemp(dir=self.root), dirs_exist_ok=True))
        return copied


def folder_of(text):
    (name,) = re.findall(r"Folder (folder-\w+)\.", text)
    return name


def train_on_folders(tmp_path, cls, **kwargs):
    """Trains a step. Returns trainer, trees, rows, and the folder and lines of each leaf's environment when scored."""
    cls = cls.fresh()
    cls.root = tmp_path / "folders"
    cls.root.mkdir()
    trainer = make_trainer(
        tmp_path,
        add_twice,
        chat_dataset(2),
        environment_factory=cls,
        root_allocation="uniform",
        candidate_pool_factor=1,
        max_steps=1,
        **kwargs,
    )
    scored, kept = {}, {}
    score = trainer.scorer.__call__

    def scoring(leaves):
        score(leaves)
        for _, turn in leaves:
            scored[turn] = turn.leaf.environment.path.name, turn.leaf.environment._lines()

    build = trainer._build_rows

    def building(trees):
        kept["rows"] = rows = build(trees)
        kept["trees"] = trees
        return rows

    trainer._engine.score, trainer._build_rows = scoring, building
    trainer.train()
    return trainer, kept["trees"], kept["rows"], scored


@pytest.mark.parametrize("cls", [Folder, LockedFolder])
def test_case_41_every_rollout_keeps_its_own_instance(tmp_path, cls):
    """`reset` makes a folder and returns its path, a tool appends a line; 8 rollouts of 2 prompts, nothing branches
    off: every rollout writes into the folder it was shown, its row has the ids of that prompt, and rollouts of one
    data row are one group. With a lock in it too, which nothing can copy."""
    options = {"per_device_train_batch_size": 8, "continuations_per_root": 0}
    trainer, trees, rows, scored = train_on_folders(tmp_path, cls, **options)
    assert [len(tree.leaves()) for tree in trees] == [4, 4]
    assert len({name for name, _ in scored.values()}) == 8
    decode = trainer.processing_class.decode
    for (tree, turn), prompt, ids, reward_prompt in zip(
        rows.leaves, rows.prompt_ids, rows.completion_ids, rows.prompts, strict=True
    ):
        name, lines = scored[turn]
        assert lines == ["1", "1"]
        assert folder_of(decode(prompt)) == folder_of(reward_prompt[-1]["content"]) == name
        assert turn.history_ids() == prompt + ids and turn.history_length == len(prompt + ids)
        assert reward_prompt[-1]["content"].startswith(tree.example["prompt"][-1]["content"])
    # What was sampled was sampled behind the same
    asked = {folder_of(history) for history in trainer.histories}
    assert asked == {name for name, _ in scored.values()}
    assert logged(trainer, "rewards/" + cls.__name__ + "/mean") == pytest.approx([0.2])


def test_case_41_a_deep_copy_never_shares_what_lies_outside(tmp_path, caplog):
    """The same, with continuations and no `fork()`: none is made, a warning names `fork()`, and the batch is full of
    rollouts with folders of their own."""
    trainer, trees, _, scored = train_on_folders(tmp_path, Folder)
    assert len(scored) == 12 == len({name for name, _ in scored.values()})
    assert all(lines == ["1", "1"] for _, lines in scored.values())
    assert {leaf.leaf.kind for tree in trees for leaf in tree.leaves()} == {"bare", "extra"}
    assert logged(trainer, "rollout/unforkable_prefixes") > [0]
    (warning,) = [record.message for record in caplog.records if "can't be restored" in record.message]
    assert "`reset` gave different tasks for one dataset row" in warning and "`fork()`" in warning


def test_case_41_continuations_are_forks_of_the_rollout_they_branch_off(tmp_path):
    """The same, with a `fork()` that copies the folder: continuations are shown their rollout's own folder, and write
    behind the lines that it had there; values are predicted on the histories that were sampled behind."""
    trainer, trees, rows, scored = train_on_folders(tmp_path, ForkedFolder, prefix_allocation="active")
    assert all(lines == ["1", "1"] for _, lines in scored.values())
    assert {leaf.leaf.kind for tree in trees for leaf in tree.leaves()} == {"bare", "continuation"}
    shown = [folder_of(trainer.processing_class.decode(ids)) for ids in rows.prompt_ids]
    bare = {name for name, (_, turn) in zip(shown, rows.leaves, strict=True) if turn.leaf.kind == "bare"}
    assert len(bare) == sum(tree.budget for tree in trees) and set(shown) == bare
    asked = set(trainer.histories)
    anchors = [turn for tree in trees for turn in tree.anchors()]
    assert {trainer.processing_class.decode(turn.history_ids()) for turn in anchors} <= asked
    assert all(turn.value is not None for turn in anchors)


class Furnished(CounterEnvironment):
    """With methods that are no tools, and a record of its copies."""

    forks: list

    @classmethod
    def fresh(cls):
        cls = super().fresh()
        cls.forks = []
        return cls

    def fork(self):
        """Copies."""
        copied = copy.copy(self)
        type(self).forks.append(copied)
        return copied

    def _private(self):
        """Private."""


def test_case_27_only_tools_are_in_the_prompt(tmp_path):
    cls = Furnished.fresh()
    trainer = make_trainer(tmp_path, add_twice, chat_dataset(), environment_factory=cls, max_steps=1)
    assert [tool.__name__ for tool in trainer.tools] == ["add"]
    trainer.train()
    for history in trainer.histories:
        listed = history.split("<tools>\n")[1].split("\n</tools>")[0]
        assert [json.loads(line)["function"]["name"] for line in listed.splitlines()] == ["add"]


def test_case_27_functions_named_like_reserved_methods_are_tools(tmp_path):
    closed = []

    def close(door: str) -> str:
        """
        Closes a door.

        Args:
            door: which one.
        """
        closed.append(door)
        return "closed"

    cls = Furnished.fresh()
    trainer = make_trainer(
        tmp_path,
        lambda history: call("close", door="left") if turn_of(history) == 1 else "done",
        chat_dataset(),
        tools=[close],
        environment_factory=cls,
        max_steps=1,
    )
    trainer.train()
    assert len(closed) >= 4 and '"name": "close"' in trainer.histories[0]
    assert logged(trainer, "tools/failure_frequency") == [0.0]


def test_case_27_every_environment_is_closed_once(tmp_path):
    cls = Furnished.fresh()
    made = []

    def reward(completions, environments, **kwargs):
        made.append(len(cls.instances))
        assert not any(one is other for one in environments for other in cls.closed)
        return [1.0] * len(completions)

    # 6 candidates for 4 rollouts: some of them are reset and not used
    trainer = make_trainer(
        tmp_path,
        add_twice,
        chat_dataset(),
        reward,
        eval_dataset=chat_dataset(2),
        environment_factory=cls,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    assert cls.forks
    assert sorted(map(id, cls.closed)) == sorted(map(id, cls.forks + cls.instances))
    # Made once and reset often: 6 candidates, and a second rollout of each of two prompts at most
    assert len(cls.instances) <= 6 + 2
    assert len(cls.resets) >= 3 * 6
    # Evaluation afterwards makes new ones, and closes them
    trainer.evaluate()
    assert sorted(map(id, cls.closed)) == sorted(map(id, cls.forks + cls.instances))


def test_string_prompts_with_a_callback(tmp_path):
    def env_step(state, action, messages):
        assert messages[0] == {"role": "user", "content": state["prompt"]}
        if "finish" in action:
            return StepResult(done=True, reward=float(state["number"] % 2), info={"number": state["number"]})
        return StepResult("\nObservation: fox.\nThought:")

    def say(history):
        return "look" if "Observation" not in history else "finish"

    trainer = make_trainer(tmp_path, say, string_dataset(), env_step=env_step)
    trainer.train()
    questions = string_dataset()["prompt"]
    assert all(any(history.startswith(question) for question in questions) for history in trainer.histories)
    assert {history.split("look")[1] for history in trainer.histories if "look" in history} == {
        "<|im_end|>\nObservation: fox.\nThought:"
    }
    assert len(logged(trainer, "env/number")) == len(logged(trainer, "rewards/env_step/mean")) == 2


def test_env_step_adds_to_reward_functions(tmp_path):
    trainer = make_trainer(
        tmp_path,
        lambda history: "red",
        chat_dataset(),
        reward_funcs=[lambda completions, **kwargs: [0.5] * len(completions)],
        env_step=functools.partial(lambda prefix, state, action, messages: StepResult(done=True, reward=2.0), 1),
        reward_weights=[3.0],
    )
    trainer.train()
    assert logged(trainer, "rewards/env_step/mean") == [2.0, 2.0]
    assert logged(trainer, "reward") == pytest.approx([3.5, 3.5])


@pytest.mark.parametrize("training", [string_dataset, chat_dataset], ids=["string", "chat"])
def test_evaluation_with_prompts_of_the_other_kind(tmp_path, training):
    """Answers have the form of the prompts at hand, not of those that training began with."""
    other = chat_dataset if training is string_dataset else string_dataset

    def env_step(state, action, messages):
        return StepResult("OBS", done="OBS" in messages[-2]["content"], reward=float(state["number"] % 2))

    options = dict(env_step=env_step, eval_dataset=other(4), eval_strategy="steps", eval_steps=1, max_steps=1)
    trainer = make_trainer(tmp_path, lambda history: "red", training(), **options)
    trainer.train()
    answered = {history for history in trainer.histories if "OBS" in history}
    in_chats = {history for history in answered if history.startswith("<|im_start|>user")}
    assert in_chats and answered - in_chats
    opening = "<|im_end|>\n<|im_start|>assistant\n"
    assert all(history.endswith(f"{opening}red<|im_end|>\n<|im_start|>user\nOBS{opening}") for history in in_chats)
    assert all(history.endswith("red<|im_end|>OBS") for history in answered - in_chats)
    chat = {"prompt": [{"role": "user", "content": "go"}], "number": 1}
    for row in (chat, {"prompt": "go", "number": 1}, chat):
        (tree,) = trainer.rollout([row])
        assert tree.leaves()[0].depth == 2
    assert [history.startswith("go") for history in trainer.histories[-6:]] == [False, False, True, True, False, False]


def test_without_an_environment_evaluation_may_have_prompts_of_the_other_kind(tmp_path):
    kinds = set()

    def reward(prompts, completions, **kwargs):
        kinds.add((type(prompts[0]), type(completions[0])))
        return [1.0] * len(prompts)

    options = dict(eval_dataset=chat_dataset(4), eval_strategy="steps", eval_steps=1, max_steps=1)
    make_trainer(tmp_path, lambda history: "red", string_dataset(), reward, **options).train()
    assert kinds == {(str, str), (list, list)}


def test_calls_that_are_no_utf8_or_nested_too_deep_end_nothing(tmp_path):
    """Neither training nor TRL's table of completions."""
    tokenizer = make_tokenizer()
    head = '<tool_call>\n{"name":"echo","arguments":{"text":'
    turns = [
        head + r'"\ud800"}}' + "\n</tool_call>",
        head + "[" * 490 + "]" * 490 + "}}\n</tool_call>",
        head + '{"text":' * 500,
    ]

    def script(request):
        at = turn_of(tokenizer.decode(request.context)) - 1
        return usual(tokenizer, turns[at] if at < len(turns) else "done") + [tokenizer.eos_token_id]

    trainer = toys.make_trainer(
        tmp_path,
        script,
        model=make_model(max_position_embeddings=8192),
        tools=[echo],
        max_completion_length=8000,
        max_steps=1,
        log_completions=True,
        log_trees=True,
    )
    trainer.train()
    assert logged(trainer, "rollout/turns_per_leaf") == [4]
    (line, *_) = next(tmp_path.glob("trees/*.jsonl")).read_text().splitlines()
    assert json.loads(line)["turns"][0]["observation"] == "\ufffd"


def code_blocks():
    page = (Path(__file__).parent.parent / "docs" / "environments.md").read_text()
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_code_of_the_environments_page_runs(tmp_path, monkeypatch):
    """The script of the page trains; its policy is a tiny model, and the run is short."""
    folder = tmp_path / "model"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    first, stops, state = code_blocks()
    script = first.replace("Qwen/Qwen2.5-1.5B-Instruct", str(folder)).replace("TRACEConfig(", "short(")
    given = {}

    def short(**kwargs):
        given.update(kwargs)
        quick = {"max_completion_length": 64, "max_steps": 1}
        return make_config(tmp_path, **({key: kwargs[key] for key in kwargs if key != "output_dir"} | quick))

    names = {"__name__": "page", "short": short}
    # Dataclasses look their module up
    monkeypatch.setitem(sys.modules, "page", types.ModuleType("page"))
    exec(compile(script, "environments.md", "exec"), names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 1 and given["max_turns"] == 6
    assert len(logged(trainer, "rewards/env_step/mean")) == 1
    # The game itself
    game = names["env_reset"]({"number": 7})
    step = names["env_step"]
    assert [step(game, said, []).observation for said in ("hm", "is it 3?", "9")] == [
        "Say a number from 1 to 20.",
        "Higher.",
        "Lower.",
    ]
    won = step(game, "7", [])
    assert (won.done, won.reward, won.info) == (True, 1.0, {"guesses": 3})
    exec(stops, names | {"TRACEConfig": short})
    assert given["turn_stop_strings"]
    exec(compile(state, "environments.md", "exec"), names)
    original = names["State"]({"a": 1}, ["b"])
    copied = original.fork()
    assert copied == original and copied.table is original.table and copied.seen is not original.seen
