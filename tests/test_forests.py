"""What holds in every forest, whatever the policy says, the environment answers and the limits are."""

import itertools
import zlib
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_trl.codec import Turned
from trace_trl.engine import Limits, RootPlan, TreeRolloutEngine
from trace_trl.environments.base import Environment, Episode, ForkError, Reply
from trace_trl.generation import Sample
from trace_trl.rows import build_rows
from trace_trl.tree import RolloutTree


END = 7


def digest(ids, *more):
    return zlib.crc32(repr((list(ids), more)).encode()) + 100  # never the end token


class NumberCodec:
    """Tokens are numbers, and texts are numbers with spaces between them."""

    conversational = False
    idle_context = [0]

    def decode_turns(self, turns):
        texts = [" ".join(map(str, ids)) for ids, _, _ in turns]
        return [Turned(text, {"role": "assistant", "content": text}) for text in texts]

    def encode_replies(self, replies):
        return [[int(number) for number in (reply.text or "").split()] for reply, _ in replies]


@dataclass
class World(Environment):
    """
    Answers what it is told by a digest of all it was told: with an end, an error, nothing, or a few negative numbers.

    Attributes:
        forking: `"copy"`, `"replay"` (no copies), `"flaky"` (copies of some states only, and some of those can't be
            copied again), `"never"` (no copies, and no two runs are alike).
    """

    forking: str
    is_async: bool = False
    longest: int = 6

    def __post_init__(self):
        self.answers = []  # all that was ever answered
        self.runs = itertools.count()

    def reset(self, example, prompt):
        return (AsyncWorldEpisode if self.is_async else WorldEpisode)(self, prompt, [example["prompt"]])


class WorldEpisode(Episode):
    def __init__(self, world, prompt, told, copies=0):
        self.world = world
        self.prompt = prompt
        self.told = told
        self.copies = copies
        self.noise = next(world.runs) if world.forking == "never" else 0

    def answer(self, action):
        self.told.append(action.text)
        number = digest(self.told)
        if number % 10 < 3:
            return Reply(done=True)
        if number % 10 == 3:
            raise RuntimeError("this step fails")
        if number % 10 == 4:
            return Reply()
        numbers = [-(number % 1000) - 1, *range(-(number // 10) % self.world.longest, 0), -self.noise - 1]
        self.world.answers.append(numbers)
        return Reply(text=" ".join(map(str, numbers)))

    def step(self, action):
        return self.answer(action)

    def on_error(self, action, error):
        self.world.answers.append([-9, -9])
        return Reply(text="-9 -9", failures=1)

    def fork(self):
        forking = self.world.forking
        flaky = forking == "flaky" and (digest(self.told) % 3 == 0 or (self.copies and digest(self.told) % 3 == 1))
        if forking in ("replay", "never") or flaky:
            raise ForkError("no copies of this")
        return type(self)(self.world, self.prompt, list(self.told), self.copies + 1)


class AsyncWorldEpisode(WorldEpisode):
    async def step(self, action):
        return self.answer(action)

    def replay(self, action):
        try:
            return self.answer(action)
        except RuntimeError as error:
            return self.on_error(action, error)


class Echo:
    """A policy whose every turn starts with a digest of the context it was given, and goes on with what is new."""

    def __init__(self, longest):
        self.longest = longest
        self.news = itertools.count(10_000)
        self.calls = []
        self.contexts = []  # the lists themselves that were given
        self.given = []  # every list that went in or out

    def __call__(self, requests):
        self.calls.append([(list(request.context), request.max_new_tokens) for request in requests])
        self.contexts.append([request.context for request in requests])
        samples = []
        for request in requests:
            new = next(self.news)
            choice = digest(request.context, new)
            ids = [digest(request.context), *[new] * (choice % self.longest)]
            finish = "stop"
            if choice % 5 and len(ids) > 1:
                ids[-1], finish = END, "eos"
            if len(ids) > request.max_new_tokens or choice % 17 == 0:
                ids, finish = ids[: request.max_new_tokens], "length"
            if choice % 23 == 0:
                ids, finish = [], "stop"
            samples.append(Sample(ids, finish, [-0.5] * len(ids)))
            self.given += [request.context, ids, samples[-1].logprobs]
        return samples


LIMITS = st.builds(
    Limits,
    completion=st.integers(1, 60),
    context=st.none() | st.integers(8, 70),
    turn=st.none() | st.integers(1, 6),
    turns=st.none() | st.integers(1, 5),
)
WORLDS = st.builds(
    World,
    forking=st.sampled_from(["copy", "replay", "flaky", "never"]),
    is_async=st.booleans(),
    longest=st.integers(1, 8),
)
# Per prompt: tokens, bare rollouts, continuations
PROMPTS = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=4)


@dataclass
class Forest:
    plans: list
    echo: Echo
    scored: list
    stats: object


def grow(prompts, world, limits, allocation="active", seed=0):
    scored = []

    def score(leaves):
        for _, turn in leaves:
            scored.append(turn)
            choice = digest(turn.history_ids()) % 5
            # One in five is scored by nobody
            turn.leaf.reward = float("nan") if choice == 4 else float(choice % 2)
            turn.leaf.rewards = [turn.leaf.reward]
            turn.leaf.success = None if choice == 4 else bool(choice % 2)

    def predict(leaves):
        for turn in {turn for leaf in leaves for turn in leaf.path()}:
            turn.value = digest(turn.history_ids()) % 100 / 100

    echo = Echo(longest=6)
    engine = TreeRolloutEngine(
        echo, NumberCodec(), world, score, limits, predict=predict, prefix_allocation=allocation, timeout=20
    )
    plans = []
    for index, (length, bare, continuations) in enumerate(prompts):
        row = {"prompt": f"{index}"}
        ids = [index + 20] * length
        (episode,) = engine.reset([(row, row["prompt"])])
        plans.append(RootPlan(RolloutTree.from_prompt("p", ids, row, index=index), episode, bare, continuations))
    stats = engine.run(plans, seed=seed)
    engine.runner.close()
    return Forest(plans, echo, scored, stats)


def own_turns(leaf):
    """Turns that were sampled for this continuation: those on no bare rollout's path."""
    return [turn for turn in leaf.path() if all(below.leaf.kind != "bare" for below in turn.leaves())]


EXAMPLES = settings(deadline=None, database=None, max_examples=150)


@given(PROMPTS, WORLDS, LIMITS, st.sampled_from(["active", "uniform", "random"]), st.integers(0, 3))
@EXAMPLES
def test_invariants_of_every_forest(prompts, world, limits, allocation, seed):
    forest = grow(prompts, world, limits, allocation, seed)
    trees = [plan.tree for plan in forest.plans]
    leaves = [leaf for tree in trees for leaf in tree.leaves()]
    turns = [turn for tree in trees for turn in tree.turns()]

    # Exactly M (1 + N) leaves, of the kinds that were asked for
    for (_, bare, continuations), tree in zip(prompts, trees, strict=True):
        kinds = [leaf.leaf.kind for leaf in tree.leaves()]
        assert kinds.count("bare") == bare
        assert kinds.count("continuation") + kinds.count("extra") == continuations
        assert [leaf.leaf.rollout for leaf in tree.leaves()] == list(range(bare + continuations))
    # Each scored once, and only leaves
    assert len(forest.scored) == len(leaves)
    assert set(forest.scored) == set(leaves)
    assert all((turn.leaf is None) == bool(turn.children) for turn in turns)

    # No branch goes on from another's context: every turn starts with the digest of its own history
    asked = [context for call in forest.echo.calls for context, _ in call]
    for turn in turns:
        before = turn.parent.history_ids()
        assert not turn.token_ids or turn.token_ids[0] == digest(before)
        assert before in asked
    histories = [turn.parent.history_ids() for turn in turns]
    assert sorted(histories) == sorted(asked)  # as often as it was sampled from
    assert all(len({id(context) for context in call}) == len(call) for call in forest.echo.contexts)

    # Budgets: what is asked for is what is left, never nothing, and never more comes back
    prompt_lengths = {tree.prompt_ids[0]: len(tree.prompt_ids) for tree in trees}
    for context, most in itertools.chain(*forest.echo.calls):
        left = limits.completion - (len(context) - prompt_lengths[context[0]])
        left = left if limits.context is None else min(left, limits.context - len(context))
        assert most == (left if limits.turn is None else min(left, limits.turn)) >= 1
    for tree in trees:
        for turn in tree.turns():
            assert turn.history_length == len(turn.history_ids())
            assert turn.history_length - len(tree.prompt_ids) <= limits.completion
            assert limits.context is None or turn.history_length <= limits.context
            assert limits.turn is None or len(turn.token_ids) <= limits.turn
            assert limits.turns is None or turn.depth <= limits.turns
            assert turn.logprobs == [-0.5] * len(turn.token_ids)
    # An observation is one whole answer, or none
    assert all(turn.observation_ids in world.answers for turn in turns if turn.observation_ids)

    # Rounds: a prompt's longest rollout, then its longest continuation; none waits for another prompt
    spans = []
    for tree in trees:
        bare = [leaf.depth for leaf in tree.leaves() if leaf.leaf.kind == "bare"]
        later = [len(own_turns(leaf)) for leaf in tree.leaves() if leaf.leaf.kind != "bare"]
        spans.append(max(bare) + max(later, default=0))
    assert len(forest.echo.calls) == forest.stats.rounds == max(spans)
    assert forest.stats.turns == len(turns) == len(asked)
    assert forest.stats.sampled_tokens == sum(len(turn.token_ids) for turn in turns)
    assert forest.stats.prefilled_tokens == sum(map(len, asked))

    # Continuations start at prefixes of bare rollouts that were scored; extra ones at the root
    for leaf in leaves:
        if leaf.leaf.kind == "continuation":
            prefix = own_turns(leaf)[0].parent
            assert prefix.depth >= 1
            assert any(below.leaf.kind == "bare" and below.leaf.scored for below in prefix.leaves())
        elif leaf.leaf.kind == "extra":
            assert len(own_turns(leaf)) == leaf.depth

    # Rows: a leaf's completion is what lies on its path, and its lists are equally long
    rows = build_rows(trees)
    for leaf, ids, *lists in zip(
        leaves, rows.completion_ids, rows.sampled_mask, rows.loss_mask, rows.advantages, rows.logprobs, strict=True
    ):
        path = [i for turn in leaf.path() for i in (*turn.token_ids, *turn.observation_ids)]
        assert ids == (path or [0])
        assert {len(part) for part in lists} == {len(ids)}

    # No list belongs to two branches, to the policy, or to the environment
    parts = ("token_ids", "observation_ids", "logprobs", "messages", "children")
    lists = [getattr(turn, part) for turn in [*turns, *(tree.root for tree in trees)] for part in parts]
    lists = [part for part in lists if part is not None]
    assert len({id(part) for part in lists}) == len(lists)
    before = [turn.history_ids() for turn in turns]
    for given_out in [*forest.echo.given, *world.answers]:
        given_out.append(-1)
    assert [turn.history_ids() for turn in turns] == before


@given(PROMPTS, WORLDS, LIMITS, st.sampled_from(["active", "uniform", "random"]))
@settings(EXAMPLES, max_examples=40)
def test_the_same_seed_grows_the_same_forest(prompts, world, limits, allocation):
    if world.forking == "never":
        world.forking = "replay"
    forests = [grow(prompts, world, limits, allocation, seed=5) for _ in range(2)]
    shapes = [
        [[(t.history_ids(), t.leaf and t.leaf.kind) for t in plan.tree.turns()] for plan in forest.plans]
        for forest in forests
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("forking", ["copy", "replay"])
def test_forests_do_branch(forking):
    """The properties above would hold in a wood without branches too."""
    forest = grow([(2, 4, 6)] * 3, World(forking), Limits(60, turns=5), "active")
    kinds = [leaf.leaf.kind for plan in forest.plans for leaf in plan.tree.leaves()]
    assert kinds.count("continuation") >= 12
    depths = {leaf.depth for plan in forest.plans for leaf in plan.tree.leaves()}
    assert len(depths) >= 3


def test_what_cannot_be_restored_becomes_a_rollout_from_the_root():
    forest = grow([(2, 3, 6)] * 2, World("never"), Limits(60, turns=5))
    leaves = [leaf for plan in forest.plans for leaf in plan.tree.leaves()]
    extra = [leaf for leaf in leaves if leaf.leaf.kind == "extra"]
    assert 1 <= len(extra) == forest.stats.extra_rollouts
    assert forest.stats.unforkable_prefixes >= 1
    # This world's answers are never the same again, but for its errors
    for leaf in leaves:
        if leaf.leaf.kind == "continuation":
            assert all(turn.observation_ids in ([], [-9, -9]) for turn in own_turns(leaf)[0].parent.path())
