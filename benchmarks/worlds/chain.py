"""
Chain: a prompt of 2 to 7 symbols, shown one per turn; each has its own right answer; reward 1 if all are right.

    s04 s51 s17 ;  s04 │ a16 .        the policy's turns are behind the bars
                   s51 │ a03 .
                   s17 │ a22 .        3 of 3 right: reward 1

No turn is told whether it was right, and none can be made good: the first wrong answer settles the outcome, unseen.
"""

from __future__ import annotations

import random
from typing import Any

from trace_trl import StepResult

from .base import World


SYMBOLS = 120
ANSWERS = 24
LENGTHS = (2, 3, 4, 5, 6, 7)
NEIGHBOURS = 20  # the symbols of a prompt are about as hard as each other: prompts are easy or hard, as in data sets
KNOWN = (0.05, 0.95)  # how often demonstrations are right about the hardest and the easiest symbol
# How often what they say instead is the same wrong answer: else to be surer of everything would be enough to succeed
MISTAKEN = 0.8
HARD = 0.8  # share of the scarce world's tasks that are made of the hardest symbols


class Chain(World):
    name = policy = "chain"
    words = [
        *(";", "."),
        *(f"s{i:03}" for i in range(SYMBOLS)),
        *(f"a{i:02}" for i in range(ANSWERS)),
    ]
    end = "."
    turn_tokens = 2
    completion_tokens = 3 * max(LENGTHS)

    def __init__(self) -> None:
        draw = random.Random("chain answers")
        low, high = KNOWN
        self.symbols = [f"s{i:03}" for i in range(SYMBOLS)]
        pairs = {symbol: draw.sample(range(ANSWERS), 2) for symbol in self.symbols}
        self.answers = {symbol: f"a{right:02}" for symbol, (right, _) in pairs.items()}
        self.mistakes = {symbol: f"a{wrong:02}" for symbol, (_, wrong) in pairs.items()}
        self.known = {symbol: low + (high - low) * i / (SYMBOLS - 1) for i, symbol in enumerate(self.symbols)}

    def row(self, draw: random.Random) -> dict[str, Any]:
        return self._task(draw.randrange(SYMBOLS - NEIGHBOURS + 1), draw)

    def _task(self, start: int, draw: random.Random) -> dict[str, Any]:
        symbols = draw.choices(self.symbols[start : start + NEIGHBOURS], k=draw.choice(LENGTHS))
        return {"prompt": f"{' '.join(symbols)} ; {symbols[0]}", "symbols": symbols}

    def level(self, row: dict[str, Any]) -> int:
        return len(row["symbols"])

    def right_turns(self, row: dict[str, Any]) -> list[str]:
        return [self.answers[symbol] for symbol in row["symbols"]]

    def reset(self, example: dict[str, Any]) -> dict[str, Any]:
        return {"symbols": example["symbols"], "turn": 0, "right": True}

    def step(self, state: dict[str, Any], action: str, messages: Any = None) -> StepResult:
        symbols = state["symbols"]
        state["right"] = state["right"] and action.strip() == self.answers[symbols[state["turn"]]]
        state["turn"] += 1
        if state["turn"] == len(symbols):
            return StepResult(done=True, reward=float(state["right"]))
        return StepResult(observation=symbols[state["turn"]])

    def demonstration(self, row: dict[str, Any], draw: random.Random) -> list[str]:
        return [self._said(symbol, draw) for symbol in row["symbols"]]

    def _said(self, symbol: str, draw: random.Random) -> str:
        if draw.random() < self.known[symbol]:
            return self.answers[symbol]
        return self.mistakes[symbol] if draw.random() < MISTAKEN else f"a{draw.randrange(ANSWERS):02}"


class ScarceChain(Chain):
    """Chain where four tasks in five are of the hardest symbols: of almost all rollouts of those, none succeeds."""

    name = "scarce_chain"

    def row(self, draw: random.Random) -> dict[str, Any]:
        return self._task(0, draw) if draw.random() < HARD else super().row(draw)
