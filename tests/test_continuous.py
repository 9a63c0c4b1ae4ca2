"""Rollouts that go on one by one: the same trees as by rounds, nobody waits for another, nothing is left behind."""

import asyncio
import random
import threading
import time

import numpy as np
import pytest

from test_engine import Broken, kinds, lasting, on_two_processes, plans_of
from toys import ScriptedGenerator, coin, make_engine, make_tokenizer, usual
from trace_trl import StepResult, continuous
from trace_trl.continuous import ContinuousRun, order_children
from trace_trl.environments.callback import CallbackEnvironment
from trace_trl.tree_log import tree_to_dict
from waiting import LIMIT, until


TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id
SAID = usual(TOKENIZER, "red") + [END]
WORDS = ["red", "green", "blue", "yes", "no", "left", "right"]


class ScriptedStream(ScriptedGenerator):
    """Answers what was asked of it one by one, in an order of its own."""

    is_shared = False

    def __init__(self, script, seed=0, most=3):
        super().__init__(script, [END])
        self.random = random.Random(seed)
        self.most = most
        self.open = {}

    @property
    def is_busy(self):
        return bool(self.open)

    def submit(self, requests):
        if requests:
            self.calls.append([request for _, request in requests])
        for key, request in requests:
            assert key not in self.open
            self.open[key] = request

    def step(self):
        keys = self.random.sample(sorted(self.open), min(len(self.open), self.random.randint(0, self.most)))
        return [(key, self._sample(self.open.pop(key))) for key in keys]


def by_branch(request):
    """A turn that its branch and its history decide."""
    draw = random.Random(f"{request.branch} {request.context}")
    return usual(TOKENIZER, " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))) + [END]


def wavering(pause=0.0):
    """An environment whose episodes end by what was said, after a time that nothing decides."""
    draw = random.Random(1)

    def env_step(state, action, messages):
        time.sleep(pause * draw.random())
        state["said"] += action
        over = len(messages) > 3 and hash_of(state["said"]) % 4 == 0
        return StepResult(observation=f"{len(action)} said", done=over or len(messages) > 14)

    return CallbackEnvironment(env_step, lambda example: {"said": example["name"]})


def hash_of(text):
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(text))


def grown(schedule, generate, environment, seed=3, prompts=5, **options):
    """Trees as they are logged, without what depends on time."""
    engine = make_engine(generate, environment, schedule=schedule, completion=400, **options)
    plans = plans_of(engine, *map(str, range(prompts)), bare=3, continuations=5)
    stats = engine.run(plans, seed=seed)
    return [tree_to_dict(plan.tree) for plan in plans], stats, plans


@pytest.mark.parametrize("allocation", ["uniform", "random"])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_turns_grow_the_same_trees(seed, allocation):
    rounds, by_rounds, _ = grown(
        None, ScriptedGenerator(by_branch, [END]), wavering(), seed, prefix_allocation=allocation
    )
    continuous, one_by_one, _ = grown(
        ContinuousRun, ScriptedStream(by_branch, seed), wavering(0.002), seed, prefix_allocation=allocation
    )
    assert continuous == rounds
    for name in ("turns", "sampled_tokens", "prefilled_tokens", "environment_calls", "extra_rollouts"):
        assert getattr(one_by_one, name) == getattr(by_rounds, name)


def test_children_are_put_in_the_order_of_their_rollouts():
    _, _, plans = grown(ContinuousRun, ScriptedStream(by_branch), wavering())
    for plan in plans:
        ordered = [list(turn.children) for turn in plan.tree.root.turns()]
        for turn in plan.tree.root.turns():
            random.Random(7).shuffle(turn.children)
        order_children(plan.tree.root)
        assert [list(turn.children) for turn in plan.tree.root.turns()] == ordered


def test_a_slow_environment_holds_up_nobody():
    """One branch's environment answers when all others are through."""
    release, ended = threading.Event(), []

    def env_reset(example):
        return {"name": example["name"], "left": 4}

    def env_step(state, action, messages):
        if state["name"] == "slow" and state["left"] == 4:
            assert release.wait(LIMIT)
        state["left"] -= 1
        if not state["left"]:
            ended.append(state["name"])
            if ended.count("quick") == 6:
                release.set()
        return StepResult(observation="go on", done=not state["left"])

    engine = make_engine(
        ScriptedStream(lambda request: SAID), CallbackEnvironment(env_step, env_reset), schedule=ContinuousRun
    )
    plans = plans_of(engine, "slow", "quick", bare=2, continuations=4)
    engine.run(plans, seed=0)
    assert set(ended[:6]) == {"quick"}
    assert [len(plan.tree.leaves()) for plan in plans] == [6, 6]


def test_a_call_that_takes_too_long_costs_its_branch_an_error_and_nobody_else_anything():
    hanging = threading.Event()

    def env_step(state, action, messages):
        if state["name"] == "hangs" and len(messages) == 2:
            hanging.wait(LIMIT)
        return StepResult(observation="go on", done=len(messages) > 6)

    engine = make_engine(
        ScriptedStream(lambda request: SAID),
        CallbackEnvironment(env_step, dict),
        schedule=ContinuousRun,
        timeout=2.0,
    )
    plans = plans_of(engine, "hangs", "well", bare=2, continuations=0)
    try:
        stats = engine.run(plans, seed=0)
    finally:
        hanging.set()
    said = [m["content"] for leaf in plans[0].tree.leaves() for turn in leaf.path() for m in turn.messages]
    assert sum("no answer within 2 seconds" in text for text in said) == 2
    assert stats.environment_failures == 2
    assert kinds(plans[1]) == ["bare", "bare"]


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["generation", "score"])
def test_an_error_ends_the_run_and_gives_up_what_is_open(place, error):
    """What is raised while environments are at work leaves none of them open, and the next run is as any other."""
    at_work, given_up, closed, broken = [], [], [], [True]

    class Session:
        opened = left = 0

        def __enter__(self):
            Session.opened += 1

        def __exit__(self, *exception):
            Session.left += 1
            generate.open.clear()

    def breaking(function):
        def call(*args):
            if broken[0] and len(at_work) == 2:
                raise error()
            return function(*args)

        return call

    async def env_step(state, action, messages):
        if broken[0] and state["name"] == "hangs":
            at_work.append(state["name"])
            try:
                await asyncio.Event().wait()
            finally:
                given_up.append(state["name"])
        return StepResult(observation="go on", done=len(messages) > 4)

    class Watched(CallbackEnvironment):
        def reset(self, example, prompt):
            episode = super().reset(example, prompt)
            close = episode.close
            episode.close = lambda: closed.append(example["name"]) or close()
            return episode

    class HangingFirst(ScriptedStream):
        """The other prompt's turns end when all environments of the first are at work."""

        def step(self):
            first = [key for key in (1, 2) if key in self.open] if broken[0] else []
            if first:
                return [(key, self._sample(self.open.pop(key))) for key in first]
            if broken[0]:
                until(lambda: len(at_work) == 2)
            return step()

    generate = HangingFirst(lambda request: SAID)
    step = super(HangingFirst, generate).step
    step = breaking(step) if place == "generation" else step
    engine = make_engine(
        generate,
        Watched(env_step, dict),
        schedule=ContinuousRun,
        generating=Session,
        score=breaking(coin) if place == "score" else coin,
    )
    with pytest.raises(error):
        engine.run(plans_of(engine, "hangs", "goes on"), seed=0)
    until(lambda: len(given_up) == 2)
    assert sorted(closed) == ["goes on", "goes on", "hangs", "hangs"] and at_work == ["hangs", "hangs"]
    broken[0] = False
    plans = plans_of(engine, "c", "d")
    engine.run(plans, seed=0)
    assert [len(plan.tree.leaves()) for plan in plans] == [4, 4]
    assert Session.opened == Session.left == 2


def play_on_two_processes(*names):
    """Plays the prompts of each process, of as many turns as their names say, with value passes that all make."""

    def work(rank, sync):
        engine = make_engine(
            ScriptedStream(lambda request: SAID, seed=rank),
            lasting(lambda name, number: int(name)),
            sync=sync,
            schedule=ContinuousRun,
            predict=lambda leaves: sync.gather("predict", len(leaves)),
            prefix_allocation="active",
        )
        plans = plans_of(engine, *names[rank])
        engine.run(plans, seed=0)
        return [kinds(plan) for plan in plans]

    syncs, (first, second) = on_two_processes(work)
    assert [len(found) for found in first + second] == [4] * sum(map(len, names))
    assert syncs[0].calls == syncs[1].calls
    return syncs[0].calls


def test_two_processes_make_the_same_number_of_ticks():
    """One process has long episodes, the other short ones and none at all; what they do together, they do together."""
    assert "predict" in play_on_two_processes(["1", "5"], ["2"])


def test_two_processes_stop_for_values_no_more_often_than_one_would():
    """Eight prompts that end one after the other, in turn on one process and on the other."""
    calls = play_on_two_processes(["1", "3", "5", "7"], ["2", "4", "6", "8"])
    assert 1 <= calls.count("predict") <= 5


class SlowStream(ScriptedStream):
    """Takes 30 steps for a turn, as an engine that samples a token in each does."""

    def __init__(self, script, seed=0):
        super().__init__(script, seed)
        self.left, self.steps = {}, 0

    def step(self):
        self.steps += 1
        for key in self.open:
            self.left[key] = self.left.get(key, 30) - 1
        ended = [key for key in self.open if not self.left[key]]
        return [(key, self._sample(self.open.pop(key))) for key in ended]


def test_a_process_with_an_engine_of_its_own_does_not_wait_for_the_others_at_every_token(monkeypatch):
    """With 64 processes some engine is always at a long step, and all of them would step as slowly."""
    monkeypatch.setattr(continuous, "STRIDE", float("inf"))
    streams = [SlowStream(lambda request: SAID, seed=rank) for rank in range(2)]

    def work(rank, sync):
        engine = make_engine(streams[rank], lasting(lambda name, number: int(name)), sync=sync, schedule=ContinuousRun)
        plans = plans_of(engine, *[["2", "4"], ["3"]][rank])
        engine.run(plans, seed=0)
        return [kinds(plan) for plan in plans]

    syncs, (first, second) = on_two_processes(work)
    assert [len(found) for found in first + second] == [4] * 3
    assert streams[0].steps >= 120  # four turns one after the other
    # Bare rollouts of three prompts and what follows them
    assert syncs[0].calls.count("totals") < 10


def test_processes_that_hold_one_engine_step_it_together():
    class SharedStream(ScriptedStream):
        is_shared = True

        def __init__(self, sync, rank):
            super().__init__(lambda request: SAID, seed=5)
            self.sync, self.rank, self.steps, self.ticks = sync, rank, 0, set()

        def submit(self, requests):
            if requests:
                self.calls.append([request for _, request in requests])
            for rank, part in enumerate(self.sync.gather("submit", list(requests))):
                self.open |= {(rank, key): request for key, request in part}

        def step(self):
            self.sync.gather("step", None)
            self.steps += 1
            self.ticks.add(self.sync.calls.count("totals"))
            keys = self.random.sample(sorted(self.open), min(len(self.open), self.random.randint(0, 2)))
            ended = [(key, self._sample(self.open.pop((rank, key)))) for rank, key in keys if rank == self.rank]
            for key in keys:
                self.open.pop(key, None)
            return ended

    streams = {}

    def work(rank, sync):
        streams[rank] = SharedStream(sync, rank)
        environment = lasting(lambda name, number: int(name))
        engine = make_engine(streams[rank], environment, sync=sync, schedule=ContinuousRun)
        plans = plans_of(engine, *[["1", "5", "2"], ["2"]][rank])
        engine.run(plans, seed=0)
        return [kinds(plan) for plan in plans]

    syncs, (first, second) = on_two_processes(work)
    assert [len(found) for found in first + second] == [4] * 4
    assert syncs[0].calls == syncs[1].calls and streams[0].steps == streams[1].steps
    # Fewer than steps; while nothing is sampled, there are as many as the environments take time
    assert len(streams[0].ticks) < streams[0].steps


def test_an_error_on_one_process_ends_both():
    def work(rank, sync):
        def score(leaves):
            if rank == 1:
                raise Broken()

        engine = make_engine(
            ScriptedStream(lambda request: SAID, seed=rank),
            lasting(lambda name, number: int(name)),
            sync=sync,
            schedule=ContinuousRun,
            score=score,
        )
        engine.run(plans_of(engine, "3"), seed=0)

    _, (first, second) = on_two_processes(work)
    assert isinstance(second, Broken) and "another process failed" in str(first)


def test_seed_of_a_choice_depends_on_the_prompt_only():
    engine = make_engine(ScriptedGenerator(lambda request: SAID, [END]), lasting(lambda name, number: 2))
    plans = plans_of(engine, "a", "b")
    forwards = engine.schedule(engine, plans, [], 5)
    seeds = [forwards._choice_seed(plan) for plan in plans]
    for plan in plans:
        plan.choices = 0
    backwards = engine.schedule(engine, plans, [], 5)
    assert [backwards._choice_seed(plan) for plan in reversed(plans)] == seeds[::-1]
    assert len({*seeds, *(backwards._choice_seed(plan) for plan in plans)}) == 4
    assert all(isinstance(seed, int) and 0 <= seed < np.iinfo(np.int32).max for seed in seeds)
