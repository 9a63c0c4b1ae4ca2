"""Leaves as a scorer leaves them: with a reward, and whether that is a success."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from trace_trl.tree import Leaf, RemoteChild, Turn, is_success


def scored(reward: float, threshold: float = 0.5, **kwargs: Any) -> Leaf:
    return Leaf(reward=reward, success=None if math.isnan(reward) else is_success(reward, threshold), **kwargs)


def elsewhere(rewards: Iterable[float], target: float | None = None, threshold: float = 0.5) -> RemoteChild:
    """A root's child on another process, by the rewards of the leaves below it."""
    leaves = [scored(reward, threshold) for reward in rewards]
    return RemoteChild(tuple(leaf.reward for leaf in leaves), tuple(leaf.success for leaf in leaves), target)


def moved(child: Turn) -> RemoteChild:
    """What other processes know of a root's child on this one."""
    leaves = [turn.leaf for turn in child.leaves()]
    return RemoteChild(tuple(leaf.reward for leaf in leaves), tuple(leaf.success for leaf in leaves), child.target)
