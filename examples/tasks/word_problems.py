"""
Word problems of one to five steps, made by rule: what a model of 135M parameters can learn to put into a program.

    Mia has 12 apples. She finds 5 more. Tom is 9 years old. She sells 4. How many apples does Mia have now?

GSM8K is out of reach for it (`warm_start/math/README.md` has the numbers). Here the number of steps, the wordings and
the sentences that do not matter make the difficulty.
"""

from __future__ import annotations

import operator
import random
from typing import Any


NAMES = {"Mia": "She", "Tom": "He", "Ana": "She", "Ben": "He", "Lea": "She", "Max": "He", "Zoe": "She", "Ali": "He"}
THINGS = ["apples", "marbles", "stamps", "books", "coins", "shells", "cards", "pencils"]
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
MOST = 400  # things that anybody has

# Wordings by operation; `{n}` is a number, `{other}` another person, `{things}` what is counted
WORDINGS = {
    "+": ["{who} finds {n} more.", "{who} buys {n} more.", "{other} gives {them} {n} {things}.", "{n} are added."],
    "-": [
        "{who} gives {n} to {other}.",
        "{who} loses {n} of them.",
        "{who} sells {n}.",
        "{n} of the {things} break, and {who_low} throws them away.",
    ],
    "*": [
        "{who} then gets so many that there are {n} times as many.",
        "The number grows {n} times as large.",
        "{other} brings more, and now there are {n} times as many {things}.",
    ],
    "/": [
        "{who} shares them equally among {n} boxes and keeps one box.",
        "{who} keeps only one of every {n}.",
        "{who} splits them into {n} equal parts and gives all parts but one to {other}.",
    ],
}
FILLERS = [
    "{other} has {n} {things} too.",
    "It is {n} degrees outside.",
    "{other} is {n} years old.",
    "The shop opens at {n}.",
]


def make_problem(rng: random.Random, steps: int) -> dict[str, Any]:
    """
    Args:
        rng (`random.Random`):
            Makes all choices.
        steps (`int`):
            Number of operations.

    Returns:
        `dict`: `problem` (`str`), `answer` (`str`), `subset` (`str`, `"3 steps"`), `program` (`str`).
    """
    name, other = rng.sample(list(NAMES), 2)
    things = rng.choice(THINGS)
    who = NAMES[name]
    words = {
        "who": who,
        "who_low": who.lower(),
        "them": "her" if who == "She" else "him",
        "other": other,
        "things": things,
    }
    number = rng.randint(6, 40)
    sentences, lines = [f"{name} has {number} {things}."], [f"x = {number}"]
    for _ in range(steps):
        operation, operand = _choose(rng, number)
        if rng.random() < 0.2:
            sentences.append(rng.choice(FILLERS).format(n=rng.randint(3, 30), **words))
        sentences.append(rng.choice(WORDINGS[operation]).format(n=operand, **words))
        lines.append(f"x = x {'//' if operation == '/' else operation} {operand}")
        number = OPERATIONS[operation](number, operand)
    return {
        "problem": " ".join([*sentences, f"How many {things} does {name} have now?"]),
        "answer": str(number),
        "subset": f"{steps} step{'s' * (steps > 1)}",
        "program": "\n".join([*lines, "print(x)"]),
    }


def _choose(rng: random.Random, number: int) -> tuple[str, int]:
    choices = [("+", rng.randint(2, 30))]
    if number > 3:
        choices.append(("-", rng.randint(2, number - 1)))
    if number * 5 <= MOST:
        choices.append(("*", rng.randint(2, 5)))
    parts = [n for n in range(2, 7) if number % n == 0 and number > n]
    if parts:
        choices.append(("/", rng.choice(parts)))
    return rng.choice(choices)


def make_problems(count: int, seed: int, most_steps: int = 5) -> list[dict[str, Any]]:
    """`count` problems, all different, with one to `most_steps` steps in turn, and an `id`."""
    rng = random.Random(seed)
    problems: dict[str, dict[str, Any]] = {}
    while len(problems) < count:
        problem = make_problem(rng, 1 + len(problems) % most_steps)
        problems.setdefault(problem["problem"], {"id": f"{seed}-{len(problems)}", **problem})
    return list(problems.values())
