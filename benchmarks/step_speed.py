"""
Seconds of an optimizer step, TRACETrainer's against TRL's GRPOTrainer with as many leaves, in the benchmark's worlds.

    python benchmarks/step_speed.py --out runs/step_speed.json

TRL's trainer plays a world in two ways: by a rollout that was written for it by hand and plays all episodes at once
(`grpo_trl`), and by its own tool loop, as its users train agents (`grpo_tools`). Both, and TRACETrainer's GRPO setting
(`grpo`), sample the same episodes token by token. `trace` is the setting of benchmarks/equal_cost.py.

Runs take turns, one at a time and all in one process: A B C D A B C D .. A ratio compares two runs of one repeat, so
what slows the machine down for a while slows both down; it is given with the least and the most of all repeats. The
same of CPU seconds tells whether other work on the machine had a part in it. The first step of a run is left out: it
makes what later ones use again.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import equal_cost


METHODS = ("grpo_trl", "grpo_tools", "grpo", "trace")
BASELINES = ("grpo_trl", "grpo_tools")  # of TRL
BOUND = 0.8  # what TRACE's ratio is to stay below

# Parts of a step. What is neither sampling nor predictor until rows are there: environments, allocation, TRL's rows
PARTS = ("sampling", "predictor", "rest of rollout", "training")


@dataclass(frozen=True)
class Timing:
    """A run's seconds, one entry per measured step: `parts` add up to `steps`; `cpu`, what the process computed, is
    about the same where it need not wait for others."""

    world: str
    method: str
    repeat: int
    leaves: int
    steps: list[float]
    cpu: list[float]
    parts: dict[str, list[float]]


class Stopwatch:
    """Sums up the seconds that calls take, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Counts all calls of `owner.function` from now on."""
        inner = getattr(owner, function)
        self.seconds[name] = 0.0

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - started

        setattr(owner, function, timed)

    def take(self) -> dict[str, float]:
        """The seconds since the last call of this method."""
        taken = dict(self.seconds)
        self.seconds = dict.fromkeys(taken, 0.0)
        return taken


def split(record: dict[str, Any], watched: dict[str, float]) -> dict[str, float]:
    """Parts of a step, from its record (worlds/training.py) and the stopwatch."""
    reading, learning = record.get("seconds_by_stage", {}).get("predictor", 0.0), watched.get("learning", 0.0)
    # What the benchmark itself looks up of a generation is no part of a step's seconds
    rollout = watched["rollout"] - record.get("seconds_measuring", 0.0)
    return {
        "sampling": watched["sampling"],
        "predictor": reading + learning,
        "rest of rollout": rollout - watched["sampling"] - reading,
        "training": record["seconds"] - rollout - learning,
    }


def measure(world: str, method: str, repeat: int, steps: int, leaves: int | None = None) -> Timing:
    """Trains a method for one step and then for `steps` measured ones."""
    from worlds.training import Meter, train

    run = equal_cost.Run(world, method, repeat, equal_cost.BEST_RATES[world][method])
    budget = replace(run.budget, leaves=leaves or run.budget.leaves, steps=steps + 1, tokens=0)
    stopwatch, records, parts, ends = Stopwatch(), [], [], []

    def prepared(trainer: Any) -> None:
        stopwatch.watch(trainer, "_generate_and_score_completions", "rollout")
        stopwatch.watch(trainer.model, "generate", "sampling")
        if getattr(trainer, "predictor_trainer", None) is not None:
            stopwatch.watch(trainer.predictor_trainer, "update", "learning")

    def write(record: dict[str, Any]) -> None:
        watched = stopwatch.take()
        ends.append(time.process_time())
        if record["step"] > 1:
            records.append(record)
            parts.append(split(record, watched))

    exact, Meter.success = Meter.success, lambda self, model: {}  # type: ignore[method-assign,assignment]
    try:
        train(world, run.settings["settings"], repeat, run.learning_rate, budget, write, prepared)
    finally:
        Meter.success = exact  # type: ignore[method-assign]
        gc.collect()  # or the next run pays for it
    return Timing(
        world,
        method,
        repeat,
        budget.leaves,
        [record["seconds"] for record in records],
        [
            end - start - record["seconds_measuring"]
            for (start, end), record in zip(list(itertools.pairwise(ends))[1:], records, strict=True)
        ],
        {part: [found[part] for found in parts] for part in PARTS},
    )


def measure_all(
    worlds: Sequence[str], methods: Sequence[str], repeats: int, steps: int, leaves: int | None
) -> Iterator[Timing]:
    """All runs, taking turns, in one process."""
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=equal_cost.prepare) as pool:
        for repeat in range(repeats):
            for world in worlds:
                for method in methods:
                    timing = pool.submit(measure, world, method, repeat, steps, leaves).result()
                    seconds = statistics.median(timing.steps)
                    print(f"{repeat + 1} of {repeats}  {world:6} {method:11} {seconds:6.2f} s a step", flush=True)
                    yield timing


# Statistics


def spread(numbers: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(numbers), "least": min(numbers), "most": max(numbers)}


def summarise(timings: Sequence[Timing]) -> dict[str, Any]:
    """
    Of every world, `leaves` of a step; `methods`: seconds of a step, of a leaf, of the parts of a step; `ratios`: of
    the steps of every method to those of each baseline, repeat by repeat; `cpu_ratios`: the same of CPU seconds.

    A run counts by the median of its steps, so that one that was held up does not.
    """
    worlds = {}
    for world in dict.fromkeys(timing.world for timing in timings):
        runs: dict[str, dict[int, Timing]] = {}
        for timing in timings:
            if timing.world == world:
                runs.setdefault(timing.method, {})[timing.repeat] = timing
        step = {
            method: {repeat: statistics.median(timing.steps) for repeat, timing in found.items()}
            for method, found in runs.items()
        }
        cpu = {
            method: {repeat: statistics.median(timing.cpu) for repeat, timing in found.items()}
            for method, found in runs.items()
        }
        methods = {
            method: {
                "step": spread(list(step[method].values())),
                "leaf": spread([step[method][repeat] / timing.leaves for repeat, timing in found.items()]),
                "cpu": spread(list(cpu[method].values())),
                "parts": {
                    part: statistics.median(statistics.median(timing.parts[part]) for timing in found.values())
                    for part in PARTS
                },
            }
            for method, found in runs.items()
        }
        pairs = [(method, baseline) for baseline in BASELINES for method in runs if method != baseline]
        ratios, cpu_ratios = (
            {
                f"{method} / {baseline}": spread([of[method][repeat] / of[baseline][repeat] for repeat in both])
                for method, baseline in pairs
                if (both := of[method].keys() & of.get(baseline, {}).keys())
            }
            for of in (step, cpu)
        )
        leaves = next(timing.leaves for timing in timings if timing.world == world)
        worlds[world] = {"leaves": leaves, "methods": methods, "ratios": ratios, "cpu_ratios": cpu_ratios}
    return worlds


def show(summary: dict[str, Any]) -> str:
    lines = []
    for world, found in summary.items():
        head = f"{world:<13}{'s / step':>10}{'CPU s':>8}{'ms / leaf':>11}" + "".join(f"{part:>17}" for part in PARTS)
        lines += ["", head]
        for method, numbers in found["methods"].items():
            row = f"{method:<13}{numbers['step']['median']:>10.3f}"
            row += f"{numbers['cpu']['median']:>8.3f}{1000 * numbers['leaf']['median']:>11.2f}"
            lines.append(row + "".join(f"{numbers['parts'][part]:>17.3f}" for part in PARTS))
        for name, ratio in found["ratios"].items():
            cpu = found["cpu_ratios"][name]
            parts = [f"{r['median']:>6.2f}   {r['least']:.2f}..{r['most']:.2f}" for r in (ratio, cpu)]
            lines.append(f"{name:<25}{parts[0]}   CPU {parts[1]}")
    return "\n".join(lines[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for all times")
    parser.add_argument("--worlds", nargs="+", choices=list(equal_cost.BUDGETS), default=equal_cost.ORDINARY)
    parser.add_argument("--methods", nargs="+", choices=list(equal_cost.METHODS), default=list(METHODS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    parser.add_argument("--leaves", type=int, help="of a step, instead of the benchmark's")
    options = parser.parse_args(arguments)
    words = [str(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    command = shlex.join(["python", "benchmarks/step_speed.py", *words])
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    timings: list[Timing] = []
    for timing in measure_all(options.worlds, options.methods, options.repeats, options.steps, options.leaves):
        timings.append(timing)
        summary = summarise(timings)
        if options.out is not None:  # after every run: what is there when it is stopped early can be used
            runs = [asdict(timing) for timing in timings]
            found = {"command": command, "summary": summary, "runs": runs}
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"\nMedians of {options.repeats} runs of {options.steps} steps; ratios with the least and the most of them\n"
    )
    print(show(summary))
    for world, found in summary.items():
        for baseline in BASELINES:
            ratio = found["ratios"].get(f"trace / {baseline}")
            if ratio is not None:
                word = "below" if ratio["median"] < BOUND else "not below"
                print(f"{world}: trace takes {ratio['median']:.2f} of {baseline}, {word} {BOUND:g}")


if __name__ == "__main__":
    main()
