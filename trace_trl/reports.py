"""
The numbers logged for one generation. `docs/metrics.md` explains each.

Every process makes a record of its own trees; [`summarise`] turns the records of all processes into metrics, so that a
prompt that spans processes is counted once. Functions that gather are called by all processes together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from accelerate.utils import gather_object

from .advantages import reward_statistics
from .engine import Stats
from .metrics import auroc, brier_score, effective, expected_calibration_error, mixed_anchor_counts
from .rows import Rows
from .tree import Leaf, RolloutTree, Turn


MAX_DEPTH = 8  # deeper anchors are logged together
CUT = ("length", "turns", "overflow")  # reasons of an end that a limit set


def gather_records(trees: Sequence[RolloutTree], stats: Stats) -> list[dict[str, Any]]:
    """What each process has to tell of its scored trees, and of what its engine did. Gathers."""
    return gather_object([record(trees, stats)])


def rollout_metrics(records: Sequence[dict[str, Any]], training: bool, tools: bool = False) -> dict[str, float]:
    """Metrics of one generation over all processes.

    Args:
        records: one per process.
        training: whether prompts had groups of rollouts, so that ratios and calibration mean something.
        tools: whether the policy had tools; adds what TRL logs of their calls.
    """
    metrics = summarise(records, training)
    if tools:
        calls, failures = metrics["rollout/environment_calls"], metrics["rollout/environment_failures"]
        metrics["tools/call_frequency"] = calls / sum(len(r["depths"]) for r in records)
        metrics["tools/failure_frequency"] = failures / max(calls, 1)
    return metrics


def record(trees: Sequence[RolloutTree], stats: Stats) -> dict[str, Any]:
    """What one process has to tell of its scored trees; picklable."""
    roots, mixed, branched = {}, 0, 0
    for tree in trees:
        is_effective = effective(tree)
        is_branched = len(tree.root.children) + len(tree.remote) > 1
        roots[tree.index] = (is_effective, is_branched)
        counts = mixed_anchor_counts(tree)
        mixed += counts[0] - int(is_effective and is_branched)
        branched += counts[1] - int(is_branched)
    leaves = [(turn, leaf_of(turn)) for tree in trees for turn in tree.leaves()]
    path_tokens = sum(len(node.token_ids) for turn, _ in leaves for node in turn.path())
    tree_tokens = sum(len(node.token_ids) for tree in trees for node in tree.turns())
    return {
        "roots": roots,
        "prefixes": (mixed, branched),
        "predictions": [pair for tree in trees for pair in predictions(tree)],
        "successes": [leaf.success for _, leaf in leaves],
        "rewards": [leaf.reward for _, leaf in leaves if leaf.scored],
        "reasons": [leaf.reason for _, leaf in leaves],
        "depths": [turn.depth for turn, _ in leaves],
        "kinds": [leaf.kind for _, leaf in leaves],
        "saved_tokens": path_tokens - tree_tokens,
        "stats": asdict(stats),
    }


def predictions(tree: RolloutTree) -> list[tuple[int, float, bool]]:
    """`(depth, value, outcome)` of every anchor of every bare rollout: an outcome is one draw from its anchor, and was
    not seen by the predictor when it gave the value. Continuations start where an outcome was already known, and are
    left out.
    """
    return [
        (anchor.depth, anchor.value, leaf.success)
        for turn, leaf in ((turn, leaf_of(turn)) for turn in tree.leaves())
        if leaf.kind == "bare" and leaf.success is not None
        for anchor in (tree.root, *turn.path()[:-1])
        if anchor.value is not None
    ]


def summarise(records: Sequence[dict[str, Any]], training: bool) -> dict[str, float]:
    """Metrics of one generation from the records of all processes, `nan` where undefined.

    Args:
        records: one per process.
        training: whether prompts had groups of rollouts, so that ratios and calibration mean something.
    """
    successes = [s for r in records for s in r["successes"] if s is not None]
    metrics = {
        "success_rate": _mean(successes),
        "rollout/turns_per_leaf": _mean([d for r in records for d in r["depths"]]),
    }
    reasons = [reason for r in records for reason in r["reasons"]]
    for reason in CUT:
        metrics[f"rollout/ended_{reason}"] = _mean([found == reason for found in reasons])
    total = {
        key: sum(r["stats"][key] or 0 for r in records)
        for key in records[0]["stats"]
        if key not in ("seconds", "info")
    }
    for key in ("sampled_tokens", "prefilled_tokens", "turns", "environment_calls", "environment_failures"):
        metrics[f"rollout/{key}"] = total[key]
    if any(r["stats"]["cached_tokens"] is not None for r in records):
        metrics["rollout/cached_tokens"] = total["cached_tokens"]
    metrics["rollout/rounds"] = max(r["stats"]["rounds"] for r in records)
    for stage in records[0]["stats"]["seconds"]:
        metrics[f"seconds/{stage}"] = max(r["stats"]["seconds"].get(stage, 0.0) for r in records)
    infos = sorted({key for r in records for key in r["stats"]["info"]})
    for key in infos:
        metrics[f"env/{key}"] = _mean([value for r in records for value in r["stats"]["info"].get(key, [])])
    if not training:
        return metrics
    roots = {index: root for r in records for index, root in r["roots"].items()}
    metrics["effective_ratio"] = _mean([is_effective for is_effective, _ in roots.values()])
    mixed = sum(e and b for e, b in roots.values()) + sum(r["prefixes"][0] for r in records)
    branched = sum(b for _, b in roots.values()) + sum(r["prefixes"][1] for r in records)
    metrics["mixed_anchor_ratio"] = mixed / branched if branched else math.nan
    metrics["rollout/active_prompts"] = len(roots)
    kinds = [kind for r in records for kind in r["kinds"]]
    for kind in ("bare", "continuation", "extra"):
        metrics[f"rollout/{kind}_leaves"] = kinds.count(kind)
    metrics["rollout/saved_tokens"] = sum(r["saved_tokens"] for r in records)
    for key in ("discarded_leaves", "discarded_tokens", "unforkable_prefixes"):
        metrics[f"rollout/{key}"] = total[key]
    metrics.update(_calibration([p for r in records for p in r["predictions"]]))
    return metrics


def _calibration(pairs: Sequence[tuple[int, float, bool]]) -> dict[str, float]:
    metrics = {}
    values, outcomes = [v for _, v, _ in pairs], [o for _, _, o in pairs]
    if pairs:
        metrics["predictor/brier"] = brier_score(values, outcomes)
        metrics["predictor/ece"] = expected_calibration_error(values, outcomes)
        metrics["predictor/auroc"] = auroc(values, outcomes)
    for depth in sorted({min(depth, MAX_DEPTH) for depth, _, _ in pairs}):
        chosen = [(v, o) for d, v, o in pairs if min(d, MAX_DEPTH) == depth]
        for name, score in (("brier", brier_score), ("ece", expected_calibration_error), ("auroc", auroc)):
            metrics[f"predictor/{name}_depth_{depth}"] = score(*zip(*chosen, strict=True))
    return metrics


def gather_lengths(rows: Rows) -> tuple[list[int], list[bool], int]:
    """Sampled tokens of each row and whether it was truncated, rows of all processes, and the tokens of their prompts
    and turns together, observations left out as in TRL. Gathers.
    """
    sampled = [sum(mask) for mask in rows.sampled_mask]
    everyone = gather_object(list(zip(sampled, rows.truncated, map(len, rows.prompt_ids), strict=True)))
    lengths, truncated, prompts = (list(column) for column in zip(*everyone, strict=True))
    return lengths, truncated, sum(lengths) + sum(prompts)


def length_metrics(sampled: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """TRL's completion length metrics, over the sampled tokens of each row, rows of all processes together."""
    ended = [length for length, cut in zip(sampled, truncated, strict=True) if not cut] or [0]
    return {
        "completions/mean_length": _mean(sampled),
        "completions/min_length": float(min(sampled)),
        "completions/max_length": float(max(sampled)),
        "completions/clipped_ratio": _mean(truncated),
        "completions/mean_terminated_length": _mean(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
    }


def gather_groups(rows: Rows) -> tuple[list[bool], list[float]]:
    """Of each row, rows of all processes: whether the rewards of its prompt's leaves are all equal, and the advantage
    of its last turn, for tables that hold one number per completion. Gathers.
    """
    trees = {id(tree): tree for tree, _ in rows.leaves}
    std = {key: reward_statistics(tree)[tree.root].std for key, tree in trees.items()}
    everyone = gather_object([(std[id(tree)] < 1e-8, turn.advantage) for tree, turn in rows.leaves])
    return [zero for zero, _ in everyone], [advantage for _, advantage in everyone]


def extra_columns(rows: Rows, known: Iterable[str] = ()) -> dict[str, list[Any]]:
    """What reward functions logged with `log_extra`, in the order of the rows.

    Args:
        known: columns of earlier generations, which get a value in every later row, so that columns stay aligned.
    """
    extras = [leaf_of(turn).extras for _, turn in rows.leaves]
    columns = sorted({*known, *(column for row in extras for column in row)})
    return {column: [row.get(column) for row in extras] for column in columns}


def leaf_of(turn: Turn) -> Leaf:
    assert turn.leaf is not None
    return turn.leaf


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
