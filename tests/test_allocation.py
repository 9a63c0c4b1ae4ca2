"""The allocators against the right values of the method, brute force, and their invariants."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_trl import allocation
from trace_trl.allocation import (
    PREFIX_ALLOCATORS,
    ROOT_ALLOCATORS,
    allocate_prefixes,
    allocate_roots,
    pcl_roots,
    prefix_utility,
    random_prefixes,
    reads_values,
    root_utility,
    uniform_prefixes,
    uniform_roots,
    utility_prefixes,
    utility_roots,
)


# Values that meet every corner: certain prompts, even chances, mirror images, and repeats of all of them.
CORNER_VALUES = [0.0, 1.0, 0.5, 0.5, 0.3, 0.7, 0.1, 0.9, 1e-9, 0.02, 0.49999]


@pytest.fixture
def assert_cost(monkeypatch):
    """A check that few blocks of marginals were computed since the last one, of `(owners + budget) log2(most)` units
    at most, as documented. An allocation that went from unit to unit would compute a block for each."""
    sizes = []

    class Counting(allocation._Level):
        def __init__(self, marginals, *args, **kwargs):
            def counted(owners, units):
                found = marginals(owners, units)
                sizes.append(found.size)
                return found

            super().__init__(counted, *args, **kwargs)

    def check(owners, budget, most):
        assert 0 < sum(sizes) <= (owners + budget) * np.log2(most)
        assert len(sizes) <= 1 + np.log2(most)
        sizes.clear()

    monkeypatch.setattr(allocation, "_Level", Counting)
    return check


def draw_values(rng, count):
    corners = rng.choice(CORNER_VALUES, size=count)
    return np.where(rng.random(count) < 0.5, corners, rng.random(count))


def is_feasible(count, budget, max_per_root):
    if budget == 0:
        return True
    return budget != 1 and budget <= count * max_per_root and not (max_per_root == 2 and budget % 2)


def chance_of_contrast(value, rollouts):
    return 0.0 if rollouts < 2 else 1 - value**rollouts - (1 - value) ** rollouts


def best_root_sums(values, max_per_root):
    """Maximum of stage 1 for every budget, by dynamic programming over the prompts; -inf where nothing adds up."""
    best = np.full(len(values) * max_per_root + 1, -np.inf)
    best[0] = 0.0
    for value in values:
        grown = best.copy()
        for rollouts in range(2, max_per_root + 1):
            grown[rollouts:] = np.maximum(grown[rollouts:], best[:-rollouts] + chance_of_contrast(value, rollouts))
        best = grown
    return best


def best_prefix_sums(values, successes, most):
    """Maximum of stage 2 for every budget up to `most`, by dynamic programming over the prefixes."""
    best = np.full(most + 1, -np.inf)
    best[0] = 0.0
    for value, success in zip(values, successes, strict=True):
        repeat = value if success else 1 - value
        grown = best.copy()
        for continuations in range(1, most + 1):
            gain = 1 - repeat**continuations
            grown[continuations:] = np.maximum(grown[continuations:], best[:-continuations] + gain)
        best = grown
    return best


def assert_valid_roots(counts, count, budget, max_per_root):
    assert counts.shape == (count,)
    assert counts.dtype == np.int64
    assert counts.sum() == budget
    assert ((counts == 0) | ((counts >= 2) & (counts <= max_per_root))).all()


def assert_valid_prefixes(counts, count, budget):
    assert counts.shape == (count,)
    assert counts.dtype == np.int64
    assert counts.sum() == budget
    assert (counts >= 0).all()


@st.composite
def root_problems(draw):
    values = draw(
        st.lists(st.one_of(st.sampled_from(CORNER_VALUES), st.floats(0, 1)), min_size=1, max_size=12).map(np.array)
    )
    max_per_root = draw(st.integers(2, 9))
    feasible = [b for b in range(values.size * max_per_root + 1) if is_feasible(values.size, b, max_per_root)]
    return values, draw(st.sampled_from(feasible)), max_per_root


@st.composite
def prefix_problems(draw):
    prefix = st.tuples(st.one_of(st.sampled_from(CORNER_VALUES), st.floats(0, 1)), st.booleans())
    values, successes = zip(*draw(st.lists(prefix, min_size=1, max_size=12)), strict=True)
    return np.array(values), np.array(successes), draw(st.integers(0, 60))


class TestUtilities:
    def test_root_utility_has_the_right_values(self):
        expected = [0, 0, 0.42, 0.63, 0.7518, 0.8295]
        np.testing.assert_allclose(root_utility(0.3, np.arange(6)), expected, rtol=0, atol=1e-12)

    def test_first_three_rollouts_of_a_prompt_are_worth_the_same(self):
        values = np.linspace(0, 1, 101)
        np.testing.assert_allclose(root_utility(values, 2), 2 * values * (1 - values), atol=1e-15)
        np.testing.assert_allclose(root_utility(values, 3), 3 * values * (1 - values), atol=1e-15)

    def test_prefix_utility_has_the_right_values(self):
        repeat = 0 * 0.7 + (1 - 0) * (1 - 0.7)
        np.testing.assert_allclose(prefix_utility(repeat, np.arange(4)), [0, 0.7, 0.91, 0.973], rtol=0, atol=1e-12)

    def test_no_continuation_flips_nothing_even_where_a_flip_is_certain(self):
        np.testing.assert_array_equal(prefix_utility([0.0, 1.0], 0), [0.0, 0.0])
        np.testing.assert_array_equal(prefix_utility([0.0, 1.0], 1), [1.0, 0.0])

    def test_sums(self):
        assert utility_roots([0.3, 0.5], [3, 0]) == pytest.approx(0.63)
        assert utility_prefixes([0.7, 0.7], [0, 1], [2, 1]) == pytest.approx(0.91 + 0.3)


class TestAllocateRoots:
    @pytest.mark.parametrize(
        ("values", "budget", "max_per_root", "best", "expected"),
        [
            ([0.02, 0.3, 0.5, 0.9], 8, 4, 1.6268, [0, 4, 4, 0]),
            ([0.02, 0.3, 0.5, 0.9], 9, 8, 1.7045, [0, 5, 4, 0]),
            ([0.01, 0.99, 0.45], 6, 8, 0.96401559375, [0, 0, 6]),
            ([0.2, 0.35, 0.6, 0.8], 16, 8, 2.8288875, [4, 4, 4, 4]),
        ],
    )
    def test_right_values(self, values, budget, max_per_root, best, expected):
        counts = allocate_roots(values, budget, max_per_root)
        np.testing.assert_array_equal(counts, expected)
        assert utility_roots(values, counts) == pytest.approx(best, abs=1e-12)

    @pytest.mark.parametrize("seed", [None, 0, 1, 2])
    def test_right_value_of_an_odd_budget_over_even_chances(self, seed):
        counts = allocate_roots([0.5, 0.5, 0.5], 7, 8, seed)
        assert sorted(counts) == [2, 2, 3]
        assert utility_roots([0.5] * 3, counts) == pytest.approx(1.75, abs=1e-12)

    def test_equals_brute_force_for_every_budget_of_500_instances(self):
        rng = np.random.default_rng(20)
        for instance in range(500):
            values, max_per_root = draw_values(rng, rng.integers(1, 8)), int(rng.integers(2, 7))
            for budget, best in enumerate(best_root_sums(values, max_per_root)):
                assert is_feasible(values.size, budget, max_per_root) == np.isfinite(best)
                if np.isfinite(best):
                    counts = allocate_roots(values, budget, max_per_root, seed=instance)
                    assert_valid_roots(counts, values.size, budget, max_per_root)
                    assert utility_roots(values, counts) == pytest.approx(best, abs=1e-11), (values, budget)

    def test_equals_brute_force_where_a_last_odd_rollout_is_left(self):
        # Distinct values: greedy on the envelope has taken three rollouts of the best prompts and is left with one for
        # the next prompt, which cannot take it alone.
        rng = np.random.default_rng(21)
        repairs = set()
        for _ in range(200):
            values = 0.5 + rng.uniform(-1, 1, size=6) * rng.choice([0.05, 0.3, 0.45])
            for max_per_root in (3, 4, 6):
                best = best_root_sums(values, max_per_root)
                for budget in (4, 7, 10):
                    counts = allocate_roots(values, budget, max_per_root)
                    assert utility_roots(values, counts) == pytest.approx(best[budget], abs=1e-12)
                    repairs.add((max_per_root, tuple(sorted(counts[counts > 0]))))
        # Both repairs occur: one prompt more with two rollouts, and a fourth rollout where there was a third.
        assert {(4, (2, 2)), (4, (4,)), (6, (2, 2, 3)), (6, (3, 4)), (3, (2, 2))} <= repairs

    def test_enters_the_most_prompts_among_equal_optima(self):
        rng = np.random.default_rng(22)
        for _ in range(150):
            count, max_per_root = int(rng.integers(1, 5)), int(rng.integers(2, 6))
            values = rng.choice(CORNER_VALUES[:8], size=count)
            optima = {}
            for counts in itertools.product([0, *range(2, max_per_root + 1)], repeat=count):
                total = sum(chance_of_contrast(v, m) for v, m in zip(values, counts, strict=True))
                optima.setdefault(sum(counts), []).append((total, sum(m > 0 for m in counts)))
            for budget, found in optima.items():
                best = max(total for total, _ in found)
                entered = max(prompts for total, prompts in found if total >= best - 1e-9)
                assert (allocate_roots(values, budget, max_per_root, seed=0) > 0).sum() == entered

    def test_untrained_predictor_spreads_over_the_pool(self):
        values = np.full(768, 0.5)
        assert (allocate_roots(values, 1024, 8, seed=0) > 0).sum() == 512
        assert set(allocate_roots(values, 1024, 8, seed=0)) == {0, 2}
        assert set(allocate_roots(values, 2048, 8, seed=0)) == {2, 3}
        assert (allocate_roots(values, 1025, 8, seed=0) == 3).sum() == 1

    def test_mirror_images_are_ties(self):
        # 0.3 and 1 - 0.7 differ in their last bits: which of them is entered is the seed's choice.
        entered = [tuple(allocate_roots([0.3, 0.7], 2, 4, seed) > 0) for seed in range(20)]
        assert len(set(entered)) == 2

    def test_certain_prompts_get_rollouts_only_when_nothing_else_is_left(self):
        counts = allocate_roots([0.0, 1.0, 0.5, 0.4], 8, 4)
        np.testing.assert_array_equal(counts, [0, 0, 4, 4])
        assert_valid_roots(allocate_roots([0.0, 1.0, 0.5, 0.4], 13, 4), 4, 13, 4)
        np.testing.assert_array_equal(allocate_roots([0.0, 1.0, 1.0], 9, 8), [3, 3, 3])

    def test_a_certain_prompt_never_takes_a_lone_rollout(self):
        # 8 rollouts fill the first prompts; the ninth would be the certain one's first.
        counts = allocate_roots([0.5, 0.4, 1.0], 9, 4)
        assert sorted(counts) == [2, 3, 4]
        assert utility_roots([0.5, 0.4, 1.0], counts) == pytest.approx(best_root_sums([0.5, 0.4, 1.0], 4)[9])

    def test_one_seed_gives_one_allocation_and_seeds_differ(self):
        values = np.full(50, 0.5)
        draws = [allocate_roots(values, 40, 4, seed=seed) for seed in (1, 1, 2)]
        np.testing.assert_array_equal(draws[0], draws[1])
        assert (draws[0] != draws[2]).any()
        np.testing.assert_array_equal(allocate_roots(values, 40, 4), [2] * 20 + [0] * 30)

    def test_budget_zero_gives_zeros(self):
        np.testing.assert_array_equal(allocate_roots([0.5, 0.5], 0, 1), [0, 0])
        assert allocate_roots([], 0, 8).shape == (0,)

    @settings(deadline=None, max_examples=200)
    @given(root_problems(), st.integers(0, 3))
    def test_every_allocation_is_valid_and_the_same_for_one_seed(self, problem, seed):
        values, budget, max_per_root = problem
        counts = allocate_roots(values, budget, max_per_root, seed)
        assert_valid_roots(counts, values.size, budget, max_per_root)
        np.testing.assert_array_equal(counts, allocate_roots(values, budget, max_per_root, seed))

    @settings(deadline=None, max_examples=200)
    @given(root_problems(), st.integers(0, 3))
    def test_utility_does_not_depend_on_pool_order_seed_or_mirroring(self, problem, seed):
        values, budget, max_per_root = problem
        utility = utility_roots(values, allocate_roots(values, budget, max_per_root))
        order = np.random.default_rng(seed).permutation(values.size)
        for other in (values[order], 1 - values):
            counts = allocate_roots(other, budget, max_per_root, seed)
            assert utility_roots(other, counts) == pytest.approx(utility, abs=1e-10)

    @pytest.mark.parametrize("shape", ["uniform", "u_shaped", "few distinct", "all even"])
    def test_large_pool_is_optimal_at_the_documented_cost(self, shape, assert_cost):
        rng, count, max_per_root = np.random.default_rng(23), 100_000, 16
        values = {
            "uniform": rng.random(count),
            "u_shaped": rng.beta(0.15, 0.15, size=count),
            "few distinct": rng.choice(CORNER_VALUES, size=count),
            "all even": np.full(count, 0.5),
        }[shape]
        # The certificate: the best `budget` unit marginals of the concave envelope bound every allocation. The bound
        # is met unless one rollout is left for prompts that need two, and then missed by the cheapest exchange.
        steps = np.diff([root_utility(values, rollouts) for rollouts in range(1, max_per_root + 1)], axis=0)
        steps[0] /= 2
        marginals = np.sort(np.concatenate([steps[:1], steps]).ravel())[::-1]
        budgets_with_one_left = 0
        for budget in range(300_000, 300_008):
            counts = allocate_roots(values, budget, max_per_root, seed=0)
            assert_cost(count, budget, max_per_root)
            assert_valid_roots(counts, count, budget, max_per_root)
            last = marginals[budget - 1]
            least_loss = 0.0
            one_left = (marginals > last + 1e-14).sum() == budget - 1
            if one_left and not (np.abs(steps[2:] - last) <= 1e-14).any():
                budgets_with_one_left += 1
                fourth_or_later = steps[2:, steps[0] > last + 1e-14]
                least_loss = min(
                    marginals[marginals > last + 1e-14][-1] - last,
                    last - fourth_or_later[fourth_or_later < last].max(),
                )
            loss = marginals[:budget].sum() - utility_roots(values, counts)
            assert loss == pytest.approx(least_loss, abs=1e-9)
        if shape in ("uniform", "u_shaped"):
            assert budgets_with_one_left

    def test_deep_budget_on_few_prompts_has_the_documented_cost(self, assert_cost):
        counts = allocate_roots([0.5, 0.4, 1.0], 300_000, 200_000)
        assert_cost(3, 300_000, 200_000)
        assert_valid_roots(counts, 3, 300_000, 200_000)

    @pytest.mark.parametrize(
        ("values", "budget", "max_per_root", "message"),
        [
            ([0.5, 0.5], 1, 4, "rollout budget is 1: raise it to 2 or more"),
            ([0.5, 0.5], -2, 4, "rollout budget is -2: set it to 0 or more"),
            ([0.5, 0.5], 9, 4, r"exceeds 2 prompts x max_per_root 4 = 8: enlarge the candidate pool"),
            ([0.5, 0.5], 3, 2, "make the budget even or raise max_per_root"),
            ([0.5, 0.5], 2, 1, "max_per_root is 1: raise it to 2 or more"),
            ([0.5, 1.5], 2, 4, r"Value 1.5 at position 1 .* pass values in \[0, 1\]"),
            ([-0.1, 0.5], 0, 4, r"pass values in \[0, 1\]"),
            ([0.5, float("nan")], 2, 4, r"Value nan at position 1 .* pass values in \[0, 1\]"),
            ([], 2, 4, "no prompt: pass at least one candidate"),
            ([[0.5, 0.5]], 2, 4, "in one dimension"),
        ],
    )
    def test_impossible_requests_say_what_to_change(self, values, budget, max_per_root, message):
        with pytest.raises(ValueError, match=message):
            allocate_roots(values, budget, max_per_root)


class TestAllocatePrefixes:
    @pytest.mark.parametrize(
        ("values", "successes", "budget", "best", "expected"),
        [
            ([0.9, 0.7, 0.4], [1, 0, 1], 3, 1.54, [0, 1, 2]),
            ([0.1, 0.6, 0.6, 0.95], [0, 0, 1, 1], 5, 1.624, [0, 2, 3, 0]),
        ],
    )
    def test_right_values(self, values, successes, budget, best, expected):
        counts = allocate_prefixes(values, successes, budget)
        np.testing.assert_array_equal(counts, expected)
        assert utility_prefixes(values, successes, counts) == pytest.approx(best, abs=1e-12)

    def test_equals_brute_force_for_every_budget_of_500_instances(self):
        rng = np.random.default_rng(30)
        for instance in range(500):
            values = draw_values(rng, rng.integers(1, 7))
            successes = rng.random(values.size) < 0.5
            for budget, best in enumerate(best_prefix_sums(values, successes, most=12)):
                counts = allocate_prefixes(values, successes, budget, seed=instance)
                assert_valid_prefixes(counts, values.size, budget)
                assert utility_prefixes(values, successes, counts) == pytest.approx(best, abs=1e-11)

    def test_ties_are_spread_over_all_prefixes_first(self):
        counts = allocate_prefixes([0.5] * 5, [0, 1, 0, 1, 0], 12, seed=0)
        assert sorted(counts) == [2, 2, 2, 3, 3]

    def test_worthless_continuations_are_spread_too(self):
        # Every continuation of the first two repeats the outcome; the third flips with its first one.
        np.testing.assert_array_equal(allocate_prefixes([1.0, 0.0, 0.0], [1, 0, 1], 7), [3, 2, 2])
        np.testing.assert_array_equal(allocate_prefixes([1.0, 0.0, 0.0], [1, 0, 1], 1), [0, 0, 1])
        np.testing.assert_array_equal(allocate_prefixes([1.0, 0.5], [1, 1], 5), [0, 5])

    def test_worthless_continuations_level_out_below_underflow(self):
        counts = allocate_prefixes([1.0, 0.5, 1.0], [1, 1, 1], 3000)
        assert counts[1] > 1000
        assert abs(counts[0] - counts[2]) <= 1

    def test_one_seed_gives_one_allocation_and_seeds_differ(self):
        values, successes = np.full(30, 0.5), np.zeros(30, dtype=bool)
        draws = [allocate_prefixes(values, successes, 10, seed=seed) for seed in (1, 1, 2)]
        np.testing.assert_array_equal(draws[0], draws[1])
        assert (draws[0] != draws[2]).any()
        np.testing.assert_array_equal(allocate_prefixes(values, successes, 10), [1] * 10 + [0] * 20)

    def test_budget_zero_gives_zeros(self):
        np.testing.assert_array_equal(allocate_prefixes([0.5, 0.5], [0, 1], 0), [0, 0])
        assert allocate_prefixes([], [], 0).shape == (0,)

    @settings(deadline=None, max_examples=200)
    @given(prefix_problems(), st.integers(0, 3))
    def test_every_allocation_is_valid_and_the_same_for_one_seed(self, problem, seed):
        values, successes, budget = problem
        counts = allocate_prefixes(values, successes, budget, seed)
        assert_valid_prefixes(counts, values.size, budget)
        np.testing.assert_array_equal(counts, allocate_prefixes(values, successes, budget, seed))

    @settings(deadline=None, max_examples=200)
    @given(prefix_problems(), st.integers(0, 3))
    def test_utility_does_not_depend_on_order_or_seed(self, problem, seed):
        values, successes, budget = problem
        utility = utility_prefixes(values, successes, allocate_prefixes(values, successes, budget))
        order = np.random.default_rng(seed).permutation(values.size)
        values, successes = values[order], successes[order]
        counts = allocate_prefixes(values, successes, budget, seed)
        assert utility_prefixes(values, successes, counts) == pytest.approx(utility, abs=1e-10)

    @settings(deadline=None, max_examples=200)
    @given(prefix_problems())
    def test_utility_does_not_change_when_outcomes_and_values_are_mirrored(self, problem):
        values, successes, budget = problem
        utility = utility_prefixes(values, successes, allocate_prefixes(values, successes, budget))
        mirrored = allocate_prefixes(1 - values, ~successes, budget)
        assert utility_prefixes(1 - values, ~successes, mirrored) == pytest.approx(utility, abs=1e-10)

    def test_many_prefixes_and_a_large_budget_are_optimal_at_the_documented_cost(self, assert_cost):
        rng, count, budget = np.random.default_rng(31), 20_000, 60_000
        values, successes = rng.random(count), rng.random(count) < 0.5
        counts = allocate_prefixes(values, successes, budget, seed=0)
        assert_cost(count, budget, budget)
        # No continuation moved from one prefix to another gains anything.
        repeat = np.where(successes, values, 1 - values)
        gain = prefix_utility(repeat, counts + 1) - prefix_utility(repeat, counts)
        worth = (prefix_utility(repeat, counts) - prefix_utility(repeat, counts - 1))[counts > 0]
        assert gain.max() <= worth.min() + 1e-12
        assert_valid_prefixes(counts, count, budget)

    @pytest.mark.parametrize(
        ("values", "successes", "budget", "message"),
        [
            ([], [], 3, "no prefix: pass at least one eligible prefix"),
            ([0.5], [1], -1, "continuation budget is -1: set it to 0 or more"),
            ([1.2], [1], 1, r"pass values in \[0, 1\]"),
            ([float("nan")], [1], 1, r"pass values in \[0, 1\]"),
            ([0.5, 0.5], [1], 1, "pass one outcome per prefix"),
            ([0.5], [0.7], 1, "not its reward"),
        ],
    )
    def test_impossible_requests_say_what_to_change(self, values, successes, budget, message):
        with pytest.raises(ValueError, match=message):
            allocate_prefixes(values, successes, budget)


class TestBaselines:
    def test_uniform_roots_fill_the_first_prompts_evenly(self):
        np.testing.assert_array_equal(uniform_roots(6, 16, 8, group_size=4), [4, 4, 4, 4, 0, 0])
        np.testing.assert_array_equal(uniform_roots(6, 18, 8, group_size=4), [5, 5, 4, 4, 0, 0])

    def test_uniform_roots_take_a_fractional_group_size(self):
        counts = uniform_roots(768, 1024, 8, group_size=8 / 3)
        assert (counts > 0).sum() == 384
        assert set(counts) == {0, 2, 3}

    def test_uniform_roots_take_more_prompts_than_wanted_where_one_would_get_too_many(self):
        np.testing.assert_array_equal(uniform_roots(6, 9, 3, group_size=9), [3, 3, 3, 0, 0, 0])
        np.testing.assert_array_equal(uniform_roots(6, 7, 3, group_size=7), [3, 2, 2, 0, 0, 0])

    def test_uniform_roots_take_fewer_prompts_than_wanted_where_one_would_get_less_than_two(self):
        np.testing.assert_array_equal(uniform_roots(6, 5, 8, group_size=1), [3, 2, 0, 0, 0, 0])

    def test_pcl_takes_the_prompts_nearest_to_even_chances(self):
        np.testing.assert_array_equal(pcl_roots([0.9, 0.45, 0.1, 0.6, 0.0], 9, 8, group_size=4), [0, 5, 0, 4, 0])

    def test_pcl_orders_equally_near_prompts_by_seed(self):
        chosen = {tuple(pcl_roots([0.4, 0.6, 0.3, 0.7], 4, 4, 4, seed)) for seed in range(20)}
        assert chosen == {(4, 0, 0, 0), (0, 4, 0, 0)}
        np.testing.assert_array_equal(pcl_roots([0.4, 0.6], 4, 4, 4), [4, 0])

    @settings(deadline=None, max_examples=200)
    @given(root_problems(), st.floats(0.5, 20), st.integers(0, 3))
    def test_every_root_choice_is_valid_and_none_beats_the_active_one(self, problem, group_size, seed):
        values, budget, max_per_root = problem
        request = {"budget": budget, "max_per_root": max_per_root, "group_size": group_size, "seed": seed}
        chosen = {name: allocate(values, **request) for name, allocate in ROOT_ALLOCATORS.items()}
        assert list(chosen) == ["active", "uniform", "pcl"]
        for counts in chosen.values():
            assert_valid_roots(counts, values.size, budget, max_per_root)
            assert utility_roots(values, counts) <= utility_roots(values, chosen["active"]) + 1e-10
        for name in ("uniform", "pcl"):
            counts = chosen[name][chosen[name] > 0]
            assert not counts.size or counts.max() - counts.min() <= 1
        np.testing.assert_array_equal(sorted(chosen["uniform"]), sorted(chosen["pcl"]))

    @settings(deadline=None, max_examples=200)
    @given(prefix_problems(), st.integers(0, 3))
    def test_every_prefix_choice_is_valid_and_none_beats_the_active_one(self, problem, seed):
        values, successes, budget = problem
        chosen = {name: f(values, successes, budget=budget, seed=seed) for name, f in PREFIX_ALLOCATORS.items()}
        assert list(chosen) == ["active", "uniform", "random"]
        best = utility_prefixes(values, successes, chosen["active"])
        for counts in chosen.values():
            assert_valid_prefixes(counts, values.size, budget)
            assert utility_prefixes(values, successes, counts) <= best + 1e-10
        assert np.ptp(chosen["uniform"]) <= 1

    def test_the_choices_that_read_values_are_those_that_are_given_them(self):
        values, other, successes = [0.5, 0.1, 0.9], [0.9, 0.5, 0.1], [1, 0, 1]
        request = {"budget": 6, "max_per_root": 4, "group_size": 3, "seed": 0}
        roots = {n for n, f in ROOT_ALLOCATORS.items() if (f(values, **request) != f(other, **request)).any()}
        assert roots == {name for name in ROOT_ALLOCATORS if reads_values(ROOT_ALLOCATORS, name)}
        prefixes = {
            name
            for name, f in PREFIX_ALLOCATORS.items()
            if (f(values, successes, budget=6, seed=0) != f(other, successes, budget=6, seed=0)).any()
        }
        assert prefixes == {name for name in PREFIX_ALLOCATORS if reads_values(PREFIX_ALLOCATORS, name)}

    def test_uniform_prefixes_give_the_remainder_by_seed(self):
        np.testing.assert_array_equal(uniform_prefixes(4, 6), [2, 2, 1, 1])
        assert len({tuple(uniform_prefixes(4, 6, seed)) for seed in range(30)}) > 2

    def test_random_prefixes_are_independent_draws(self):
        counts = random_prefixes(10, 100_000, seed=0)
        np.testing.assert_array_equal(counts, random_prefixes(10, 100_000, seed=0))
        # Chi-square with 9 degrees of freedom: even shares would give 0, and 27.9 is passed once in a thousand.
        assert 1 < ((counts - 10_000) ** 2 / 10_000).sum() < 27.9

    @pytest.mark.parametrize("allocate", [uniform_prefixes, random_prefixes])
    def test_continuations_without_prefixes_are_refused(self, allocate):
        assert allocate(0, 0).shape == (0,)
        with pytest.raises(ValueError, match="no prefix"):
            allocate(0, 1)
        with pytest.raises(ValueError, match="set it to 0 or more"):
            allocate(3, -1)

    @pytest.mark.parametrize("name", ["active", "uniform", "pcl"])
    def test_unreachable_root_budgets_are_refused_by_every_choice(self, name):
        for budget, max_per_root in [(1, 4), (9, 4), (3, 2), (2, 1), (-1, 4)]:
            with pytest.raises(ValueError):
                ROOT_ALLOCATORS[name]([0.5, 0.5], budget=budget, max_per_root=max_per_root, group_size=2, seed=0)

    def test_a_group_size_that_is_not_positive_is_refused(self):
        with pytest.raises(ValueError, match="ask for a positive number"):
            uniform_roots(4, 8, 4, group_size=0)
