"""What the processes of a run tell each other. Every function here is called by all of them in the same order."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .tree import RemoteChild, RolloutTree


class AcceleratorSync:
    """[`~trace_trl.engine.Sync`] over the processes of an [`~accelerate.Accelerator`]."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator

    def most(self, number: int) -> int:
        if self.accelerator.num_processes == 1:
            return number
        return int(self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).max())

    def check(self, error: BaseException | None) -> None:
        if self.most(int(error is not None)):
            if error is not None:
                raise error
            raise RuntimeError("Another process failed during rollouts; its own error is in its output.")


def share_roots(trees: list[RolloutTree], process_index: int, num_processes: int) -> None:
    """Fills `remote` of every tree whose prompt has rollouts on other processes too."""
    if num_processes == 1:
        return
    own = [
        (
            process_index,
            tree.index,
            [RemoteChild(tuple(_rewards(child)), child.target) for child in tree.root.children],
        )
        for tree in trees
    ]
    shared = gather_object(own)
    for tree in trees:
        tree.remote = [
            c for process, index, cs in shared if index == tree.index and process != process_index for c in cs
        ]


def _rewards(child: Any) -> list[float]:
    return [leaf.leaf.reward for leaf in child.leaves()]
