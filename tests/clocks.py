"""
Finds tests that assert how long something took: `python tests/clocks.py`, a part of `make quality`.

Such a test fails on a busy machine without any fault. A test asserts order, counts and outcomes; speed belongs into
`benchmarks/`. What is looked for are comparisons by order (`<`, `<=`, `>`, `>=`) in an `assert` in which a clock takes
part: a call of one, or a name or a logged number that holds what one said.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path


TESTS = Path(__file__).parent
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "time_ns", "monotonic_ns", "getrusage"}
# Names and keys that hold times by their own account
TIMES = re.compile(r"\b(seconds|elapsed|took|duration|cpu_time|deadline)\b")
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)

# Where a clock is the thing itself, and why the bound holds on any machine: `file::function`
ALLOWED = {
    "waiting.py::until": "the limit of all waiting, 60 s for what takes moments",
    "toys.py::pass_time": "a clock that the test itself sets",
    "test_logs.py::test_resets_are_seconds_of_the_environment": "a clock that the test itself sets",
}


def is_clock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr in CLOCKS and ast.unparse(function.value) in ("time", "resource", "os")
    return isinstance(function, ast.Name) and function.id in CLOCKS - {"time"}


def tells_time(node: ast.AST, times: set[str]) -> bool:
    """Whether a clock, or a name that holds what one said, takes part in an expression."""
    for part in ast.walk(node):
        if is_clock(part) or isinstance(part, ast.Name) and (part.id in times or TIMES.search(part.id)):
            return True
        if isinstance(part, ast.Attribute) and TIMES.search(part.attr):
            return True
        if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant):
            if isinstance(part.slice.value, str) and TIMES.search(part.slice.value):
                return True
    return False


def is_positive(node: ast.Compare) -> bool:
    """`seconds > 0`: that something took time at all holds on every machine."""
    return isinstance(node.ops[0], (ast.Gt, ast.GtE)) and ast.unparse(node.comparators[0]) in ("0", "0.0")


def names_of(target: ast.AST) -> Iterator[str]:
    for part in ast.walk(target):
        if isinstance(part, ast.Name):
            yield part.id


def compared_times(function: ast.AST) -> Iterator[int]:
    """Lines of a function at which a time is asserted to be above or below something."""
    times: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(is_clock(part) for part in ast.walk(node.value)):
            times.update(name for target in node.targets for name in names_of(target))
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                by_order = isinstance(part, ast.Compare) and any(isinstance(op, ORDER) for op in part.ops)
                if by_order and tells_time(part, times) and not is_positive(part):
                    yield node.lineno


def main() -> int:
    found, used = [], set()
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for line in compared_times(node):
                    place = f"{path.relative_to(TESTS)}::{node.name}"
                    used.add(place)
                    if place not in ALLOWED:
                        found.append(
                            f"tests/{path.relative_to(TESTS)}:{line}: {node.name} asserts how long something took"
                        )
    found += [f"tests/clocks.py: {place} is allowed, but asserts no time" for place in sorted(ALLOWED.keys() - used)]
    print("\n".join(found) or "no test asserts how long something took")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
