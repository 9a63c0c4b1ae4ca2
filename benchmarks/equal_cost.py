"""
Trains a tiny policy in a world by many methods, at equal cost, and writes down every step.

    python benchmarks/equal_cost.py --out runs/equal_cost                    # the comparison
    python benchmarks/equal_cost.py --out runs/quick --suite quick           # ten minutes of it
    python benchmarks/equal_cost.py --out runs/scarce --suite scarce         # where most tasks are out of reach
    python benchmarks/equal_cost.py --out runs/sweep --suite sweep           # learning rates
    python benchmarks/equal_cost.py --out runs/ablations --suite ablations
    python benchmarks/report.py runs/equal_cost                              # tables and plots

A run is a method in a world, with a seed and a learning rate. All runs of a world train the same warm-started policy
with as many leaves a step, through `TRACETrainer` (TRL's own `GRPOTrainer` for `grpo_trl`), and go on until they have
spent both as many leaves and as many sampled tokens as the world's budget says. So they can be compared at either.
Tokens of discarded rollouts count. Success is not sampled but known: worlds/policy.py.

Each run is a file of its own, OUT/<world>/<run>.jsonl, one JSON line a step. A run that is complete is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Budget:
    """What each run of a world spends.

    Attributes:
        leaves (`int`): of a step, those that are trained.
        steps (`int`): least number of them.
        tokens (`int`): least number of sampled tokens: about what GRPO samples in that many steps.
        group (`int`): rollouts of a prompt in GRPO.
    """

    leaves: int
    steps: int
    tokens: int
    group: int = 8

    @property
    def most_steps(self) -> int:
        """Where a run ends although it has not spent its tokens."""
        return 2 * self.steps

    def cut(self, fraction: float) -> Budget:
        return replace(self, steps=round(self.steps * fraction), tokens=round(self.tokens * fraction))


BUDGETS = {
    "chain": Budget(192, 30, 50_000),
    "hops": Budget(192, 24, 48_000),
    # Twice as much: with little contrast, little is learned at first
    "scarce_chain": Budget(192, 60, 100_000),
}

# What TRACEConfig is given; `trainer` and `values` are for worlds/training.py
METHODS: dict[str, dict[str, Any]] = {
    "grpo_trl": {"trainer": "trl"},
    "grpo_tools": {"trainer": "trl_tools"},  # the same numbers as `grpo_trl`, in more time: benchmarks/step_speed.py
    "grpo": {"root_allocation": "uniform", "continuations_per_root": 0},
    "dapo": {"root_allocation": "dapo", "continuations_per_root": 0, "candidate_pool_factor": 4.0},
    "pcl": {"root_allocation": "pcl", "continuations_per_root": 0},
    "treepo": {
        "root_allocation": "uniform",
        "prefix_allocation": "random",
        "continuations_per_root": 2,
        "advantage_estimator": "treepo",
    },
    "uniform": {"root_allocation": "uniform", "prefix_allocation": "uniform", "continuations_per_root": 2},
    "root_only": {"root_allocation": "active", "prefix_allocation": "uniform", "continuations_per_root": 2},
    "prefix_only": {"root_allocation": "uniform", "prefix_allocation": "active", "continuations_per_root": 2},
    "trace": {"continuations_per_root": 2},
    "trace_oracle": {"continuations_per_root": 2, "values": "oracle"},
    "trace_constant": {"continuations_per_root": 2, "values": "constant"},
    # Of the analysis: what exact values and certain predictions would be worth
    "trace_oracle_headroom": {"continuations_per_root": 2, "values": "oracle", "headroom_exponent": 2.0},
    "trace_certainty": {"continuations_per_root": 2, "predictor_certainty": True, "predictor_passes": 128},
}

# Of all methods but TRL's trainer. A policy that changes as fast as these needs a predictor that follows
PREDICTOR = {"predictor_passes": 32, "predictor_buffer_size": 1024}

# Learning rates that are tried, and for each method the one that is used; `--suite sweep` gives the evidence
RATES = {"chain": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), "hops": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)}
RATES["scarce_chain"] = RATES["chain"]
BEST_RATES: dict[str, dict[str, float]] = {
    "chain": dict.fromkeys(METHODS, 2e-3) | dict.fromkeys(("grpo_trl", "grpo_tools", "grpo", "dapo", "pcl"), 4e-3),
    "hops": dict.fromkeys(METHODS, 1e-3),
    "scarce_chain": dict.fromkeys(METHODS, 2e-3) | {"root_only": 4e-3},
}

ABLATIONS: list[dict[str, Any]] = [
    {"continuations_per_root": 0},
    {"continuations_per_root": 1},
    {"continuations_per_root": 5},
    {"candidate_pool_factor": 1.0},
    {"candidate_pool_factor": 4.0},
    *({"advantage_estimator": name} for name in ("sibling_fallback", "leaf", "treerl", "treepo", "tree_grpo")),
    {"value_backup": "child_mean"},
    {"turn_weighting": "per_leaf"},
    {"turn_weighting": "on_policy"},
    {"predictor_buffer_size": 256},
    {"predictor_buffer_size": 16384},
    {"headroom_exponent": 1.0},
    {"headroom_exponent": 2.0},
    {"headroom_exponent": 4.0},
    {"predictor_certainty": True},
    {"predictor_passes": 1},
    {"predictor_passes": 4},
    {"predictor_passes": 128},
]
SWEPT_ABLATIONS = (
    "advantage_estimator",
    "continuations_per_root",
    "turn_weighting",
)  # these change the scale of steps


@dataclass(frozen=True)
class Run:
    world: str
    method: str
    seed: int
    learning_rate: float
    options: tuple[tuple[str, Any], ...] = ()  # over the method's own
    fraction: float = 1.0  # of the world's budget

    @property
    def name(self) -> str:
        options = "".join(f"_{name}={value}" for name, value in self.options)
        part = "" if self.fraction == 1 else f"_{self.fraction:g}of_budget"
        return f"{self.method}{options}{part}_lr{self.learning_rate:g}_seed{self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """All that its numbers follow from."""
        method = METHODS[self.method]
        options = {**({} if "trainer" in method else PREDICTOR), **method, **dict(self.options)}
        return json.loads(json.dumps({"run": asdict(self), "budget": asdict(self.budget), "settings": options}))

    @property
    def budget(self) -> Budget:
        return BUDGETS[self.world].cut(self.fraction)

    def path(self, out: Path) -> Path:
        return out / self.world / f"{self.name}.jsonl"


# Suites. Seeds go outermost, so that what is there when a suite is stopped early can be compared


def comparison(options: argparse.Namespace) -> list[Run]:
    return [
        Run(world, method, seed, BEST_RATES[world][method], fraction=options.fraction)
        for seed in options.seeds
        for world in options.worlds
        for method in options.methods
    ]


def sweep(options: argparse.Namespace) -> list[Run]:
    return [
        Run(world, method, seed, rate, fraction=options.fraction)
        for seed in options.seeds
        for world in options.worlds
        for method in options.methods
        for rate in options.rates or RATES[world]
    ]


def ablations(options: argparse.Namespace) -> list[Run]:
    runs = []
    for seed in options.seeds:
        for world in options.worlds:
            best = BEST_RATES[world]["trace"]
            # The default at as many rates as what it is compared with
            around = [best / 2, best, best * 2]
            wanted = [one for one in ABLATIONS if not options.ablate or one.keys() & set(options.ablate)]
            for changed in ({}, *wanted):
                swept = not changed or changed.keys() & set(SWEPT_ABLATIONS)
                rates = around if swept else [best]
                runs += [
                    Run(world, "trace", seed, rate, tuple(changed.items()), options.fraction)
                    for rate in options.rates or rates
                ]
    return runs


ORDINARY = ["chain", "hops"]
SCARCE = ["grpo", "dapo", "pcl", "treepo", "uniform", "root_only", "trace", "trace_oracle", "trace_oracle_headroom"]

# Name of a suite: its runs, and what is its own among the options
SUITES: dict[str, tuple[Any, dict[str, Any]]] = {
    "full": (comparison, {"seeds": [0, 1, 2, 3, 4], "methods": [m for m in METHODS if m != "grpo_tools"]}),
    "quick": (comparison, {"seeds": [0, 1, 2, 3, 4], "methods": ["grpo", "trace"], "fraction": 0.5}),
    "scarce": (comparison, {"seeds": [0, 1, 2, 3, 4], "methods": SCARCE, "worlds": ["scarce_chain"]}),
    "sweep": (sweep, {"seeds": [100, 101], "methods": [m for m in METHODS if not m.startswith("grpo_t")]}),
    "ablations": (ablations, {"seeds": [0, 1, 2], "methods": ["trace"]}),
}


# Running


def is_complete(run: Run, out: Path) -> bool:
    """Whether its file is there, whole, and of a run with these settings."""
    path = run.path(out)
    if not path.exists():
        return False
    lines = path.read_text().splitlines()
    try:
        return run.settings.items() <= json.loads(lines[0]).items() and json.loads(lines[-1])["complete"]
    except (ValueError, IndexError, KeyError):
        return False


def play(run: Run, out: str, command: str = "") -> float:
    """Trains a run in this process and writes its file, which names the command. Returns the seconds it took."""
    from worlds.training import train

    path = run.path(Path(out))
    path.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    unfinished = path.with_suffix(".part")
    with open(unfinished, "w") as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        write({**run.settings, "command": command})
        train(run.world, run.settings["settings"], run.seed, run.learning_rate, run.budget, write)
        write({"complete": True, "seconds": time.perf_counter() - started})
    unfinished.replace(path)
    return time.perf_counter() - started


def prepare() -> None:
    """Readies a process of the pool: one thread each, and none of the libraries' own words."""
    import warnings

    import torch
    from datasets.utils.logging import disable_progress_bar
    from transformers.utils import logging

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bar()


def play_all(runs: Iterable[Run], out: Path, processes: int, command: str = "") -> int:
    """Plays all runs that are not complete yet. Returns how many failed."""
    runs = list(dict.fromkeys(runs))
    missing = [run for run in runs if not is_complete(run, out)]
    print(f"{len(runs)} runs, {len(runs) - len(missing)} of them complete; {processes} at a time", flush=True)
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
    started, failed = time.perf_counter(), 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=prepare) as pool:
        futures = {pool.submit(play, run, str(out), command): run for run in missing}
        for number, future in enumerate(_as_completed(futures, pool), start=1):
            run, passed = futures[future], time.perf_counter() - started
            try:
                outcome = f"{future.result():.0f} s"
            except BrokenProcessPool:
                sys.exit(
                    "A process of the pool was killed, as where memory runs out: start again, with fewer --processes."
                )
            except Exception as error:
                failed += 1
                outcome = f"FAILED: {type(error).__name__}: {error}"
            left = passed / number * (len(missing) - number)
            print(
                f"{number:4d} of {len(missing)}  {run.world}/{run.name}  {outcome}  {left / 60:.0f} min left",
                flush=True,
            )
    return failed


def _as_completed(futures: Iterable[Future], pool: ProcessPoolExecutor) -> Iterator[Future]:
    try:
        yield from as_completed(futures)
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        sys.exit("Interrupted: start again to go on.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs' files")
    parser.add_argument("--suite", choices=list(SUITES), default="full")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS))
    parser.add_argument("--worlds", nargs="+", choices=list(BUDGETS))
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates of the sweep and of ablations")
    names = sorted({name for changed in ABLATIONS for name in changed})
    parser.add_argument("--ablate", nargs="+", choices=names, help="of the ablations, those of these options")
    parser.add_argument("--fraction", type=float, help="of the budget that each run spends")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    make_runs, defaults = SUITES[options.suite]
    for name, value in {"worlds": ORDINARY, "fraction": 1.0, **defaults}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    words = [str(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    command = shlex.join(["python", "benchmarks/equal_cost.py", *words])
    failed = play_all(make_runs(options), options.out, options.processes, command)
    if failed:
        sys.exit(f"{failed} runs failed: start again to repeat them.")


if __name__ == "__main__":
    main()
