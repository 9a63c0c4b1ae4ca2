"""Verdicts on the claims, and whether numbers lie within the spread of other runs."""

from __future__ import annotations

import math
from collections.abc import Callable

from .numbers import MEASURES, TITLES, Summary, divide, number


Judged = tuple[bool | None, str]  # whether it is met, `None` where the runs do not say


def judge_effective_ratio(summary: Summary) -> Judged:
    ratios = summary.medians("effective_ratio", "trace", "grpo", "pcl", "treepo")
    factor = divide(ratios["trace"], ratios["grpo"])
    met = (factor >= 2.26 or ratios["trace"] > 0.9) and ratios["trace"] > max(ratios["pcl"], ratios["treepo"])
    return met, f"{listed(ratios)}; {number(factor, 2)} times GRPO's"


def judge_tokens(summary: Summary) -> Judged:
    ratios = {goal: found["to_grpo"].median for goal, found in summary.numbers["tokens_to"]["trace"].items()}
    text = ", ".join(f"{number(ratio, 2)} of GRPO's tokens to {goal}" for goal, ratio in ratios.items())
    if any(ratio > 0.5 for ratio in ratios.values()):
        return False, text
    # GRPO was there at the start, or half of its runs never were
    return (None if any(map(math.isnan, ratios.values())) else True), text


def judge_mixed_anchors(summary: Summary) -> Judged:
    mixed = summary.medians("mixed_anchors", "uniform", "root_only", "prefix_only", "trace")
    stages = mixed["root_only"], mixed["prefix_only"]
    return min(stages) > mixed["uniform"] and mixed["trace"] > max(stages), listed(mixed)


def judge_oracle(summary: Summary) -> Judged:
    share, spread = summary.numbers["gap_closed"], summary.numbers["gap_closed_by_seed"]
    text = f"{number(share, 2)} of the gap between medians; seed by seed {spread.show(2)}"
    return (None if math.isnan(share) else share >= 0.8), text


def judge_seconds(summary: Summary) -> Judged:
    ratio = summary.numbers["seconds_to_trl"]
    return (ratio.median < 0.8 if ratio else None), f"{ratio.show(2)} of the seconds, seed by seed"


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
    "D3": (
        "Each stage alone gives more mixed anchors than uniform allocation, both together more than each.",
        ("trace", "uniform", "root_only", "prefix_only"),
        judge_mixed_anchors,
    ),
    "D4": (
        "In effective ratio TRACE goes at least 0.8 of the way from uniform allocation to exact values.",
        ("trace", "uniform", "trace_oracle"),
        judge_oracle,
    ),
    "D5": ("A step of TRACE takes less than 0.8 of a step of TRL's trainer.", ("trace", "grpo_trl"), judge_seconds),
}


def verdicts(summary: Summary) -> list[tuple[str, str, str]]:
    """Claim, "met", "not met" or "undecided", and the numbers."""
    found = []
    for claim, (_, methods, judge) in CLAIMS.items():
        missing = [TITLES[method] for method in methods if method not in summary.runs]
        met, text = (None, f"no runs of {'; '.join(missing)}") if missing else judge(summary)
        found.append((claim, "undecided" if met is None else "met" if met else "not met", text))
    return found


def compare(ours: dict[str, Summary], others: dict[str, Summary]) -> list[str]:
    """Whether each median of our main table lies between the least and the most of the others'."""
    lines, inside = [], []
    for world, summary in ours.items():
        other = others.get(world)
        if other and other.budget != summary.budget:
            lines.append(f"{world}: budgets differ, {summary.budget} and {other.budget}")
        for method, found in summary.main.items():
            name = f"{world}, {TITLES.get(method, method)}"
            if other is None or method not in other.runs:
                lines.append(f"{name}: not among the others")
                continue
            rates = [runs[method][0].learning_rate for runs in (summary.runs, other.runs)]
            if rates[0] != rates[1]:
                lines.append(f"{name}: learning rates differ, {rates[0]:g} and {rates[1]:g}")
            for measure, there in other.main[method].items():
                inside.append(there.low <= found[measure].median <= there.high)
                word, heading = "within" if inside[-1] else "outside", MEASURES[measure][0].lower()
                place = f"{number(found[measure].median)} {word} {number(there.low)}..{number(there.high)}"
                lines.append(f"{name}: {heading} {place}")
    return [*lines, f"{sum(inside)} of {len(inside)} within"]
