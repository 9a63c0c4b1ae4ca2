"""
Demonstrations for the mathematics example, made of the calculations in the answers of its bundled training rows:

    She sold 48/2 = <<48/2=24>>24 clips in May.           # She sold 48/2
    In all 48+24 = <<48+24=72>>72 clips.             ──▶  a = 48/2
                                                          # In all 48+24
                                                          b = 48+a
                                                          print(b)
"""

from __future__ import annotations

import gzip
import json
import random
import re
from typing import Any

from mathematics import TRAIN_FILE, build_prompt

from trace_trl.environments.math_data import load_problems
from trace_trl.environments.python import PythonEnvironment


Messages = list[dict[str, str]]

CALCULATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
NUMBER = re.compile(r"(?<![\w.])\d*\.?\d+(?![\w.])")
LONGEST = 60  # words of a problem


def program_of(answer: str) -> str | None:
    """A program that makes the calculations of an answer, or `None` where one of them is no plain arithmetic."""
    lines, known = [], {}
    for line in answer.split("####")[0].splitlines():
        for match in CALCULATION.finditer(line):
            expression, value = match.group(1).replace(" ", ""), match.group(2).strip()
            if not re.fullmatch(r"[\d.+\-*/()]+", expression) or len(known) == 26:
                return None
            expression = NUMBER.sub(lambda number: known.get(number.group(), number.group()), expression)
            thought = re.split(r"[=<]", line[: match.start()].strip())[0].strip(" $")
            name = chr(ord("a") + len(lines) // 2)
            lines += [f"# {thought}", f"{name} = {expression}"]
            known[value] = name
    return "\n".join([*lines, f"print({name})"]) if lines else None


def demonstrate(row: dict[str, Any], answer: str, environment: PythonEnvironment) -> Messages | None:
    """An episode in the real environment, or `None` if the program does not come to the right answer."""
    program = program_of(answer)
    if program is None:
        return None
    state = environment.reset(row)
    turn = f"```python\n{program}\n```"
    observation = str(environment.step(state, turn).observation)
    state.close()
    printed = observation.split("\n")[1]
    try:
        right = abs(float(printed) - float(row["answer"].replace(",", ""))) < 1e-6
    except ValueError:
        return None
    if not right:
        return None
    return [
        *build_prompt(row["problem"]),
        {"role": "assistant", "content": turn},
        {"role": "user", "content": observation},
        {"role": "assistant", "content": f"The answer is \\boxed{{{row['answer']}}}."},
    ]


def build_demonstrations(
    count: int = 400, steps: tuple[str, ...] = ("1 step", "2 steps"), seed: int = 0
) -> list[Messages]:
    """
    Args:
        count (`int`, *optional*, defaults to `400`):
            Most demonstrations.
        steps (`tuple[str, ...]`, *optional*):
            Subsets of the rows they are made of.
        seed (`int`, *optional*, defaults to `0`):
            Seed of their order.

    Returns:
        `list[list[dict]]`: conversations, in random order.
    """
    with gzip.open(TRAIN_FILE, "rt", encoding="utf-8") as lines:
        answers = [json.loads(line)["answer"] for line in lines]
    rows = [
        (row, answer)
        for row, answer in zip(load_problems(TRAIN_FILE), answers, strict=True)
        if row["subset"] in steps and len(row["problem"].split()) <= LONGEST
    ]
    random.Random(seed).shuffle(rows)
    environment = PythonEnvironment()
    played = (demonstrate(*row, environment) for row in rows)
    demonstrations = [messages for messages in played if messages is not None][:count]
    environment.close()
    return demonstrations
