"""Verdicts on the claims, and whether numbers lie within the spread of other runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from .numbers import MEASURES, TITLES, Spread, Summary, divide, number
from .runs import Budget


Judged = tuple[bool | None, str]  # whether it is met, `None` where the runs do not say

# Of step_speed.py: the two ways in which TRL's trainer plays a world
TRL_TRAINERS = {"grpo_tools": "TRL's tool loop", "grpo_trl": "a rollout written for TRL by hand"}


def judge_effective_ratio(summary: Summary) -> Judged:
    ratios = summary.medians("effective_ratio", "trace", "grpo", "pcl", "treepo")
    factor = divide(ratios["trace"], ratios["grpo"])
    met = (factor >= 2.26 or ratios["trace"] > 0.9) and ratios["trace"] > max(ratios["pcl"], ratios["treepo"])
    return met, f"{listed(ratios)}; {number(factor, 2)} times GRPO's"


def judge_tokens(summary: Summary) -> Judged:
    ratios = {goal: found["to_grpo"].median for goal, found in summary.numbers["tokens_to"]["trace"].items()}
    text = "; ".join(f"{goal}: {_share_of_tokens(ratio)}" for goal, ratio in ratios.items())
    if any(ratio > 0.5 for ratio in ratios.values()):
        return False, text
    # GRPO was there at the start, or half of its runs never were
    return (None if any(map(math.isnan, ratios.values())) else True), text


def _share_of_tokens(ratio: float) -> str:
    if math.isnan(ratio):
        return "no ratio, GRPO was there before the first step or not in half of its runs"
    return "not reached" if math.isinf(ratio) else f"{number(ratio, 2)} of GRPO's tokens"


def judge_mixed(summary: Summary, measure: str) -> Judged:
    mixed = summary.medians(measure, "uniform", "root_only", "prefix_only", "trace")
    stages = mixed["root_only"], mixed["prefix_only"]
    return min(stages) > mixed["uniform"] and mixed["trace"] > max(stages), listed(mixed)


def judge_oracle(summary: Summary) -> Judged:
    share, spread = summary.numbers["gap_closed"], summary.numbers["gap_closed_by_seed"]
    text = f"{number(share, 2)} of the gap between medians; seed by seed {spread.show(2)}"
    return (None if math.isnan(share) else share >= 0.8), text


def judge_seconds(summary: Summary) -> Judged:
    ratios = summary.numbers.get("speed", {}).get("ratios", {})
    found = {words: ratios.get(f"trace / {baseline}") for baseline, words in TRL_TRAINERS.items()}
    missing = [words for words, ratio in found.items() if ratio is None]
    if missing:
        return None, f"no times (`--speed`) against {' and '.join(missing)}"
    text = [f"{r['median']:.2f} [{r['least']:.2f}..{r['most']:.2f}] of {words}" for words, r in found.items()]
    return all(ratio["median"] < 0.8 for ratio in found.values()), ", ".join(text)


def listed(values: dict[str, float]) -> str:
    return ", ".join(f"{TITLES[method]} {value:.3f}" for method, value in values.items())


# What is claimed, the methods it needs, and its judge
CLAIMS: dict[str, tuple[str, tuple[str, ...], Callable[[Summary], Judged]]] = {
    "D1": (
        "TRACE's effective ratio is at least 2.26 times GRPO's or above 0.9, and above PCL's and TreePO-style's.",
        ("trace", "grpo", "pcl", "treepo"),
        judge_effective_ratio,
    ),
    "D2": (
        "TRACE reaches 50, 80 and 100 % of GRPO's final success with at most half of GRPO's sampled tokens.",
        ("trace", "grpo"),
        judge_tokens,
    ),
    "D3, share": (
        "Of the anchors that branch, each stage alone has a larger share mixed than uniform allocation, both together "
        "a larger one than each.",
        ("trace", "uniform", "root_only", "prefix_only"),
        partial(judge_mixed, measure="mixed_share"),
    ),
    "D3, number": (
        "The same of the number of mixed anchors per step.",
        ("trace", "uniform", "root_only", "prefix_only"),
        partial(judge_mixed, measure="mixed_anchors"),
    ),
    "D4": (
        "In effective ratio TRACE goes at least 0.8 of the way from uniform allocation to exact values.",
        ("trace", "uniform", "trace_oracle"),
        judge_oracle,
    ),
    "D5": (
        "A step of TRACE takes less than 0.8 of a step of TRL's trainer with as many leaves, however that rolls out.",
        ("trace",),
        judge_seconds,
    ),
}


def verdicts(summary: Summary) -> list[tuple[str, str, str]]:
    """Claim, "met", "not met" or "undecided", and the numbers."""
    found = []
    for claim, (_, methods, judge) in CLAIMS.items():
        missing = [TITLES[method] for method in methods if method not in summary.runs]
        met, text = (None, f"no runs of {'; '.join(missing)}") if missing else judge(summary)
        found.append((claim, "undecided" if met is None else "met" if met else "not met", text))
    return found


class Table(Protocol):
    """What can be compared: the main table of a world."""

    budget: Budget
    main: dict[str, dict[str, Spread]]

    @property
    def rates(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class PublishedTable:
    budget: Budget
    main: dict[str, dict[str, Spread]]
    rates: dict[str, float]


def published(path: Path) -> dict[str, Table]:
    """The tables of a file that `report.py --json` has written, by world."""

    def spread(found: dict[str, Any]) -> Spread:
        return Spread({int(seed): math.inf if v == "never" else v for seed, v in found["by_seed"].items()})

    return {
        world: PublishedTable(
            Budget(**found["budget"]),
            {method: {name: spread(of) for name, of in row.items()} for method, row in found["main"].items()},
            found["rates"],
        )
        for world, found in json.loads(path.read_text()).items()
    }


def compare(ours: Mapping[str, Table], others: Mapping[str, Table]) -> list[str]:
    """Whether each median of our main table lies between the least and the most of the others'. Worlds with different
    budgets are not compared."""
    lines, inside = [], []
    for world, summary in ours.items():
        other = others.get(world)
        if other and other.budget != summary.budget:
            lines.append(f"{world}: not compared, budgets differ: {summary.budget} and {other.budget}")
            continue
        for method, found in summary.main.items():
            name = f"{world}, {TITLES.get(method, method)}"
            if other is None or method not in other.main:
                lines.append(f"{name}: not among the others")
                continue
            rates = [summary.rates[method], other.rates[method]]
            if rates[0] != rates[1]:
                lines.append(f"{name}: learning rates differ, {rates[0]:g} and {rates[1]:g}")
            for measure, there in other.main[method].items():
                inside.append(there.low <= found[measure].median <= there.high)
                word, heading = "within" if inside[-1] else "outside", MEASURES[measure][0].lower()
                place = f"{number(found[measure].median)} {word} {number(there.low)}..{number(there.high)}"
                lines.append(f"{name}: {heading} {place}")
    return [*lines, f"{sum(inside)} of {len(inside)} within"]
