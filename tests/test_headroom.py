"""Stage 1 with a headroom exponent: right values, brute force with known and with uncertain values, and refusals."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from betas import moment
from trace_trl.allocation import ROOT_ALLOCATORS, allocate_roots


def worth(value, certainty, exponent, count):
    """`E[(1 - V)^b U_root(V, m)]`, the exponent whole."""
    if count < 2:
        return 0.0
    if certainty == 1:
        return (1 - value) ** exponent * (1 - value**count - (1 - value) ** count)
    strength = certainty / (1 - certainty)
    a, b = strength * value, strength * (1 - value)
    return moment(a, b, 0, exponent) - moment(a, b, count, exponent) - moment(a, b, 0, count + exponent)


def splits(count, budget):
    return (s for s in itertools.product(range(budget + 1), repeat=count) if sum(s) == budget and 1 not in s)


VALUES = st.floats(0.01, 0.99)


@given(
    beliefs=st.lists(st.tuples(VALUES, st.floats(0.01, 0.98)), min_size=1, max_size=3),
    budget=st.integers(2, 8),
    exponent=st.integers(0, 4),
    known=st.booleans(),
)
@settings(deadline=None, database=None, max_examples=150)
def test_against_brute_force(beliefs, budget, exponent, known):
    values = [value for value, _ in beliefs]
    certainties = [1.0 if known else certainty for _, certainty in beliefs]
    counts = allocate_roots(values, budget, 8, certainties=certainties, headroom_exponent=exponent)
    assert counts.sum() == budget and 1 not in counts

    def total(split):
        return sum(worth(v, c, exponent, m) for v, c, m in zip(values, certainties, split, strict=True))

    best = max(map(total, splits(len(values), budget)))
    assert total(counts.tolist()) == pytest.approx(best, abs=1e-9)


@given(value=VALUES, certainty=st.floats(0.05, 0.9), exponent=st.floats(0.1, 5))
@settings(deadline=None, database=None, max_examples=50)
def test_any_exponent_against_an_integral(value, certainty, exponent):
    # Two prompts, the second known exactly: the allocator's choice turns where the expected worths cross
    strength = certainty / (1 - certainty)
    grid = np.random.default_rng(0).beta(strength * value, strength * (1 - value), 200_000)
    uncertain = ((1 - grid) ** exponent * 2 * grid * (1 - grid)).mean()
    spread = ((1 - grid) ** exponent * 2 * grid * (1 - grid)).std() / 200_000**0.5
    others = np.linspace(0.01, 1 / (2 + exponent), 60)
    for other in others:
        exact = (1 - other) ** exponent * 2 * other * (1 - other)
        if abs(exact - uncertain) > 6 * spread + 1e-6:
            counts = allocate_roots(
                [value, other], 2, 2, certainties=[certainty, 1.0], headroom_exponent=exponent
            ).tolist()
            assert counts == ([2, 0] if uncertain > exact else [0, 2])


def test_zero_is_the_paper():
    assert allocate_roots([0.02, 0.3, 0.5, 0.9], 8, 4, headroom_exponent=0).tolist() == [0, 4, 4, 0]


def test_of_two_as_likely_to_be_mixed_the_harder_is_taken():
    # 2 v (1 - v) is 0.18 for 0.1 and for 0.9; with b = 1 the first is worth 0.162, the second 0.018
    assert allocate_roots([0.1, 0.9], 2, 4, seed=3, headroom_exponent=1.0).tolist() == [2, 0]
    assert allocate_roots([0.9, 0.1], 2, 4, seed=3, headroom_exponent=1.0).tolist() == [0, 2]


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 4.0])
def test_most_wanted_rate(exponent):
    # v (1 - v)^(1 + b) has its maximum at 1 / (2 + b)
    values = np.linspace(0, 1, 2001)
    chosen = values[allocate_roots(values, 2, 2, headroom_exponent=exponent).argmax()]
    assert chosen == pytest.approx(1 / (2 + exponent), abs=1e-3)


def test_what_is_settled_is_worth_nothing():
    for certainties in (None, [0.3, 0.3, 0.3]):
        counts = allocate_roots([0.0, 1.0, 0.4], 5, 8, certainties=certainties, headroom_exponent=2.0)
        assert counts.tolist() == [0, 0, 5]


def test_baselines_do_not_heed_it():
    for name in ("uniform", "pcl"):
        plain, weighed = (
            ROOT_ALLOCATORS[name](
                [0.1, 0.5, 0.7], budget=6, max_per_root=4, group_size=2, seed=0, headroom_exponent=exponent
            )
            for exponent in (0.0, 3.0)
        )
        assert plain.tolist() == weighed.tolist()


@pytest.mark.parametrize("wrong", [-0.5, float("inf"), float("nan")])
def test_wrong_exponents_are_refused(wrong):
    with pytest.raises(ValueError, match="headroom exponent is .*: set it to 0 or more"):
        allocate_roots([0.5, 0.5], 4, 4, headroom_exponent=wrong)
