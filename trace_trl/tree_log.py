"""
The tree log: one JSON line per prompt and generation, in rotating files. `docs/tree_log.md` describes every key.

    output_dir/trees/trees-000001.jsonl     oldest, removed first
                     trees-000002.jsonl     being written

A line is written in one go and never split over two files, so that a reader may follow the files of a live run.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .foreign import optional_method, sound_text
from .metrics import effective
from .tree import Leaf, RemoteChild, RolloutTree, Start


SCHEMA_VERSION = 1
_FILE_NAME = re.compile(r"trees-(\d{6,})\.jsonl")
# JSON allows these inside strings, but readers that use `str.splitlines` would see a line end.
_LONGEST_COLUMN = 200  # characters: longer texts of a row, such as documents, are not repeated in every line
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


def _plain(value: Any) -> Any:
    """`value` made of types that strict JSON and UTF-8 can hold; what is neither becomes `str(value)`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return sound_text(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    tolist = optional_method(value, "tolist")  # of arrays and scalars of numpy and torch
    if tolist is not None:
        return _plain(tolist())
    return _plain(str(value))


def _observation_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """Text of the messages that the policy did not write."""
    texts = []
    for message in messages:
        if message.get("role") == "assistant":
            continue
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            parts = [part.get("text", "") if isinstance(part, Mapping) else part for part in content]
            content = "\n".join(map(str, parts))
        texts.append("" if content is None else str(content))
    return "\n".join(texts)


def _row_of(example: Mapping[str, Any]) -> dict[str, Any]:
    """The row's `id`; where it has none, its numbers and short texts, the prompt left out."""
    if "id" in example:
        return {"id": example["id"]}
    return {
        key: value
        for key, value in example.items()
        if key != "prompt" and (isinstance(value, (bool, int, float)) or _is_short(value))
    }


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_COLUMN


def tree_to_dict(tree: RolloutTree, include_ids: bool = False) -> dict[str, Any]:
    """A tree as JSON-able dictionary, the form in which it is logged.

    Of the dataset row (`tree.example`) what tells it from others is kept; the leaves' environments are left out.

    Args:
        tree (`RolloutTree`):
            The tree to write.
        include_ids (`bool`, *optional*, defaults to `False`):
            Whether to add what [`tree_from_dict`] needs to build the same tree again: token ids, log-probs, messages
            and the leaves' `extras`.

    Returns:
        `dict[str, Any]`: keys as in `docs/tree_log.md`; numbers that are not finite are `None`.
    """
    ids = {tree.root: 0}
    turns = []
    continuations = 0
    for turn in tree.turns():
        ids[turn] = len(ids)
        node: dict[str, Any] = {
            "id": ids[turn],
            "parent": ids[turn.parent],  # type: ignore[index]
            "depth": turn.depth,
            "text": turn.text,
            "observation": _observation_text(turn.messages),
            "tokens": len(turn.token_ids),
            "observation_tokens": len(turn.observation_ids),
            "value": turn.value,
            "target": turn.target,
            "advantage": turn.advantage,
            "leaf": None,
        }
        if turn.start is not None:
            node["start"] = {"prompt": turn.start.prompt, "prompt_tokens": len(turn.start.ids)}
            if include_ids:
                node["start"]["prompt_ids"] = turn.start.ids
        if include_ids:
            node |= {
                "token_ids": turn.token_ids,
                "observation_ids": turn.observation_ids,
                "logprobs": turn.logprobs,
                "messages": turn.messages,
            }
        if turn.leaf is not None:
            continuations += turn.leaf.kind != "bare"
            node["leaf"] = {
                "kind": turn.leaf.kind,
                "reason": turn.leaf.reason,
                "reward": turn.leaf.reward,
                "rewards": turn.leaf.rewards,
                "success": turn.leaf.success,
                "rollout": turn.leaf.rollout,
                "info": turn.leaf.info,
            }
            if include_ids:
                node["leaf"] |= {"environment_reward": turn.leaf.environment_reward, "extras": turn.leaf.extras}
        turns.append(node)
    record = {
        "schema_version": SCHEMA_VERSION,
        "prompt_index": tree.index,
        "row": _row_of(tree.example),
        "prompt": tree.prompt,
        "prompt_tokens": len(tree.prompt_ids),
        "budget": {"bare": tree.budget, "continuations": continuations},
        "value": tree.root.value,
        "target": tree.root.target,
        "effective": effective(tree),
        "remote": [
            {"rewards": child.rewards, "successes": child.successes, "target": child.target} for child in tree.remote
        ],
        "turns": turns,
    }
    if include_ids:
        record["prompt_ids"] = tree.prompt_ids
    return _plain(record)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def tree_from_dict(record: Mapping[str, Any]) -> RolloutTree:
    """The tree that [`tree_to_dict`] wrote, or a line of the tree log.

    Written with `include_ids=True` it is the same tree, but for the dataset row, the environments and certainties;
    otherwise its turns have no token ids and no messages either.

    Raises:
        ValueError: if `record` has another schema version.
    """
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"Tree of schema version {record.get('schema_version')!r}: this reads {SCHEMA_VERSION}.")
    tree = RolloutTree.from_prompt(
        record["prompt"],
        record.get("prompt_ids", ()),
        index=record["prompt_index"],
        budget=record["budget"]["bare"],
        remote=[
            RemoteChild(tuple(map(_number, child["rewards"])), tuple(child["successes"]), child["target"])
            for child in record["remote"]
        ],
    )
    tree.root.history_length = record["prompt_tokens"]
    tree.root.value, tree.root.target = record["value"], record["target"]
    by_id = {0: tree.root}
    for node in record["turns"]:
        leaf = None
        if node["leaf"] is not None:
            fields = dict(node["leaf"])
            fields["reward"] = _number(fields["reward"])
            fields["rewards"] = list(map(_number, fields["rewards"]))
            leaf = Leaf(**fields)
        start = node.get("start")
        logprobs = node.get("logprobs")
        parent = by_id[node["parent"]]
        turn = RolloutTree.add_turn(
            parent,
            node.get("token_ids", ()),
            node.get("observation_ids", ()),
            logprobs=None if logprobs is None else list(map(_number, logprobs)),
            text=node["text"],
            messages=node.get("messages", ()),
            leaf=leaf,
            start=None if start is None else Start(start["prompt"], start.get("prompt_ids", [])),
        )
        before = parent.history_length if start is None else start["prompt_tokens"]
        turn.history_length = before + node["tokens"] + node["observation_tokens"]
        turn.value, turn.target, turn.advantage = node["value"], node["target"], _number(node["advantage"])
        by_id[node["id"]] = turn
    return tree


class TreeLogger:
    """Writes trees as JSON lines to `trees-000001.jsonl`, `trees-000002.jsonl`, ... in one directory.

    A new logger on a directory with files goes on in the newest of them; what a killed run left of its last line is
    removed. One process writes to one directory.

    Args:
        directory (`str` or `os.PathLike`):
            Where the files lie; created if missing.
        max_bytes (`int`, *optional*, defaults to 16 MiB):
            Size at which the next file is begun. A line that is longer has a file to itself.
        max_files (`int`, *optional*, defaults to `8`):
            Files to keep; the oldest are removed.

    Raises:
        ValueError: if `max_bytes` or `max_files` is below 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_bytes: int = 16 * 1024 * 1024,
        max_files: int = 8,
    ):
        if max_bytes < 1 or max_files < 1:
            raise ValueError(f"max_bytes ({max_bytes}) and max_files ({max_files}) must be at least 1.")
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.max_files = max_files
        self.directory.mkdir(parents=True, exist_ok=True)
        numbers = self._numbers()
        self._current = numbers[-1] if numbers else 1
        if numbers:
            with open(self._path(self._current), "r+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)

    def _path(self, number: int) -> Path:
        return self.directory / f"trees-{number:06d}.jsonl"

    def _numbers(self) -> list[int]:
        matches = (_FILE_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def log(
        self,
        trees: Iterable[RolloutTree | Mapping[str, Any]],
        step: int,
        extra: Mapping[str, Any] | None = None,
        generation: int = 0,
    ) -> None:
        """Appends one line per tree.

        Args:
            trees (`Iterable[RolloutTree | Mapping]`):
                Trees, or what [`tree_to_dict`] made of them, for instance on another process, whose number is then
                under `process`.
            step (`int`):
                Training step the trees were generated for.
            extra (`Mapping[str, Any]`, *optional*):
                Written under the key `extra` of every line.
            generation (`int`, *optional*, defaults to `0`):
                Number of the generation within its step.
        """
        for tree in trees:
            if isinstance(tree, RolloutTree):
                tree = tree_to_dict(tree)
            head = {"schema_version": SCHEMA_VERSION, "step": step, "generation": generation, "process": 0}
            line = {**head, **tree, "extra": extra or {}}
            text = json.dumps(_plain(line), ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
            self._write(text.encode() + b"\n")

    def _write(self, line: bytes) -> None:
        path = self._path(self._current)
        size = path.stat().st_size if path.exists() else 0
        if size and size + len(line) > self.max_bytes:
            self._current += 1
            path, size = self._path(self._current), 0
        # Unbuffered: the line reaches the file at once, and an interrupted write is undone rather than left half done.
        with open(path, "ab", buffering=0) as file:
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[file.write(rest) :]
            except BaseException:
                file.truncate(size)
                raise
        for number in self._numbers()[: -self.max_files]:
            self._path(number).unlink(missing_ok=True)
