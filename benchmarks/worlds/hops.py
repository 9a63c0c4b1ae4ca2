"""
Hops: questions over a small encyclopedia, answered by looking one page up per turn.

    mother of boss of n12 ? │ search[ n12 ]         the policy's turns are behind the bars
    friend n41 boss n03 mother n27 rival n55 │ search[ n03 ]
    rival n08 mother n19 friend n33 boss n60 │ answer[ n19 ]        reward 1

A page lists its relations in an order of its own in every question. A question of h hops may search h times.
"""

from __future__ import annotations

import random
import re
from typing import Any

from trace_trl import StepResult

from .base import World


NAMES = 60
RELATIONS = ("mother", "boss", "friend", "rival")
HOPS = (1, 2, 3, 4)
# How often demonstrations follow each relation as asked, rather than any of the four
KNOWN = {"mother": 0.8, "boss": 0.4, "friend": 0.1, "rival": 0.0}

_CALL = re.compile(r"(search|answer)\[\s*(\S+)")


class Hops(World):
    name = policy = "hops"
    words = ["of", "?", "search[", "answer[", "]", "nothing", *RELATIONS, *(f"n{i:02}" for i in range(NAMES))]
    end = "]"
    turn_tokens = 3
    completion_tokens = (2 * len(RELATIONS) + 3) * max(HOPS) + 3

    def __init__(self) -> None:
        draw = random.Random("hops encyclopedia")
        names = [f"n{i:02}" for i in range(NAMES)]
        # Four different names on a page, so that only the right relation gives the right one
        self.pages = {
            name: dict(zip(RELATIONS, draw.sample([n for n in names if n != name], len(RELATIONS)), strict=True))
            for name in names
        }

    def row(self, draw: random.Random) -> dict[str, Any]:
        start = f"n{draw.randrange(NAMES):02}"
        relations = [draw.choice(RELATIONS) for _ in range(draw.choice(HOPS))]
        return {
            "prompt": " ".join(f"{relation} of" for relation in reversed(relations)) + f" {start} ?",
            "start": start,
            "relations": relations,
        }

    def level(self, row: dict[str, Any]) -> int:
        return len(row["relations"])

    def right_turns(self, row: dict[str, Any]) -> list[str]:
        return self._turns(row, row["relations"])

    def _turns(self, row: dict[str, Any], relations: list[str]) -> list[str]:
        name, turns = row["start"], []
        for relation in relations:
            turns.append(f"search[ {name}")
            name = self.pages[name][relation]
        return [*turns, f"answer[ {name}"]

    def page(self, name: str, question: str) -> str:
        if name not in self.pages:
            return "nothing"
        facts = list(self.pages[name].items())
        random.Random(f"{question} {name}").shuffle(facts)
        return " ".join(f"{relation} {other}" for relation, other in facts)

    def reset(self, example: dict[str, Any]) -> dict[str, Any]:
        answer = self.right_turns(example)[-1].split()[-1]
        return {"searches": len(example["relations"]), "question": example["prompt"], "answer": answer}

    def step(self, state: dict[str, Any], action: str, messages: Any = None) -> StepResult:
        call = _CALL.search(action)
        kind, name = call.groups() if call else ("search", "")
        if kind == "answer":
            return StepResult(done=True, reward=float(name == state["answer"]))
        state["searches"] -= 1
        if state["searches"] < 0:
            return StepResult(done=True, reward=0.0)
        return StepResult(observation=self.page(name, state["question"]))

    def demonstration(self, row: dict[str, Any], draw: random.Random) -> list[str]:
        followed = [
            relation if draw.random() < KNOWN[relation] else draw.choice(RELATIONS) for relation in row["relations"]
        ]
        return self._turns(row, followed)
