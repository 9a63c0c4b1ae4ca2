"""Numbers of runs: choice of the learning rate, medians over seeds, calibration, ablations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .runs import Budget, Options, Run, mean


TITLES = {
    "grpo_trl": "GRPO (TRL's trainer)",
    "grpo": "GRPO",
    "dapo": "GRPO + dynamic sampling",
    "pcl": "PCL",
    "treepo": "TreePO-style",
    "uniform": "uniform / uniform",
    "root_only": "root stage only",
    "prefix_only": "prefix stage only",
    "trace": "TRACE",
    "trace_oracle": "TRACE, exact values",
    "trace_constant": "TRACE, 0.5 for every value",
    "trace_oracle_headroom": "TRACE, exact values, headroom 2",
    "trace_certainty": "TRACE, certainties, 128 passes",
}
LEVELS = (0.5, 0.8, 1.0)  # of GRPO's final success
CHANCES = (0.05, 0.25, 0.75, 0.95)  # where the budget is told apart by a prompt's exact chance of success
SCORES = {"brier": "Brier", "ece": "ECE", "auroc": "AUROC"}


def chance_bins() -> list[tuple[str, float, float]]:
    edges = [0.0, *CHANCES, math.nextafter(1.0, 2.0)]
    names = [f"below {CHANCES[0]:g}", *(f"{a:g} to {b:g}" for a, b in pairwise(CHANCES)), f"{CHANCES[-1]:g} and more"]
    return [(name, low, high) for name, (low, high) in zip(names, pairwise(edges), strict=True)]


class Spread(dict[int, float]):
    """A number of several runs, by seed."""

    @property
    def median(self) -> float:
        return statistics.median(self.values()) if self else math.nan

    @property
    def low(self) -> float:
        return min(self.values(), default=math.nan)

    @property
    def high(self) -> float:
        return max(self.values(), default=math.nan)

    def show(self, digits: int = 3) -> str:
        spread = f" [{number(self.low, digits)}..{number(self.high, digits)}]" if len(self) > 1 else ""
        return number(self.median, digits) + spread


def number(value: float, digits: int = 3) -> str:
    return "–" if math.isnan(value) else "never" if math.isinf(value) else f"{value:,.{digits}f}"


def divide(a: float, b: float) -> float:
    return a / b if b and math.isfinite(b) else math.nan


def by_seed(runs: Iterable[Run], measure: Callable[..., float], *arguments: Any) -> Spread:
    values = {run.seed: measure(run, *arguments) for run in sorted(runs, key=lambda run: run.seed)}
    return Spread({seed: value for seed, value in values.items() if not math.isnan(value)})


def paired(function: Callable[..., float], *spreads: Spread) -> Spread:
    """A number of several methods, for each seed that all of them have."""
    seeds = sorted(set.intersection(*map(set, spreads)))
    values = {seed: function(*(spread[seed] for spread in spreads)) for seed in seeds}
    return Spread({seed: value for seed, value in values.items() if not math.isnan(value)})


def in_units(spread: Spread, unit: float) -> Spread:
    return Spread({seed: value / unit for seed, value in spread.items()} if 0 < unit < math.inf else {})


def total(run: Run, budget: Budget, key: str) -> float:
    return sum(record[key] for record in run.steps(budget))


# Of the main table: heading, digits, and what a run has
MEASURES: dict[str, tuple[str, int, Callable[[Run, Budget], float]]] = {
    "effective_ratio": ("Effective ratio", 3, lambda r, b: mean(x["effective_ratio"] for x in r.steps(b))),
    "success_at_leaves": ("Success, equal leaves", 3, lambda r, b: r.at_leaves(b)["success"]),
    "success_at_tokens": ("Success, equal tokens", 3, lambda r, b: float(r.success(b.tokens))),
    "tokens_per_leaf": (
        "Sampled tokens per trained leaf",
        2,
        lambda r, b: r.steps(b)[-1]["tokens"] / (r.steps(b)[-1]["step"] * b.leaves),
    ),
    "mixed_anchors": ("Mixed anchors per step", 2, lambda r, b: mean(x["mixed_anchors"] for x in r.steps(b))),
    "mixed_share": (
        "Share of branched anchors mixed",
        3,
        lambda r, b: divide(total(r, b, "mixed_anchors"), total(r, b, "branched_anchors")),
    ),
}


def measures(runs: list[Run], budget: Budget) -> dict[str, Spread]:
    return {name: by_seed(runs, measure, budget) for name, (_, _, measure) in MEASURES.items()}


@dataclass
class Choice:
    """The learning rates of a method with its options, and the runs at the best of them."""

    method: str
    options: Options
    scores: dict[float, Spread]
    best: float
    edge: str
    runs: list[Run]

    @property
    def title(self) -> str:
        return ", ".join([TITLES.get(self.method, self.method), *(f"{name}={value}" for name, value in self.options)])


def common_budget(groups: Iterable[list[Run]]) -> Budget:
    """The largest at which every group has a run."""
    largest = [max((run.budget for run in runs), key=lambda budget: (budget.steps, budget.tokens)) for runs in groups]
    steps, tokens = min(budget.steps for budget in largest), min(budget.tokens for budget in largest)
    return Budget(largest[0].leaves, steps, tokens, largest[0].group)


def covering(runs: Iterable[Run], budget: Budget) -> list[Run]:
    return [run for run in runs if run.budget.covers(budget)]


Groups = dict[tuple[str, Options], dict[float, list[Run]]]


def grouped(runs: Iterable[Run]) -> Groups:
    groups: Groups = {}
    for run in runs:
        groups.setdefault((run.method, run.options), {}).setdefault(run.learning_rate, []).append(run)
    return groups


def choose(runs: Iterable[Run], sweep: Iterable[Run] = ()) -> list[Choice]:
    """Picks the learning rate of every method and its options, from the runs of one world.

    Args:
        sweep: runs that decide instead, where they have the method: those that are shown then had no part in it.
    """
    groups, swept = grouped(runs), grouped(sweep)
    order = [*TITLES, *sorted({method for method, _ in groups} - set(TITLES))]
    choices = []
    for method, options in sorted(groups, key=lambda group: (order.index(group[0]), group[1])):
        rates = swept.get((method, options)) or groups[method, options]
        budget = common_budget(rates.values())
        scores = {rate: by_seed(covering(rates[rate], budget), Run.mean_success, budget) for rate in sorted(rates)}
        best = max((spread.median, -rate, rate) for rate, spread in scores.items())[-1]
        at_edge = best in (min(scores), max(scores))
        edge = "one rate" if len(scores) == 1 else "edge!" if at_edge else "inside"
        choices.append(Choice(method, options, scores, best, edge, groups[method, options].get(best, [])))
    return choices


def calibration(runs: list[Run], steps: int) -> dict[str, dict[str, list[Spread]]]:
    """Scores of the predictor by anchor, each over all predictions of the whole training and of its halves."""
    depths = sorted({depth for run in runs for depth, _, _ in run.predictions(1, steps)})
    anchors: dict[str, int | None] = {"all": None} if depths else {}
    anchors |= {f"depth {depth}" if depth else "roots": depth for depth in depths}
    parts = (1, steps), (1, steps // 2), (steps // 2 + 1, steps)
    return {
        anchor: {name: [by_seed(runs, Run.score, name, depth, *part) for part in parts] for name in SCORES}
        for anchor, depth in anchors.items()
    }


def budget_by_chance(runs: dict[str, list[Run]], budget: Budget) -> dict[str, dict[str, Spread]]:
    """By method, the share of leaves that went to prompts of a chance of success before the step."""

    def share(run: Run, low: float, high: float) -> float:
        leaves = [(chance, count) for record in run.steps(budget) for chance, _, count, _ in record["roots"]]
        return divide(sum(n for chance, n in leaves if low <= chance < high), sum(n for _, n in leaves))

    told = {method: [run for run in found if "roots" in run.records[-1]] for method, found in runs.items()}
    return {
        method: {name: by_seed(found, share, low, high) for name, low, high in chance_bins()}
        for method, found in told.items()
        if found
    }


def value_order(value: str) -> tuple[bool, float, str]:
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value


def ablations(choices: list[Choice]) -> dict[str, dict[str, Any]]:
    """By option, the plain method and its variants."""
    plain = {choice.method: choice for choice in choices if not choice.options}
    groups: dict[str, list[tuple[str, Choice]]] = {}
    for choice in sorted(choices, key=lambda choice: [value_order(value) for _, value in choice.options]):
        if choice.options:
            names = ", ".join(name for name, _ in choice.options)
            names += "" if choice.method == "trace" else f" ({TITLES.get(choice.method, choice.method)})"
            default = [("default", plain[choice.method])] if choice.method in plain else []
            rows = groups.setdefault(names, default)
            rows.append((", ".join(value for _, value in choice.options), choice))
    found = {}
    for names, rows in sorted(groups.items()):
        budget = common_budget(choice.runs for _, choice in rows)
        found[names] = {
            "budget": budget,
            "commands": commands_of(run for _, choice in rows for run in choice.runs),
            "rows": {
                value: {"learning_rate": choice.best, "edge": choice.edge}
                | measures(covering(choice.runs, budget), budget)
                for value, choice in rows
            },
        }
    return found


@dataclass
class Summary:
    """A world: what was run, and all numbers of it. `runs` has those of the plain methods at their best rate."""

    world: str
    budget: Budget
    choices: list[Choice]
    runs: dict[str, list[Run]]
    main: dict[str, dict[str, Spread]]
    numbers: dict[str, Any]
    notes: list[str]
    commands: list[str]

    @property
    def shown_commands(self) -> list[str]:
        return commands_of(run for runs in self.runs.values() for run in runs) or self.commands

    @property
    def rates(self) -> dict[str, float]:
        return {method: runs[0].learning_rate for method, runs in self.runs.items()}

    def medians(self, measure: str, *methods: str) -> dict[str, float]:
        return {method: self.main[method][measure].median for method in methods}


def summarise(runs: Iterable[Run], sweep: Iterable[Run] = ()) -> dict[str, Summary]:
    """A summary of every world that has runs. `sweep` are runs that the learning rates are chosen by."""
    worlds: dict[str, list[Run]] = {}
    for run in runs:
        worlds.setdefault(run.world, []).append(run)
    sweep = list(sweep)
    return {
        world: summarise_world(world, worlds[world], [run for run in sweep if run.world == world])
        for world in sorted(worlds)
    }


def summarise_world(world: str, every: list[Run], sweep: list[Run]) -> Summary:
    if len({(run.budget.leaves, run.budget.group) for run in [*every, *sweep]}) > 1:
        raise ValueError(f"Runs of {world} differ in leaves per step or in group size: they cannot be compared.")
    choices = choose(every, sweep)
    plain = [choice for choice in choices if not choice.options]
    budget = common_budget([[run for choice in plain or choices for run in choice.runs] or every])
    runs = {choice.method: covering(choice.runs, budget) for choice in plain}
    runs = {method: found for method, found in runs.items() if found}
    main = {method: measures(found, budget) for method, found in runs.items()}
    numbers: dict[str, Any] = {
        "calibration": calibration(runs.get("trace", []), budget.steps),
        "success_by_level": {},
        "budget_by_chance": budget_by_chance(runs, budget),
        "ablations": ablations(choices),
    }
    for method, found in runs.items():
        ends = {run.seed: run.at_leaves(budget)["success_by_level"] for run in found}
        levels = sorted({level for end in ends.values() for level in end}, key=value_order)
        numbers["success_by_level"][method] = {
            level: Spread({seed: end[level] for seed, end in ends.items() if level in end}) for level in levels
        }
    if "grpo" in runs:
        final = main["grpo"]["success_at_leaves"].median
        goals = {f"{level:.0%}": level * final for level in LEVELS}
        reached = {m: {g: by_seed(f, Run.tokens_to, goals[g]) for g in goals} for m, f in runs.items()}
        norm = {goal: reached["grpo"][goal].median for goal in goals}
        numbers["grpo_final_success"] = final
        numbers["tokens_to"] = {
            method: {
                goal: {"tokens": spread, "to_grpo": in_units(spread, norm[goal])}
                for goal, spread in goals_reached.items()
            }
            for method, goals_reached in reached.items()
        }
    if {"trace", "uniform", "trace_oracle"} <= runs.keys():
        ratios = [main[method]["effective_ratio"] for method in ("trace", "uniform", "trace_oracle")]
        numbers["gap_closed"] = share_of_gap(*(spread.median for spread in ratios))
        numbers["gap_closed_by_seed"] = paired(share_of_gap, *ratios)
    commands = commands_of([*sweep, *every])
    return Summary(world, budget, choices, runs, main, numbers, notes(plain, runs, budget), commands)


def share_of_gap(value: float, bottom: float, top: float) -> float:
    return divide(value - bottom, top - bottom)


def notes(plain: list[Choice], runs: dict[str, list[Run]], budget: Budget) -> list[str]:
    """What a reader has to know of the runs that are not there."""
    missing = [title for method, title in TITLES.items() if method not in {choice.method for choice in plain}]
    found = [f"Left out, without complete runs: {'; '.join(missing)}."] if missing else []
    for choice in plain:
        if choice.method not in runs:
            found.append(f"Left out, without a run of the whole budget at its best learning rate: {choice.title}.")
        early = sum(run.records[-1]["tokens"] < budget.tokens for run in runs.get(choice.method, []))
        if early:
            found.append(
                f"Ended before the tokens were spent, so that the last success counts: {choice.title}, {early}."
            )
    return found


def commands_of(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(run.command for run in runs))
