"""
How many outcomes a value head must have seen to allocate as exact values would, in the benchmark's worlds.

    python benchmarks/predictor_limits.py

A fresh head is trained on prompts that were drawn at random, with a few outcomes each, of one and the same policy:
the warm-started one, and what TRACE has made of it after some steps. What makes it harder in a run is not there,
neither a policy that moves on nor prompts that the head chose itself. Then pools of other prompts are allocated by it,
as stage 1 does. Printed is the expected share of active prompts whose leaves hold both outcomes, if all leaves are
drawn from the root, and how much of the way from uniform allocation to exact values that is.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from equal_cost import BEST_RATES, BUDGETS, METHODS, ORDINARY, PREDICTOR, prepare
from worlds import WORLDS
from worlds.policy import RightPaths, load, success_chances
from worlds.training import train

from trace_trl.allocation import allocate_roots, root_utility, uniform_roots
from trace_trl.predictor import HiddenStates, PredictorTrainer, SuccessPredictor


OUTCOMES = 4  # of a prompt the head learns from
POOLS = 40
CONTINUATIONS = 2


def mixed_share(chances: np.ndarray, counts: np.ndarray) -> float:
    """Expected share of active prompts that show both outcomes in `counts * (1 + N)` rollouts."""
    active = counts > 0
    return float(root_utility(chances[active], counts[active] * (1 + CONTINUATIONS)).mean())


def train_head(states: torch.Tensor, chances: torch.Tensor, passes: int, certainty: bool, seed: int) -> Any:
    head = SuccessPredictor(states.size(1), seed=seed)
    trainer = PredictorTrainer(head, passes=passes, buffer_size=len(states), seed=seed, certainty=certainty)
    draws = torch.rand(len(states), OUTCOMES, generator=torch.Generator().manual_seed(seed)) < chances[:, None]
    outcomes = draws.double()
    trainer.observe(states, outcomes.mean(1).tolist(), outcomes.var(1).tolist())
    trainer.update()
    return head


def trained(name: str, steps: int) -> Any:
    """The policy after so many steps of TRACE."""
    if not steps:
        return load(WORLDS[name]())[0]
    trainers: list[Any] = []
    budget = replace(BUDGETS[name], steps=steps, tokens=0)
    options, rate = {**PREDICTOR, **METHODS["trace"]}, BEST_RATES[name]["trace"]
    train(name, options, 0, rate, budget, lambda record: None, prepared=trainers.append)
    return trainers[0].model


def measure(name: str, steps: int, sizes: Sequence[int], passes: int, seeds: Sequence[int]) -> None:
    world, budget = WORLDS[name](), BUDGETS[name]
    model, (_, tokenizer) = trained(name, steps).eval(), load(world)
    paths = RightPaths(world, tokenizer)
    pool = 2 * budget.leaves // budget.group
    rollouts = budget.leaves // (1 + CONTINUATIONS)
    rows = world.rows(max(sizes) + POOLS * pool, "predictor limits")
    prompts = [tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in rows]
    reader = HiddenStates(lambda: model, tokenizer.pad_token_id, 256, torch.no_grad)
    states = torch.stack([read[0] for read in reader.read(prompts, [[len(ids) - 1] for ids in prompts])])
    chances = torch.tensor([found[0] for found in success_chances(model, paths, rows)], dtype=torch.float64)
    pools = list(zip(states[max(sizes) :].split(pool), chances[max(sizes) :].split(pool), strict=True))

    def allocated(values: np.ndarray, true: np.ndarray, certainties: np.ndarray | None = None) -> float:
        counts = allocate_roots(values, rollouts, budget.group, seed=0, certainties=certainties)
        return mixed_share(true, counts)

    exact = statistics.fmean(allocated(true.numpy(), true.numpy()) for _, true in pools)
    group = budget.group / (1 + CONTINUATIONS)
    plain = uniform_roots(pool, rollouts, budget.group, group)
    uniform = statistics.fmean(mixed_share(true.numpy(), plain) for _, true in pools)
    shape = f"{pool} prompts a pool, {rollouts} rollouts"
    print(f"{name} after {steps} steps: uniform {uniform:.3f}, exact values {exact:.3f}; {shape}")
    for size in sizes:
        for certainty in (False, True):
            shares = []
            for seed in seeds:
                head = train_head(states[:size], chances[:size], passes, certainty, seed)
                for found, true in pools:
                    with torch.no_grad():
                        values, certainties = (x.double().numpy() for x in head.beliefs(found))
                    shares.append(allocated(values, true.numpy(), certainties if certainty else None))
            share = statistics.fmean(shares)
            way = (share - uniform) / (exact - uniform)
            kind = "certainties" if certainty else "values     "
            print(f"  {size:5d} prompts  {kind}  {share:.3f}  {way:.0%} of the way", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=sorted(WORLDS), default=ORDINARY)
    parser.add_argument("--steps", nargs="+", type=int, default=[0, 15], help="of TRACE that the policy has made")
    parser.add_argument("--prompts", nargs="+", type=int, default=[75, 300, 1200, 4800], help="that the head has seen")
    parser.add_argument("--passes", type=int, default=20 * PREDICTOR["predictor_passes"], help="mini-batches of 256")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    prepare()
    for name in options.worlds:
        for steps in options.steps:
            measure(name, steps, options.prompts, options.passes, options.seeds)


if __name__ == "__main__":
    main()
