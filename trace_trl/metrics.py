"""
What is measured on scored trees and on the predictor. Each number is explained in `docs/metrics.md`.

Unscored leaves (reward `nan`) count as neither success nor failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from .tree import RolloutTree, Turn


def _outcomes(tree: RolloutTree) -> dict[Turn, tuple[bool, bool]]:
    """For every node, whether a success and whether a failure is at or below it; at the root, on any process."""
    seen: dict[Turn, tuple[bool, bool]] = {}
    for turn in reversed(list(tree.root.turns())):
        outcome = None if turn.leaf is None else turn.leaf.success
        success, failure = outcome is True, outcome is False
        for child in turn.children:
            success |= seen[child][0]
            failure |= seen[child][1]
        seen[turn] = success, failure
    success, failure = seen[tree.root]
    for remote in tree.remote:
        success |= True in remote.successes
        failure |= False in remote.successes
    seen[tree.root] = success, failure
    return seen


def effective(tree: RolloutTree) -> bool:
    """Whether the leaves of a scored tree, on all processes, hold both a success and a failure."""
    return all(_outcomes(tree)[tree.root])


def effective_ratio(trees: Iterable[RolloutTree]) -> float:
    """Share of active prompts that are [`effective`]; `nan` if none is active.

    A prompt is active if it has a leaf. A prompt that spans processes must be counted by one of them only.
    """
    active = [tree for tree in trees if tree.root.children or tree.remote]
    return sum(effective(tree) for tree in active) / len(active) if active else math.nan


def mixed_anchor_counts(tree: RolloutTree) -> tuple[int, int]:
    """Branched anchors below which both outcomes were seen, and branched anchors.

    An anchor is branched if it has at least two children: the root, those on other processes included, and every
    prefix that was continued. A root that spans processes is counted on each of them.

    Returns:
        `tuple[int, int]`: `(mixed, branched)`.
    """
    outcomes = _outcomes(tree)
    mixed = branched = 0
    for anchor in tree.anchors():
        remote = len(tree.remote) if anchor is tree.root else 0
        if len(anchor.children) + remote > 1:
            branched += 1
            mixed += all(outcomes[anchor])
    return mixed, branched


def mixed_anchor_ratio(trees: Iterable[RolloutTree]) -> float:
    """Share of branched anchors below which both outcomes were seen, over all trees; `nan` if nothing branched."""
    counts = [mixed_anchor_counts(tree) for tree in trees]
    branched = sum(count for _, count in counts)
    return sum(count for count, _ in counts) / branched if branched else math.nan


def _pairs(values: Sequence[float], outcomes: Sequence[float]) -> tuple[np.ndarray, np.ndarray] | None:
    """Both as float arrays; `None` if they are empty or hold a `nan`, where no score is defined."""
    predicted, observed = np.asarray(values, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    if predicted.ndim != 1 or predicted.shape != observed.shape:
        raise ValueError(f"Values of shape {predicted.shape} for outcomes of shape {observed.shape}.")
    if not predicted.size or np.isnan(predicted).any() or np.isnan(observed).any():
        return None
    return predicted, observed


def brier_score(values: Sequence[float], outcomes: Sequence[float]) -> float:
    """Mean squared difference of predicted values and outcomes; lower is better, 0.25 for a constant 0.5.

    Args:
        values (`Sequence[float]` of shape `(n,)`):
            Predicted chances of success, in [0, 1].
        outcomes (`Sequence[float]` of shape `(n,)`):
            0 or 1, or `False` or `True`.

    Returns:
        `float`: `nan` without entries, or if one is `nan`.

    Raises:
        ValueError: if the shapes differ.
    """
    pairs = _pairs(values, outcomes)
    return math.nan if pairs is None else float(np.mean((pairs[0] - pairs[1]) ** 2))


def expected_calibration_error(values: Sequence[float], outcomes: Sequence[float], bins: int = 10) -> float:
    """Mean distance of confidence and success rate over bins of equal width, weighted by the entries in a bin.

        ECE = sum_b |B_b| / n * |mean value in B_b - mean outcome in B_b|

    A value on an edge belongs to the upper bin, 1.0 to the last. Arguments, `nan` and errors as in [`brier_score`].
    """
    pairs = _pairs(values, outcomes)
    if pairs is None:
        return math.nan
    predicted, observed = pairs
    # `searchsorted` on the edges, not `floor(value * bins)`: 0.29 * 100 is 28.999999999999996.
    index = np.searchsorted(np.arange(1, bins) / bins, predicted, side="right")
    gaps = np.bincount(index, weights=predicted - observed, minlength=bins)
    return float(np.abs(gaps).sum() / predicted.size)


def auroc(values: Sequence[float], outcomes: Sequence[float]) -> float:
    """Chance that a success has a higher value than a failure, ties counted half (Mann-Whitney, mid-ranks).

    Arguments and errors as in [`brier_score`]. `nan` also where only one outcome occurs.
    """
    pairs = _pairs(values, outcomes)
    if pairs is None:
        return math.nan
    predicted, observed = pairs
    success = observed > 0.5
    num_success = int(success.sum())
    num_failure = success.size - num_success
    if not num_success or not num_failure:
        return math.nan
    _, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    midranks = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(midranks[inverse][success].sum())
    return (rank_sum - num_success * (num_success + 1) / 2) / (num_success * num_failure)
