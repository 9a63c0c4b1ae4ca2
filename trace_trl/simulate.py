"""
Plans a rollout budget without a model: what each allocation makes of it under simulated success martingales.

    python -m trace_trl.simulate                                          # M = 1024, N = 2, the paper's budget
    python -m trace_trl.simulate --rollouts 512 --continuations 6 --noise 2

A prompt draws its success rate `V_0` from a Beta distribution, U-shaped by default: most prompts are solved nearly
always or nearly never. Every turn of a rollout brings one independent piece of evidence, `e_t ~ Normal(0, 1/T)`, and
the rollout succeeds if `z_0 + e_1 + .. + e_T > 0` with `z_0 = Phi^-1(V_0)`. The value after t of T turns is Doob's
martingale of that outcome,

    V_t = P(success | e_1, .., e_t) = Phi((z_0 + e_1 + .. + e_t) / sqrt(1 - t/T))

so `E[V_t | V_0] = V_0` exactly and `V_T` is 0 or 1. A continuation keeps the evidence of its prefix and draws the rest
anew. The predictor sees `logit V_t` plus Gaussian noise, drawn once per anchor. The allocations are those of
`trace_trl.allocation`, all compared at equal leaves, `M (1 + N)`; the number of sampled turns tells what these cost.

What is simplified: all rollouts have T turns, values do not change with training, and the predictor's errors at the
prefixes of one rollout are independent.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np

from .allocation import PREFIX_ALLOCATORS, ROOT_ALLOCATORS


SMALLEST_CHANCE = 1e-12  # values are kept this far from 0 and 1, where logit and Phi^-1 are finite


@dataclass(frozen=True)
class Method:
    """A root choice, and a prefix choice or `None` where all leaves are bare rollouts (N = 0)."""

    roots: str
    prefixes: str | None


METHODS = {
    "GRPO": Method("uniform", None),
    "PCL": Method("pcl", None),
    "TreePO-style": Method("uniform", "random"),
    "root stage only": Method("active", "uniform"),
    "prefix stage only": Method("uniform", "active"),
    "TRACE": Method("active", "active"),
}


@dataclass(frozen=True)
class SimulationConfig:
    """
    Attributes:
        rollouts (`int`): bare rollouts `M` of one generation.
        continuations (`int`): continuations `N` per bare rollout; there are `M (1 + N)` leaves.
        pool_factor (`float`): candidate prompts, as a multiple of `M (1 + N) / num_generations`.
        turns (`int`): turns `T` of an episode; with 1 there are no prefixes and continuations start at the root.
        num_generations (`int`): leaves per prompt of the choices that give every prompt the same.
        max_per_root (`int` or `None`): most bare rollouts of one prompt; `None` for `num_generations`.
        noise (`float`): standard deviation of the predictor's error, in logits; 0 for an oracle.
        prompts_shape (`tuple[float, float]`): parameters of the Beta distribution of `V_0`.
        repeats (`int`): independent generations that are averaged.
        seed (`int`): the methods see the same pools and the same root predictions.
    """

    rollouts: int = 1024
    continuations: int = 2
    pool_factor: float = 2.0
    turns: int = 5
    num_generations: int = 8
    max_per_root: int | None = None
    noise: float = 1.0
    prompts_shape: tuple[float, float] = (0.15, 0.15)
    repeats: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("rollouts", 2),
            ("continuations", 0),
            ("turns", 1),
            ("num_generations", 2),
            ("repeats", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to {least} or more.")
        if not self.pool_factor >= 1:
            raise ValueError(f"pool_factor is {self.pool_factor}: set it to 1 or more.")
        if not self.noise >= 0:
            raise ValueError(f"noise is {self.noise}: set it to 0 or more.")
        if not min(self.prompts_shape) > 0:
            raise ValueError(f"prompts_shape is {self.prompts_shape}: both parameters of a Beta are positive.")

    @property
    def leaves(self) -> int:
        return self.rollouts * (1 + self.continuations)

    @property
    def pool_size(self) -> int:
        return math.ceil(self.pool_factor * self.leaves / self.num_generations)


def evidence_of(values: np.ndarray) -> np.ndarray:
    """`z_0 = Phi^-1(V_0)`, elementwise."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse(value) for value in np.clip(values, SMALLEST_CHANCE, 1 - SMALLEST_CHANCE)])


def value_of(evidence: np.ndarray, turns_done: np.ndarray | int, turns: int) -> np.ndarray:
    """`V_t` of the evidence gathered so far; 0 or 1 once all turns are done. `turns_done` is broadcast."""
    left = 1.0 - np.asarray(turns_done) / turns
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = -evidence / np.sqrt(2.0 * left)
    running = 0.5 * np.asarray(np.frompyfunc(math.erfc, 1, 1)(scaled), dtype=np.float64)
    return np.where(left > 0, running, evidence > 0)


def draw_evidence(start: np.ndarray, turns_left: np.ndarray | int, turns: int, rng: np.random.Generator) -> np.ndarray:
    """Evidence at the end of episodes that have `turns_left` more turns to go from `start`."""
    return start + rng.normal(size=start.shape) * np.sqrt(np.asarray(turns_left) / turns)


def draw_paths(start: np.ndarray, turns: int, rng: np.random.Generator) -> np.ndarray:
    """Evidence after every turn of one rollout from each `start`: shape `(rollouts, turns + 1)`, `start` first."""
    steps = rng.normal(scale=math.sqrt(1.0 / turns), size=(start.size, turns))
    return np.concatenate([start[:, None], start[:, None] + np.cumsum(steps, axis=1)], axis=1)


def predict(values: np.ndarray, noise: float, rng: np.random.Generator) -> np.ndarray:
    """The predictor's view: `sigmoid(logit V + noise * Normal(0, 1))`."""
    clipped = np.clip(values, SMALLEST_CHANCE, 1 - SMALLEST_CHANCE)
    logits = np.log(clipped) - np.log1p(-clipped) + noise * rng.normal(size=values.shape)
    return 1.0 / (1.0 + np.exp(-logits))


@dataclass(frozen=True)
class Generation:
    """What one generation held.

    Attributes:
        leaves (`int`): terminal states, bare rollouts and continuations.
        sampled_turns (`int`): turns the policy had to sample; those of a shared prefix count once.
        active_prompts, mixed_prompts (`int`): prompts with rollouts, and those whose leaves hold both outcomes.
        branched_anchors, mixed_anchors (`int`): roots and prefixes with at least two children, and those whose
            children's leaves hold both outcomes.
    """

    leaves: int
    sampled_turns: int
    active_prompts: int
    mixed_prompts: int
    branched_anchors: int
    mixed_anchors: int


def simulate_generation(
    method: Method, config: SimulationConfig, evidence: np.ndarray, predicted: np.ndarray, seed: Sequence[int]
) -> Generation:
    """Allocates and samples one generation.

    Args:
        method (`Method`): the two choices.
        config (`SimulationConfig`): budget and turns.
        evidence (`np.ndarray`, shape `(pool,)`): `z_0` of every candidate.
        predicted (`np.ndarray`, shape `(pool,)`): the predictor's view of `V_0`.
        seed (sequence of `int`): for everything drawn here.

    Raises:
        ValueError: if the budget cannot be allocated, see [`allocate_roots`].
    """
    rng = np.random.default_rng(seed)
    turns, branching = config.turns, method.prefixes is not None
    budget = config.rollouts if branching else config.leaves
    counts = ROOT_ALLOCATORS[method.roots](
        predicted,
        budget=budget,
        max_per_root=config.num_generations if config.max_per_root is None else config.max_per_root,
        # With a uniform choice, every prompt has `num_generations` leaves, whether they branch or not.
        group_size=config.num_generations * budget / config.leaves,
        seed=rng,
    )
    prompt_of = np.repeat(np.arange(counts.size), counts)
    paths = draw_paths(evidence[prompt_of], turns, rng)
    success = paths[:, -1] > 0

    leaves = counts.copy()
    successes = np.bincount(prompt_of[success], minlength=counts.size)
    sampled_turns = budget * turns
    branched_prefixes = mixed_prefixes = 0
    if branching and turns == 1:
        # No prefix can be expanded: continuations become rollouts from the root.
        extra = np.repeat(np.arange(counts.size), counts * config.continuations)
        won = draw_evidence(evidence[extra], turns, turns, rng) > 0
        leaves += counts * config.continuations
        successes += np.bincount(extra[won], minlength=counts.size)
        sampled_turns += extra.size * turns
    elif method.prefixes is not None:
        depths = np.arange(1, turns)
        views = predict(value_of(paths[:, 1:-1], depths, turns), config.noise, rng)
        children = _expand(method.prefixes, config.continuations, counts, views, success, rng)

        row, column = np.nonzero(children)
        times = children[row, column]
        row, column = np.repeat(row, times), np.repeat(column, times)
        won = draw_evidence(paths[row, column + 1], turns - depths[column], turns, rng) > 0
        sampled_turns += int((turns - depths[column]).sum())
        leaves += np.bincount(prompt_of[row], minlength=counts.size)
        successes += np.bincount(prompt_of[row[won]], minlength=counts.size)

        # Below a prefix are the factual leaf and the continuations from it and from later prefixes of its rollout.
        wins = np.zeros_like(children)
        np.add.at(wins, (row[won], column[won]), 1)
        leaves_below = children[:, ::-1].cumsum(axis=1)[:, ::-1] + 1
        wins_below = wins[:, ::-1].cumsum(axis=1)[:, ::-1] + success[:, None]
        branched_prefixes = int((children > 0).sum())
        mixed_prefixes = int(((children > 0) & (wins_below > 0) & (wins_below < leaves_below)).sum())

    active, mixed = int((counts > 0).sum()), int(((successes > 0) & (successes < leaves)).sum())
    return Generation(
        leaves=int(leaves.sum()),
        sampled_turns=sampled_turns,
        active_prompts=active,
        mixed_prompts=mixed,
        branched_anchors=active + branched_prefixes,
        mixed_anchors=mixed + mixed_prefixes,
    )


def _expand(
    prefixes: str,
    continuations: int,
    counts: np.ndarray,
    views: np.ndarray,
    success: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Continuations per prefix, shape `(rollouts, turns - 1)`, chosen prompt by prompt."""
    allocate = PREFIX_ALLOCATORS[prefixes]
    children = np.zeros(views.shape, dtype=np.int64)
    outcomes = np.broadcast_to(success[:, None], views.shape)
    ends = np.cumsum(counts)
    for prompt in np.flatnonzero(counts):
        rows = slice(ends[prompt] - counts[prompt], ends[prompt])
        budget = int(counts[prompt]) * continuations
        chosen = allocate(views[rows].ravel(), outcomes[rows].ravel(), budget=budget, seed=rng)
        children[rows] = chosen.reshape(-1, views.shape[1])
    return children


def simulate(config: SimulationConfig) -> list[dict[str, float | int | str]]:
    """Runs every method of `METHODS` and averages over `config.repeats` generations.

    Returns:
        One `dict` per method, with `method`, `leaves`, `active_prompts`, `mixed_prompts` (those whose leaves hold both
        outcomes), `effective_ratio` (their share) and its standard error `effective_ratio_se`, `branched_anchors`,
        `mixed_anchor_ratio` (share of branched anchors whose children's leaves hold both outcomes), `sampled_turns`.
        Counts are means per generation, ratios means of the generations' ratios.

    Raises:
        ValueError: if the budget cannot be allocated, see [`allocate_roots`].
    """
    generations: dict[str, list[Generation]] = {name: [] for name in METHODS}
    for repeat in range(config.repeats):
        rng = np.random.default_rng([config.seed, repeat])
        values = rng.beta(*config.prompts_shape, size=config.pool_size)
        evidence, predicted = evidence_of(values), predict(values, config.noise, rng)
        drawn: dict[Method, int] = {}  # methods that are the same draw the same
        for number, (name, method) in enumerate(METHODS.items(), start=1):
            if not config.continuations:
                method = Method(method.roots, None)
            seed = (config.seed, repeat, drawn.setdefault(method, number))
            generations[name].append(simulate_generation(method, config, evidence, predicted, seed))

    results: list[dict[str, float | int | str]] = []
    for name, runs in generations.items():
        effective = np.array([run.mixed_prompts / run.active_prompts for run in runs])
        results.append(
            {
                "method": name,
                "leaves": runs[0].leaves,
                "active_prompts": float(np.mean([run.active_prompts for run in runs])),
                "mixed_prompts": float(np.mean([run.mixed_prompts for run in runs])),
                "effective_ratio": float(effective.mean()),
                "effective_ratio_se": float(effective.std(ddof=1) / math.sqrt(len(runs))) if len(runs) > 1 else 0.0,
                "branched_anchors": float(np.mean([run.branched_anchors for run in runs])),
                "mixed_anchor_ratio": float(np.mean([run.mixed_anchors / run.branched_anchors for run in runs])),
                "sampled_turns": float(np.mean([run.sampled_turns for run in runs])),
            }
        )
    return results


def format_table(results: Sequence[dict[str, float | int | str]]) -> str:
    """Aligned text, one line per method; `cost` is sampled turns relative to the first method.

    The effective ratio stands next to the counts it is made of: fewer prompts with more leaves each raise it too.
    """
    header = ["method", "leaves", "effective ratio", "mixed prompts", "mixed anchors", "sampled turns", "cost"]
    rows = [
        [
            str(result["method"]),
            f"{result['leaves']}",
            f"{result['effective_ratio']:.3f} +- {result['effective_ratio_se']:.3f}",
            f"{result['mixed_prompts']:.0f} of {result['active_prompts']:.0f}",
            f"{result['mixed_anchor_ratio']:.3f} of {result['branched_anchors']:.0f}",
            f"{result['sampled_turns']:.0f}",
            f"{float(result['sampled_turns']) / float(results[0]['sampled_turns']):.2f}",
        ]
        for result in results
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in [header, *rows]
    )


def _shape(text: str) -> tuple[float, float]:
    parts = [float(part) for part in text.split(",")]
    if len(parts) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} holds {len(parts)} numbers: give A or A,B.")
    return parts[0], parts[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    defaults = SimulationConfig()
    parser = argparse.ArgumentParser(
        prog="python -m trace_trl.simulate",
        description="Compares the allocations of trace_trl at equal leaves on simulated success martingales.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rollouts", type=int, metavar="M", default=defaults.rollouts, help="bare rollouts of one generation")
    add(
        "--continuations", type=int, metavar="N", default=defaults.continuations, help="continuations per bare rollout"
    )
    add("--pool-factor", type=float, default=defaults.pool_factor, help="candidates per prompt of plain GRPO")
    add("--turns", type=int, default=defaults.turns, help="turns of an episode")
    add("--num-generations", type=int, default=defaults.num_generations, help="leaves per prompt of uniform choices")
    add("--max-per-root", type=int, default=None, help="most bare rollouts of one prompt; None: num-generations")
    add("--noise", type=float, default=defaults.noise, help="predictor error in logits; 0 is an oracle")
    add(
        "--prompts-shape",
        type=_shape,
        metavar="A[,B]",
        default=",".join(map(str, defaults.prompts_shape)),
        help="Beta parameters of the prompts' success rates; below 1 is U-shaped",
    )
    add("--repeats", type=int, default=defaults.repeats, help="generations that are averaged")
    add("--seed", type=int, default=defaults.seed, help="of everything drawn")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    try:
        config = SimulationConfig(**options)
        results = simulate(config)
    except ValueError as error:
        parser.error(str(error))
    if as_json:
        print(json.dumps({"config": asdict(config), "results": results}, indent=2))
        return
    print(
        f"{config.leaves} leaves = M {config.rollouts} x (1 + N {config.continuations}), pool of {config.pool_size} "
        f"prompts, {config.turns} turns, predictor noise {config.noise:g} logits, "
        f"V_0 ~ Beta{config.prompts_shape}, {config.repeats} repeats\n"
    )
    print(format_table(results))


if __name__ == "__main__":
    main()
