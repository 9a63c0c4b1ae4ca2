"""
Function calls in a model's text, read as data.

    [cd(folder='docs'), ls()]                                          call_format "python"
    <tool_call>{"name": "cd", "arguments": {"folder": "docs"}}</tool_call>         "json"

Nothing is ever evaluated: names and arguments come from `ast` and `json`, and an argument that is not a literal makes
its call fail with a sentence that the policy reads. What counts as a list of calls is decided as BFCL's own handlers
decide it, since a text without one ends the user's turn there and here.
"""

from __future__ import annotations

import ast
import json
import math
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .base import without_thoughts


CALL_FORMATS = ("python", "json")

# A parser's work and its recursion are bounded by the text; no call of the benchmark needs a hundredth of this.
_MAX_CHARS = 100_000
# Larger integers can't be printed (Python stops at 4300 digits), so no function could answer with them anyway.
MAX_BITS = 15_000

# CPython up to 3.11 counts the depth of a tree that it converts in one place for all threads: where another one parses
# meanwhile, it raises "SystemError: AST constructor recursion depth mismatch"
_parsing = threading.Lock()

_FENCE = re.compile(r"\s*```\w*\n(.*)```\s*", re.DOTALL)
_LOOKS_LIKE_CALLS = re.compile(r"\s*\[?\s*[A-Za-z_][\w.]*\(")
_KINDS: dict[type, str] = {
    ast.Name: "a name",
    ast.Call: "a nested call",
    ast.JoinedStr: "a formatted string",
    ast.Lambda: "a function",
    ast.ListComp: "a comprehension",
}
_NAMES = {"true": "True", "false": "False", "null": "None", "none": "None"}


@dataclass(frozen=True, slots=True)
class Call:
    """
    One function call.

    Attributes:
        name (`str`): the function's name.
        arguments (`dict[str, Any]`): arguments given by name, all literals.
        positional (`tuple`): arguments given by position; only "python" text has them.
        problem (`str` or `None`): why the call can't be made; its arguments are left out then.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()
    problem: str | None = None

    def __str__(self) -> str:
        if self.problem is not None:
            return f"{self.name}(...)"
        shown = [repr(value) for value in self.positional]
        return f"{self.name}({', '.join([*shown, *(f'{name}={value!r}' for name, value in self.arguments.items())])})"


class _Refused(ValueError):
    """An argument is not a literal."""


def parse_calls(text: str, call_format: str = "python") -> tuple[list[Call], int]:
    """
    Reads the calls of one turn.

    Args:
        text (`str`):
            The turn. What stands in `<think>` is left out.
        call_format (`str`, *optional*, defaults to `"python"`):
            `"python"` or `"json"`.

    Returns:
        `tuple[list[Call], int]`: the calls in their order, none if the turn holds no readable list of calls; and how
        many pieces of the text were meant as calls but can't be read.
    """
    text = without_thoughts(text)
    parse = {"python": _parse_python, "json": _parse_json}[call_format]
    return parse(text)


def format_calls(calls: Sequence[Call], call_format: str = "python") -> str:
    """The text of calls that [`parse_calls`] reads back; arguments by position have no "json" text."""
    if call_format == "python":
        return f"[{', '.join(map(str, calls))}]"
    if any(call.positional for call in calls):
        raise ValueError("JSON calls have no arguments by position.")
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>" for call in calls
    )


def _parse_python(text: str) -> tuple[list[Call], int]:
    meant = int(_LOOKS_LIKE_CALLS.match(text) is not None)
    if len(text) > _MAX_CHARS:
        return [], meant
    fenced = _FENCE.fullmatch(text)
    text = (fenced[1] if fenced else text).strip("` \t\r\n")
    # As BFCL completes it: small models often write a single call without brackets
    text = ("" if text.startswith("[") else "[") + text + ("" if text.endswith("]") else "]")
    try:
        with _parsing:
            body = ast.parse(text, mode="eval").body
        nodes: list[ast.expr] = [body] if isinstance(body, ast.Call) else list(getattr(body, "elts", ()))
        calls = [_python_call(node) for node in nodes if isinstance(node, ast.Call)]
    # `ast` refuses NUL characters by ValueError, too large numbers and too deep nesting by any of these
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return [], meant
    return (calls, 0) if len(calls) == len(nodes) else ([], meant)


def _python_call(node: ast.Call) -> Call:
    name = _function_name(node.func)
    try:
        positional = tuple(_literal(value, f"number {i + 1}") for i, value in enumerate(node.args))
        arguments = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise _Refused("Arguments can't be unpacked with **: write them out.")
            arguments[keyword.arg] = _literal(keyword.value, f"`{keyword.arg}`")
    except _Refused as error:
        return Call(name, problem=str(error))
    return Call(name, arguments, positional)


def _function_name(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "?")
    return ".".join(reversed(parts))


def _literal(node: ast.expr, where: str) -> Any:
    if isinstance(node, ast.Constant):
        return _plain(node.value, where)
    if isinstance(node, ast.List):
        return [_literal(item, where) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_literal(item, where) for item in node.elts)
    if isinstance(node, ast.Dict):
        return {_key(key, where): _literal(value, where) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _plain(-value if isinstance(node.op, ast.USub) else value, where)
    if isinstance(node, ast.Name) and node.id in _NAMES:
        raise _Refused(f"Argument {where} is the name {node.id}: write {_NAMES[node.id]}.")
    raise _Refused(
        f"Argument {where} is {_KINDS.get(type(node), 'an expression')}, not a literal: write out its value."
    )


def _key(node: ast.expr | None, where: str) -> Any:
    if not isinstance(node, ast.Constant):
        raise _Refused(f"A key in argument {where} is not a literal.")
    return _plain(node.value, where)


def _plain(value: Any, where: str) -> Any:
    """The value itself, or one whose parts were checked, if text in both formats could have given it."""
    kind = type(value)
    if kind is list:
        return [_plain(item, where) for item in value]
    if kind is dict:
        return {key: _plain(item, where) for key, item in value.items()}
    if kind is float and not math.isfinite(value):
        raise _Refused(f"Argument {where} is no finite number.")
    if kind is int and value.bit_length() > MAX_BITS:
        raise _Refused(f"Argument {where} is too large a number.")
    if kind not in (str, int, float, bool, type(None)):
        raise _Refused(f"Argument {where} is of type {kind.__name__}: write text, numbers, lists or dictionaries.")
    return value


def _parse_json(text: str) -> tuple[list[Call], int]:
    calls, unreadable = [], int("<tool_call>" in text and "</tool_call>" not in text)
    for block in _blocks(text):
        try:
            found = json.loads(block) if len(block) <= _MAX_CHARS else None
        except (ValueError, RecursionError):  # ValueError for a number of too many digits, too
            found = None
        if found is None:
            unreadable += 1  # BFCL drops such a block, and runs the others
            continue
        try:
            calls.append(_json_call(found))
        except (KeyError, TypeError, ValueError, RecursionError):
            return [], unreadable + 1  # one block that is JSON but no call spoils them all, as in BFCL
    return calls, unreadable


def _blocks(text: str) -> Iterator[str]:
    """What stands between the tags. Not by a regular expression: its time is quadratic in unclosed tags."""
    start = text.find("<tool_call>")
    while start >= 0:
        end = text.find("</tool_call>", start)
        if end < 0:
            return
        yield text[start + len("<tool_call>") : end]
        start = text.find("<tool_call>", end)


def _json_call(found: Any) -> Call:
    name, arguments = found["name"], found["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("no call")
    try:
        return Call(name, {key: _plain(value, f"`{key}`") for key, value in arguments.items()})
    except _Refused as error:
        return Call(name, problem=str(error))
