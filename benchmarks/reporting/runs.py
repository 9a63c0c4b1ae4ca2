"""Runs, read from the files that equal_cost.py has written."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trace_trl.metrics import auroc, brier_score, expected_calibration_error


SCORERS = {"brier": brier_score, "ece": expected_calibration_error, "auroc": auroc}

Options = tuple[tuple[str, str], ...]
Record = dict[str, Any]


def mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


@dataclass(frozen=True)
class Budget:
    leaves: int  # of a step
    steps: int
    tokens: int
    group: int

    def covers(self, other: Budget) -> bool:
        return self.steps >= other.steps and self.tokens >= other.tokens

    def __str__(self) -> str:
        return f"{self.steps} steps of {self.leaves} leaves, {self.tokens:,} sampled tokens"


@dataclass(frozen=True)
class Run:
    world: str
    method: str
    options: Options
    learning_rate: float
    seed: int
    budget: Budget
    records: list[Record]
    folder: Path
    command: str = ""

    def steps(self, budget: Budget) -> list[Record]:
        return [record for record in self.records if 1 <= record["step"] <= budget.steps]

    def at_leaves(self, budget: Budget) -> Record:
        """The last step within as many leaves as the budget's steps train; discarded leaves count as well."""
        within = [record for record in self.records if record["leaves"] <= budget.steps * budget.leaves]
        return within[-1]

    def success(self, tokens: Any) -> Any:
        """Success after so many sampled tokens; the last one beyond the run's end."""
        return np.interp(tokens, [r["tokens"] for r in self.records], [r["success"] for r in self.records])

    def mean_success(self, budget: Budget) -> float:
        tokens = [0, *(r["tokens"] for r in self.records if 0 < r["tokens"] < budget.tokens), budget.tokens]
        success = self.success(tokens)
        return float(((success[1:] + success[:-1]) / 2 * np.diff(tokens)).sum() / budget.tokens)

    def tokens_to(self, success: float) -> float:
        """Sampled tokens at which so much success is first reached; infinite where it never is."""
        if self.records[0]["success"] >= success:
            return 0.0
        for before, after in pairwise(self.records):
            if after["success"] >= success:
                share = (success - before["success"]) / (after["success"] - before["success"])
                return before["tokens"] + share * (after["tokens"] - before["tokens"])
        return math.inf

    def predictions(self, first: int, last: int) -> list[tuple[int, float, int]]:
        """Depth, predicted value and outcome of every anchor of these steps' bare rollouts."""
        records = (record for record in self.records if first <= record["step"] <= last)
        return [tuple(found) for record in records for found in record.get("predictions", [])]

    def score(self, name: str, depth: int | None, first: int, last: int) -> float:
        """A score of the predictor over all predictions of these steps, or those at a depth. Pooled, since the mean of
        calibration errors of few predictions each is too large."""
        pairs = [(value, outcome) for at, value, outcome in self.predictions(first, last) if depth in (None, at)]
        return SCORERS[name](*zip(*pairs, strict=True)) if pairs else math.nan


def read_run(path: Path, folder: Path) -> Run | None:
    """The run of a file; `None` where it was not played to its end."""
    try:
        header, *records, last = map(json.loads, path.read_text().splitlines())
    except ValueError:  # cut off within a line, or empty
        return None
    if not last.get("complete"):
        return None
    run = header["run"]
    options = tuple((name, value if isinstance(value, str) else json.dumps(value)) for name, value in run["options"])
    budget = Budget(*(header["budget"][name] for name in ("leaves", "steps", "tokens", "group")))
    command = header.get("command") or f"python benchmarks/equal_cost.py --out {folder}"
    return Run(
        run["world"], run["method"], options, run["learning_rate"], run["seed"], budget, records, folder, command
    )


def load(folders: Iterable[Path | str]) -> tuple[list[Run], list[Path]]:
    """The runs of these directories, and the files that are incomplete.

    Where a run is there twice, that with the larger budget counts, or the first.
    """
    found: dict[tuple, Run] = {}
    incomplete = []
    for folder in map(Path, folders):
        for path in sorted([*folder.glob("*/*.jsonl"), *folder.glob("*/*.part")]):
            run = None if path.suffix == ".part" else read_run(path, folder)
            if run is None:
                incomplete.append(path)
                continue
            key = run.world, run.method, run.options, run.learning_rate, run.seed
            if key not in found or not found[key].budget.covers(run.budget):
                found[key] = run
    return list(found.values()), incomplete
