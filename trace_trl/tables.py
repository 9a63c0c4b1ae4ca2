"""
What the tables of `log_completions` hold. TRL prints them and writes them as Parquet, and both take less than a
rollout may hold: a tool call without arguments, one whose arguments are no object, values of several kinds in one
column. Such things are shown as text, since a log must not end a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from .environments.callback import as_text
from .foreign import nests_deeper, shown, sound, sound_text


def loggable(logs: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's columns of the latest rollouts (`_logs`), of which every one can be printed and written.

    Arguments of tool calls are JSON, content in blocks is joined; a column that still has no type of its own is text.
    """
    rows = {name: _column([_entry(value) for value in logs[name]]) for name in ("prompt", "completion")}
    return {**logs, **rows, "extra": {name: _column(values) for name, values in logs["extra"].items()}}


def _entry(value: Any) -> Any:
    is_chat = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    return [_message(message) for message in value] if is_chat else value


def _message(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    texts = {key: _content(value) for key, value in message.items() if key != "tool_calls"}
    return texts | ({"tool_calls": [_call(call) for call in calls]} if isinstance(calls, (list, tuple)) else {})


def _content(value: Any) -> str | None:
    try:
        return None if value is None else sound_text(as_text(value))
    except Exception:
        return _text(value)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict):
        function = {"name": "unknown", "arguments": function}
    return {
        "type": "function",
        "function": {"name": _text(function.get("name")), "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(value: Any) -> str:
    """As JSON of an object: TRL prints nothing else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            pass
    value = {} if value is None else value if isinstance(value, dict) else {"arguments": value}
    text = _text(value)
    try:
        return text if isinstance(json.loads(text), dict) else json.dumps({"arguments": text})
    except (ValueError, RecursionError):
        return json.dumps({"arguments": text})


def _column(values: Iterable[Any]) -> list[Any]:
    values = list(values)
    if not nests_deeper(values):
        values = [sound(value) for value in values]
        try:
            if _is_written(pa.array(values, from_pandas=True).type):
                return values
        except Exception:  # whatever a value's own methods raise
            pass
    return [None if value is None else _text(value) for value in values]


def _is_written(kind: pa.DataType) -> bool:
    """Whether Parquet takes an Arrow type: it has no structures without fields."""
    if pa.types.is_struct(kind) and not kind.num_fields:
        return False
    return all(_is_written(kind.field(index).type) for index in range(kind.num_fields))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return sound_text(value)
    try:
        return sound_text(json.dumps(value, ensure_ascii=False, default=shown))
    except (TypeError, ValueError, RecursionError):  # keys that are no text, circles
        return sound_text(shown(value))
