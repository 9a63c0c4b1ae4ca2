"""
What TRACE rests on, checked by exact enumeration: the bias of backups, the variation still to come, and the optimality
of the two allocation stages.

A world is all that may follow a history: an `int` is an episode that ended with that outcome, a tuple of
`(chance, world)` pairs is what the policy's next turn may lead to. Every combination of rollouts that a world allows
is enumerated with its chance, a tree is built of each, and the package backs it up or counts its contrasts.
"""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_trl.allocation import (
    allocate_prefixes,
    allocate_roots,
    pcl_roots,
    random_prefixes,
    root_utility,
    uniform_prefixes,
    uniform_roots,
    utility_prefixes,
    utility_roots,
)
from trace_trl.metrics import effective, mixed_anchor_counts
from trace_trl.simulate import draw_evidence, draw_paths, evidence_of, value_of
from trace_trl.tree import BACKUPS, Leaf, RolloutTree


def coin(chance):
    """One turn from the end of the episode."""
    return ((chance, 1), (1 - chance, 0))


SURE = ((1.0, 1),)
ON = ()  # a turn that did not end the episode, where nobody asks what may follow

# Episodes of two turns: the first leads to a prefix of known value, the second decides. Values of the prefixes:
EVEN = ((1.0, coin(0.7)),)
HIGH = ((0.5, coin(0.9)), (0.5, coin(0.5)))
LOW = ((0.5, coin(0.5)), (0.5, coin(0.1)))  # `HIGH` with the outcomes exchanged
SURE_OR_EVEN = ((0.5, SURE), (0.5, coin(0.5)))
# Episodes of three turns.
DEEP = ((0.5, ((0.5, coin(0.9)), (0.5, coin(0.4)))), (0.5, ((0.25, coin(0.7)), (0.75, coin(0.2)))))
# A good first turn ends the episode at once: only the others leave a prefix, and there more failures than successes.
SOLVED_OR_ON = ((0.5, 1), (0.5, coin(0.4)))
# The same one turn later, so that every rollout has at least one prefix.
ON_THEN_SOLVED_OR_ON = ((1.0, SOLVED_OR_ON),)


def value(world):
    """`V = P(success | H)`."""
    return float(world) if isinstance(world, int) else sum(chance * value(after) for chance, after in world)


def episodes(world):
    """Every way an episode may go on: its chance, and the worlds after each further turn."""
    if isinstance(world, int):
        return [(1.0, ())]
    return [(chance * rest, (after, *way)) for chance, after in world for rest, way in episodes(after)]


def add_episode(tree, parent, way, worlds, rollout):
    """Adds one turn per world of `way` below `parent`. Returns the turns."""
    turns = []
    for world in way:
        ended = isinstance(world, int)
        leaf = Leaf(reward=float(world), success=bool(world), rollout=rollout) if ended else None
        parent = tree.add_turn(parent, [0], leaf=leaf)
        worlds[parent] = world
        turns.append(parent)
    return turns


def bare_draws(world, rollouts, choose):
    """Every outcome of the bare rollouts: its chance, their ways, and what is chosen for their prefixes (j, t)."""
    for drawn in itertools.product(episodes(world), repeat=rollouts):
        ways = [way for _, way in drawn]
        prefixes = [(j, t) for j, way in enumerate(ways) for t in range(len(way) - 1)]
        chosen = []
        if choose is not None and prefixes:
            # The predictor is perfect unless `choose` replaces what it said.
            counts = choose([value(ways[j][t]) for j, t in prefixes], [ways[j][-1] for j, _ in prefixes])
            chosen = list(zip(prefixes, counts, strict=True))
        yield math.prod(chance for chance, _ in drawn), ways, chosen


def grown_trees(world, rollouts, choose):
    """Every tree of bare rollouts and continuations: its chance, the tree, and the world behind each turn."""
    for chance, ways, chosen in bare_draws(world, rollouts, choose):
        starts = [prefix for prefix, count in chosen for _ in range(count)]
        for continued in itertools.product(*(episodes(ways[j][t]) for j, t in starts)):
            tree = RolloutTree.from_prompt("prompt", [1], budget=rollouts)
            worlds = {tree.root: world}
            bare = [add_episode(tree, tree.root, way, worlds, j) for j, way in enumerate(ways)]
            for number, ((j, t), (_, way)) in enumerate(zip(starts, continued, strict=True)):
                add_episode(tree, bare[j][t], way, worlds, rollouts + number)
            yield chance * math.prod(chance for chance, _ in continued), tree, worlds


def expected_errors(world, rollouts, choose):
    """For each backup, `E[target - V | H]` at every history that the first rollout may pass.

    A history is the tuple of the worlds behind it, `()` at the root.
    """
    chances, errors = defaultdict(float), {mode: defaultdict(float) for mode in BACKUPS}
    for chance, tree, worlds in grown_trees(world, rollouts, choose):
        passed = [tree.root, *tree.leaves()[0].path()[:-1]]
        truth = [worlds[turn] for turn in passed]
        for mode in BACKUPS:
            tree.backup(mode)
            for depth, turn in enumerate(passed):
                errors[mode][tuple(truth[1 : depth + 1])] += chance * (turn.target - value(truth[depth]))
        for depth in range(len(passed)):
            chances[tuple(truth[1 : depth + 1])] += chance
    assert chances[()] == pytest.approx(1.0, abs=1e-12)
    return {mode: {at: error / chances[at] for at, error in errors[mode].items()} for mode in BACKUPS}


def root_bias(world, rollouts, choose):
    errors = expected_errors(world, rollouts, choose)
    return errors["leaf_mean"][()], errors["child_mean"][()]


def assert_no_error(errors):
    assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=1e-12)


def active(budget):
    return lambda values, successes: allocate_prefixes(values, successes, budget)


def uniform(budget):
    return lambda values, successes: uniform_prefixes(len(values), budget)


def active_without_outcomes(budget):
    """The counts follow the values of the prefixes, and no outcome."""
    return lambda values, successes: allocate_prefixes(values, [0] * len(values), budget)


def same_for_every_prefix(count):
    return lambda values, successes: [count] * len(values)


# Three continuations for two rollouts: the prefixes get unequal counts, but always the same ones.
FIXED_COUNTS = {
    "uniform": uniform(3),
    "random": lambda values, successes: random_prefixes(len(values), 3, seed=0),
    "active, untrained": lambda values, successes: allocate_prefixes([0.5] * len(values), successes, 3),
}


class TestBackupsAreUnbiased:
    """Both are, where nothing that was seen of a rollout decides how often it is branched."""

    @pytest.mark.parametrize("rollouts", [1, 2, 3])
    @pytest.mark.parametrize("world", [EVEN, HIGH, DEEP, SOLVED_OR_ON])
    def test_without_branching(self, world, rollouts):
        for errors in expected_errors(world, rollouts, None).values():
            assert len(errors) > 1
            assert_no_error(errors)

    @pytest.mark.parametrize("choose", FIXED_COUNTS.values(), ids=FIXED_COUNTS)
    @pytest.mark.parametrize("world", [EVEN, HIGH, SURE_OR_EVEN, DEEP])
    def test_with_counts_fixed_in_advance(self, world, choose):
        for errors in expected_errors(world, 2, choose).values():
            assert len(errors) > 1
            assert_no_error(errors)


class TestChildMeanRemovesTheBiasOfWeights:
    """The leaves below a child may depend on which child it is, as long as they know nothing of what came after."""

    @pytest.mark.parametrize(
        ("rollouts", "count", "leaf_mean"), [(2, 1, -0.05), (2, 2, -0.075), (3, 1, -0.0675), (3, 2, -0.72 / 7)]
    )
    def test_where_only_longer_rollouts_can_be_branched(self, rollouts, count, leaf_mean):
        # A rollout of value 1 keeps its one leaf, a rollout of value 0.4 gets `count` more: with one continuation, two
        # rollouts have 2, 3 or 4 leaves of mean 1, (1 + 2 * 0.4) / 3 = 0.6 or 0.4, together 0.65 instead of 0.7.
        assert value(SOLVED_OR_ON) == pytest.approx(0.7)
        errors = expected_errors(SOLVED_OR_ON, rollouts, same_for_every_prefix(count))
        assert errors["leaf_mean"][()] == pytest.approx(leaf_mean, abs=1e-12)
        assert_no_error(errors["child_mean"])

    def test_where_counts_follow_the_values_of_the_prefixes(self):
        errors = expected_errors(HIGH, 2, active_without_outcomes(4))
        assert errors["leaf_mean"][()] == pytest.approx(-1 / 30, abs=1e-12)
        assert_no_error(errors["child_mean"])

    def test_where_only_uncertain_prefixes_are_branched(self):
        # Stage 2 as it is. A sure success gets nothing as long as another prefix can be flipped: with one sure and one
        # even prefix, which is every other time, (1 + 3 * 0.5) / 4 = 0.625 stands for 0.75.
        assert root_bias(SURE_OR_EVEN, 2, active(2)) == pytest.approx((-0.0625, 0.0), abs=1e-12)

    def test_but_a_later_turn_of_the_same_rollout_must_not_count(self):
        # With two prefixes in a row, the value of the second has a say in the count of the first.
        assert root_bias(DEEP, 2, active_without_outcomes(2)) == pytest.approx((0.0734375, 0.017578125), abs=1e-12)

    def test_but_the_length_of_a_rollout_must_not_count(self):
        # A fixed budget spread evenly over prefixes: a rollout that went on shares it among more of them.
        assert root_bias(ON_THEN_SOLVED_OR_ON, 2, uniform(4)) == pytest.approx((-0.05, -0.0125), abs=1e-12)


class TestOutcomeChosenBranchingBiasesBothBackups:
    """Stage 2 chooses the count of a prefix by the outcome that it then averages with its continuations."""

    def test_counts_of_the_example(self):
        # Two failures or two successes at 0.7 are equals; a failure is flipped sooner than a success and needs less.
        for successes, counts in [((1, 1), (3, 3)), ((0, 0), (3, 3)), ((1, 0), (4, 2)), ((0, 1), (2, 4))]:
            np.testing.assert_array_equal(allocate_prefixes([0.7, 0.7], successes, 6), counts)

    @pytest.mark.parametrize("mode", BACKUPS)
    def test_both_are_biased_at_the_branched_prefix(self, mode):
        # A success is diluted by 3 or 4 continuations, a failure by 3 or 2: failures keep more of their weight.
        success, failure = 0.7 / (1 + 3) + 0.3 / (1 + 4), 0.3 / (1 + 3) + 0.7 / (1 + 2)
        error = expected_errors(EVEN, 2, active(6))[mode][(coin(0.7),)]
        assert error == pytest.approx(0.7 * 0.3 * (success - failure), abs=1e-12)
        assert error == pytest.approx(0.6846 - 0.7, abs=1e-12)

    def test_child_mean_hands_the_bias_of_the_prefix_up_to_the_root(self):
        # The root itself is not branched. Leaf means are right there: all 8 leaves weigh the same, and 6 of them are
        # fresh draws of chance 0.7 wherever they were put.
        assert root_bias(EVEN, 2, active(6)) == pytest.approx((0.0, 0.6846 - 0.7), abs=1e-12)

    @pytest.mark.parametrize(
        ("world", "continuations", "leaf_mean", "child_mean"),
        [
            # The first continuations go where they flip most surely, which is to failures of prefixes of high value
            # and successes of prefixes of low value; the next ones to more even prefixes.
            (HIGH, 1, -0.045, 0.01125),
            (LOW, 1, 0.045, -0.01125),
            (HIGH, 2, -1 / 30, 0.0),
            (HIGH, 3, -0.0025, -0.003675),
            (EVEN, 1, 0.0, 0.0),
            (EVEN, 2, 0.0, 0.0),
            (EVEN, 3, 0.0, -0.0154),
        ],
    )
    def test_neither_is_always_the_better_one(self, world, continuations, leaf_mean, child_mean):
        assert root_bias(world, 2, active(2 * continuations)) == pytest.approx((leaf_mean, child_mean), abs=1e-12)

    @pytest.mark.parametrize("world", [EVEN, HIGH, LOW, SURE_OR_EVEN, DEEP])
    def test_leaf_mean_errs_by_the_values_of_the_prefixes_it_favours(self, world):
        # A continuation is a fresh draw from its prefix, so its outcome may be replaced by the prefix's value.
        rollouts, budget = 2, 2
        shift = sum(
            chance * sum(count * (value(ways[j][t]) - value(world)) for (j, t), count in chosen)
            for chance, ways, chosen in bare_draws(world, rollouts, active(budget))
        )
        leaf_mean, _ = root_bias(world, rollouts, active(budget))
        assert leaf_mean == pytest.approx(shift / (rollouts + budget), abs=1e-12)

    @pytest.mark.parametrize("budget", [2, 4, 6])
    @pytest.mark.parametrize("world", [EVEN, HIGH, LOW, SURE_OR_EVEN])
    def test_child_mean_errs_by_the_weight_that_factual_outcomes_keep(self, world, budget):
        # E[(r + k V) / (1 + k)] - V = E[(r - V) / (1 + k)], nothing if the count k does not know r.
        rollouts = 2
        shift = sum(
            chance * sum((ways[j][-1] - value(ways[j][t])) / (1 + count) for (j, t), count in chosen)
            for chance, ways, chosen in bare_draws(world, rollouts, active(budget))
        )
        _, child_mean = root_bias(world, rollouts, active(budget))
        assert child_mean == pytest.approx(shift / rollouts, abs=1e-12)

    def test_child_mean_is_the_closer_one_over_random_prompts(self):
        rng = np.random.default_rng(0)
        biases = []
        for first, high, low in rng.random((40, 3)):
            world = ((first, coin(high)), (1 - first, coin(low)))
            biases.append(root_bias(world, 2, active(4)))
        leaf_mean, child_mean = np.abs(biases).mean(axis=0)
        assert child_mean > 1e-4
        assert leaf_mean > 5 * child_mean

    @pytest.mark.parametrize("start", [0.1, 0.9])
    def test_leaf_mean_pulls_sure_prompts_to_the_middle(self, start):
        """The simulator's martingales: four rollouts of five turns, two continuations for each."""
        rng, turns, rollouts, continuations, repeats = np.random.default_rng(1), 5, 4, 2, 1500
        depths, errors = np.arange(1, turns), np.empty((repeats, 2))
        for repeat in range(repeats):
            paths = draw_paths(evidence_of(np.full(rollouts, start)), turns, rng)
            values, successes = value_of(paths[:, 1:-1], depths, turns), paths[:, -1] > 0
            counts = allocate_prefixes(
                values.ravel(), np.repeat(successes, turns - 1), rollouts * continuations, seed=rng
            )
            tree = RolloutTree.from_prompt("prompt", [1], budget=rollouts)
            prefixes = []
            for success in successes:
                prefixes += add_episode(tree, tree.root, [ON] * (turns - 1) + [int(success)], {}, 0)[:-1]
            starts = np.repeat(np.arange(counts.size), counts)
            left = turns - np.tile(depths, rollouts)[starts]
            won = draw_evidence(paths[:, 1:-1].ravel()[starts], left, turns, rng) > 0
            for prefix, success in zip(starts, won, strict=True):
                add_episode(tree, prefixes[prefix], [int(success)], {}, 0)
            for column, mode in enumerate(("leaf_mean", "child_mean")):
                tree.backup(mode)
                # Less the mean of the bare rollouts, which is unbiased and shares most of the noise.
                errors[repeat, column] = tree.root.target - successes.mean()
        inwards = math.copysign(1.0, 0.5 - start) * errors.mean(axis=0)
        noise = errors.std(axis=0) / math.sqrt(repeats)
        assert (noise < 0.005).all()
        assert inwards[0] > 0.06 + 5 * noise[0]
        assert abs(inwards[1]) < 0.01 + 5 * noise[1]


def random_world(rng, turns):
    chances = rng.dirichlet(np.ones(rng.integers(1, 4)))
    return tuple(
        (float(chance), int(rng.random() < 0.5) if turns == 1 or rng.random() < 0.2 else random_world(rng, turns - 1))
        for chance in chances
    )


def histories(world):
    """All worlds that may follow, `world` itself first."""
    yield world
    if not isinstance(world, int):
        for _, after in world:
            yield from histories(after)


def variation_to_come(world):
    """`E[sum_t (V_{t+1} - V_t)^2 | H]`, turn by turn."""
    if isinstance(world, int):
        return 0.0
    now = value(world)
    return sum(chance * ((value(after) - now) ** 2 + variation_to_come(after)) for chance, after in world)


class TestVariationToCome:
    """The expected quadratic variation of the success martingale that is still to come is `V (1 - V)`."""

    def test_at_every_history_of_300_random_worlds(self):
        rng = np.random.default_rng(2)
        met = 0
        for instance in range(300):
            for world in histories(random_world(rng, turns=1 + instance % 6)):
                assert variation_to_come(world) == pytest.approx(value(world) * (1 - value(world)), abs=1e-12)
                met += not isinstance(world, int) and 0.01 < value(world) < 0.99
        assert met > 1000

    def test_over_whole_episodes(self):
        # Without the recursion, which takes for granted that the variation of the turns adds up.
        rng = np.random.default_rng(3)
        for _ in range(60):
            world = random_world(rng, turns=4)
            total = 0.0
            for chance, way in episodes(world):
                total += chance * np.square(np.diff([value(world), *map(value, way)])).sum()
            assert total == pytest.approx(value(world) * (1 - value(world)), abs=1e-12)

    def test_is_half_the_chance_that_two_rollouts_differ(self):
        rng = np.random.default_rng(4)
        for _ in range(60):
            world = random_world(rng, turns=4)
            assert root_utility(value(world), 2) == pytest.approx(2 * variation_to_come(world), abs=1e-12)

    def test_of_a_fully_grown_tree_is_read_from_its_child_means(self):
        # Where all next turns have the same chance and all are in the tree, a child mean is the value itself. A leaf
        # mean is not, for shorter episodes have fewer leaves.
        rng = np.random.default_rng(5)
        gaps = dict.fromkeys(BACKUPS, 0.0)
        for _ in range(60):
            tree = RolloutTree.from_prompt("prompt", [1])

            def grow(parent, world, tree=tree):
                for _, after in world:
                    (turn,) = add_episode(tree, parent, [after], {}, 0)
                    if not isinstance(after, int):
                        grow(turn, after)

            grow(tree.root, random_world(rng, turns=4))
            for mode in BACKUPS:
                tree.backup(mode)
                to_come = {}
                for turn in reversed(list(tree.root.turns())):
                    steps = [(child.target - turn.target) ** 2 + to_come[child] for child in turn.children]
                    to_come[turn] = sum(steps) / len(steps) if steps else 0.0
                    gap = abs(to_come[turn] - turn.target * (1 - turn.target))
                    gaps[mode] = max(gaps[mode], gap)
        assert gaps["child_mean"] < 1e-12
        assert gaps["leaf_mean"] > 0.01

    @pytest.mark.parametrize("start", [0.1, 0.5, 0.8])
    def test_of_the_simulated_martingales(self, start):
        rng, turns, draws = np.random.default_rng(6), 5, 40_000
        paths = draw_paths(evidence_of(np.full(draws, start)), turns, rng)
        values = value_of(paths, np.arange(turns + 1), turns)
        to_come = np.square(np.diff(values, axis=1))[:, ::-1].cumsum(axis=1)[:, ::-1]
        excess = to_come - values[:, :-1] * (1 - values[:, :-1])
        assert (np.abs(excess.mean(axis=0)) <= 5 * excess.std(axis=0) / math.sqrt(draws)).all()


def expected_mixed_prompts(values, counts):
    """Expected number of effective prompts of value `values[i]` with `counts[i]` rollouts, over all outcomes."""
    total = 0.0
    for chance_of_success, count in zip(values, counts, strict=True):
        for outcomes in itertools.product((0, 1), repeat=count):
            tree = RolloutTree.from_prompt("prompt", [1])
            for outcome in outcomes:
                add_episode(tree, tree.root, [outcome], {}, 0)
            chance = math.prod(chance_of_success if outcome else 1 - chance_of_success for outcome in outcomes)
            total += chance * effective(tree)
    return total


def expected_mixed_prefixes(values, success, counts):
    """Expected number of mixed prefixes of one rollout with that outcome, over all outcomes of its continuations.

    The root has one child, so that it is no branched anchor and does not count.
    """
    total = 0.0
    owners = np.repeat(np.arange(len(values)), counts)
    for outcomes in itertools.product((0, 1), repeat=owners.size):
        tree = RolloutTree.from_prompt("prompt", [1])
        turns = add_episode(tree, tree.root, [ON] * len(values) + [success], {}, 0)
        for owner, outcome in zip(owners, outcomes, strict=True):
            add_episode(tree, turns[owner], [outcome], {}, 0)
        chance = math.prod(
            values[owner] if outcome else 1 - values[owner] for owner, outcome in zip(owners, outcomes, strict=True)
        )
        total += chance * mixed_anchor_counts(tree)[0]
    return total


CHANCES = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 0.3, 0.7]), st.floats(0, 1))


@st.composite
def root_problems(draw):
    values = draw(st.lists(CHANCES, min_size=1, max_size=12))
    most = draw(st.integers(2, 9))
    step = 2 if most == 2 else 1
    return values, draw(st.sampled_from(range(2, len(values) * most + 1, step))), most


@st.composite
def prefix_problems(draw):
    values, successes = zip(*draw(st.lists(st.tuples(CHANCES, st.booleans()), min_size=1, max_size=12)), strict=True)
    return values, successes, draw(st.integers(0, 40))


class TestObjectivesAreExpectedContrasts:
    @pytest.mark.parametrize("counts", [(0, 2, 3, 4), (1, 6, 0, 2), (5, 1, 2, 0)])
    def test_utility_of_roots_is_the_expected_number_of_mixed_prompts(self, counts):
        values = (0.02, 0.3, 0.5, 0.9)
        assert utility_roots(values, counts) == pytest.approx(expected_mixed_prompts(values, counts), abs=1e-12)

    @pytest.mark.parametrize("counts", [(0, 2, 3, 4), (1, 6, 0, 2), (5, 1, 2, 0)])
    def test_utility_of_prefixes_is_the_expected_number_of_flipped_ones(self, counts):
        values, successes = (0.1, 0.6, 0.6, 0.95), (0, 0, 1, 1)
        mixed = sum(
            expected_mixed_prefixes([chance], success, [count])
            for chance, success, count in zip(values, successes, counts, strict=True)
        )
        assert utility_prefixes(values, successes, counts) == pytest.approx(mixed, abs=1e-12)

    def test_a_prefix_is_also_mixed_by_continuations_from_further_down(self):
        # Stage 2 counts the flips of a prefix's own continuations; the mixed-anchor ratio looks at all leaves below.
        # With several prefixes in a row, the number of mixed anchors is therefore not what stage 2 maximises, and
        # spreading over both can mix more of them: one flip at the second serves the first.
        values, successes = [0.1, 0.4], [0, 0]
        chosen, spread = allocate_prefixes(values, successes, 2), uniform_prefixes(2, 2)
        np.testing.assert_array_equal([chosen, spread], [[0, 2], [1, 1]])
        assert utility_prefixes(values, successes, chosen) == pytest.approx(0.64)
        assert utility_prefixes(values, successes, spread) == pytest.approx(0.5)
        assert expected_mixed_prefixes(values, 0, chosen) == pytest.approx(0.64)
        assert expected_mixed_prefixes(values, 0, spread) == pytest.approx(0.4 + (1 - 0.9 * 0.6))


class TestActiveIsNeverBelowTheBaselines:
    """The expected number of contrasts, at the same budget, if the predictor is right."""

    @settings(deadline=None, max_examples=200)
    @given(root_problems(), st.floats(0.5, 20), st.integers(0, 3))
    def test_roots(self, problem, group_size, seed):
        values, budget, most = problem
        best = utility_roots(values, allocate_roots(values, budget, most, seed))
        assert best >= utility_roots(values, uniform_roots(len(values), budget, most, group_size)) - 1e-9
        assert best >= utility_roots(values, pcl_roots(values, budget, most, group_size, seed)) - 1e-9

    @settings(deadline=None, max_examples=200)
    @given(prefix_problems(), st.integers(0, 10**6))
    def test_prefixes(self, problem, seed):
        values, successes, budget = problem
        best = utility_prefixes(values, successes, allocate_prefixes(values, successes, budget, seed))
        for counts in (uniform_prefixes(len(values), budget, seed), random_prefixes(len(values), budget, seed)):
            assert best >= utility_prefixes(values, successes, counts) - 1e-9

    def test_roots_by_how_much(self):
        values = [0.02, 0.3, 0.5, 0.9]
        mixed = {
            "active": expected_mixed_prompts(values, allocate_roots(values, 8, 4)),
            "uniform": expected_mixed_prompts(values, uniform_roots(4, 8, 4, 2)),
            "pcl": expected_mixed_prompts(values, pcl_roots(values, 8, 4, 2)),
            "pcl, half the prompts": expected_mixed_prompts(values, pcl_roots(values, 8, 4, 4)),
        }
        expected = {"active": 1.6268, "uniform": 1.1392, "pcl": 1.1392, "pcl, half the prompts": 1.6268}
        assert mixed == pytest.approx(expected, abs=1e-12)

    def test_prefixes_by_how_much(self):
        values, successes = [0.9, 0.7, 0.4], [1, 0, 1]
        assert utility_prefixes(values, successes, allocate_prefixes(values, successes, 3)) == pytest.approx(1.54)
        assert utility_prefixes(values, successes, uniform_prefixes(3, 3)) == pytest.approx(0.1 + 0.7 + 0.6)


class TestActiveCanBeBelowUniformWithAWrongPredictor:
    def test_roots(self):
        values, believed = [0.5, 0.9], [0.9, 0.5]
        chosen, even = allocate_roots(believed, 4, 4), uniform_roots(2, 4, 4, 2)
        np.testing.assert_array_equal([chosen, even], [[0, 4], [2, 2]])
        assert expected_mixed_prompts(values, chosen) == pytest.approx(0.3438)
        assert expected_mixed_prompts(values, even) == pytest.approx(0.5 + 0.18)

    def test_prefixes(self):
        values, believed, successes = [0.9, 0.05], [0.05, 0.9], [0, 0]
        chosen, even = allocate_prefixes(believed, successes, 2), uniform_prefixes(2, 2)
        np.testing.assert_array_equal([chosen, even], [[0, 2], [1, 1]])
        assert utility_prefixes(values, successes, chosen) == pytest.approx(1 - 0.95**2)
        assert utility_prefixes(values, successes, even) == pytest.approx(0.9 + 0.05)
