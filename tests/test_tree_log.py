"""The tree log: strict JSON, rotation, resuming, and the documented schema."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leaves import elsewhere
from toys import make_tokenizer, make_trainer
from trace_trl import StepResult, tree_log
from trace_trl.advantages import compute_advantages
from trace_trl.tree import Leaf, RolloutTree, Start
from trace_trl.tree_log import TreeLogger, tree_from_dict, tree_to_dict


PAGE = Path(__file__).parent.parent / "docs" / "tree_log.md"


def search(word, answer):
    return [{"role": "assistant", "content": word}, {"role": "tool", "name": "search", "content": answer}]


def example_tree():
    """Two bare rollouts, of which the first fails, and one continuation from its second turn."""
    prompt = [{"role": "user", "content": "Who was born first, Ada or Grace?"}]
    tree = RolloutTree.from_prompt(prompt, range(9), example={"answer": "Ada"}, index=3, budget=2)
    add = tree.add_turn
    a1 = add(tree.root, [1] * 4, [2] * 5, text="search(Ada)", messages=search("search(Ada)", "Ada: 1815"))
    a2 = add(a1, [3] * 4, [4] * 5, text="search(Grace)", messages=search("search(Grace)", "Grace: 1906"))
    add(a2, [5] * 2, text="Grace", leaf=Leaf(reward=0.0, rewards=[0.0, math.nan], success=False, rollout=0))
    b1 = add(tree.root, [6] * 4, [7] * 5, text="search(Grace)", messages=search("search(Grace)", "Grace: 1906"))
    add(b1, [8] * 2, text="Ada", leaf=Leaf(reward=1.0, rewards=[1.0, math.nan], success=True, rollout=1))
    leaf = Leaf(kind="continuation", reward=1.0, rewards=[1.0, math.nan], success=True, rollout=2, info={"pages": 2.0})
    add(a2, [9] * 2, text="Ada", leaf=leaf)
    tree.root.value, a1.value, a2.value, b1.value = 0.55, 0.5, 0.625, 0.5
    tree.backup()
    compute_advantages([tree])
    return tree


def one_leaf(text="answer", prompt="prompt"):
    tree = RolloutTree.from_prompt(prompt, [1])
    tree.add_turn(tree.root, [1], text=text, leaf=Leaf(reward=1.0, success=True))
    return tree


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def read(directory):
    """Every line of the log, oldest file first, read as strictly as the standard asks."""
    lines = []
    for path in sorted(Path(directory).iterdir()):
        data = path.read_bytes()
        assert data.endswith(b"\n") and b"\r" not in data
        for line in data.decode("utf-8").splitlines():
            lines.append(json.loads(line, parse_constant=refuse))
    return lines


# The page


def page_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_example_line_of_the_page_is_what_is_written(tmp_path):
    TreeLogger(tmp_path).log([example_tree()], step=12)
    assert page_blocks("json") == [(tmp_path / "trees-000001.jsonl").read_text(encoding="utf-8")]


def test_the_page_names_every_key(tmp_path):
    TreeLogger(tmp_path).log([example_tree()], step=12)
    (record,) = read(tmp_path)
    turn = record["turns"][-1]
    full = tree_to_dict(example_tree(), include_ids=True)
    full_turn = next(turn for turn in full["turns"] if turn["leaf"])
    page = PAGE.read_text(encoding="utf-8")
    keys = {*record, *record["budget"], *turn, *full, *full_turn, *full_turn["leaf"], "rewards", "successes", "target"}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_the_snippet_of_the_page_runs_without_the_package(tmp_path):
    TreeLogger(tmp_path / "output" / "trees").log([example_tree(), one_leaf()], step=12)
    (snippet,) = page_blocks("python")
    assert len(snippet.strip().splitlines()) <= 10
    run = subprocess.run(
        [sys.executable, "-I", "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.splitlines() == [
        "12  3  0.0  search(Ada)  search(Grace)  Grace",
        "12  3  1.0  search(Ada)  search(Grace)  Ada",
        "12  3  1.0  search(Grace)  Ada",
        "12  0  1.0  answer",
    ]


# Content


def test_a_line_holds_the_tree(tmp_path):
    tree = example_tree()
    tree.remote = [elsewhere([1.0, math.nan], 1.0)]
    TreeLogger(tmp_path).log([tree], step=5, extra={"loss": math.nan, "lr": 0.1})
    (record,) = read(tmp_path)
    assert list(record)[:2] == ["schema_version", "step"]
    assert record["step"] == 5 and record["prompt_index"] == 3 and record["prompt_tokens"] == 9
    assert record["prompt"] == tree.prompt
    assert record["budget"] == {"bare": 2, "continuations": 1}
    assert record["value"] == 0.55 and record["target"] == pytest.approx(2 / 3) and record["effective"] is True
    assert (record["generation"], record["process"], record["row"]) == (0, 0, {"answer": "Ada"})
    assert record["remote"] == [{"rewards": [1.0, None], "successes": [True, None], "target": 1.0}]
    assert record["extra"] == {"loss": None, "lr": 0.1}
    assert [turn["id"] for turn in record["turns"]] == [1, 2, 3, 4, 5, 6]
    assert [turn["parent"] for turn in record["turns"]] == [0, 1, 2, 2, 0, 5]
    a2, c3 = record["turns"][1], record["turns"][3]
    assert a2["observation"] == "Grace: 1906" and (a2["tokens"], a2["observation_tokens"]) == (4, 5)
    assert a2["leaf"] is None and a2["target"] == 0.5 and a2["advantage"] == pytest.approx(-0.288625, abs=1e-6)
    assert c3["leaf"] == {
        "kind": "continuation",
        "reason": "final",
        "reward": 1.0,
        "rewards": [1.0, None],
        "success": True,
        "rollout": 2,
        "info": {"pages": 2.0},
    }


@pytest.mark.parametrize(
    "example, row",
    [
        ({"prompt": "p", "id": "q7", "answer": "Ada"}, {"id": "q7"}),
        (
            {"prompt": "p", "answer": "Ada", "level": 3, "context": ["x"], "page": "x" * 201},
            {"answer": "Ada", "level": 3},
        ),
        ({"prompt": "p"}, {}),
    ],
)
def test_a_line_tells_its_row_from_others(example, row):
    assert tree_to_dict(RolloutTree.from_prompt("p", [1], example=example))["row"] == row


def test_lines_of_a_run_can_be_told_apart(tmp_path):
    """Two generations of two prompts within one optimizer step: no two lines have the same generation and prompt."""
    args = dict(max_steps=1, gradient_accumulation_steps=4, steps_per_generation=2, log_trees=True)
    ends = make_tokenizer().eos_token_id

    def env_step(state, action, messages):
        return StepResult(done=True, reward=1.0, info={"pages": 2})

    trainer = make_trainer(tmp_path, script=lambda request: [7, ends], env_step=env_step, **args)
    trainer.train()
    lines = read(tmp_path / "trees")
    keys = [(line["step"], line["generation"], line["process"], line["prompt_index"]) for line in lines]
    assert len(set(keys)) == len(keys) and {line["generation"] for line in lines} == {0, 1}
    assert all(line["row"] for line in lines)
    leaves = [turn["leaf"] for line in lines for turn in line["turns"] if turn["leaf"]]
    assert leaves and all(leaf["info"] == {"pages": 2.0} for leaf in leaves)


def test_case_41_a_line_tells_what_a_rollout_was_shown():
    """A tree with a rollout whose reset answered differently: written and read again, with ids and without."""
    tree = RolloutTree.from_prompt("folder a", [1, 2, 3])
    tree.add_turn(tree.root, [11], leaf=Leaf(reward=0.0))
    turn = tree.add_turn(tree.root, [21], [22], start=Start("folder bb", [7, 8, 9, 10]))
    tree.add_turn(turn, [23], leaf=Leaf(reward=1.0, rollout=1))
    for include_ids in (False, True):
        record = tree_to_dict(tree, include_ids)
        assert [node.get("start", {}).get("prompt_tokens") for node in record["turns"]] == [None, 4, None]
        again = tree_from_dict(json.loads(json.dumps(record)))
        assert tree_to_dict(again, include_ids) == record or not include_ids
        _, (first, leaf) = again.root.children[0], list(again.root.children[1].turns())
        assert again.start(leaf).prompt == "folder bb" and (first.history_length, leaf.history_length) == (6, 7)
    assert leaf.history_ids() == [7, 8, 9, 10, 21, 22, 23]


def test_observations_of_every_kind(tmp_path):
    tree = RolloutTree.from_prompt("prompt", [1])
    parts = [{"type": "text", "text": "seen"}, {"type": "image"}, "plain"]
    messages = [
        {"role": "assistant", "content": "mine"},
        {"role": "tool", "content": parts},
        {"role": "user", "content": None},
        {"role": "tool", "content": 7},
    ]
    tree.add_turn(tree.root, [1], messages=messages, leaf=Leaf(reward=1.0))
    TreeLogger(tmp_path).log([tree], step=0)
    assert read(tmp_path)[0]["turns"][0]["observation"] == "seen\n\nplain\n\n7"


class Lookup:
    @property
    def tolist(self):
        raise KeyError("tolist")

    def __str__(self):
        return "looked up"


class Opaque:
    def __str__(self):
        return "opaque \ud800"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("grüße 🙂", "grüße 🙂"),
        ("lone \ud83d here", "lone \ufffd here"),
        ("pair \ud83d\ude42", "pair 🙂"),
        ("a\u2028b\u2029c\x85d\x0be\x1cf\rg\nh\x00", "a\u2028b\u2029c\x85d\x0be\x1cf\rg\nh\x00"),
        ([{"role": "user", "content": [{"type": "image", "image": Opaque()}]}], "opaque \ufffd"),
        ({1: (1, 2), None: {3}}, None),
        (b"\xff", "b'\\xff'"),
        (np.float32("nan"), None),
        (np.array([1.5, math.inf]), [1.5, None]),
        (np.int64(3), 3),
        (True, True),
        (-math.inf, None),
        (Lookup(), "looked up"),
    ],
)
def test_any_prompt_becomes_strict_json(tmp_path, prompt, expected):
    TreeLogger(tmp_path).log([one_leaf(prompt=prompt)], step=0, extra={"\ud800": prompt})
    (record,) = read(tmp_path)
    written = record["prompt"]
    if isinstance(prompt, list):
        written = written[0]["content"][0]["image"]
    if isinstance(prompt, dict):
        expected = {"1": [1, 2], "None": "{3}"}
    assert written == expected
    assert record["extra"] == {"\ufffd": record["prompt"]}


@given(text=st.text(st.characters(exclude_categories=[])), reward=st.floats())
@settings(deadline=None, database=None)
def test_any_text_and_number_is_one_line_of_strict_json(text, reward):
    tree = one_leaf(text=text)
    tree.leaves()[0].leaf.reward = reward
    lines = []
    logger = object.__new__(TreeLogger)
    logger._write = lines.append
    logger.log([tree], step=0)
    (line,) = lines[0].decode("utf-8").splitlines()
    turn = json.loads(line, parse_constant=refuse)["turns"][0]
    assert turn["leaf"]["reward"] == (reward if math.isfinite(reward) else None)
    if not any(0xD800 <= ord(char) < 0xE000 for char in text):
        assert turn["text"] == text


# Round trip


SPECS = st.lists(
    st.recursive(
        st.sampled_from([0.0, 1.0, math.nan]), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=8
    ),
    max_size=3,
)


def same(a, b):
    """Equality that takes nan for equal to nan."""
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return a == b


@given(spec=SPECS, data=st.data())
@settings(deadline=None, database=None)
def test_round_trip_with_ids(spec, data):
    tree = RolloutTree.from_prompt([{"role": "user", "content": "q"}], [7, 8], index=4, budget=3)
    tree.remote = [elsewhere([1.0, math.nan], 1.0), elsewhere([math.nan])]
    ids = st.lists(st.integers(0, 9), max_size=3)

    def add(parent, children):
        for child in children:
            token_ids = data.draw(ids)
            leaf = None
            if not isinstance(child, list):
                success = None if math.isnan(child) else bool(child)
                leaf = Leaf("extra", "length", child, [child, 2.0], success, rollout=5, extras={"note": "x"})
                leaf.environment_reward = 0.5
            turn = tree.add_turn(
                parent,
                token_ids,
                data.draw(ids),
                logprobs=data.draw(st.sampled_from([None, [-0.25] * len(token_ids), [math.nan] * len(token_ids)])),
                text="text",
                messages=search("a", "b"),
                leaf=leaf,
            )
            turn.value = 0.25
            if leaf is None:
                add(turn, child)

    add(tree.root, spec)
    tree.root.value = 0.75
    tree.backup()
    compute_advantages([tree])

    record = tree_to_dict(tree, include_ids=True)
    again = tree_from_dict(json.loads(json.dumps(record, allow_nan=False)))
    assert tree_to_dict(again, include_ids=True) == record
    assert (again.prompt, again.index, again.budget) == (tree.prompt, tree.index, tree.budget)
    for old, new in zip(tree.remote, again.remote, strict=True):
        assert same(old.rewards, new.rewards) and old.target == new.target
    for old, new in zip(tree.root.turns(), again.root.turns(), strict=True):
        for name in ("token_ids", "observation_ids", "depth", "logprobs", "text", "messages"):
            assert same(getattr(old, name), getattr(new, name)), name
        for name in ("value", "target", "advantage", "history_length"):
            assert getattr(old, name) == getattr(new, name), name
        assert (old.leaf is None) == (new.leaf is None)
        for name in old.leaf.__slots__ if old.leaf else ():
            assert same(getattr(old.leaf, name), getattr(new.leaf, name)), name


def test_a_logged_line_gives_the_tree_without_its_ids(tmp_path):
    tree = example_tree()
    TreeLogger(tmp_path).log([tree], step=0)
    again = tree_from_dict(read(tmp_path)[0])
    assert [turn.history_length for turn in again.turns()] == [turn.history_length for turn in tree.turns()]
    assert [turn.text for turn in again.turns()] == [turn.text for turn in tree.turns()]
    expected = [turn.advantage for turn in tree.turns()]
    compute_advantages([again])
    assert [turn.advantage for turn in again.turns()] == expected


def test_another_schema_version_is_refused():
    record = tree_to_dict(one_leaf())
    with pytest.raises(ValueError, match="schema version 99"):
        tree_from_dict({**record, "schema_version": 99})


def test_a_tree_is_not_changed_by_what_is_done_to_its_dictionary():
    tree = example_tree()
    record = tree_to_dict(tree, include_ids=True)
    record["turns"][0]["token_ids"].append(99)
    record["turns"][0]["messages"][0]["content"] = "changed"
    record["prompt"][0]["content"] = "changed"
    assert tree_to_dict(tree, include_ids=True) == tree_to_dict(example_tree(), include_ids=True)


# Files


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def test_rotation_keeps_whole_lines_and_removes_the_oldest(tmp_path):
    TreeLogger(tmp_path / "one").log([one_leaf()], step=0)
    size = (tmp_path / "one" / "trees-000001.jsonl").stat().st_size
    logger = TreeLogger(tmp_path / "trees", max_bytes=2 * size, max_files=3)
    for step in range(9):
        logger.log([one_leaf()], step=step)
    assert names(tmp_path / "trees") == ["trees-000003.jsonl", "trees-000004.jsonl", "trees-000005.jsonl"]
    assert [record["step"] for record in read(tmp_path / "trees")] == [4, 5, 6, 7, 8]
    assert all(path.stat().st_size <= 2 * size for path in (tmp_path / "trees").iterdir())


def test_a_line_longer_than_a_file_has_one_to_itself(tmp_path):
    logger = TreeLogger(tmp_path, max_bytes=1000)
    logger.log([one_leaf(), one_leaf(text="x" * 5000), one_leaf()], step=0)
    assert [len(record["turns"][0]["text"]) for record in read(tmp_path)] == [6, 5000, 6]
    assert len(names(tmp_path)) == 3


def test_resuming_goes_on_where_the_log_ended(tmp_path):
    for step in range(4):  # a new logger each time, as after four restarts
        TreeLogger(tmp_path, max_bytes=900, max_files=2).log([one_leaf()], step=step)
    expected = tmp_path / "expected"
    logger = TreeLogger(expected, max_bytes=900, max_files=2)
    for step in range(4):
        logger.log([one_leaf()], step=step)
    assert names(tmp_path)[1:] == names(expected)
    for name in names(expected):
        assert (tmp_path / name).read_bytes() == (expected / name).read_bytes()


def test_resuming_numbers_files_by_value(tmp_path):
    line = b'{"schema_version": 1}\n'
    for name in ("trees-999999.jsonl", "trees-1000000.jsonl", "notes.txt", "trees-000001.jsonl.bak"):
        (tmp_path / name).write_bytes(line)
    TreeLogger(tmp_path, max_bytes=1, max_files=2).log([one_leaf()], step=0)
    assert names(tmp_path) == ["notes.txt", "trees-000001.jsonl.bak", "trees-1000000.jsonl", "trees-1000001.jsonl"]


@pytest.mark.parametrize("tail", [b'{"schema_version": 1, "st', b"{"])
def test_resuming_removes_what_a_killed_run_left_of_a_line(tmp_path, tail):
    TreeLogger(tmp_path).log([one_leaf()], step=0)
    with open(tmp_path / "trees-000001.jsonl", "ab") as file:
        file.write(tail)
    TreeLogger(tmp_path).log([one_leaf()], step=1)
    assert [record["step"] for record in read(tmp_path)] == [0, 1]


def test_a_failed_write_leaves_no_half_line(tmp_path, monkeypatch):
    logger = TreeLogger(tmp_path)
    logger.log([one_leaf()], step=0)

    class Full:
        """A disk that is full after a few bytes."""

        def __init__(self, file):
            self.file, self.left = file, 10

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            self.file.close()

        def write(self, data):
            if not self.left:
                raise OSError(28, "No space left on device")
            written = self.file.write(data[: self.left])
            self.left -= written
            return written

        def truncate(self, size):
            return self.file.truncate(size)

    with monkeypatch.context() as patch:
        patch.setattr(tree_log, "open", lambda *args, **kwargs: Full(open(*args, **kwargs)), raising=False)
        with pytest.raises(OSError, match="No space left"):
            logger.log([one_leaf()], step=1)
    logger.log([one_leaf()], step=2)
    assert [record["step"] for record in read(tmp_path)] == [0, 2]


def test_a_reader_of_a_live_run_sees_whole_lines(tmp_path):
    logger = TreeLogger(tmp_path, max_bytes=2000)
    for step in range(10):
        logger.log([one_leaf(), one_leaf(text="ü" * step)], step=step)
        assert read(tmp_path)[-1]["step"] == step


def test_dictionaries_are_logged_like_trees(tmp_path):
    TreeLogger(tmp_path / "a").log([example_tree()], step=1)
    TreeLogger(tmp_path / "b").log([tree_to_dict(example_tree())], step=1)
    a, b = ((tmp_path / name / "trees-000001.jsonl").read_bytes() for name in "ab")
    assert a == b


def test_bad_limits_are_refused(tmp_path):
    for limits in ({"max_bytes": 0}, {"max_files": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            TreeLogger(tmp_path / "never", **limits)
    assert not os.path.exists(tmp_path / "never")
