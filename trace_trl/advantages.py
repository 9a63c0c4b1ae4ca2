"""
From a scored tree to one advantage per turn, and one weight per turn and training row.

An estimator compares the mean reward below a turn with the rewards below one or more of the nodes above it:

    root          μ, σ over all leaves of the prompt
      ├── a1      same history as b1: siblings
      │    └── a2     no siblings: one segment with a1, one advantage
      │         ├── a3    siblings again: compared below a2 only
      │         └── c3
      └── b1

All of them need the same statistics, mean and standard deviation of the rewards below every node, which one
bottom-up pass gives ([`reward_statistics`]). A turn that several leaves share has one advantage; [`row_weights`] says
in which of their rows it is trained.

This module knows nothing of torch, TRL or processes. A prompt whose root spans processes is complete once
`RolloutTree.remote` is filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .tree import Leaf, RolloutTree, Turn


EPSILON = 1e-4  # the constant TRL adds to every standard deviation
SCALES = ("group", "batch", "none")
TURN_WEIGHTINGS = ("once", "per_leaf", "on_policy")


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Count, mean and sum of squared deviations of some rewards, and whether they differ. Where they do by less than
    about 1e-160, the squares are 0 all the same.

    Two of them are merged by Chan's formula, not over sums of squares: equal rewards then have a standard deviation of
    exactly 0, whatever their size.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    differ: bool = False

    @classmethod
    def of(cls, rewards: Iterable[float]) -> RewardStats:
        """Statistics of `rewards`; `nan` entries are left out."""
        stats = cls()
        for reward in rewards:
            if not math.isnan(reward):
                stats = stats.merge(cls(1, float(reward), 0.0))
        return stats

    def merge(self, other: RewardStats) -> RewardStats:
        if not self.count:
            return other
        if not other.count:
            return self
        count = self.count + other.count
        delta = other.mean - self.mean
        return RewardStats(
            count,
            self.mean + delta * other.count / count,
            self.squares + other.squares + delta * delta * self.count * other.count / count,
            self.differ or other.differ or self.mean != other.mean,
        )

    @property
    def std(self) -> float:
        """Sample standard deviation (`n - 1`), 0.0 for fewer than two rewards."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


def reward_statistics(tree: RolloutTree) -> dict[Turn, RewardStats]:
    """Statistics of the scored leaves at or below every node, the root included, in one pass.

    The root's statistics include the leaves on other processes (`tree.remote`).
    """
    stats: dict[Turn, RewardStats] = {}
    for turn in reversed(list(tree.root.turns())):
        below = RewardStats.of([turn.leaf.reward]) if turn.leaf is not None else RewardStats()
        for child in turn.children:
            below = below.merge(stats[child])
        stats[turn] = below
    for remote in tree.remote:
        stats[tree.root] = stats[tree.root].merge(RewardStats.of(remote.rewards))
    return stats


@dataclass(frozen=True)
class Scale:
    """The difference every estimator is made of: `(mean below c - mean below y) / (σ + 1e-4)`.

    Args:
        name (`str`, *optional*, defaults to `"group"`):
            What `σ` is: `"group"`, the sample standard deviation over the leaves below `y`; `"batch"`, `batch_std`;
            `"none"`, no division at all. As `scale_rewards` of [`~trl.GRPOConfig`].
        batch_std (`float`, *optional*):
            Sample standard deviation over all scored leaves of the generation, on all processes. Needed for `"batch"`.

    Raises:
        ValueError: if `name` is not one of `SCALES`, or if `"batch"` comes without `batch_std`.
    """

    name: str = "group"
    batch_std: float | None = None

    def __post_init__(self) -> None:
        if self.name not in SCALES:
            raise ValueError(f"Unknown scale {self.name!r}: use one of {', '.join(map(repr, SCALES))}.")
        if self.name == "batch" and self.batch_std is None:
            raise ValueError("The scale 'batch' needs `batch_std`, the standard deviation over the whole generation.")

    def __call__(self, child: RewardStats, group: RewardStats) -> float:
        """Scaled difference of two means; 0.0 if no leaf below `child` is scored, or if it is not a finite number."""
        if not child.count:
            return 0.0
        difference = child.mean - group.mean
        if self.name == "group":
            difference /= group.std + EPSILON
        elif self.name == "batch":
            difference /= self.batch_std + EPSILON  # type: ignore[operator]
        # As TRL's `nan_to_num`: an infinite reward, or a `batch_std` of `nan`, must not reach the loss.
        return difference if math.isfinite(difference) else 0.0


def num_root_children(tree: RolloutTree) -> int:
    """Children of the root over all processes: the rollouts of this prompt that were drawn from the root."""
    return len(tree.root.children) + len(tree.remote)


def _turns_with_parent(tree: RolloutTree) -> Iterator[tuple[Turn, Turn]]:
    for turn in tree.turns():
        yield turn, turn.parent  # type: ignore[misc]


def _branchings(tree: RolloutTree, stats: dict[Turn, RewardStats]) -> set[Turn]:
    """Nodes with siblings below them: at least two children with a scored leaf at or below each.

    A child that nothing scored is nobody's sibling: compared with it alone, the other child would have advantage 0
    where it has that of its segment.
    """
    scored = {node: sum(stats[child].count > 0 for child in node.children) for node in stats}
    scored[tree.root] += sum(RewardStats.of(child.rewards).count > 0 for child in tree.remote)
    return {node for node, count in scored.items() if count > 1}


def sibling(tree: RolloutTree, scale: Scale) -> dict[Turn, float]:
    """TRACE (arXiv 2606.11119, sibling-based advantages): a turn against the turns that share its history.

        A(c) = (mean R below c - μ_y) / (σ_y + 1e-4),   y the parent of c

    A turn without siblings takes the value of its nearest ancestor turn that has some, and 0 if none has: the turns of
    one segment between two branchings share one advantage.
    """
    stats = reward_statistics(tree)
    return _against_siblings(tree, scale, stats, _branchings(tree, stats))


def sibling_fallback(tree: RolloutTree, scale: Scale) -> dict[Turn, float]:
    """[`sibling`], where siblings whose leaves all have the same reward do not count as siblings: such turns take the
    value of their nearest ancestor turn that has siblings with another reward, not 0.
    """
    stats = reward_statistics(tree)
    contrasts = {node for node in _branchings(tree, stats) if stats[node].differ}
    return _against_siblings(tree, scale, stats, contrasts)


def _against_siblings(
    tree: RolloutTree, scale: Scale, stats: dict[Turn, RewardStats], branchings: set[Turn]
) -> dict[Turn, float]:
    advantages: dict[Turn, float] = {}
    for turn, parent in _turns_with_parent(tree):
        if not stats[turn].count:
            advantages[turn] = 0.0
        elif parent in branchings:
            advantages[turn] = scale(stats[turn], stats[parent])
        else:
            advantages[turn] = advantages.get(parent, 0.0)
    return advantages


def leaf(tree: RolloutTree, scale: Scale) -> dict[Turn, float]:
    """GRPO over the leaves of the prompt: `A(c) = (mean R below c - μ_root) / (σ_root + 1e-4)`.

    The mean is over the leaves that share the turn, since a shared turn is trained once.
    """
    stats = reward_statistics(tree)
    return {turn: scale(stats[turn], stats[tree.root]) for turn in tree.turns()}


def treerl(tree: RolloutTree, scale: Scale) -> dict[Turn, float]:
    """TreeRL (arXiv 2506.11902): global plus local advantage, both of the segment the turn lies in.

        A(c) = (mean R below c - μ_root) / (σ_root + 1e-4) + (mean R below c - μ_y) / (σ_y + 1e-4),   y the parent of c

    A turn without siblings takes the value of its nearest ancestor turn that has some, and 0 if none has. Right below
    the root both terms are the same: without branching this is twice GRPO. TreeRL divides by
    `sqrt(number of leaves below c)` because it trains a shared turn in the row of each of these leaves; here a shared
    turn is trained in one row only, so that factor is left out.
    """
    stats = reward_statistics(tree)
    branchings = _branchings(tree, stats)
    root = stats[tree.root]
    advantages: dict[Turn, float] = {}
    for turn, parent in _turns_with_parent(tree):
        if not stats[turn].count:
            advantages[turn] = 0.0
        elif parent in branchings:
            advantages[turn] = scale(stats[turn], root) + scale(stats[turn], stats[parent])
        else:
            advantages[turn] = advantages.get(parent, 0.0)
    return advantages


def treepo(tree: RolloutTree, scale: Scale) -> dict[Turn, float]:
    """TreePO (arXiv 2508.17445): the mean over the subgroups a turn belongs to.

        A(c) = mean over the branching ancestors y of c of (mean R below c - μ_y) / (σ_y + 1e-4)

    A branching ancestor is the root or a turn above `c`, with siblings below it: a node with one child has the same
    leaves as that child and would only count a subgroup twice. A turn without siblings takes the value of its nearest
    ancestor turn that has some, and 0 if none has. Costs one step per turn and branching above it.
    """
    stats = reward_statistics(tree)
    branchings = _branchings(tree, stats)
    groups: dict[Turn, list[RewardStats]] = {tree.root: []}
    advantages: dict[Turn, float] = {}
    for turn, parent in _turns_with_parent(tree):
        branches = parent in branchings
        groups[turn] = [*groups[parent], stats[parent]] if branches else groups[parent]
        if not stats[turn].count:
            advantages[turn] = 0.0
        elif branches:
            advantages[turn] = sum(scale(stats[turn], group) for group in groups[turn]) / len(groups[turn])
        else:
            advantages[turn] = advantages.get(parent, 0.0)
    return advantages


def tree_grpo(tree: RolloutTree, scale: Scale) -> dict[Turn, float]:
    """Tree-GRPO (arXiv 2509.21240): intra-tree plus inter-tree advantage.

        A(c) = (mean R below c - μ_tree) / (σ_tree + 1e-4) + (mean R below c - μ_root) / (σ_root + 1e-4)

    A "tree" is a child of the root and all that lies below it.
    """
    stats = reward_statistics(tree)
    root = stats[tree.root]
    advantages: dict[Turn, float] = {}
    for first in tree.root.children:
        for turn in first.turns():
            advantages[turn] = scale(stats[turn], stats[first]) + scale(stats[turn], root)
    return advantages


Estimator = Callable[[RolloutTree, Scale], dict[Turn, float]]

ESTIMATORS: dict[str, Estimator] = {
    "sibling": sibling,
    "sibling_fallback": sibling_fallback,
    "leaf": leaf,
    "treerl": treerl,
    "treepo": treepo,
    "tree_grpo": tree_grpo,
}
# "treerl" counts the root twice
GRPO_WITHOUT_BRANCHES = ("sibling", "sibling_fallback", "leaf", "treepo", "tree_grpo")


def compute_advantages(
    trees: Iterable[RolloutTree],
    estimator: str = "sibling",
    scale: str = "group",
    batch_std: float | None = None,
) -> None:
    """Writes `turn.advantage` of every turn of every tree.

    Without branching every estimator is GRPO as in TRL, `"treerl"` twice that. Unscored leaves (reward `nan`) are
    left out of every mean and standard deviation; a turn without a scored leaf at or below it has advantage 0. Linear
    in the number of turns, but for `"treepo"`.

    Args:
        trees (`Iterable[RolloutTree]`):
            Scored trees; `tree.remote` filled where a prompt spans processes.
        estimator (`str`, *optional*, defaults to `"sibling"`):
            One of `ESTIMATORS`.
        scale (`str`, *optional*, defaults to `"group"`):
            One of `SCALES`, see [`Scale`].
        batch_std (`float`, *optional*):
            Sample standard deviation over the rewards of all scored leaves of the generation, on all processes.

    Raises:
        ValueError: for an unknown estimator or scale, or a missing `batch_std`.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"Unknown estimator {estimator!r}: use one of {', '.join(map(repr, ESTIMATORS))}.")
    scaling = Scale(scale, batch_std)
    for tree in trees:
        advantages = ESTIMATORS[estimator](tree, scaling)
        for turn in tree.turns():
            turn.advantage = advantages.get(turn, 0.0)


def normalize_then_sum(
    rewards_per_leaf: Sequence[Sequence[float]], groups: Sequence[int], weights: Sequence[float]
) -> list[float]:
    """One reward per leaf from several reward functions, each normalised on its own first.

    The formula of TRL's `multi_objective_aggregation="normalize_then_sum"` (GDPO, arXiv 2601.05242), for prompts with
    any number of leaves. For leaf `i` of prompt `g`, reward function `k` with weight `w_k`:

        s_i = sum_k w_k (r_ik - μ_gk) / (σ_gk + 1e-4),   A_i = (s_i - μ_s) / (σ_s + 1e-4)

    with `nan` entries left out of every sum, mean and (sample) standard deviation. The result is already normalised:
    it stands for the reward in [`compute_advantages`] with `scale="none"`.

    Args:
        rewards_per_leaf (`Sequence[Sequence[float]]` of shape `(leaves, reward functions)`):
            All leaves of the generation, on all processes; `nan` where a function returned `None`.
        groups (`Sequence[int]` of length `leaves`):
            Prompt of each leaf.
        weights (`Sequence[float]` of length `reward functions`):
            Weight of each function.

    Returns:
        `list[float]` of length `leaves`: `nan` for a leaf that no function scored.

    Raises:
        ValueError: if the lengths do not fit.
    """
    if len(groups) != len(rewards_per_leaf):
        raise ValueError(f"{len(groups)} group numbers for {len(rewards_per_leaf)} leaves.")
    for rewards in rewards_per_leaf:
        if len(rewards) != len(weights):
            raise ValueError(f"{len(rewards)} rewards for {len(weights)} weights.")

    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    sums = [
        math.nan if all(math.isnan(reward) for reward in rewards) else 0.0 for rewards in rewards_per_leaf
    ]  # a leaf that no function scored stays `nan`
    for rows in members.values():
        for k, weight in enumerate(weights):
            stats = RewardStats.of(rewards_per_leaf[row][k] for row in rows)
            for row in rows:
                term = weight * (rewards_per_leaf[row][k] - stats.mean) / (stats.std + EPSILON)
                if not math.isnan(term):
                    sums[row] += term
    batch = RewardStats.of(sums)
    return [(value - batch.mean) / (batch.std + EPSILON) for value in sums]


def path_weights(tree: RolloutTree) -> list[float]:
    """Chance of each leaf's path being drawn without branching, for the leaves in the order of `tree.leaves()`.

    `1 / m` with `m` the children of the root on all processes, times `1 / children` at each branching below. Over all
    leaves of a prompt, those on other processes included, it sums to 1.
    """
    chances: dict[Turn, float] = {tree.root: 1.0}
    for turn, parent in _turns_with_parent(tree):
        # Unscored ones count: they were drawn
        children = num_root_children(tree) if parent is tree.root else len(parent.children)
        chances[turn] = chances[parent] / children
    return [chances[turn] for turn in tree.leaves()]


def row_weights(tree: RolloutTree, weighting: str = "once", mask_truncated: bool = False) -> list[list[float]]:
    """What each turn weighs in each training row: one row per leaf, one entry per turn on the leaf's path.

    A weight of 0 means that the row's loss mask is 0 on the turn's tokens.

    - `"once"`: a shared turn has weight 1 in one row, that of the first-started rollout it belongs to, and 0 in the
      others, so that a turn on `k` leaves does not weigh `k` times.
    - `"per_leaf"`: 1 everywhere.
    - `"on_policy"`: all turns of a row weigh the chance of the row's path being drawn without branching
      ([`path_weights`]) times the number of the prompt's leaves on all processes. Where nothing branches, that is 1.

    The row of an unscored leaf carries no signal: a turn that it shares with scored leaves is trained in their rows
    only. The turns of its own keep their weight: their advantage is 0, and they count as they do in TRL.

    Args:
        tree (`RolloutTree`):
            A tree whose leaves are scored.
        weighting (`str`, *optional*, defaults to `"once"`):
            One of `TURN_WEIGHTINGS`.
        mask_truncated (`bool`, *optional*, defaults to `False`):
            Whether rows of truncated leaves are 0 throughout, as with TRL's `mask_truncated_completions`. Turns that
            they share with other leaves are then trained in the rows of those.

    Returns:
        `list[list[float]]`: aligned with `tree.leaves()` and each leaf's `turn.path()`.

    Raises:
        ValueError: if `weighting` is not one of `TURN_WEIGHTINGS`.
    """
    if weighting not in TURN_WEIGHTINGS:
        raise ValueError(f"Unknown turn weighting {weighting!r}: use one of {', '.join(map(repr, TURN_WEIGHTINGS))}.")
    leaves = tree.leaves()
    stats = reward_statistics(tree)
    if weighting == "on_policy":
        num_leaves = len(leaves) + sum(len(child.rewards) for child in tree.remote)
        path_weight = [chance * num_leaves for chance in path_weights(tree)]
    else:
        path_weight = [1.0] * len(leaves)

    rows = []
    taken: set[Turn] = set()
    for turn, weight in zip(leaves, path_weight, strict=True):
        end: Leaf = turn.leaf  # type: ignore[assignment]
        row = []
        for node in turn.path():
            trained = not (mask_truncated and end.truncated) and (end.scored or not stats[node].count)
            if trained and weighting == "once":
                trained = node not in taken
                taken.add(node)
            row.append(weight if trained else 0.0)
        rows.append(row)
    return rows
