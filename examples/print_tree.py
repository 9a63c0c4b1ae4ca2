"""
Prints trees of a tree log as text, the ones with both outcomes first. Needs nothing but Python.

    python examples/print_tree.py runs/hotpotqa/trees --count 1
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def lines_of(record: dict, width: int = 64) -> list[str]:
    """One line per turn: predicted value, advantage, what was said, and how the episode ended."""
    children: dict[int, list[dict]] = {}
    for turn in record["turns"]:
        children.setdefault(turn["parent"], []).append(turn)

    def number(value: float | None, form: str) -> str:
        return "  -" if value is None else format(value, form)

    def walk(parent: int, indent: str) -> list[str]:
        lines = []
        turns = children.get(parent, [])
        for position, turn in enumerate(turns):
            last = position == len(turns) - 1
            leaf = turn["leaf"]
            action = " ".join(turn["text"].split("Action:")[-1].split())
            end = "" if leaf is None else f"   R = {number(leaf['reward'], '.2f')} ({leaf['kind']}, {leaf['reason']})"
            value = "" if leaf is not None else f"v {number(turn['value'], '.2f')}  "
            advantage = f"A {number(turn['advantage'], '+.2f')}"
            lines.append(f"{indent}{'└─' if last else '├─'} {value}{advantage}  {action[:width]}{end}")
            lines += walk(turn["id"], indent + ("   " if last else "│  "))
        return lines

    prompt = record["prompt"]
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return [f"v {number(record['value'], '.2f')}  {question}", *walk(0, "")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("directory", type=Path, help="folder with trees-*.jsonl")
    parser.add_argument("--count", type=int, default=3, help="trees to print")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    records = [json.loads(line) for path in sorted(args.directory.glob("trees-*.jsonl")) for line in path.open()]
    records.sort(key=lambda record: (not record["effective"], -record["step"]))
    for record in records[: args.count]:
        print("\n".join(lines_of(record)), end="\n\n")


if __name__ == "__main__":
    main()
