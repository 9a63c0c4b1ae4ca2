"""
What others made: text and data of the policy, of environments and of tools, which may hold anything.

Text is mended where it enters a tree, so that whatever reads the tree (tokenizer, template, reward functions, tables)
can do without looking. This module knows nothing of torch, TRL or processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


MOST_NESTED = 50  # levels of lists and dictionaries in a message: copies, templates and tables go down one by one


def sound_text(text: str) -> str:
    """`text` as UTF-8 can hold it: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def sound(value: Any) -> Any:
    """`value` with [`sound_text`] in all dictionaries and lists; it must not be nested without end."""
    if isinstance(value, str):
        return sound_text(value)
    if isinstance(value, dict):
        return {sound(key): sound(item) for key, item in value.items()}
    return [sound(item) for item in value] if isinstance(value, (list, tuple)) else value


def nests_deeper(value: Any, levels: int = MOST_NESTED) -> bool:
    """Whether dictionaries and lists lie in each other more than `levels` deep."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return False
    return levels == 0 or any(nests_deeper(item, levels - 1) for item in value)


def optional_method(target: Any, name: str) -> Callable | None:
    """A method that a user's object may have; `None` where it has none, or where looking for it fails, as with a
    `__getattr__` that looks keys up, or a property that raises."""
    try:
        method = getattr(target, name)
    except Exception:
        return None
    return method if callable(method) else None


def shown(value: Any) -> str:
    """The start of `repr(value)`, for messages; the name of its type where it has none that can be made."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return type(value).__name__
