"""Continuations start from the very state the factual rollout was in, and share nothing with it."""

import asyncio
import copy
import functools
import gc
import random
import threading
import time
import weakref
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toys import Clock, Hanging, call, make_tokenizer, roll_out, texts
from trace_trl import StepResult
from trace_trl.engine import Limits
from trace_trl.environments.base import Action, Episode, ForkError, Reply
from trace_trl.environments.callback import CallbackEnvironment
from trace_trl.environments.forking import CopySnapshot, ReplaySnapshot, copy_state, take_snapshot
from trace_trl.environments.runner import ConcurrentRunner
from trace_trl.environments.tools import ToolEnvironment, environment_tools
from waiting import LIMIT, until


LOOP = ConcurrentRunner()  # gives the event loop of environments without a trainer


def loop():
    return LOOP.loop


@pytest.fixture
def hanging():
    with Hanging() as hanging:
        yield hanging


@pytest.fixture
def clock(monkeypatch, hanging):
    return Clock(monkeypatch, hanging)


def act(text):
    return Action(text, {"role": "assistant", "content": text}, [{"role": "user", "content": "go"}])


def act_calling(name, **arguments):
    function = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return Action(name, {"role": "assistant", "content": "", "tool_calls": [function]}, [])


def play(episode, action):
    """A step as a replay plays it, in this thread, sync or async."""
    return episode.replay(action)


# The order: fork(), deepcopy, replay


class Recorded:
    """A state whose `fork()` and `__deepcopy__` do as they are told, and tell."""

    def __init__(self, fork="works", deepcopy="works"):
        self.ways = {"fork": fork, "deepcopy": deepcopy}
        self.asked = []
        self.items = []

    def _copied(self, way):
        self.asked.append(way)
        does = self.ways[way]
        if does == "works":
            copied = Recorded(*self.ways.values())
            copied.items = [*self.items, way]
            return copied
        if does == "raises half-way":
            copied = Recorded()
            copied.items = self.items  # shared, and lost
            raise RuntimeError(f"{way} broke")
        return {"returns nothing": None, "returns itself": self}[does]

    def fork(self):
        return self._copied("fork")

    def __deepcopy__(self, memo):
        return self._copied("deepcopy")


@pytest.mark.parametrize(
    ("fork", "deepcopy", "asked"),
    [
        ("works", "works", ["fork"]),
        ("raises half-way", "works", ["fork", "deepcopy"]),
        ("returns nothing", "works", ["fork", "deepcopy"]),
        ("returns itself", "works", ["fork", "deepcopy"]),
    ],
)
def test_order_of_ways(fork, deepcopy, asked):
    state = Recorded(fork, deepcopy)
    copied = copy_state(state)
    assert state.asked == asked and state.items == []
    assert copied is not state and copied.items == asked[-1:]


@pytest.mark.parametrize("fork", ["raises half-way", "returns nothing", "returns itself"])
def test_neither_way_of_copying_works(fork):
    state = Recorded(fork, "raises half-way")
    with pytest.raises(ForkError, match=r"Recorded can't be copied: its fork.* \(deepcopy broke\)"):
        copy_state(state)
    assert state.items == []


def test_fork_error_says_that_nothing_else_may_be_tried():
    class State:
        copies = 0

        def fork(self):
            raise ForkError("a database session is never copied")

        def __deepcopy__(self, memo):
            State.copies += 1

    with pytest.raises(ForkError, match="a database session"):
        copy_state(State())
    assert State.copies == 0


def test_async_fork():
    class State:
        async def fork(self):
            await asyncio.sleep(0)
            return "copied"

    assert copy_state(State(), loop) == "copied"
    assert isinstance(copy_state(State()), State)  # without a loop, as any fork() that fails


def test_plain_states_are_copied():
    for state in (None, 3, "text", {"a": [1]}, (1, [2])):
        copied = copy_state(state)
        assert copied == state
    state = {"a": [1]}
    copied = copy_state(state)
    copied["a"].append(2)
    assert state == {"a": [1]}


class Steps:
    """An environment made of one function, for snapshots."""

    def __init__(self, step, make_state):
        self.environment = CallbackEnvironment(step, lambda example: make_state(), loop=loop)

    def reset(self):
        return self.environment.reset({}, "go")


def count(state, action, messages):
    state.items.append(action)
    return StepResult(f"{len(state.items)} items, the last one {action}")


@pytest.mark.parametrize("fork", ["works", "raises half-way"])
@pytest.mark.parametrize("deepcopy", ["works", "raises half-way"])
def test_snapshot_takes_the_first_way_that_works(fork, deepcopy):
    steps = Steps(count, lambda: Recorded(fork, deepcopy))
    episode = steps.reset()
    history = [(action, episode.step(action)) for action in (act("one"), act("two"))]
    snapshot = take_snapshot(episode, steps.reset, history)
    copied = "works" in (fork, deepcopy)
    assert type(snapshot) is (CopySnapshot if copied else ReplaySnapshot)
    restored = snapshot.restore()
    items = [item for item in restored.environment.items if item not in ("fork", "deepcopy")]
    assert items == ["one", "two"]
    # What raised half-way has not harmed the live episode
    assert episode.environment.items == ["one", "two"]
    assert episode.step(act("three")).messages[0]["content"] == "3 items, the last one three"
    assert [item for item in restored.environment.items if item not in ("fork", "deepcopy")] == ["one", "two"]


def test_nothing_to_restart_from():
    steps = Steps(count, lambda: Recorded("raises half-way", "raises half-way"))
    with pytest.raises(ForkError, match="can't be copied"):
        take_snapshot(steps.reset(), None, [])


def test_big_immutable_parts_are_shared_by_fork():
    index = tuple(range(100_000))

    @dataclass
    class State:
        index: tuple
        seen: list = field(default_factory=list)

        def fork(self):
            return State(self.index, list(self.seen))

    def env_step(state, action, messages):
        state.seen.append(action)
        return StepResult(str(len(state.seen)))

    environment = CallbackEnvironment(env_step, lambda example: State(index))
    episode = environment.reset({}, "go")
    episode.step(act("one"))
    snapshot = take_snapshot(episode, None, [])
    forks = [snapshot.restore() for _ in range(3)]
    for number, fork in enumerate(forks):
        fork.step(act(f"fork {number}"))
    assert all(fork.environment.index is index for fork in forks)
    assert [fork.environment.seen for fork in forks] == [["one", f"fork {number}"] for number in range(3)]
    assert episode.environment.seen == ["one"]


def test_continuations_of_one_prefix_are_restored_one_after_the_other():
    """A `fork()` need not be safe for threads."""
    busy = threading.Lock()
    overlaps = []

    class State:
        def fork(self):
            if not busy.acquire(blocking=False):
                overlaps.append(True)
                return State()
            time.sleep(0.01)
            busy.release()
            return State()

    environment = CallbackEnvironment(lambda state, action, messages: StepResult("on"), lambda example: State())
    (tree,), _, _ = roll_out(
        environment, lambda history: "red", bare=1, continuations=8, limits=Limits(10_000, turns=2)
    )
    assert [leaf.leaf.kind for leaf in tree.leaves()] == ["bare"] + ["continuation"] * 8
    assert not overlaps


# Replay


def replayable(answer=lambda state, action: f"{state['steps']}: {action}", make_state=dict, prompt=lambda: "go"):
    """A snapshot after two steps that can be restored by replay only, and what was played."""
    played = []

    def env_step(state, action, messages):
        state["steps"] = state.get("steps", 0) + 1
        played.append((action, copy.deepcopy(messages)))
        messages.clear()
        return StepResult(answer(state, action))

    class Locked(CallbackEnvironment):
        def reset(self, example, shown):
            return super().reset(example, prompt())

    environment = Locked(env_step, lambda example: {"lock": threading.Lock(), **make_state()})
    episode = environment.reset({}, None)
    history = [(action, episode.step(action)) for action in (act("one"), act("two"))]
    played.clear()
    snapshot = take_snapshot(episode, lambda: environment.reset({}, None), history)
    assert isinstance(snapshot, ReplaySnapshot)
    return snapshot, played


def test_replay_plays_the_same_actions_and_messages():
    snapshot, played = replayable()
    for _ in range(2):
        assert snapshot.restore().environment["steps"] == 2
    messages = [{"role": "user", "content": "go"}]
    assert played == [("one", messages), ("two", messages)] * 2


def test_replay_refuses_other_answers():
    numbers = iter(range(100))
    snapshot, _ = replayable(lambda state, action: str(next(numbers)))
    with pytest.raises(ForkError, match="not deterministic"):
        snapshot.restore()


def test_replay_refuses_another_task():
    tasks = iter(range(100))
    snapshot, played = replayable(prompt=lambda: f"task {next(tasks)}")
    with pytest.raises(ForkError, match="another task"):
        snapshot.restore()
    assert played == []


def test_replay_of_a_failed_reset():
    states = iter([{}, None])
    snapshot, _ = replayable(make_state=lambda: next(states))
    with pytest.raises(ForkError, match="Replay failed"):
        snapshot.restore()


def test_replay_closes_what_it_could_not_restore():
    closed = []

    class Environment(Episode):
        prompt = "go"

        def __init__(self):
            self.steps = 0

        def step(self, action):
            return Reply(text=str(next(numbers)))

        def close(self):
            closed.append(self)

    numbers = iter(range(10))
    made = []

    def restart():
        made.append(Environment())
        return made[-1]

    episode = Environment()
    snapshot = ReplaySnapshot(restart, "go", [(act("one"), episode.step(act("one")))])
    with pytest.raises(ForkError):
        snapshot.restore()
    assert closed == made and len(made) == 1


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1)])
def test_replay_repeats_errors_the_policy_has_read(error):
    def env_step(state, action, messages):
        if action == "bad":
            state["failed"] = True
            raise error
        return StepResult(action)

    async def async_env_step(state, action, messages):
        return env_step(state, action, messages)

    for function in (env_step, async_env_step):
        environment = CallbackEnvironment(function, lambda example: {"lock": threading.Lock()}, loop=loop)

        def restart(environment=environment):
            return environment.reset({}, "go")

        runner = ConcurrentRunner()
        episode = restart()
        history = []
        for action in (act("good"), act("bad"), act("good")):
            (reply,) = runner.run([functools.partial(play, episode, action)], timeout=LIMIT)
            history.append((action, reply))
        assert history[1][1].failures == 1
        (restored,) = runner.run([take_snapshot(episode, restart, history).restore], timeout=LIMIT)
        assert restored.environment["failed"]


def test_replay_gives_tools_the_arguments_that_were_sampled():
    class Takes:
        def __init__(self):
            self.lock = threading.Lock()

        def reset(self, **row):
            self.taken = []

        def take(self, things):
            """Takes all there is."""
            while things:
                self.taken.append(things.pop())
            return str(self.taken)

    environment = ToolEnvironment([], factories={None: Takes})
    episode = environment.reset({}, "go")
    history = [(action, episode.step(action)) for action in [act_calling("take", things=["a", "b"])]]
    restored = take_snapshot(episode, lambda: environment.reset({}, "go"), history).restore()
    assert restored.environment.taken == ["b", "a"]


def test_replay_of_async_episodes_in_many_workers():
    async def env_step(state, action, messages):
        state["steps"] = state.get("steps", 0) + 1
        await asyncio.sleep(0.001)
        return StepResult(str(state["steps"]), done=state["steps"] == 4)

    environment = CallbackEnvironment(env_step, lambda example: {"lock": threading.Lock()}, loop=loop)
    (tree,), stats, _ = roll_out(environment, lambda history: "red", bare=2, continuations=200)
    assert len(tree.leaves()) == 202 and stats.unforkable_prefixes == stats.extra_rollouts == 0
    assert {tuple(texts(leaf)[1::2]) for leaf in tree.leaves()} == {("1", "2", "3")}


# Case 23


@pytest.mark.parametrize("way", ["fork", "deepcopy", "replay"])
def test_case_23_three_children_of_one_node(way):
    """Tokens, messages and states of three children of one node differ; parent and siblings stay as they were."""

    class State:
        def __init__(self):
            self.words, self.deep = [], {"words": []}
            if way == "replay":
                self.lock = threading.Lock()

    if way == "fork":
        State.fork = copy.deepcopy

    seen = []

    def env_step(state, action, messages):
        state.words.append(action)
        state.deep["words"].append(action)
        assert state.deep["words"] == state.words
        # The state and the conversation are of one branch
        assert [m["content"] for m in messages if m["role"] == "assistant"] == state.words
        messages[0]["content"] = action
        messages.append({"role": "user", "content": action})
        if len(state.words) == 3:
            seen.append(list(state.words))
        return StepResult(" ".join(state.words), done=len(state.words) == 3)

    def first_prefix_only(leaves):
        # The rollout failed: where failure is certain no continuation flips the outcome
        for turn in {turn for leaf in leaves for turn in leaf.path()}:
            turn.value = 0.9 if turn.depth == 1 else 0.0

    words = iter(["red", "green", "blue", "left"])
    said = {}

    def say(history):
        turn = history.count("<|im_start|>assistant")
        # The first rollout says 0, 1, 2; each continuation a word of its own in every turn
        if len(said) < 3:
            said[turn] = str(turn)
            return said[turn]
        return next(words)

    environment = CallbackEnvironment(env_step, lambda example: State())
    prompt = [{"role": "user", "content": "go"}]
    (tree,), stats, engine = roll_out(
        environment,
        say,
        [{"prompt": prompt}],
        bare=1,
        continuations=2,
        predict=first_prefix_only,
    )
    first = tree.root.children[0]
    assert [child.text for child in first.children] == ["2", "red", "green"]
    assert [texts(leaf)[::2] for leaf in tree.leaves()] == [
        ["1", "2", "3"],
        ["1", "red", "blue"],
        ["1", "green", "left"],
    ]
    assert [texts(leaf)[1::2] for leaf in tree.leaves()] == [["1", "1 2"], ["1", "1 red"], ["1", "1 green"]]
    assert seen == [["1", "2", "3"], ["1", "red", "blue"], ["1", "green", "left"]]
    tokenizer = make_tokenizer()
    for leaf in tree.leaves():
        ids = leaf.history_ids()
        assert ids[: len(tree.prompt_ids)] == tree.prompt_ids
        for turn in leaf.path():
            assert tokenizer.decode(turn.token_ids) == turn.text + "<|im_end|>"
        assert len(ids) == leaf.history_length
    assert tree.prompt == prompt == [{"role": "user", "content": "go"}]
    assert stats.turns == 3 + 2 * 2 and stats.environment_calls == 3 + 2 * 2


def test_case_23_messages_of_siblings_are_not_shared():
    def env_step(state, action, messages):
        return StepResult([{"role": "user", "content": "same"}], done=len(messages) > 4)

    (tree,), _, _ = roll_out(CallbackEnvironment(env_step), lambda history: "red", bare=2, continuations=4)
    turns = list(tree.turns())
    before = [copy.deepcopy(turn.messages) for turn in turns]
    for number, turn in enumerate(turns):
        turn.messages[0]["content"] = f"changed {number}"
        turn.token_ids.append(number)
        assert [t.messages for t in turns[number + 1 :]] == before[number + 1 :]


# Random environments


MODULUS = 997


def step_of(position, log, word):
    """A state machine: where it stands, all it was told, and what it answers."""
    position = (position * 31 + sum(map(ord, word)) + len(log)) % MODULUS
    return position, [*log, word], f"at {position}"


class Machine:
    """Changes in place; its ways of being copied are set per class."""

    def __init__(self):
        self.position, self.log, self.nested = 1, [], {"log": []}

    def tell(self, word: str) -> str:
        """
        Tells.

        Args:
            word: what to tell.
        """
        self.position, self.log, answer = step_of(self.position, self.log, word)
        self.nested["log"].append(word)
        return answer

    def _told(self):
        return self.position, list(self.log), list(self.nested["log"])

    def reset(self, **row):
        self.__init__()


class ForkingMachine(Machine):
    def fork(self):
        copied = type(self)()
        copied.position, copied.log, copied.nested = self.position, list(self.log), {"log": list(self.nested["log"])}
        return copied


class LockedMachine(Machine):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def asynchronous(cls):
    async def tell(self, word: str) -> str:
        """
        Tells.

        Args:
            word: what to tell.
        """
        await asyncio.sleep(0)
        return cls.tell(self, word)

    return type(f"Async{cls.__name__}", (cls,), {"tell": tell})


def callback_environment(cls, is_async):
    def env_step(state, action, messages):
        return StepResult(state.tell(action))

    async def async_env_step(state, action, messages):
        await asyncio.sleep(0)
        return env_step(state, action, messages)

    return CallbackEnvironment(async_env_step if is_async else env_step, lambda example: cls(), loop=loop), act


def tool_environment(cls, is_async):
    cls = asynchronous(cls) if is_async else cls
    return ToolEnvironment([], factories={None: cls}, loop=loop), lambda word: act_calling("tell", word=word)


@dataclass
class Live:
    """A branch: its episode, the words it still has to say, those said, and its record."""

    episode: Episode
    words: list
    said: list = field(default_factory=list)
    history: list = field(default_factory=list)


WORDS = st.text("abc", min_size=1, max_size=3)
PATHS = st.lists(st.tuples(st.integers(0, 20), st.lists(WORDS, min_size=1, max_size=4)), min_size=1, max_size=6)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("make", [callback_environment, tool_environment], ids=["callback", "tools"])
@pytest.mark.parametrize("cls", [ForkingMachine, Machine, LockedMachine], ids=["fork", "deepcopy", "replay"])
@settings(max_examples=25, deadline=None, database=None)
@given(first=st.lists(WORDS, min_size=1, max_size=4), branches=PATHS, seed=st.integers(0, 100))
def test_branches_are_as_if_played_alone(cls, make, is_async, first, branches, seed):
    """Branches at random prefixes of random branches, played in turns, end where a lone path with their words ends."""
    environment, action_of = make(cls, is_async)

    def restart():
        return environment.reset({}, "go")

    def keep(live):
        snapshots.append((list(live.said), list(live.history), take_snapshot(live.episode, restart, live.history)))

    snapshots = []
    lives = [Live(restart(), list(first))]
    keep(lives[0])
    todo = list(branches)
    order = random.Random(seed)
    while any(live.words for live in lives) or todo:
        talking = [live for live in lives if live.words]
        if todo and (not talking or order.random() < 0.4):
            at, words = todo.pop()
            said, history, snapshot = snapshots[at % len(snapshots)]
            lives.append(Live(snapshot.restore(), list(words), list(said), list(history)))
            continue
        live = order.choice(talking)
        word = live.words.pop(0)
        reply = play(live.episode, action_of(word))
        assert not reply.failures
        live.said.append(word)
        live.history.append((action_of(word), reply))
        keep(live)
    for live in lives:
        alone = restart()
        answers = [play(alone, action_of(word)).messages for word in live.said]
        assert [reply.messages for _, reply in live.history] == answers
        position, log = 1, []
        for word in live.said:
            position, log, _ = step_of(position, log, word)
        assert live.episode.environment._told() == alone.environment._told() == (position, log, log)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("make", [callback_environment, tool_environment], ids=["callback", "tools"])
@pytest.mark.parametrize("cls", [ForkingMachine, Machine, LockedMachine], ids=["fork", "deepcopy", "replay"])
def test_trees_of_random_policies_tell_what_a_lone_path_tells(cls, make, is_async):
    """The same through the engine: every leaf's observations and final state are those of its own words."""
    environment, _ = make(cls, is_async)
    choose = random.Random(7)
    tools = make is tool_environment
    finals = []

    def say(history):
        if history.count("<|im_start|>assistant") == 6 or choose.random() < 0.1:
            return "stop"
        word = choose.choice(["a", "b", "c"])
        return call("tell", word=word) if tools else word

    def score(leaves):
        for _, turn in leaves:
            finals.append((turn, turn.leaf.environment._told()))
            turn.leaf.reward, turn.leaf.rewards = 0.0, [0.0]
            turn.leaf.success = choose.random() < 0.5

    rows = [{"prompt": [{"role": "user", "content": "go"}]} for _ in range(4)]
    schema = environment_tools(cls()) if tools else None
    trees, stats, _ = roll_out(
        environment,
        say,
        rows,
        bare=3,
        continuations=9,
        score=score,
        tools=lambda tree: schema,
        limits=Limits(10_000, turns=6),
    )
    assert stats.unforkable_prefixes == 0 and len(finals) == 4 * 12
    assert sum(leaf.leaf.kind == "continuation" for tree in trees for leaf in tree.leaves()) >= 18
    for turn, state in finals:
        position, log = 1, []
        for node in turn.path():
            if tools and "tool_calls" not in node.messages[0]:
                continue
            word = node.messages[0]["tool_calls"][0]["function"]["arguments"]["word"] if tools else node.text
            position, log, answer = step_of(position, log, word)
            if node.leaf is None:
                assert node.messages[1]["content"] == answer
        assert state == (position, log, log)


# What can't be forked, and what must not be


def test_case_25_a_state_is_not_forked_after_a_timeout(hanging, clock):
    forked = []

    class State:
        steps = 0

        def fork(self):
            forked.append(self.steps)
            copied = State()
            copied.steps = self.steps
            return copied

    def env_step(state, action, messages):
        state.steps += 1
        if state.steps == 3 and not hanging.at_work:
            hanging()
        return StepResult(str(state.steps), done=state.steps == 6)

    (tree,), _, _ = roll_out(
        CallbackEnvironment(env_step, lambda example: State()),
        lambda history: "red",
        bare=1,
        continuations=4,
        timeout=0.6,
    )
    # Two prefixes before the third step hung, then two continuations of either
    assert sorted(forked) == [1, 1, 1, 2, 2, 2]
    leaves = tree.leaves()
    assert [leaf.leaf.kind for leaf in leaves] == ["bare"] + ["continuation"] * 4
    assert texts(leaves[0])[5] == "Error: The environment gave no answer within 0.6 seconds."
    for leaf in leaves[1:]:
        assert texts(leaf)[1::2] == ["1", "2", "3", "4", "5"]


def test_a_fork_that_hangs_is_given_up_once(caplog, hanging, clock):
    closed = []

    class State:
        def __init__(self, original=None):
            self.original, self.steps = original, 0

        def fork(self):
            if hanging.at_work == 2:
                raise AssertionError("tried again")
            hanging()
            return State(self)

        def close(self):
            closed.append(self)

    def env_step(state, action, messages):
        state.steps += 1
        return StepResult("on", done=state.steps == 4)

    environment = CallbackEnvironment(env_step, lambda example: State())
    (tree,), stats, _ = roll_out(environment, lambda history: "red", bare=2, continuations=2, timeout=0.6)
    # Both together
    assert 0.6 <= clock.passed < 1
    assert [leaf.leaf.kind for leaf in tree.leaves()] == ["bare"] * 2 + ["extra"] * 2
    assert stats.unforkable_prefixes == 2 and hanging.at_work == 2
    assert len([r for r in caplog.records if "can't be restored" in r.getMessage()]) == 1
    # The states whose fork() still is at work are closed after it, and so is what it comes to
    assert len(closed) == 2
    hanging.release.set()
    until(lambda: len(closed) >= 6)
    assert len(closed) == len({id(state) for state in closed}) == 6
    assert len([state for state in closed if state.original is not None]) == 2


def test_a_restore_that_hangs_strikes_its_prefix_off(hanging):
    closed = []

    class State:
        def __init__(self, steps=0, is_snapshot=False):
            self.steps, self.is_snapshot = steps, is_snapshot

        def fork(self):
            if self.is_snapshot and self.steps == 1:
                hanging()
            return State(self.steps, not self.is_snapshot)

        def close(self):
            closed.append(self)

    def env_step(state, action, messages):
        state.steps += 1
        return StepResult("on", done=state.steps == 3)

    environment = CallbackEnvironment(env_step, lambda example: State())
    (tree,), stats, _ = roll_out(environment, lambda history: "red", bare=1, continuations=4, timeout=2)
    assert [leaf.leaf.kind for leaf in tree.leaves()] == ["bare"] + ["continuation"] * 4
    # All of them from the second prefix, which can be restored
    assert [len(turn.children) for turn in tree.leaves()[0].path()] == [1, 5, 0]
    assert stats.unforkable_prefixes == 1
    # One bare rollout, the snapshot of the second prefix, four continuations
    assert len(closed) == 6
    hanging.release.set()
    # The first snapshot, and what was restored from it in the end
    until(lambda: len(closed) >= 6 + 3)
    assert len({id(state) for state in closed}) == len(closed) == 6 + 3


def test_snapshots_are_dropped_after_expansion():
    alive = weakref.WeakSet()

    class State:
        def __init__(self, steps=0):
            self.steps = steps
            alive.add(self)

        def fork(self):
            return State(self.steps)

    def env_step(state, action, messages):
        state.steps += 1
        return StepResult(str(state.steps), done=state.steps == 5)

    counts = []
    runner = ConcurrentRunner()

    def count():
        # A worker may still hold what its last call returned: each is given another one
        workers = len(runner._workers)
        together = threading.Barrier(max(workers, 1))
        runner.run([functools.partial(together.wait, LIMIT)] * workers)
        gc.collect()
        return len(alive)

    def say(history):
        counts.append(count())
        return "red"

    environment = CallbackEnvironment(env_step, lambda example: State())
    (tree,), stats, _ = roll_out(environment, say, bare=3, continuations=2, runner=runner)
    # Three bare rollouts, and after every turn three snapshots more
    assert counts[:15] == [3 * (1 + turn) for turn in range(5) for _ in range(3)]
    # Two continuations, and nothing else
    assert set(counts[15:]) <= {1, 2} and len(counts) > 16
    assert count() == 0
