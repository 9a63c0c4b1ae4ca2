"""Tables, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .claims import TRL_TRAINERS
from .numbers import LEVELS, MEASURES, SCORES, TITLES, Spread, Summary, chance_bins, number, value_order


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def by_method(head: Sequence[str], found: dict[str, Any], cells: Callable[[Any], Iterable[str]]) -> str:
    return markdown(["Method", *head], ([TITLES.get(method, method), *cells(of)] for method, of in found.items()))


def measured(found: dict[str, Any]) -> list[str]:
    return [found[name].show(digits) for name, (_, digits, _) in MEASURES.items()]


def main_table(summary: Summary) -> str:
    rows = []
    for method, runs in summary.runs.items():
        title, rate = TITLES.get(method, method), f"{runs[0].learning_rate:g}"
        rows.append([title, rate, str(len(runs)), *measured(summary.main[method])])
    return markdown(["Method", "Learning rate", "Seeds", *(heading for heading, _, _ in MEASURES.values())], rows)


def rates_table(summary: Summary) -> str:
    rates = sorted({rate for choice in summary.choices for rate in choice.scores})
    rows = []
    for choice in summary.choices:
        cells = {rate: f"{score.median:.3f} ({len(score)})" for rate, score in choice.scores.items()}
        cells[choice.best] = f"**{cells[choice.best]}**"
        rows.append([choice.title, *(cells.get(rate, "") for rate in rates), f"{choice.best:g}", choice.edge])
    return markdown(["Method", *(f"{rate:g}" for rate in rates), "Best", "In the range"], rows)


def tokens_table(summary: Summary) -> str:
    def cells(goals: dict[str, dict[str, Spread]]) -> Iterable[str]:
        for found in goals.values():
            tokens, to_grpo = found["tokens"], found["to_grpo"]
            yield f"{tokens.show(0)}; {sum(map(math.isfinite, tokens.values()))} of {len(tokens)}"
            yield to_grpo.show(2)

    head = [heading for level in LEVELS for heading in (f"Tokens to {level:.0%}", f"To GRPO's, {level:.0%}")]
    return by_method(head, summary.numbers.get("tokens_to", {}), cells)


def calibration_table(summary: Summary) -> str:
    rows = []
    for anchor, scores in summary.numbers["calibration"].items():
        halves = [f"{number(first.median)}, {number(second.median)}" for _, first, second in scores.values()]
        rows.append([anchor, *(scores[name][0].show() for name in SCORES), *halves])
    return markdown(["Anchors", *SCORES.values(), *(f"{title}, halves" for title in SCORES.values())], rows)


def seconds_table(summary: Summary) -> str:
    def spread(found: dict[str, float], scale: float = 1.0) -> str:
        median, least, most = (f"{scale * found[name]:.2f}" for name in ("median", "least", "most"))
        return f"{median} [{least}..{most}]"

    methods = summary.numbers["speed"]["methods"]
    parts = list(next(iter(methods.values()))["parts"])
    head = ["Method", "Seconds per step", "Milliseconds per leaf", *(f"Of it {part}" for part in parts)]
    rows = [
        [
            TRL_TRAINERS.get(method, TITLES.get(method, method)),
            *(spread(found["step"]), spread(found["leaf"], 1000)),
            *(f"{found['parts'][part]:.2f}" for part in parts),
        ]
        for method, found in methods.items()
    ]
    return markdown(head, rows)


def chances_table(summary: Summary) -> str:
    found = summary.numbers["budget_by_chance"]
    names = [name for name, _, _ in chance_bins()]
    return by_method(names, found, lambda of: [of[name].show(2) for name in names])


def levels_table(summary: Summary) -> str:
    found = summary.numbers["success_by_level"]
    levels = sorted({level for of in found.values() for level in of}, key=value_order)
    return by_method(
        [f"Level {level}" for level in levels], found, lambda of: [of.get(x, Spread()).show() for x in levels]
    )


def ablation_table(ablation: dict[str, Any]) -> str:
    head = ["Value", "Learning rate", "In the range", "Seeds", *(heading for heading, _, _ in MEASURES.values())]
    rows = []
    for value, found in ablation["rows"].items():
        rate, seeds = f"{found['learning_rate']:g}", str(len(found["effective_ratio"]))
        rows.append([value, rate, found["edge"], seeds, *measured(found)])
    return markdown(head, rows)
