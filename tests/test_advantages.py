"""Advantages and turn weights, against the formulas written out plainly."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trl.trainer.utils import nanstd

from leaves import elsewhere, moved
from trace_trl.advantages import (
    ESTIMATORS,
    SCALES,
    TURN_WEIGHTINGS,
    RewardStats,
    compute_advantages,
    normalize_then_sum,
    path_weights,
    reward_statistics,
    row_weights,
)
from trace_trl.tree import Leaf, RolloutTree


EPS = 1e-4

# A tree is a nested list: a list is a turn and its children, a number a turn that ended its episode with that reward.
REWARDS = st.sampled_from([0.0, 1.0, 0.3, -2.0, math.nan]) | st.floats(-10, 10)
SPECS = st.lists(
    st.recursive(REWARDS, lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=12), min_size=1, max_size=4
)
FLAT = st.lists(REWARDS, min_size=1, max_size=8)


def grow(spec, seed=None):
    """Tree of a nested list; rollouts are numbered depth-first, or in a random order."""
    tree = RolloutTree.from_prompt("prompt", [1, 2, 3])
    leaves = []

    def add(parent, children):
        for child in children:
            if isinstance(child, list):
                add(tree.add_turn(parent, [4], [5]), child)
            else:
                leaves.append(Leaf(reward=child))
                tree.add_turn(parent, [4], leaf=leaves[-1])

    add(tree.root, spec)
    numbers = list(range(len(leaves)))
    if seed is not None:
        random.Random(seed).shuffle(numbers)
    for leaf, number in zip(leaves, numbers, strict=True):
        leaf.rollout = number
    return tree


def method_tree(c3=1.0):
    """Bare rollouts a1 a2 a3 (R=0) and b1 b2 (R=1), and one continuation c3 (R=1 by default) after a2."""
    tree = grow([[[0.0, c3]], [1.0]])
    names = ("a1", "a2", "a3", "c3", "b1", "b2")
    turns = dict(zip(names, tree.turns(), strict=True))
    for number, name in enumerate(("a3", "b2", "c3")):
        turns[name].leaf.rollout = number
    return tree, turns


def advantages_of(tree, **kwargs):
    compute_advantages([tree], **kwargs)
    return [turn.advantage for turn in tree.turns()]


# The formulas again, from parents, leaves and numpy only, with a rescan of the whole tree for every mean.


def upward(turn):
    """`turn` and the nodes above it, the root last."""
    nodes = []
    while turn is not None:
        nodes.append(turn)
        turn = turn.parent
    return nodes


def rewards_below(tree, node):
    rewards = [leaf.leaf.reward for leaf in tree.leaves() if any(above is node for above in upward(leaf))]
    if node is tree.root:
        rewards += [reward for child in tree.remote for reward in child.rewards]
    return [reward for reward in rewards if not math.isnan(reward)]


def difference(tree, child, node, scale, batch_std):
    mine, all_rewards = rewards_below(tree, child), rewards_below(tree, node)
    if not mine:
        return 0.0
    value = np.mean(mine) - np.mean(all_rewards)
    if scale == "group":
        value /= (np.std(all_rewards, ddof=1) if len(all_rewards) > 1 else 0.0) + EPS
    if scale == "batch":
        value /= batch_std + EPS
    return float(value)


def has_siblings(tree, turn):
    """Whether `turn` is one of at least two children with a scored leaf."""
    groups = [rewards_below(tree, child) for child in turn.parent.children]
    if turn.parent is tree.root:
        groups += [[reward for reward in child.rewards if not math.isnan(reward)] for child in tree.remote]
    return bool(rewards_below(tree, turn)) and sum(map(bool, groups)) > 1


def differ(tree, node):
    """Whether the leaves below `node` have different rewards."""
    return len(set(rewards_below(tree, node))) > 1


def segment_head(tree, turn, contrast=False):
    """Nearest ancestor-or-self turn with siblings (with `contrast`: that differ), `None` if there is none."""
    nodes = (node for node in upward(turn)[:-1] if has_siblings(tree, node))
    return next((node for node in nodes if not contrast or differ(tree, node.parent)), None)


def brute_force(tree, turn, estimator, scale, batch_std):
    def diff(child, node):
        return difference(tree, child, node, scale, batch_std)

    if estimator == "leaf":
        return diff(turn, tree.root)
    if estimator == "tree_grpo":
        first = upward(turn)[-2]
        return diff(turn, first) + diff(turn, tree.root)
    head = segment_head(tree, turn, contrast=estimator == "sibling_fallback")
    if head is None or not rewards_below(tree, turn):
        return 0.0
    if estimator in ("sibling", "sibling_fallback"):
        return diff(head, head.parent)
    if estimator == "treerl":
        return diff(head, tree.root) + diff(head, head.parent)
    branching = [node.parent for node in upward(head)[:-1] if has_siblings(tree, node)]
    return sum(diff(head, node) for node in branching) / len(branching)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(spec=SPECS, remote=st.lists(st.lists(REWARDS, min_size=1, max_size=3), max_size=2))
@example(spec=[1.0, [0.0, 9.479022813008765e-169]], remote=[])  # rewards that differ, and whose variance is 0
@settings(deadline=None, database=None, max_examples=40)
def test_estimators_against_brute_force(estimator, scale, spec, remote):
    tree = grow(spec)
    tree.remote = [elsewhere(rewards) for rewards in remote]
    compute_advantages([tree], estimator=estimator, scale=scale, batch_std=0.7)
    for turn in tree.turns():
        expected = brute_force(tree, turn, estimator, scale, 0.7)
        assert turn.advantage == pytest.approx(expected, abs=1e-9, rel=1e-9)


@given(SPECS)
@settings(deadline=None, database=None)
def test_reward_statistics_against_brute_force(spec):
    tree = grow(spec)
    stats = reward_statistics(tree)
    assert set(stats) == set(tree.root.turns())
    for node, below in stats.items():
        rewards = rewards_below(tree, node)
        assert below.count == len(rewards)
        if rewards:
            assert below.mean == pytest.approx(np.mean(rewards), abs=1e-12)
        assert below.std == pytest.approx(np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0, abs=1e-12)


def test_right_values_scale_none():
    tree, turns = method_tree()
    compute_advantages([tree], scale="none")
    expected = {"a1": -1 / 6, "a2": -1 / 6, "b1": 1 / 3, "b2": 1 / 3, "a3": -0.5, "c3": 0.5}
    for name, value in expected.items():
        assert turns[name].advantage == pytest.approx(value, abs=1e-12)


def test_right_values_scale_group():
    tree, turns = method_tree()
    stats = reward_statistics(tree)
    assert stats[tree.root].std == pytest.approx(0.577350, abs=1e-6)
    assert stats[turns["a2"]].std == pytest.approx(0.707107, abs=1e-6)
    compute_advantages([tree])
    expected = {
        "a1": -0.288625, "a2": -0.288625, "b1": 0.577250, "b2": 0.577250, "a3": -0.707007, "c3": 0.707007,
    }  # fmt: skip
    for name, value in expected.items():
        assert turns[name].advantage == pytest.approx(value, abs=1e-6)


def test_right_values_of_the_other_estimators():
    tree, turns = method_tree()
    expected = {
        "leaf": {"a1": -1 / 6, "a2": -1 / 6, "a3": -2 / 3, "c3": 1 / 3, "b1": 1 / 3},
        "treerl": {"a1": -1 / 3, "a2": -1 / 3, "a3": -2 / 3 - 0.5, "c3": 1 / 3 + 0.5, "b1": 2 / 3},
        "treepo": {"a1": -1 / 6, "a2": -1 / 6, "a3": (-2 / 3 - 0.5) / 2, "c3": (1 / 3 + 0.5) / 2, "b1": 1 / 3},
        "tree_grpo": {"a1": -1 / 6, "a2": -1 / 6, "a3": -0.5 - 2 / 3, "c3": 0.5 + 1 / 3, "b1": 1 / 3},
    }
    for estimator, values in expected.items():
        compute_advantages([tree], estimator=estimator, scale="none")
        for name, value in values.items():
            assert turns[name].advantage == pytest.approx(value, abs=1e-12), (estimator, name)


def test_right_values_where_siblings_agree():
    # a3 and c3 both fail, so that nothing tells them apart; a1, a2 and both of them are worse than b1
    tree, turns = method_tree(c3=0.0)
    for estimator, below in (("sibling", 0.0), ("sibling_fallback", -1 / 3)):
        compute_advantages([tree], estimator=estimator, scale="none")
        expected = {"a1": -1 / 3, "a2": -1 / 3, "a3": below, "c3": below, "b1": 2 / 3, "b2": 2 / 3}
        for name, value in expected.items():
            assert turns[name].advantage == pytest.approx(value, abs=1e-12), (estimator, name)


def trl_advantages(groups, scale):
    """The lines of `GRPOTrainer._generate_and_score_completions` for groups of one size."""
    rewards = torch.tensor(groups, dtype=torch.float64)
    mean = torch.nanmean(rewards, dim=1, keepdim=True)
    std = nanstd(rewards, dim=1, keepdim=True) if scale == "group" else nanstd(rewards)
    advantages = rewards - mean
    if scale != "none":
        advantages = advantages / (std + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0).tolist()


@pytest.mark.parametrize("scale", SCALES)
@given(groups=st.integers(2, 6).flatmap(lambda n: st.lists(st.lists(REWARDS, min_size=n, max_size=n), max_size=4)))
@settings(deadline=None, database=None)
def test_without_branching_every_estimator_is_trl(scale, groups):
    if not groups:
        return
    expected = trl_advantages(groups, scale)
    batch_std = RewardStats.of(reward for group in groups for reward in group).std
    for estimator in ESTIMATORS:
        trees = [grow(group) for group in groups]
        compute_advantages(trees, estimator=estimator, scale=scale, batch_std=batch_std)
        factor = 2 if estimator == "treerl" else 1  # its local and its global term are the same here
        for tree, values in zip(trees, expected, strict=True):
            actual = [leaf.advantage for leaf in tree.leaves()]
            assert actual == pytest.approx([factor * value for value in values], abs=1e-6)


def chain(length, reward):
    """A rollout of `length` turns."""
    return reward if length == 1 else [chain(length - 1, reward)]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (1, 2, 3, 4), (4, 3, 2, 1)])
def test_case_16_advantages_sum_to_zero(lengths, estimator, scale):
    rewards = [3.0, 0.0, 0.0, 1.0]
    tree = grow([chain(length, reward) for length, reward in zip(lengths, rewards, strict=True)])
    compute_advantages([tree], estimator=estimator, scale=scale, batch_std=0.9)
    leaves = tree.leaves()
    assert sum(leaf.advantage for leaf in leaves) == pytest.approx(0.0, abs=1e-9)
    # The number of turns of a rollout moves nobody's advantage, and all turns of a rollout share theirs.
    flat = advantages_of(grow(rewards), estimator=estimator, scale=scale, batch_std=0.9)
    for leaf, expected in zip(leaves, flat, strict=True):
        assert [turn.advantage for turn in leaf.path()] == pytest.approx([expected] * leaf.depth, abs=1e-12)


def test_case_16_values():
    mean, std = 1.0, math.sqrt(2.0)
    actual = advantages_of(grow([3.0, 0.0, 0.0, 1.0]))
    assert actual == pytest.approx([(reward - mean) / (std + EPS) for reward in (3, 0, 0, 1)], abs=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("scale", SCALES)
def test_case_17_unscored_leaves_carry_no_signal(estimator, scale):
    def run(spec):
        return advantages_of(grow(spec), estimator=estimator, scale=scale, batch_std=0.5)

    with_unscored = run([1.0, math.nan, 0.0, [math.nan, [math.nan]]])
    scored = run([1.0, 0.0])
    assert [with_unscored[0], with_unscored[2]] == pytest.approx(scored)
    assert [with_unscored[1], *with_unscored[3:]] == [0.0] * 5
    assert run([math.nan, [math.nan, math.nan]]) == [0.0] * 4
    assert run([math.nan, 1.0]) == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ("sibling", "treerl", "treepo"))
@pytest.mark.parametrize("scale", SCALES)
def test_case_17_an_unscored_continuation_does_not_silence_the_factual_tail(estimator, scale):
    def run(spec):
        return advantages_of(grow(spec), estimator=estimator, scale=scale, batch_std=0.5)

    head, tail, unscored, other = run([[0.0, math.nan], 1.0])
    assert [head, tail, other] == pytest.approx(run([[0.0], 1.0])) and tail == head != 0.0
    assert unscored == 0.0
    # Two scored children are siblings, whatever else is there
    whole = run([[0.0, math.nan, 1.0], 1.0])
    assert [*whole[:2], *whole[3:]] == pytest.approx(run([[0.0, 1.0], 1.0])) and whole[2] == 0.0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_case_17_batch_of_unscored_leaves(estimator):
    # TRL's `nanstd` of fewer than two rewards is nan, and so may be the `batch_std` a caller takes from it.
    assert advantages_of(grow([math.nan, 2.0]), estimator=estimator, scale="batch", batch_std=math.nan) == [0.0, 0.0]


@pytest.mark.parametrize("weighting", TURN_WEIGHTINGS)
def test_case_17_shared_turns_are_trained_in_scored_rows_only(weighting):
    tree = grow([[math.nan, 1.0, 0.0], 0.0])  # the first-started rollout is unscored
    compute_advantages([tree])
    shared, unscored, *_ = tree.turns()
    rows = dict(zip(tree.leaves(), row_weights(tree, weighting), strict=True))
    assert shared.advantage != 0.0
    assert rows[unscored][0] == 0.0
    assert rows[unscored][1] > 0.0 and unscored.advantage == 0.0
    if weighting == "once":
        assert [row[0] for row in rows.values()] == [0.0, 1.0, 0.0, 1.0]


def test_case_19_a_zero_length_turn_moves_nobody():
    tree, reference = grow([3.0, 0.0, 0.0, 1.0]), grow([3.0, 0.0, 0.0, 1.0])
    empty = tree.leaves()[1]
    empty.token_ids.clear()
    assert advantages_of(tree) == advantages_of(reference)
    assert row_weights(tree) == row_weights(reference)
    assert [len(leaf.token_ids) for leaf in tree.leaves()] == [1, 0, 1, 1]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(reward=st.floats(-1e9, 1e9), spec=SPECS)
@settings(deadline=None, database=None, max_examples=30)
def test_equal_rewards_give_exactly_zero(estimator, reward, spec):
    tree = grow(spec)
    for leaf in tree.leaves():
        leaf.leaf.reward = reward
    assert {below.std for below in reward_statistics(tree).values()} == {0.0}
    assert set(advantages_of(tree, estimator=estimator)) == {0.0}


def test_large_rewards_do_not_cancel():
    assert RewardStats.of([1e9, 1e9 + 1, 1e9 + 2]).std == pytest.approx(1.0, abs=1e-9)


def test_infinite_rewards_do_not_reach_the_loss():
    for estimator in ESTIMATORS:
        for scale in SCALES:
            values = advantages_of(
                grow([math.inf, 0.0, [1.0, -math.inf]]), estimator=estimator, scale=scale, batch_std=1
            )
            assert all(map(math.isfinite, values))


def test_advantages_are_overwritten():
    tree = grow([1.0, math.nan])
    for turn in tree.turns():
        turn.advantage = 7.0
    assert advantages_of(tree) == [0.0, 0.0]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(spec=SPECS, data=st.data())
@settings(deadline=None, database=None, max_examples=30)
def test_a_prompt_on_two_processes_equals_one_tree(estimator, scale, spec, data):
    whole = grow(spec)
    cut = data.draw(st.integers(0, len(spec)))
    parts = [grow(spec[:cut]), grow(spec[cut:])]
    for part, other in zip(parts, reversed(parts), strict=True):
        part.remote = [moved(child) for child in other.root.children]
    options = {"estimator": estimator, "scale": scale, "batch_std": 0.3}
    expected = advantages_of(whole, **options)
    actual = [value for part in parts for value in advantages_of(part, **options)]
    assert actual == pytest.approx(expected, abs=1e-9, rel=1e-9)
    for weighting in TURN_WEIGHTINGS:
        rows = [row for part in parts for row in row_weights(part, weighting)]
        for row, reference in zip(rows, row_weights(whole, weighting), strict=True):
            assert row == pytest.approx(reference)
    assert [weight for part in parts for weight in path_weights(part)] == pytest.approx(path_weights(whole))


def test_unknown_names_are_refused_with_the_options():
    tree = grow([1.0, 0.0])
    with pytest.raises(ValueError, match="'sibling', 'sibling_fallback', 'leaf', 'treerl', 'treepo', 'tree_grpo'"):
        compute_advantages([tree], estimator="gae")
    with pytest.raises(ValueError, match="'group', 'batch', 'none'"):
        compute_advantages([tree], scale="prompt")
    with pytest.raises(ValueError, match="batch_std"):
        compute_advantages([tree], scale="batch")
    with pytest.raises(ValueError, match="'once', 'per_leaf', 'on_policy'"):
        row_weights(tree, "twice")


# Turn weights


def total_weight(tree, rows):
    """Summed weight of every turn over all rows."""
    totals = dict.fromkeys(tree.turns(), 0.0)
    for leaf, row in zip(tree.leaves(), rows, strict=True):
        for turn, weight in zip(leaf.path(), row, strict=True):
            totals[turn] += weight
    return totals


def test_weights_of_the_method_example():
    tree, _ = method_tree()  # rows: a1 a2 a3, b1 b2, a1 a2 c3
    assert row_weights(tree) == [[1.0, 1.0, 1.0], [1.0, 1.0], [0.0, 0.0, 1.0]]
    assert row_weights(tree, "per_leaf") == [[1.0] * 3, [1.0] * 2, [1.0] * 3]
    assert path_weights(tree) == [0.25, 0.5, 0.25]
    assert row_weights(tree, "on_policy") == [[0.75] * 3, [1.5] * 2, [0.75] * 3]


@given(spec=SPECS, seed=st.integers(0, 10**6))
@settings(deadline=None, database=None)
def test_once_trains_every_turn_in_exactly_one_row(spec, seed):
    tree = grow(spec, seed)
    rows = row_weights(tree)
    assert set(total_weight(tree, rows).values()) == {1.0}
    for leaf, row in zip(tree.leaves(), rows, strict=True):
        for turn, weight in zip(leaf.path(), row, strict=True):
            below = [other.leaf for other in turn.leaves()]
            scored = [other for other in below if other.scored]
            first = min(scored or below, key=lambda other: other.rollout)
            assert weight == float(first is leaf.leaf)


@given(spec=SPECS, seed=st.integers(0, 10**6))
@settings(deadline=None, database=None)
def test_on_policy_weights_are_the_chances_of_the_paths(spec, seed):
    tree = grow(spec, seed)
    for leaf in tree.leaves():
        leaf.leaf.reward = 1.0
    leaves, chances = tree.leaves(), path_weights(tree)
    for leaf, chance in zip(leaves, chances, strict=True):
        assert chance == pytest.approx(math.prod(1 / len(turn.parent.children) for turn in leaf.path()))
    assert sum(chances) == pytest.approx(1.0)
    rows = row_weights(tree, "on_policy")
    assert sum(row[0] for row in rows) == pytest.approx(len(leaves))
    for turn, total in total_weight(tree, rows).items():
        reached = math.prod(1 / len(node.parent.children) for node in turn.path())
        assert total == pytest.approx(len(leaves) * reached)


@pytest.mark.parametrize("weighting", TURN_WEIGHTINGS)
@given(rewards=FLAT, lengths=st.lists(st.integers(1, 4), min_size=8, max_size=8))
@settings(deadline=None, database=None)
def test_without_branching_all_weights_are_one(weighting, rewards, lengths):
    tree = grow([chain(length, reward) for length, reward in zip(lengths, rewards, strict=False)])
    assert row_weights(tree, weighting) == [[pytest.approx(1.0)] * leaf.depth for leaf in tree.leaves()]


@pytest.mark.parametrize("weighting", TURN_WEIGHTINGS)
def test_case_15_rows_of_truncated_leaves_are_zero(weighting):
    tree = grow([[0.0, 1.0], 1.0])
    first = tree.leaves()[0]
    first.leaf.reason = "length"
    rows = row_weights(tree, weighting, mask_truncated=True)
    assert rows[0] == [0.0, 0.0]
    # The turn it shares is trained with the leaf that was not truncated.
    assert rows[1][0] > 0.0
    assert row_weights(tree, weighting)[0][1] > 0.0


# normalize_then_sum


def trl_normalize_then_sum(rewards, weights):
    """The lines of `GRPOTrainer._generate_and_score_completions`, `rewards` of shape (groups, leaves, functions)."""
    grouped = torch.tensor(rewards, dtype=torch.float64)
    num_generations = grouped.shape[1]
    rewards_per_func = grouped.view(-1, grouped.shape[-1])
    unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)
    mean_k = torch.nanmean(grouped, dim=1, keepdim=True)
    std_k = nanstd(grouped, dim=1, keepdim=True) if num_generations > 1 else torch.zeros_like(mean_k)
    reward_k = (grouped - mean_k) / (std_k + 1e-4)
    reward_k = reward_k.view(-1, grouped.shape[-1])
    rewards = (reward_k * torch.tensor(weights, dtype=torch.float64).unsqueeze(0)).nansum(dim=1)
    rewards[unscorable_mask] = torch.nan
    std_rewards = nanstd(rewards).expand_as(rewards) if rewards.numel() > 1 else torch.zeros_like(rewards)
    return (rewards - torch.nanmean(rewards)) / (std_rewards + 1e-4)


SCORES = st.sampled_from([0.0, 1.0, 0.25, math.nan])
WEIGHTS = [1.0, 0.5, -2.0]


@st.composite
def reward_tables(draw, sizes):
    """Leaves of several prompts: one list of rows (a reward per function) per prompt."""
    functions = draw(st.integers(1, 3))
    row = st.lists(SCORES, min_size=functions, max_size=functions)
    return [draw(st.lists(row, min_size=size, max_size=size)) for size in draw(sizes)]


def flatten(table):
    rows = [row for group in table for row in group]
    return rows, [index for index, group in enumerate(table) for _ in group], WEIGHTS[: len(rows[0])]


def assert_equal_but_undefined(actual, expected):
    """TRL gives nan to the only scored row of a batch too (and then 0); unscorable rows are nan in both."""
    for value, reference in zip(actual, expected, strict=True):
        if math.isnan(reference):
            assert math.isnan(value) or value == 0.0
        else:
            assert value == pytest.approx(reference, abs=1e-6)


@given(table=st.integers(1, 5).flatmap(lambda size: reward_tables(st.lists(st.just(size), min_size=1, max_size=4))))
@settings(deadline=None, database=None)
def test_normalize_then_sum_is_trl(table):
    rows, groups, weights = flatten(table)
    actual = normalize_then_sum(rows, groups, weights)
    assert_equal_but_undefined(actual, trl_normalize_then_sum(table, weights).tolist())
    for row, value in zip(rows, actual, strict=True):
        assert math.isnan(value) == all(map(math.isnan, row))


@given(table=reward_tables(st.lists(st.integers(1, 5), min_size=1, max_size=4)), seed=st.integers(0, 10**6))
@settings(deadline=None, database=None)
def test_normalize_then_sum_of_groups_of_any_size(table, seed):
    # A row that nothing scored counts for nothing, so groups padded with such rows have TRL's one size.
    rows, groups, weights = flatten(table)
    size = max(map(len, table))
    padded = [group + [[math.nan] * len(weights)] * (size - len(group)) for group in table]
    reference = trl_normalize_then_sum(padded, weights).view(len(table), size).tolist()
    expected = [value for group, values in zip(table, reference, strict=True) for value in values[: len(group)]]
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)  # leaves of one prompt need not be neighbours
    actual = normalize_then_sum([rows[i] for i in order], [groups[i] for i in order], weights)
    assert_equal_but_undefined(actual, [expected[i] for i in order])


def test_normalize_then_sum_without_branching_is_the_advantage():
    table = [[[0.0, 1.0], [1.0, math.nan], [1.0, 0.0]], [[0.0, 0.0], [1.0, 1.0], [math.nan, math.nan]]]
    rows, groups, weights = flatten(table)
    rewards = normalize_then_sum(rows, groups, weights)
    trees = [grow(rewards[:3]), grow(rewards[3:])]
    compute_advantages(trees, scale="none")
    actual = [leaf.advantage for tree in trees for leaf in tree.leaves()]
    assert actual == pytest.approx(
        torch.nan_to_num(trl_normalize_then_sum(table, weights), nan=0.0).tolist(), abs=1e-6
    )


def test_normalize_then_sum_refuses_other_lengths():
    with pytest.raises(ValueError, match="1 group numbers for 2 leaves"):
        normalize_then_sum([[1.0], [0.0]], [0], [1.0])
    with pytest.raises(ValueError, match="1 rewards for 2 weights"):
        normalize_then_sum([[1.0]], [0], [1.0, 1.0])
    assert normalize_then_sum([], [], [1.0]) == []
