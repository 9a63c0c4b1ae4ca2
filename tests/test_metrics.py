"""Effective and mixed-anchor ratios, and the scores of the predictor."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leaves import elsewhere, scored
from trace_trl.metrics import (
    auroc,
    brier_score,
    effective,
    effective_ratio,
    expected_calibration_error,
    mixed_anchor_counts,
    mixed_anchor_ratio,
)
from trace_trl.tree import RolloutTree


# A tree is a nested list: a list is a turn and its children, a number a turn that ended its episode with that reward.
REWARDS = st.sampled_from([0.0, 1.0, 0.4, 0.6, math.nan])
SPECS = st.lists(
    st.recursive(REWARDS, lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=12), max_size=4
)


def grow(spec, remote=(), threshold=0.5):
    tree = RolloutTree.from_prompt("prompt", [1])
    tree.remote = [elsewhere(rewards, threshold=threshold) for rewards in remote]

    def add(parent, children):
        for child in children:
            if isinstance(child, list):
                add(tree.add_turn(parent, [1]), child)
            else:
                tree.add_turn(parent, [1], leaf=scored(child, threshold))

    add(tree.root, spec)
    return tree


def test_effective_needs_both_outcomes():
    assert effective(grow([[0.0, 1.0], 1.0]))
    assert not effective(grow([[0.0, 0.4], 0.0]))
    assert effective(grow([[0.0, 0.4], 0.0], threshold=0.3))
    assert not effective(grow([1.0, 1.0]))
    assert not effective(grow([1.0]))
    assert not effective(grow([]))


def test_case_17_unscored_leaves_are_neither_success_nor_failure():
    assert not effective(grow([1.0, math.nan]))
    assert not effective(grow([0.0, math.nan]))
    assert not effective(grow([math.nan, math.nan], remote=[[math.nan]]))
    assert mixed_anchor_counts(grow([[math.nan, 1.0], [0.0, 1.0]])) == (2, 3)


def test_effective_sees_other_processes():
    assert effective(grow([1.0], remote=[[0.0, math.nan]]))
    assert not effective(grow([1.0], remote=[[1.0, 0.6]]))
    assert effective(grow([1.0], remote=[[1.0, 0.6]], threshold=0.7))


@pytest.mark.parametrize("threshold", [0.7, 0.8, 0.9, 0.95])
def test_a_reward_at_the_threshold_is_a_success_in_single_precision_too(threshold):
    """As float32, in which rewards are added up, 0.7, 0.9 and 0.95 are a little less and 0.8 is a little more."""
    single = np.float32(threshold)
    below = float(np.nextafter(single, np.float32(0)))
    for reward in (threshold, float(single)):
        assert effective(grow([reward, below], threshold=threshold))
        assert effective(grow([below], remote=[[reward]], threshold=threshold))
        assert not effective(grow([reward], remote=[[threshold]], threshold=threshold))


def test_what_the_leaf_says_is_a_success_whatever_its_reward():
    tree = grow([0.9, 1.0])
    tree.leaves()[0].leaf.success = False
    assert effective(tree)


def test_mixed_anchors_of_the_method_example():
    # The root is mixed, and so is the prefix a2; a1 and b1 have one child.
    assert mixed_anchor_counts(grow([[[0.0, 1.0]], [1.0]])) == (2, 2)
    assert mixed_anchor_counts(grow([[[1.0, 1.0]], [0.0]])) == (1, 2)
    assert mixed_anchor_counts(grow([[[1.0]]])) == (0, 0)


def test_mixed_anchors_count_remote_children_of_the_root():
    assert mixed_anchor_counts(grow([[1.0, 1.0]], remote=[[0.0]])) == (1, 2)
    assert mixed_anchor_counts(grow([[1.0, 1.0]])) == (0, 1)


def test_ratios():
    trees = [grow([0.0, 1.0]), grow([1.0, 1.0]), grow([[0.0, 1.0], 1.0]), grow([])]
    assert effective_ratio(trees) == pytest.approx(2 / 3)  # a prompt without rollouts is not active
    assert mixed_anchor_ratio(trees) == pytest.approx(3 / 4)
    assert math.isnan(effective_ratio([])) and math.isnan(effective_ratio([grow([])]))
    assert math.isnan(mixed_anchor_ratio([grow([1.0])]))


@given(spec=SPECS, remote=st.lists(st.lists(REWARDS, min_size=1, max_size=3), max_size=2))
@settings(deadline=None, database=None)
def test_ratios_against_brute_force(spec, remote):
    tree = grow(spec, remote)

    def outcomes(node):
        rewards = [leaf.leaf.reward for leaf in tree.leaves() if node is tree.root or node in leaf.path()]
        if node is tree.root:
            rewards += [reward for child in remote for reward in child]
        return {reward >= 0.5 for reward in rewards if not math.isnan(reward)}

    assert effective(tree) == (len(outcomes(tree.root)) == 2)
    branched = [turn for turn in tree.turns() if len(turn.children) > 1]
    if len(tree.root.children) + len(remote) > 1:
        branched.append(tree.root)
    mixed = sum(len(outcomes(node)) == 2 for node in branched)
    assert mixed_anchor_counts(tree) == (mixed, len(branched))


# Scores of the predictor


def test_brier_by_hand():
    assert brier_score([0.1, 0.9, 0.8], [0, 1, 0]) == pytest.approx((0.01 + 0.01 + 0.64) / 3)
    assert brier_score([0.5, 0.5], [True, False]) == 0.25
    assert brier_score([0.0, 1.0], [0, 1]) == 0.0


def test_expected_calibration_error_by_hand():
    # Bins: [0, 0.1) holds 0.05 (outcome 1), [0.6, 0.7) holds 0.61 and 0.69 (1, 0), [0.9, 1] holds 1.0 (1).
    expected = 1 / 4 * 0.95 + 2 / 4 * abs(0.65 - 0.5) + 1 / 4 * 0.0
    assert expected_calibration_error([0.05, 0.61, 0.69, 1.0], [1, 1, 0, 1]) == pytest.approx(expected)
    assert expected_calibration_error([0.5] * 4, [0, 1, 0, 1]) == 0.0
    # An edge belongs to the upper bin: 0.3 and 0.39 share one, 0.29 does not.
    assert expected_calibration_error([0.3, 0.39], [1, 0]) == pytest.approx(abs(0.69 - 1) / 2)
    assert expected_calibration_error([0.3, 0.29], [1, 0]) == pytest.approx((0.7 + 0.29) / 2)
    assert expected_calibration_error([0.1, 0.9], [1, 0], bins=1) == pytest.approx(0.0)


def test_auroc_by_hand():
    assert auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == 0.75
    assert auroc([0.2, 0.8], [0, 1]) == 1.0
    assert auroc([0.8, 0.2], [0, 1]) == 0.0
    assert auroc([0.5, 0.5, 0.5], [0, 1, 1]) == 0.5


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.7, 1.0]) | st.floats(0, 1), st.booleans())))
@settings(deadline=None, database=None)
def test_scores_against_brute_force(pairs):
    values, outcomes = [value for value, _ in pairs], [outcome for _, outcome in pairs]
    if not pairs:
        for score in (brier_score, expected_calibration_error, auroc):
            assert math.isnan(score(values, outcomes))
        return
    n = len(pairs)
    assert brier_score(values, outcomes) == pytest.approx(sum((v - o) ** 2 for v, o in pairs) / n)
    error = 0.0
    for b in range(10):
        lower, upper = b / 10, (b + 1) / 10
        held = [(v, o) for v, o in pairs if lower <= v < upper or (b == 9 and v == 1.0)]
        if held:
            error += len(held) / n * abs(np.mean([v for v, _ in held]) - np.mean([o for _, o in held]))
    assert expected_calibration_error(values, outcomes) == pytest.approx(error, abs=1e-9)
    successes, failures = [v for v, o in pairs if o], [v for v, o in pairs if not o]
    if successes and failures:
        wins = sum((s > f) + 0.5 * (s == f) for s in successes for f in failures)
        assert auroc(values, outcomes) == pytest.approx(wins / (len(successes) * len(failures)))
    else:
        assert math.isnan(auroc(values, outcomes))


@pytest.mark.parametrize("score", [brier_score, expected_calibration_error, auroc])
def test_scores_of_unusable_input(score):
    assert math.isnan(score([math.nan, 0.5], [1, 0]))
    assert math.isnan(score([0.5, 0.5], [1, math.nan]))
    with pytest.raises(ValueError, match="shape"):
        score([0.5], [1, 0])
