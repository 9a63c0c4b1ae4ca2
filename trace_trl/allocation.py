"""
Where a sampling budget is spent: the two allocation stages of TRACE (arXiv 2606.11119) and the baselines' choices.

    stage 1   values of all candidate prompts      ── allocate_roots ──>     bare rollouts per prompt, m_i
    stage 2   values of one prompt's prefixes and  ── allocate_prefixes ──>  continuations per prefix, k_jt
              the outcomes of its bare rollouts

A value is the predicted chance of success from a history on. Both stages maximise the expected number of contrasts: of
prompts whose rollouts show both outcomes, and of prefixes where a continuation flips the outcome already seen. Pure
functions on numbers: the same arguments give the same counts on every process. This module knows nothing of torch,
TRL or trees.

A value may come with a certainty, the share `E[V(1 - V)] / (v(1 - v))` of the outcomes' variance that is left once the
true value `V` is known: 1 where `v` is exactly `V`, 0 where the outcome is settled and nobody knows how. A prompt of
value 0.5 is worth most if its outcomes are mixed, and nothing if it is either solved or hopeless. `V` is then taken
to be Beta distributed, with mean `v` and that variance:

    V ~ Beta(s v, s (1 - v)),   s = certainty / (1 - certainty)

and both objectives are expected over it, in stage 2 after one draw, the factual outcome. Certainties of 1 for all
give the paper's formulas.

Contrast is not progress: of a prompt solved 95 times in 100 and one solved 5 times in 100, which are as likely to
show both outcomes, the first has little left to gain. With a headroom exponent `b > 0`, stage 1 weighs `U_root` by
`(1 - V)^b`, so that the most wanted success rate goes from 1/2 down to `1 / (2 + b)`.

`ROOT_ALLOCATORS` and `PREFIX_ALLOCATORS` hold the choices by name, each kind with one signature. What is added there,
an [`Allocator`] or a plain function, is a choice of the configuration:

    counts = ROOT_ALLOCATORS[name](values, budget=..., max_per_root=..., group_size=..., seed=..., certainties=...,
                                   headroom_exponent=...)
    counts = PREFIX_ALLOCATORS[name](values, successes, budget=..., seed=..., certainties=...)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt


Seed: TypeAlias = "int | np.random.Generator | None"

# Marginals closer than this, relative to their size, are ties: 0.3 and 0.7 differ in the last bits of v(1 - v).
TIE_TOLERANCE = 1e-12
# Where a certainty counts as 1, and where as the least: the Beta distribution's parameters stay between 1e-6 and 1e3
SURE, UNSURE = 0.999, 1e-6


def root_utility(value: npt.ArrayLike, count: npt.ArrayLike) -> np.ndarray:
    """Chance that `count` rollouts of a prompt show both outcomes (stage 1 of arXiv 2606.11119):

        U_root(v, m) = 1 - v^m - (1 - v)^m   for m >= 1,   U_root(v, 0) = 0

    Args:
        value (array-like of `float`): predicted success rates in [0, 1].
        count (array-like of `int`): rollouts, broadcast against `value`.

    Returns:
        `np.ndarray` of the broadcast shape.
    """
    v, m = np.asarray(value, dtype=np.float64), np.asarray(count)
    return np.where(m < 2, 0.0, 1.0 - v**m - (1.0 - v) ** m)


def prefix_utility(repeat: npt.ArrayLike, count: npt.ArrayLike) -> np.ndarray:
    """Chance that at least one of `count` continuations flips the factual outcome (stage 2 of arXiv 2606.11119):

        U_pref(q, k) = 1 - q^k

    Args:
        repeat (array-like of `float`): chances `q = r v + (1 - r)(1 - v)` that a continuation repeats the outcome.
        count (array-like of `int`): continuations, broadcast against `repeat`.

    Returns:
        `np.ndarray` of the broadcast shape.
    """
    return 1.0 - np.asarray(repeat, dtype=np.float64) ** np.asarray(count)


def utility_roots(values: npt.ArrayLike, counts: npt.ArrayLike) -> float:
    """Objective of stage 1, `sum_i U_root(v_i, m_i)`: the expected number of prompts that show both outcomes."""
    return float(root_utility(values, counts).sum())


def utility_prefixes(values: npt.ArrayLike, successes: npt.ArrayLike, counts: npt.ArrayLike) -> float:
    """Objective of stage 2, `sum_jt U_pref(q_jt, k_jt)`: the expected number of prefixes whose outcome is flipped.

    Args:
        values, successes: as in [`allocate_prefixes`].
        counts (array-like of `int`, shape `(prefixes,)`): continuations per prefix.
    """
    v, r = np.asarray(values, dtype=np.float64), np.asarray(successes, dtype=np.float64)
    return float(prefix_utility(r * v + (1 - r) * (1 - v), counts).sum())


def allocate_roots(
    values: npt.ArrayLike,
    budget: int,
    max_per_root: int,
    seed: Seed = None,
    certainties: npt.ArrayLike | None = None,
    headroom_exponent: float = 0.0,
) -> np.ndarray:
    """Stage 1 of TRACE (arXiv 2606.11119), solved exactly: bare rollouts for every prompt of the candidate pool.

        maximise  sum_i (1 - v_i)^b U_root(v_i, m_i)
        subject to  sum_i m_i = budget,  m_i in {0} or [2, max_per_root]

    where the paper has `b = 0`.

    Among equal optima, one that enters the most prompts; what is left open by that goes to the prompts with the fewest
    rollouts, in a random order given by `seed`.

    Args:
        values (array-like of `float`, shape `(prompts,)`): predicted success rates in [0, 1].
        budget (`int`): bare rollouts to spend, all of them.
        max_per_root (`int`): most rollouts one prompt may get.
        seed (`int`, `np.random.Generator` or `None`): order among ties; `None` takes them in pool order.
        certainties (array-like of `float`, shape `(prompts,)`, *optional*): how exactly the values are known, in
            [0, 1]; see above. `None` is 1 for all.
        headroom_exponent (`float`): `b`, how much more a hard prompt is worth than an easy one; 0 or more.

    Returns:
        `np.ndarray` of `int64`, shape `(prompts,)`.

    Raises:
        ValueError: if a value or certainty is not in [0, 1], the exponent is negative, or if no allocation spends
            exactly `budget`: a budget that is negative, 1, above `prompts * max_per_root`, or odd with
            `max_per_root=2`; `max_per_root` below 2.

    Cost: `O((prompts + budget) log(max_per_root))`.
    """
    # The only constraint that is not concave is m_i != 1. Sharing the worth of the first two rollouts, 2 v(1 - v),
    # between them gives unit marginals v(1 - v) three times and then falling: the concave envelope, equal to U_root at
    # every permitted m. Let t be the marginal of the last unit that a greedy choice on the envelope takes. An
    # allocation falls short of the envelope's optimum by |marginal - t| for each unit above t that it leaves and each
    # unit below t that it takes, and by nothing else.
    #
    # With all units above t taken, the remainder is made of units at t: of prompts not yet entered (2 or 3 units, not
    # 1) and further rollouts of entered prompts (any number). That works without loss unless the remainder is 1 and no
    # entered prompt has a unit at t. Then an allocation must take a unit below t or leave one above t, and one such
    # unit suffices: give an entered prompt its best unit below t, or take the worst unit above t away and enter a
    # prompt at t with two. Entering a prompt below t, which takes two units, would also need one above t to be left,
    # so it is never better. The cheaper of the two repairs is the optimum.
    v = _check_values(values)
    s = _strengths(certainties, v.size)
    budget = _check_budget(budget, "rollout budget")
    _check_root_budget(v.size, budget, max_per_root)
    if not 0 <= headroom_exponent < np.inf:
        raise ValueError(f"The headroom exponent is {headroom_exponent}: set it to 0 or more.")
    counts = np.zeros(v.size, dtype=np.int64)
    if budget == 0:
        return counts
    rank = _tie_ranks(v.size, seed)

    if s is None:
        weights = (1.0 - v) ** headroom_exponent
    else:
        # (1 - V)^b times the density of Beta(x, y) is its mean times that of Beta(x, y + b)
        x, y = s * v, s * (1.0 - v)
        weights = _mean_headroom(x, y, headroom_exponent)
        y = y + headroom_exponent

    def marginals(owners: np.ndarray, units: np.ndarray) -> np.ndarray:
        if s is None:
            return weights[owners] * _root_marginals(v[owners], units)
        return weights[owners] * _beta_root_marginals(x[owners], y[owners], units)

    level = _Level(marginals, v.size, budget, max_per_root)

    counts, room, left = level.counts, level.room, budget - int(level.counts.sum())
    open_prompts = np.flatnonzero((counts == 0) & (room > 0))
    open_prompts = open_prompts[np.argsort(rank[open_prompts])]
    entered = open_prompts[: left // 2]
    counts[entered] = 2
    room[entered] -= 2
    room[counts == 0] = 0
    left -= 2 * entered.size
    if left <= room.sum():
        return _raise_lowest(counts, room, left, rank)

    active = np.flatnonzero(counts)
    lasts = marginals(active, counts[active])
    nexts = np.where(counts[active] < max_per_root, marginals(active, counts[active] + 1), -np.inf)
    loss_of_entering = lasts.min() - level.threshold
    loss_of_adding = level.threshold - nexts.max()
    if loss_of_entering <= loss_of_adding + TIE_TOLERANCE * level.threshold:
        tied = active[lasts <= lasts.min() * (1 + TIE_TOLERANCE)]
        counts[tied[np.lexsort((rank[tied], -counts[tied]))[0]]] -= 1
        counts[open_prompts[0]] = 2
    else:
        tied = active[nexts >= nexts.max() * (1 - TIE_TOLERANCE)]
        counts[tied[np.lexsort((rank[tied], counts[tied]))[0]]] += 1
    return counts


def allocate_prefixes(
    values: npt.ArrayLike,
    successes: npt.ArrayLike,
    budget: int,
    seed: Seed = None,
    certainties: npt.ArrayLike | None = None,
) -> np.ndarray:
    """Stage 2 of TRACE (arXiv 2606.11119), solved exactly: continuations for every prefix of one prompt's rollouts.

        q = r v + (1 - r)(1 - v)
        maximise  sum_jt (1 - q_jt^k_jt)   subject to  sum_jt k_jt = budget

    The marginal of a further continuation, `q^k (1 - q)`, falls with k: the greedy choice is the optimum. Among equal
    optima the continuations are spread over the prefixes with the fewest, in a random order given by `seed`.

    Args:
        values (array-like of `float`, shape `(prefixes,)`): predicted success rates in [0, 1] at the prefixes (j, t).
        successes (array-like of `bool` or 0/1, shape `(prefixes,)`): factual outcome `r_j` of the rollout that the
            prefix belongs to.
        budget (`int`): continuations to spend, all of them.
        seed (`int`, `np.random.Generator` or `None`): order among ties; `None` takes them in the order given.
        certainties (array-like of `float`, shape `(prefixes,)`, *optional*): how exactly the values are known, in
            [0, 1]; see above. `None` is 1 for all.

    Returns:
        `np.ndarray` of `int64`, shape `(prefixes,)`.

    Raises:
        ValueError: if a value or certainty is not in [0, 1], a success neither 0 nor 1, the lengths differ, `budget`
            is negative, or `budget` is positive and there is no prefix.

    Cost: `O((prefixes + budget) log(budget))`.
    """
    v = _check_values(values)
    r = _check_successes(successes, v.size)
    budget = _check_budget(budget, "continuation budget")
    _check_prefix_budget(v.size, budget)
    if budget == 0:
        return np.zeros(v.size, dtype=np.int64)
    s = _strengths(certainties, v.size)
    repeat, flip = np.where(r, v, 1.0 - v), np.where(r, 1.0 - v, v)

    def marginals(owners: np.ndarray, units: np.ndarray) -> np.ndarray:
        if s is None:
            return flip[owners] * repeat[owners] ** (units - 1)
        # The factual outcome is one draw: the chance of repeating it is Beta(s q + 1, s (1 - q)) now
        return _beta_moment(s[owners] * repeat[owners] + 1.0, s[owners] * flip[owners], units - 1)

    level = _Level(marginals, v.size, budget, max_per_owner=budget)
    return _raise_lowest(level.counts, level.room, budget - int(level.counts.sum()), _tie_ranks(v.size, seed))


def uniform_roots(count: int, budget: int, max_per_root: int, group_size: float) -> np.ndarray:
    """The same number of bare rollouts for each of the first prompts of the pool, as GRPO samples them.

    `budget // group_size` prompts share the budget evenly; the first ones get the remainder, one each. There are more
    prompts where `max_per_root` would be exceeded, fewer where one would get less than 2 rollouts or the pool ends.

    Args:
        count (`int`): prompts in the pool.
        budget, max_per_root: as in [`allocate_roots`].
        group_size (`float`): rollouts per prompt that are wanted on average.

    Returns:
        `np.ndarray` of `int64`, shape `(count,)`.

    Raises:
        ValueError: as [`allocate_roots`], or if `group_size` is not positive.
    """
    budget = _check_budget(budget, "rollout budget")
    _check_root_budget(count, budget, max_per_root)
    if not group_size > 0:
        raise ValueError(f"The group size is {group_size}: ask for a positive number of rollouts per prompt.")
    counts = np.zeros(count, dtype=np.int64)
    if budget == 0:
        return counts
    # The two bounds never cross: a budget that passed the check has ceil(budget / max_per_root) <= budget // 2.
    most, fewest = min(count, budget // 2), -(-budget // max_per_root)
    prompts = max(fewest, min(most, int(budget // group_size)))
    counts[:prompts] = budget // prompts
    counts[: budget % prompts] += 1
    return counts


def pcl_roots(
    values: npt.ArrayLike, budget: int, max_per_root: int, group_size: float, seed: Seed = None
) -> np.ndarray:
    """The counts of [`uniform_roots`] for the prompts whose value is nearest 0.5, as in PCL (arXiv 2510.01135).

    Args:
        values, budget, max_per_root: as in [`allocate_roots`].
        group_size (`float`): rollouts per prompt that are wanted on average.
        seed (`int`, `np.random.Generator` or `None`): order among equally near prompts; `None` takes pool order.

    Returns:
        `np.ndarray` of `int64`, shape `(prompts,)`.

    Raises:
        ValueError: as [`uniform_roots`], or if a value is not in [0, 1].
    """
    v = _check_values(values)
    counts = np.empty(v.size, dtype=np.int64)
    distance = np.round(np.abs(v - 0.5) / TIE_TOLERANCE)
    counts[np.lexsort((_tie_ranks(v.size, seed), distance))] = uniform_roots(v.size, budget, max_per_root, group_size)
    return counts


def uniform_prefixes(count: int, budget: int, seed: Seed = None) -> np.ndarray:
    """The same number of continuations for every prefix; the remainder goes, one each, to prefixes chosen by `seed`.

    Args:
        count (`int`): prefixes.
        budget (`int`): continuations to spend, all of them.
        seed (`int`, `np.random.Generator` or `None`): who gets the remainder; `None` gives it to the first ones.

    Returns:
        `np.ndarray` of `int64`, shape `(count,)`.

    Raises:
        ValueError: if `budget` is negative, or positive and there is no prefix.
    """
    budget = _check_budget(budget, "continuation budget")
    _check_prefix_budget(count, budget)
    if budget == 0:
        return np.zeros(count, dtype=np.int64)
    return budget // count + (_tie_ranks(count, seed) < budget % count)


def random_prefixes(count: int, budget: int, seed: Seed = None) -> np.ndarray:
    """Every continuation at a prefix drawn uniformly and independently of the others (TreePO-style).

    Args:
        count (`int`): prefixes.
        budget (`int`): continuations to spend, all of them.
        seed (`int`, `np.random.Generator` or `None`): as for `np.random.default_rng`: `None` differs at every call.

    Returns:
        `np.ndarray` of `int64`, shape `(count,)`.

    Raises:
        ValueError: if `budget` is negative, or positive and there is no prefix.
    """
    budget = _check_budget(budget, "continuation budget")
    _check_prefix_budget(count, budget)
    if budget == 0:
        return np.zeros(count, dtype=np.int64)
    return np.bincount(np.random.default_rng(seed).integers(count, size=budget), minlength=count).astype(np.int64)


def _active_roots(values, *, budget, max_per_root, group_size, seed=None, certainties=None, headroom_exponent=0.0):
    return allocate_roots(values, budget, max_per_root, seed, certainties, headroom_exponent)


def _uniform_roots(values, *, budget, max_per_root, group_size, seed=None, certainties=None, headroom_exponent=0.0):
    return uniform_roots(len(values), budget, max_per_root, group_size)


def _pcl_roots(values, *, budget, max_per_root, group_size, seed=None, certainties=None, headroom_exponent=0.0):
    return pcl_roots(values, budget, max_per_root, group_size, seed)


def _active_prefixes(values, successes, *, budget, seed=None, certainties=None):
    return allocate_prefixes(values, successes, budget, seed, certainties)


def _uniform_prefixes(values, successes, *, budget, seed=None, certainties=None):
    return uniform_prefixes(len(values), budget, seed)


def _random_prefixes(values, successes, *, budget, seed=None, certainties=None):
    return random_prefixes(len(values), budget, seed)


@dataclass(frozen=True)
class Allocator:
    """An entry of a registry.

    Attributes:
        function (`Callable`): takes the arguments of its neighbours in the registry, and gives one count per value.
        reads_values (`bool`): whether the counts depend on the values. If not, no value is predicted, and all are 0.5.
    """

    function: Callable[..., np.ndarray]
    reads_values: bool = True

    def __call__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return self.function(*args, **kwargs)


ROOT_ALLOCATORS: dict[str, Allocator] = {
    "active": Allocator(_active_roots),
    "uniform": Allocator(_uniform_roots, reads_values=False),
    "pcl": Allocator(_pcl_roots),
}

PREFIX_ALLOCATORS: dict[str, Allocator] = {
    "active": Allocator(_active_prefixes),
    "uniform": Allocator(_uniform_prefixes, reads_values=False),
    "random": Allocator(_random_prefixes, reads_values=False),
}


def reads_values(allocators: Mapping[str, Callable[..., np.ndarray]], name: str) -> bool:
    """Whether the allocator of that name needs predicted values. A plain function is taken to."""
    return name in allocators and getattr(allocators[name], "reads_values", True)


def _root_marginals(v: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Worth of the `units`-th rollout on the concave envelope of `U_root`; the arguments are broadcast."""
    exponents = np.maximum(units - 2, 1)
    tail = np.where(units <= 3, 1.0, v**exponents + (1.0 - v) ** exponents)
    return v * (1.0 - v) * tail


def _beta_root_marginals(a: np.ndarray, b: np.ndarray, units: np.ndarray) -> np.ndarray:
    """[`_root_marginals`], expected over `V ~ Beta(a, b)`: the first three units are worth `E[V(1 - V)]`."""
    exponents = np.maximum(units - 1, 2)
    tail = _beta_moment(a, b, exponents) + _beta_moment(b, a, exponents)
    return np.where(units <= 3, a * b / ((a + b) * (a + b + 1.0)), tail)


def _mean_headroom(a: np.ndarray, b: np.ndarray, power: float) -> np.ndarray:
    """`E[(1 - X)^power]` for `X ~ Beta(a, b)`; 0 where `b` is, unless `power` is 0."""
    if power == 0:
        return np.ones_like(a)
    # Gamma(z) = Gamma(z + 1) / z keeps the arguments above 1
    first = b / (b + power) * (a + b + power) / (a + b)
    return first * np.exp(
        _log_gamma(b + power + 1.0) - _log_gamma(b + 1.0) - _log_gamma(a + b + power + 1.0) + _log_gamma(a + b + 1.0)
    )


def _beta_moment(a: np.ndarray, b: np.ndarray, power: np.ndarray) -> np.ndarray:
    """`E[X^power (1 - X)]` for `X ~ Beta(a, b)`."""
    # The first factors by themselves, which are 0 where `a` or `b` is
    first = np.where(power > 0, a, 1.0) * b / (a + b)
    rest = np.exp(
        _log_gamma(a + np.maximum(power, 1))
        - _log_gamma(a + 1.0)
        - _log_gamma(a + b + 1.0 + power)
        + _log_gamma(a + b + 1.0)
    )
    return first * rest


def _log_gamma(x: np.ndarray) -> np.ndarray:
    """`log(Gamma(x))` for `x >= 1`, which NumPy lacks: Stirling's series above 9, the recurrence below."""
    x = np.asarray(x, dtype=np.float64)
    factor = np.ones_like(x)
    for _ in range(9):
        low = x < 9.0
        factor = np.where(low, factor * x, factor)
        x = np.where(low, x + 1.0, x)
    y = 1.0 / (x * x)
    series = (1 / 12 - y * (1 / 360 - y * (1 / 1260 - y * (1 / 1680 - y * (1 / 1188 - y * 691 / 360360))))) / x
    return (x - 0.5) * np.log(x) - x + 0.5 * np.log(2 * np.pi) + series - np.log(factor)


class _Level:
    """Cuts falling sequences of unit marginals at the worth of the `budget`-th best unit, without a heap.

    Units are looked at in blocks of doubling depth. An owner whose last seen unit is above the running threshold has
    all its seen units above it, so a block of depth d holds at most `budget / d` owners: each block costs `O(budget)`.

    Attributes:
        threshold (`float`): marginal of the `budget`-th best unit.
        counts (`np.ndarray` of `int64`, shape `(owners,)`): units above the threshold.
        room (`np.ndarray` of `int64`, shape `(owners,)`): units at the threshold.
    """

    def __init__(
        self,
        marginals: Callable[[np.ndarray, np.ndarray], np.ndarray],
        owners: int,
        budget: int,
        max_per_owner: int,
    ):
        self.threshold = -np.inf
        worth, owner = np.empty(0), np.empty(0, dtype=np.int64)
        live, depth, width = np.arange(owners), 0, 3
        while live.size and depth < max_per_owner:
            units = np.arange(depth + 1, min(depth + width, max_per_owner) + 1)
            block = marginals(live[:, None], units)
            worth, owner = np.concatenate([worth, block.ravel()]), np.concatenate([owner, np.repeat(live, units.size)])
            if worth.size >= budget:
                self.threshold = float(np.partition(worth, worth.size - budget)[worth.size - budget])
                kept = worth >= self.threshold * (1 - TIE_TOLERANCE)
                worth, owner = worth[kept], owner[kept]
            live = live[block[:, -1] > self.threshold]
            depth += units.size
            width = depth
        above = worth > self.threshold * (1 + TIE_TOLERANCE)
        self.counts = np.bincount(owner[above], minlength=owners).astype(np.int64)
        self.room = np.bincount(owner[~above], minlength=owners).astype(np.int64)
        if self.threshold == 0:
            # Worthless units never end, and the blocks stop among them.
            self.room = max_per_owner - self.counts


def _raise_lowest(counts: np.ndarray, room: np.ndarray, extra: int, rank: np.ndarray) -> np.ndarray:
    """Adds `extra` units where there is room, always to the lowest count, by `rank` among equal counts."""
    top = counts + room
    low, high = 0, int(top.max())  # low: a level all counts can be raised to within `extra`
    while low < high:
        middle = (low + high + 1) // 2
        if int((np.clip(middle, counts, top) - counts).sum()) <= extra:
            low = middle
        else:
            high = middle - 1
    raised = np.clip(low, counts, top)
    last = np.flatnonzero((raised == low) & (top > low))
    raised[last[np.argsort(rank[last])[: extra - int((raised - counts).sum())]]] += 1
    return raised


def _tie_ranks(count: int, seed: Seed) -> np.ndarray:
    return np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)


def _check_values(values: npt.ArrayLike) -> np.ndarray:
    v = np.asarray(values, dtype=np.float64)
    if v.ndim != 1:
        raise ValueError(f"Values have shape {v.shape}: pass one value per anchor, in one dimension.")
    wrong = ~((v >= 0) & (v <= 1))  # `nan` compares false
    if wrong.any():
        raise ValueError(
            f"Value {v[wrong][0]} at position {int(np.argmax(wrong))} is no chance of success: pass values in [0, 1]."
        )
    return v


def _strengths(certainties: npt.ArrayLike | None, count: int) -> np.ndarray | None:
    """Sums `s` of the Beta distributions' parameters; `None` where every value counts as known."""
    if certainties is None:
        return None
    c = np.asarray(certainties, dtype=np.float64)
    if c.shape != (count,):
        raise ValueError(f"Certainties have shape {c.shape} for {count} values: pass one per value.")
    if not ((c >= 0) & (c <= 1)).all():
        raise ValueError("A certainty is not in [0, 1]: pass the share of the outcomes' variance that is left.")
    c = np.clip(c, UNSURE, SURE)
    return None if (c == SURE).all() else c / (1.0 - c)


def _check_successes(successes: npt.ArrayLike, count: int) -> np.ndarray:
    r = np.asarray(successes)
    if r.shape != (count,):
        raise ValueError(f"Successes have shape {r.shape} for {count} values: pass one outcome per prefix.")
    if not np.isin(r, (0, 1)).all():
        raise ValueError(
            "An outcome is neither 0 nor 1: pass whether each prefix's rollout succeeded, not its reward."
        )
    return r.astype(bool)


def _check_budget(budget: int, name: str) -> int:
    budget = operator.index(budget)
    if budget < 0:
        raise ValueError(f"The {name} is {budget}: set it to 0 or more.")
    return budget


def _check_root_budget(count: int, budget: int, max_per_root: int) -> None:
    if budget == 0:
        return
    if count == 0:
        raise ValueError(f"There are {budget} rollouts to spend and no prompt: pass at least one candidate.")
    if max_per_root < 2:
        raise ValueError(f"max_per_root is {max_per_root}: raise it to 2 or more, a lone rollout shows no contrast.")
    if budget == 1:
        raise ValueError("The rollout budget is 1: raise it to 2 or more, a lone rollout shows no contrast.")
    if max_per_root == 2 and budget % 2:
        raise ValueError(
            f"The rollout budget {budget} is odd and max_per_root is 2: make the budget even or raise max_per_root."
        )
    if budget > count * max_per_root:
        raise ValueError(
            f"The rollout budget {budget} exceeds {count} prompts x max_per_root {max_per_root} = "
            f"{count * max_per_root}: enlarge the candidate pool, raise max_per_root, or lower the budget."
        )


def _check_prefix_budget(count: int, budget: int) -> None:
    if budget > 0 and count == 0:
        raise ValueError(
            f"There are {budget} continuations to spend and no prefix: pass at least one eligible prefix."
        )
