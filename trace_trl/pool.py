"""
The candidate pool of one generation, and what is rolled out from it on this process.

    candidates of all processes ─▶ root allocation: m_1 .. m_B, the same on every process
                                ─▶ every process plays equally many of these rollouts, in the candidates' order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from datasets import IterableDataset

from .allocation import ROOT_ALLOCATORS
from .engine import RootPlan
from .environments.base import Episode
from .seams import RepeatSampler
from .tree import RolloutTree


@dataclass
class Candidate:
    """One prompt of the pool: its row, the prompt as its environment's reset left it, the predicted `v(x_i)`, and how
    exactly that is known."""

    example: dict[str, Any]
    prompt: Any
    prompt_ids: list[int]
    value: float | None = None
    certainty: float | None = None


class PoolSampler(RepeatSampler):
    """
    TRL's sampler of prompts, in the same order, also in the epoch that a resumed run begins with.

    TRL's own draws each epoch's order from a random state that goes on from epoch to epoch, and that no checkpoint
    keeps: a run resumed in its second epoch would see the first epoch's order again.

    Args:
        epoch (`Callable[[], int]`): number of the epoch that begins, from 0.
        kwargs: those of [`~trl.trainer.utils.RepeatSampler`].
    """

    def __init__(self, *args: Any, epoch: Callable[[], int], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle and self.seed is not None:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


def fill_first_pool(dataset: IterableDataset, pool_size: int) -> IterableDataset:
    """A stream that starts over where it ends before its first pool is full.

    Incomplete pools are dropped, as TRL drops incomplete batches. Of a short stream nothing would be left, though TRL,
    whose batches hold fewer prompts than a pool, could train on it.
    """

    def fill(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        if indices[0] > 0 or len(indices) >= pool_size:
            return batch
        return {key: [values[i % len(values)] for i in range(pool_size)] for key, values in batch.items()}

    return dataset.map(fill, with_indices=True, batched=True, batch_size=pool_size)


def allocate(pool: list[Candidate], args: Any, seed: int, parts: int = 1, uniform: bool = False) -> list[int]:
    """Bare rollouts `m_i` of every candidate of the pool, by the configured allocator.

    Args:
        parts: number of equal parts of the pool that each get an equal part of the budget.
        uniform: whether to spend the budget uniformly instead.
    """
    # DAPO starts out uniform; what it resamples depends on outcomes
    name = "uniform" if uniform or args.root_allocation == "dapo" else args.root_allocation
    values = [0.5 if candidate.value is None else candidate.value for candidate in pool]
    sure = [1.0 if candidate.certainty is None else candidate.certainty for candidate in pool]
    size = len(values) // parts
    return [
        int(count)
        for part in range(parts)
        for count in ROOT_ALLOCATORS[name](
            values[part * size : (part + 1) * size],
            budget=args.rollout_budget // parts,
            max_per_root=args.max_rollouts_per_root,
            group_size=args.rollouts_per_group,
            seed=seed + part,
            certainties=sure[part * size : (part + 1) * size],
            headroom_exponent=args.headroom_exponent,
        )
    ]


def shares(counts: list[int], process_index: int, num_processes: int) -> list[int]:
    """How many of each candidate's bare rollouts a process plays.

    Args:
        counts: bare rollouts of every candidate; their sum is a multiple of `num_processes`.
    """
    per_process = sum(counts) // num_processes
    start, end = process_index * per_process, (process_index + 1) * per_process
    result = []
    position = 0
    for count in counts:
        result.append(max(0, min(position + count, end) - max(position, start)))
        position += count
    return result


def make_plans(
    pool: list[Candidate],
    counts: list[int],
    own: list[int],
    local: dict[int, Episode],
    continuations: int,
    reset: Callable[[list[tuple[dict[str, Any], Any]]], list[Episode]],
    encode: Callable[[list[dict[str, Any]], list[Any]], list[list[int]]],
    with_reserves: bool,
) -> tuple[list[RootPlan], list[RootPlan]]:
    """Plans of this process, and plans of candidates that may replace them.

    Args:
        pool: candidates of all processes.
        counts: their bare rollouts, over all processes.
        own: their bare rollouts on this process.
        local: episodes already reset here, by candidate. A plan takes those of the candidates it is for; the others
            are the caller's to close.
        continuations: `N`.
        reset: resets an episode for a candidate that another process has reset.
        encode: gives the token ids of prompts, from their rows and the prompts. Where `reset` answered differently
            here, the rollouts of this process are shown what it answered here.
        with_reserves: whether candidates of this process that got no rollout are kept as reserves.
    """
    plans: list[RootPlan] = []
    reserves: list[RootPlan] = []
    foreign = [index for index, bare in enumerate(own) if bare and index not in local]
    rows = [(pool[index].example, pool[index].example.get("prompt")) for index in foreign]
    episodes = {**local, **dict(zip(foreign, reset(rows), strict=True))}
    other = [index for index in foreign if episodes[index].prompt != pool[index].prompt]
    prompts = [episodes[index].prompt for index in other]
    encoded = encode([pool[index].example for index in other], prompts) if other else []
    shown = {index: (c.prompt, c.prompt_ids) for index, c in enumerate(pool)}
    shown |= {index: (prompt, ids) for index, prompt, ids in zip(other, prompts, encoded, strict=True)}
    for index, (candidate, budget, bare) in enumerate(zip(pool, counts, own, strict=True)):
        is_reserve = with_reserves and not budget and index in local
        if bare or is_reserve:
            tree = RolloutTree.from_prompt(*shown[index], candidate.example, index=index, budget=budget)
            tree.root.value, tree.root.certainty = candidate.value, candidate.certainty
            plan = RootPlan(tree, episodes[index], bare, bare * continuations, varies=index in other)
            (plans if bare else reserves).append(plan)
    return plans, reserves
