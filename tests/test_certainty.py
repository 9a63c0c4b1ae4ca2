"""Allocation where values are not known exactly: right values, brute force, and what the predictor learns of it."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from betas import moment
from leaves import elsewhere, scored
from trace_trl.allocation import SURE, allocate_prefixes, allocate_roots
from trace_trl.predictor import PredictorTrainer, SuccessPredictor
from trace_trl.tree import RolloutTree


def beta(value, certainty):
    strength = certainty / (1 - certainty)
    return strength * value, strength * (1 - value)


def root_worth(value, certainty, count):
    if count < 2:
        return 0.0
    a, b = beta(value, certainty)
    return 1 - moment(a, b, count, 0) - moment(a, b, 0, count)


def prefix_worth(value, certainty, success, count):
    a, b = beta(value, certainty)
    a, b = (a + 1, b) if success else (a, b + 1)
    return 1 - (moment(a, b, count, 0) if success else moment(a, b, 0, count))


def splits(count, budget):
    return (s for s in itertools.product(range(budget + 1), repeat=count) if sum(s) == budget)


CERTAINTIES = st.floats(0.01, 0.98) | st.just(0.9985)
VALUES = st.floats(0.01, 0.99)


def test_uniform_belief_gives_laplaces_rule():
    # V ~ Beta(1, 1): after one success the next k draws are successes with chance 2 / (2 + k)
    assert [prefix_worth(0.5, 2 / 3, True, k) for k in range(4)] == pytest.approx([0, 1 / 3, 1 / 2, 3 / 5])
    assert [root_worth(0.5, 2 / 3, m) for m in (2, 3, 4)] == pytest.approx([1 / 3, 1 / 2, 3 / 5])


@given(beliefs=st.lists(st.tuples(VALUES, CERTAINTIES), min_size=1, max_size=3), budget=st.integers(2, 7))
@settings(deadline=None, database=None, max_examples=80)
def test_roots_against_brute_force(beliefs, budget):
    values, certainties = zip(*beliefs, strict=True)
    counts = allocate_roots(values, budget, 7, certainties=certainties)
    assert counts.sum() == budget and 1 not in counts

    def worth(split):
        return sum(root_worth(v, c, m) for (v, c), m in zip(beliefs, split, strict=True))

    best = max(worth(split) for split in splits(len(beliefs), budget) if 1 not in split)
    assert worth(counts.tolist()) == pytest.approx(best, abs=1e-9)


@given(
    beliefs=st.lists(st.tuples(VALUES, CERTAINTIES, st.booleans()), min_size=1, max_size=4), budget=st.integers(1, 5)
)
@settings(deadline=None, database=None, max_examples=80)
def test_prefixes_against_brute_force(beliefs, budget):
    values, certainties, successes = zip(*beliefs, strict=True)
    counts = allocate_prefixes(values, successes, budget, certainties=certainties)
    assert counts.sum() == budget

    def worth(split):
        return sum(prefix_worth(v, c, r, k) for (v, c, r), k in zip(beliefs, split, strict=True))

    best = max(worth(split) for split in splits(len(beliefs), budget))
    assert worth(counts.tolist()) == pytest.approx(best, abs=1e-9)


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=6), budget=st.integers(2, 12), seed=st.integers(0, 9))
@settings(deadline=None, database=None)
def test_exactly_known_values_give_the_papers_allocation(values, budget, seed):
    sure = [1.0] * len(values)
    if budget <= 12 * len(values):
        plain = allocate_roots(values, budget, 12, seed)
        assert allocate_roots(values, budget, 12, seed, certainties=sure).tolist() == plain.tolist()
    successes = [value > 0.4 for value in values]
    plain = allocate_prefixes(values, successes, budget, seed)
    assert allocate_prefixes(values, successes, budget, seed, certainties=sure).tolist() == plain.tolist()


def test_almost_exactly_known_values_are_worth_what_known_ones_are():
    for count in range(2, 9):
        assert root_worth(0.3, SURE, count) == pytest.approx(1 - 0.3**count - 0.7**count, abs=2e-3)
    assert allocate_roots([0.3, 0.5, 0.9], 9, 8, certainties=[SURE, SURE, 0.998]).tolist() == [5, 4, 0]
    assert allocate_roots([0.3, 0.5, 0.9], 9, 8).tolist() == [5, 4, 0]


def test_what_is_settled_but_unknown_gets_nothing():
    assert allocate_roots([0.5, 0.5, 0.9], 6, 8, certainties=[0.0, 0.05, 1.0]).tolist() == [0, 0, 6]
    assert allocate_prefixes([0.5, 0.8], [True, True], 4, certainties=[0.01, 1.0]).tolist() == [0, 4]
    # Corners: impossible and certain prompts, nothing known of anything
    assert allocate_roots([0.0, 1.0, 0.5], 6, 8, certainties=[0.0, 0.5, 0.5]).tolist() == [0, 0, 6]
    assert sorted(allocate_roots([0.0, 1.0], 5, 8, certainties=[0.0, 0.0])) == [2, 3]
    assert allocate_prefixes([0.0, 1.0], [False, True], 2, certainties=[0.3, 0.0]).sum() == 2


@pytest.mark.parametrize("wrong", [[0.5], [0.5, 1.5], [0.5, math.nan], [-0.1, 0.5]])
def test_wrong_certainties_are_refused(wrong):
    with pytest.raises(ValueError, match=r"one per value|not in \[0, 1\]"):
        allocate_roots([0.5, 0.5], 4, 4, certainties=wrong)
    with pytest.raises(ValueError, match=r"one per value|not in \[0, 1\]"):
        allocate_prefixes([0.5, 0.5], [True, False], 4, certainties=wrong)


def grow(rewards_by_child):
    tree = RolloutTree.from_prompt("p", [1])
    for rewards in rewards_by_child:
        child = tree.add_turn(tree.root, [2])
        if len(rewards) == 1:
            child.leaf = scored(rewards[0])
        else:
            for reward in rewards:
                tree.add_turn(child, [3], leaf=scored(reward))
    return tree


def test_target_variance_right_values():
    tree = grow([[1.0], [0.0], [1.0, 0.0, 0.0, 1.0]])
    tree.backup()
    # Bare rollouts 1, 0, 1: of the six ordered pairs two are a success before a failure
    assert tree.root.target_variance == pytest.approx(2 / 6)
    # Continuations 0, 0, 1 of the third, whose own outcome does not count
    third = tree.root.children[2]
    assert third.target_variance == pytest.approx(2 / 6) and tree.root.children[0].target_variance is None
    tree = grow([[1.0, 0.0], [1.0]])
    tree.backup()
    assert tree.root.target_variance == 0.0 and tree.root.children[0].target_variance is None
    # Another process played one more
    tree.remote = [elsewhere([0.0, 1.0], 0.5), elsewhere([math.nan])]
    tree.backup()
    assert tree.root.target_variance == pytest.approx(2 / 6)
    for rewards, expected in (([[1.0]], None), ([[1.0], [1.0]], 0.0), ([[1.0], [math.nan]], None)):
        tree = grow(rewards)
        tree.backup()
        assert tree.root.target_variance == expected


@pytest.mark.parametrize(("value", "continuations"), [(0.9, 4), (0.7, 6), (0.2, 5)])
def test_target_variance_is_unbiased_although_outcomes_decide_where_to_branch(value, continuations):
    """All outcomes of two bare rollouts with a prefix each, and of the continuations that stage 2 gives them."""
    at_root, at_prefixes, branched = 0.0, 0.0, 0.0
    for bare in itertools.product([0.0, 1.0], repeat=2):
        counts = allocate_prefixes([value, value], bare, continuations)
        for more in itertools.product([0.0, 1.0], repeat=continuations):
            tree = grow([[bare[0], *more[: counts[0]]], [bare[1], *more[counts[0] :]]])
            tree.backup()
            chance = math.prod(value if outcome else 1 - value for outcome in (*bare, *more))
            at_root += chance * tree.root.target_variance
            for prefix in tree.root.children:
                if prefix.target_variance is not None:
                    at_prefixes += chance * prefix.target_variance
                    branched += chance
    assert at_root == pytest.approx(value * (1 - value), abs=1e-12)
    assert branched > 1 and at_prefixes / branched == pytest.approx(value * (1 - value), abs=1e-12)


def test_the_predictor_tells_settled_from_mixed_outcomes():
    """Anchors of two kinds, which a feature tells apart, with success rate 0.5: mixed ones, and ones that are always
    or never solved, which no feature tells apart."""
    random = np.random.default_rng(0)
    mixed = random.random(2000) < 0.5
    chances = np.where(mixed, 0.5, random.random(2000) < 0.5)
    wins = random.binomial(4, chances)
    targets, variances = wins / 4, wins * (4 - wins) / 12
    features = torch.tensor(np.stack([mixed, ~mixed, random.random(2000)], axis=1)).float()
    head = SuccessPredictor(3, 16)
    trainer = PredictorTrainer(head, learning_rate=0.01, buffer_size=2000, certainty=True)
    trainer.observe(features, targets.tolist(), variances.tolist())
    assert head(features[:1]).tolist() == [0.5]
    for _ in range(60):
        trainer.update()
    values, certainties = head.beliefs(torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]]))
    assert values.tolist() == pytest.approx([0.5, 0.5], abs=0.06)
    assert certainties.tolist() == pytest.approx([1.0, 0.0], abs=0.1)
