"""What the processes of a run tell each other. Every function here is called by all of them in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .advantages import RewardStats, normalize_then_sum
from .environments.base import describe
from .tree import RemoteChild, RolloutTree, Turn


class AcceleratorSync:
    """[`~trace_trl.engine.Sync`] over the processes of an [`~accelerate.Accelerator`]."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator

    def most(self, number: int) -> int:
        if self.accelerator.num_processes == 1:
            return number
        return int(self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).max())

    def totals(self, *numbers: int) -> list[int]:
        if self.accelerator.num_processes == 1:
            return list(numbers)
        own = torch.tensor(numbers, device=self.accelerator.device)
        return self.accelerator.reduce(own, "sum").tolist()

    def check(self, error: BaseException | None) -> None:
        if not self.most(int(error is not None)):
            return
        told = [None if error is None else f"{type(error).__name__}: {describe(error)}"]
        if self.accelerator.num_processes > 1:
            told = gather_object(told)
        if error is not None:
            raise error
        process, text = next((process, text) for process, text in enumerate(told) if text is not None)
        raise RuntimeError(f"Process {process} failed, which ends all processes. {text}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is raised inside on one process ends all of them, in `check`'s way."""
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.check(error)


def gather_on_main(objects: list[Any], accelerator: Accelerator) -> list[Any]:
    """The objects of all processes, on the main process; an empty list on the others, which keep nothing of them."""
    if accelerator.num_processes == 1:
        return objects
    everyone: list[Any] = [None] * accelerator.num_processes
    torch.distributed.gather_object(objects, everyone if accelerator.is_main_process else None, dst=0)
    return [item for part in everyone for item in part or ()]


def on_main(accelerator: Accelerator, objects: list[Any], function: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Has the main process answer the objects of all processes, in one go.

    Args:
        objects: of this process; processes may have different numbers of them, or none.
        function: called on the main process with the objects of all, in the order of the processes; gives one answer
            per object.

    Returns:
        `list`: the answers to this process's objects.

    Raises:
        Exception: what `function` raised, on the main process; on the others a `RuntimeError` that tells of it.
    """
    if accelerator.num_processes == 1:
        return function(objects)
    processes = accelerator.num_processes
    everyone: list[Any] = [None] * processes
    torch.distributed.gather_object(objects, everyone if accelerator.is_main_process else None, dst=0)
    parts: list[Any] = [None] * processes
    error: Exception | None = None
    if accelerator.is_main_process:
        try:
            answers = iter(function([item for part in everyone for item in part]))
            parts = [(None, [next(answers) for _ in part]) for part in everyone]
        # The others wait, and are told
        except Exception as caught:
            error = caught
            parts = [(f"{type(error).__name__}: {describe(error)}", None)] * processes
    received: list[Any] = [None]
    torch.distributed.scatter_object_list(received, parts if accelerator.is_main_process else None, src=0)
    text, own = received[0]
    if error is not None:
        raise error
    if text is not None:
        raise RuntimeError(f"Process 0 failed, which ends all processes. {text}")
    return own


def share_roots(trees: Sequence[RolloutTree], process_index: int, num_processes: int) -> None:
    """Fills `remote` of every tree whose prompt has rollouts on other processes too."""
    if num_processes == 1:
        return
    own = [
        (
            process_index,
            tree.index,
            [RemoteChild(*_judged(child), child.target) for child in tree.root.children],
        )
        for tree in trees
    ]
    shared = gather_object(own)
    for tree in trees:
        tree.remote = [
            c for process, index, cs in shared if index == tree.index and process != process_index for c in cs
        ]


def batch_reward_std(trees: Sequence[RolloutTree]) -> float:
    """Sample standard deviation of the rewards of all leaves of all processes (`scale_rewards="batch"`)."""
    return RewardStats.of(gather_object([reward for tree in trees for reward in _rewards(tree.root)])).std


@contextmanager
def normalized_rewards(
    trees: Sequence[RolloutTree], weights: Sequence[float], process_index: int, num_processes: int
) -> Iterator[None]:
    """While this is open, each leaf's reward is the sum of its reward functions' normalised ones
    (`multi_objective_aggregation="normalize_then_sum"`), and what trees know of other processes agrees with that.
    """
    leaves = [(tree.index, leaf) for tree in trees for turn in tree.leaves() if (leaf := turn.leaf) is not None]
    rows = gather_object([(process_index, index, leaf.rewards) for index, leaf in leaves])
    normalized = normalize_then_sum([rewards for _, _, rewards in rows], [index for _, index, _ in rows], weights)
    own = [r for r, (process, _, _) in zip(normalized, rows, strict=True) if process == process_index]
    original = [leaf.reward for _, leaf in leaves]
    for (_, leaf), reward in zip(leaves, own, strict=True):
        leaf.reward = reward
    share_roots(trees, process_index, num_processes)
    yield
    for (_, leaf), reward in zip(leaves, original, strict=True):
        leaf.reward = reward
    share_roots(trees, process_index, num_processes)


def _judged(node: Turn) -> tuple[tuple[float, ...], tuple[bool | None, ...]]:
    """Rewards and successes of the leaves below `node`."""
    leaves = [turn.leaf for turn in node.leaves() if turn.leaf is not None]
    return tuple(leaf.reward for leaf in leaves), tuple(leaf.success for leaf in leaves)


def _rewards(node: Turn) -> list[float]:
    return [leaf.leaf.reward for leaf in node.leaves() if leaf.leaf is not None]
