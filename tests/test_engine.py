"""How the engine plays a forest: one call a round, no prompt waits for another, no leaf is lost, errors are shared."""

import collections
import gc
import threading

import pytest

from toys import ScriptedGenerator, coin, make_engine, make_plan, make_tokenizer, make_trainer, usual
from trace_trl import StepResult
from trace_trl.engine import OneProcess
from trace_trl.environments.base import Environment, Episode, ForkError, Reply
from trace_trl.environments.callback import CallbackEnvironment
from trace_trl.generation import Request
from trace_trl.pool import Candidate, make_plans
from waiting import LIMIT, until


TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id
SAID = usual(TOKENIZER, "red") + [END]


def say(request):
    return SAID


def lasting(turns):
    """An environment whose episodes end after `turns(state, number)` turns, where `number` counts those begun."""
    begun = collections.Counter()

    def env_reset(example):
        begun[example["name"]] += 1
        return {"name": example["name"], "left": turns(example["name"], begun[example["name"]])}

    def env_step(state, action, messages):
        state["left"] -= 1
        return StepResult(observation=f"{state['left']} left", done=state["left"] <= 0)

    return CallbackEnvironment(env_step, env_reset)


def plans_of(engine, *names, bare=2, continuations=2):
    return [
        make_plan(engine, prompt=name, bare=bare, continuations=continuations, index=index, name=name)
        for index, name in enumerate(names)
    ]


def kinds(plan):
    return [leaf.leaf.kind for leaf in plan.tree.leaves()]


def starts(plan):
    """The prefix each continuation started from."""
    found = []
    for leaf in plan.tree.leaves():
        if leaf.leaf.kind == "continuation":
            bare = {turn for other in plan.tree.leaves() if other.leaf.kind == "bare" for turn in other.path()}
            found.append(next(turn.parent for turn in leaf.path() if turn not in bare))
    return found


def span(plan):
    """Rounds a prompt takes: its longest rollout, then its longest continuation."""
    bare = [leaf.depth for leaf in plan.tree.leaves() if leaf.leaf.kind == "bare"]
    origins = iter(starts(plan))
    later = [
        leaf.depth - (next(origins).depth if leaf.leaf.kind == "continuation" else 0)
        for leaf in plan.tree.leaves()
        if leaf.leaf.kind != "bare"
    ]
    return max(bare) + max(later, default=0)


# Rounds


@pytest.mark.parametrize("prompts", [1, 3, 20])
def test_generation_calls_do_not_grow_with_the_number_of_prompts(prompts):
    generate = ScriptedGenerator(say, [END])
    # Of every prompt the first rollout takes five turns, the others one to three
    engine = make_engine(generate, lasting(lambda name, number: 5 if number == 1 else (int(name) + number) % 3 + 1))
    plans = plans_of(engine, *map(str, range(prompts)), bare=3, continuations=6)
    stats = engine.run(plans, seed=0)
    assert all(len(plan.tree.leaves()) == 9 for plan in plans)
    # A continuation plays on with what its prefix had left: four turns at most
    assert len(generate.calls) == stats.rounds <= 5 + 4
    assert max(map(len, generate.calls)) >= 3 * prompts


def test_generation_calls_of_a_training_step(tmp_path):
    trainer = make_trainer(
        tmp_path,
        per_device_train_batch_size=12,
        num_generations=6,
        continuations_per_root=2,
        max_completion_length=100,
        max_turn_length=3,
        max_steps=2,
        env_step=lambda state, action, messages: StepResult(
            observation="go on", done=(len(action) + len(messages)) % 3 == 0
        ),
        turn_stop_strings=["a", "e", "o", "t"],
    )
    calls, longest = [], []
    engine = trainer._engine
    generate, run = engine.generate, engine.run
    engine.generate = lambda requests: calls.append(len(requests)) or generate(requests)

    def watched(plans, *args, **kwargs):
        before = len(calls)
        stats = run(plans, *args, **kwargs)
        leaves = [leaf for plan in plans for leaf in plan.tree.leaves()]
        bare = max(leaf.depth for leaf in leaves if leaf.leaf.kind == "bare")
        later = max(leaf.depth for leaf in leaves if leaf.leaf.kind != "bare")
        longest.append((len(calls) - before, bare + later))
        return stats

    engine.run = watched
    trainer.train()
    assert len(longest) == 2
    assert all(1 <= made <= allowed for made, allowed in longest)


def test_a_prompt_expands_while_others_still_roll_out():
    generate = ScriptedGenerator(say, [END])
    engine = make_engine(generate, lasting(lambda name, number: {"short": 2, "long": 6}[name]))
    plans = plans_of(engine, "short", "long")
    engine.run(plans, seed=0)

    def of(plan, call):
        return sum(request.context[: len(plan.tree.prompt_ids)] == plan.tree.prompt_ids for request in call)

    short = [of(plans[0], call) for call in generate.calls]
    long = [of(plans[1], call) for call in generate.calls]
    # Two rollouts of two turns, then two continuations of the second turn, while the other prompt is in its third
    assert short == [2, 2, 2] + [0] * (len(short) - 3)
    assert long[:6] == [2] * 6
    assert all(leaf.leaf.scored for plan in plans for leaf in plan.tree.leaves())


def test_leaves_are_scored_prompt_by_prompt_as_they_end():
    scored = []

    def score(leaves):
        scored.append([(turn.leaf.kind, tree.index) for tree, turn in leaves])
        coin(leaves)

    engine = make_engine(
        ScriptedGenerator(say, [END]), lasting(lambda name, number: {"short": 2, "long": 4}[name]), score=score
    )
    engine.run(plans_of(engine, "short", "long"), seed=0)
    assert scored[0] == [("bare", 0)] * 2
    assert [("bare", 1)] * 2 in scored
    assert sorted(sum(scored, [])) == sorted(
        [("bare", i) for i in (0, 0, 1, 1)] + [("continuation", i) for i in (0, 0, 1, 1)]
    )


def test_rounds_of_sync_and_async_environments_are_the_same():
    async def env_step(state, action, messages):
        return StepResult(observation=f"turn {len(messages)}", done=len(messages) > 5)

    def plain(state, action, messages):
        return StepResult(observation=f"turn {len(messages)}", done=len(messages) > 5)

    trees = []
    for function in (env_step, plain):
        engine = make_engine(ScriptedGenerator(say, [END]), CallbackEnvironment(function, None), timeout=20)
        plans = plans_of(engine, "a", "b")
        engine.run(plans, seed=0)
        trees.append([[turn.history_ids() for turn in plan.tree.turns()] for plan in plans])
    assert trees[0] == trees[1]


def test_progress_is_told_after_every_round():
    told = []
    generate = ScriptedGenerator(say, [END])
    engine = make_engine(
        generate,
        lasting(lambda name, number: 2),
        progress=lambda stats, done, wanted: told.append((stats.rounds, done, wanted)),
    )
    engine.run(plans_of(engine, "a", "b"), seed=0)
    assert told == [(1, 0, 8), (2, 4, 8), (3, 8, 8)]


def test_nothing_to_play():
    generate = ScriptedGenerator(say, [END])
    stats = make_engine(generate, lasting(lambda name, number: 1)).run([])
    assert (generate.calls, stats.rounds, stats.turns) == ([], 0, 0)


def test_garbage_is_looked_for_rarely_while_the_engine_runs():
    seen = []

    def watching(request):
        seen.append(gc.get_threshold())
        return SAID

    before = gc.get_threshold()
    for threshold, inside in ((700, 100_000), (200_000, 200_000), (0, 0)):
        try:
            gc.set_threshold(threshold, 11, 12)
            engine = make_engine(ScriptedGenerator(watching, [END]), lasting(lambda name, number: 1))
            engine.run(plans_of(engine, "a"), seed=0)
            assert set(seen) == {(inside, 11, 12)}
            assert gc.get_threshold() == (threshold, 11, 12)
            engine.generate = breaking
            with pytest.raises(Broken):
                engine.run(plans_of(engine, "a"), seed=0)
            assert gc.get_threshold() == (threshold, 11, 12)
        finally:
            gc.set_threshold(*before)
            seen.clear()


def test_case_41_a_process_shows_what_its_own_reset_answered():
    """Two rows that another process reset, one of which is answered differently here: the rollouts of this process are
    shown its own answer, under the row's number and value; the other row's prompt stays as it was."""
    rows = [{"prompt": "a", "same": True}, {"prompt": "b", "same": False}]
    pool = [Candidate(row, row["prompt"] + " there", [1], value=0.25) for row in rows]

    def reset(examples):
        episodes = [Episode() for _ in examples]
        for episode, (row, prompt) in zip(episodes, examples, strict=True):
            episode.prompt = prompt + (" there" if row["same"] else " here")
        return episodes

    def encode(examples, prompts):
        assert (examples, prompts) == ([rows[1]], ["b here"])
        return [[7, 8]]

    plans, reserves = make_plans(pool, [4, 4], [2, 2], {}, 1, reset, encode, with_reserves=False)
    trees = [plan.tree for plan in plans]
    assert [(tree.prompt, tree.prompt_ids, tree.index) for tree in trees] == [
        ("a there", [1], 0),
        ("b here", [7, 8], 1),
    ]
    assert [(tree.example, tree.budget, tree.root.value) for tree in trees] == [(row, 4, 0.25) for row in rows]
    assert [(plan.episode.prompt, plan.varies) for plan in plans] == [("a there", False), ("b here", True)]
    assert reserves == []


# Where continuations start


def test_without_an_eligible_prefix_continuations_start_at_the_root():
    engine = make_engine(ScriptedGenerator(say, [END]), lasting(lambda name, number: 1))
    plans = plans_of(engine, "a", "b", bare=2, continuations=4)
    stats = engine.run(plans, seed=0)
    assert [kinds(plan) for plan in plans] == [["bare"] * 2 + ["extra"] * 4] * 2
    assert stats.extra_rollouts == 8
    assert all(leaf.depth == 1 and leaf.leaf.scored for plan in plans for leaf in plan.tree.leaves())


class Breaking(Environment):
    """Three turns; a copy of the state after turn `broken` can be made, but not be copied again."""

    def __init__(self, *broken):
        self.broken = broken

    def reset(self, example, prompt):
        return BreakingEpisode(self, prompt)


class BreakingEpisode(Episode):
    def __init__(self, owner, prompt, turn=0, is_copy=False):
        self.owner, self.prompt, self.turn, self.is_copy = owner, prompt, turn, is_copy

    def step(self, action):
        self.turn += 1
        return Reply(messages=[{"role": "user", "content": f"turn {self.turn}"}], done=self.turn == 3)

    def on_error(self, action, error):
        raise AssertionError from error

    def fork(self):
        if self.is_copy and self.turn in self.owner.broken:
            raise ForkError("broken")
        return BreakingEpisode(self.owner, self.prompt, self.turn, is_copy=True)


@pytest.mark.parametrize("broken", [(), (1,), (2,), (1, 2)])
def test_continuations_of_a_prefix_that_fails_to_fork_go_to_the_others(broken):
    engine = make_engine(ScriptedGenerator(say, [END]), Breaking(*broken))
    (plan,) = plans_of(engine, "a", bare=2, continuations=8)
    stats = engine.run([plan], seed=0)
    depths = collections.Counter(turn.depth for turn in starts(plan))
    assert depths == {(): {1: 4, 2: 4}, (1,): {2: 8}, (2,): {1: 8}, (1, 2): {}}[broken]
    assert kinds(plan).count("extra") == stats.extra_rollouts == (8 if len(broken) == 2 else 0)
    assert stats.unforkable_prefixes == 2 * len(broken)
    assert len(plan.tree.leaves()) == 10
    assert plan.snapshots == {}


def test_prefixes_of_unscored_rollouts_get_no_continuations():
    def score(leaves):
        for _, turn in leaves:
            scored = turn.leaf.rollout != 1
            turn.leaf.reward, turn.leaf.success = (1.0, True) if scored else (float("nan"), None)

    for bare, expected in ((3, 6), (2, 4)):
        engine = make_engine(ScriptedGenerator(say, [END]), lasting(lambda name, number: 3), score=score)
        (plan,) = plans_of(engine, "a", bare=bare, continuations=expected)
        engine.run([plan], seed=0)
        second = plan.tree.leaves()[1]
        assert not second.leaf.scored
        assert len(starts(plan)) == expected
        assert not set(second.path()) & set(starts(plan))


def test_where_no_rollout_was_scored_all_continuations_start_at_the_root():
    def score(leaves):
        pass

    engine = make_engine(ScriptedGenerator(say, [END]), lasting(lambda name, number: 3), score=score)
    (plan,) = plans_of(engine, "a")
    engine.run([plan], seed=0)
    assert kinds(plan) == ["bare", "bare", "extra", "extra"]


def test_active_allocation_gives_the_right_value():
    """Factual outcomes 1 0 1 at values 0.9 0.7 0.4: three continuations are spent 0 1 2."""
    successes, values = [True, False, True], [0.9, 0.7, 0.4]

    def score(leaves):
        for _, turn in leaves:
            turn.leaf.success = successes[turn.leaf.rollout] if turn.leaf.rollout < 3 else True
            turn.leaf.reward = float(turn.leaf.success)

    def predict(leaves):
        for leaf in leaves:
            leaf.path()[0].value = values[leaf.leaf.rollout]

    engine = make_engine(
        ScriptedGenerator(say, [END]),
        lasting(lambda name, n: 2),
        score=score,
        predict=predict,
        prefix_allocation="active",
    )
    (plan,) = plans_of(engine, "a", bare=3, continuations=3)
    engine.run([plan], seed=0)
    first_turns = [leaf.path()[0] for leaf in plan.tree.leaves()[:3]]
    assert [starts(plan).count(turn) for turn in first_turns] == [0, 1, 2]


def test_uniform_allocation_spreads_evenly():
    engine = make_engine(ScriptedGenerator(say, [END]), lasting(lambda name, number: 3), prefix_allocation="uniform")
    (plan,) = plans_of(engine, "a", bare=2, continuations=8)
    engine.run([plan], seed=0)
    assert sorted(collections.Counter(starts(plan)).values()) == [2, 2, 2, 2]


def test_random_allocation_depends_on_the_seed_only():
    chosen = []
    for seed in (0, 0, 1):
        engine = make_engine(
            ScriptedGenerator(say, [END]), lasting(lambda name, number: 4), prefix_allocation="random"
        )
        (plan,) = plans_of(engine, "a", bare=2, continuations=12)
        engine.run([plan], seed=seed)
        prefixes = [turn for leaf in plan.tree.leaves()[:2] for turn in leaf.path()[:-1]]
        chosen.append([starts(plan).count(turn) for turn in prefixes])
        assert sum(chosen[-1]) == 12
    assert chosen[0] == chosen[1] != chosen[2]


# DAPO: prompts whose rollouts agree are replaced


def dapo(agreeing, names, reserve_names, continuations=0, turns=1):
    """An engine whose rollouts of the prompts `agreeing` all succeed, and of the others every other one."""

    def score(leaves):
        for tree, turn in leaves:
            success = tree.example["name"] in agreeing or turn.leaf.rollout % 2 == 1
            turn.leaf.success, turn.leaf.reward = success, float(success)

    generate = ScriptedGenerator(say, [END])
    engine = make_engine(
        generate,
        lasting(lambda name, number: turns),
        score=score,
        is_mixed=lambda tree: len({leaf.leaf.success for leaf in tree.leaves()}) == 2,
    )
    plans = plans_of(engine, *names, continuations=continuations)
    reserves = plans_of(engine, *reserve_names, bare=0, continuations=0)
    for plan in plans:
        plan.tree.budget = plan.bare
    return engine, generate, plans, reserves


def played(plans, reserves):
    return [plan.tree.example["name"] for plan in plans + reserves if plan.bare]


def test_dapo_replaces_agreeing_prompts_while_the_pool_lasts():
    engine, generate, plans, reserves = dapo("ac", "abc", "xyz")
    stats = engine.run(plans, reserves, seed=0)
    assert played(plans, reserves) == ["b", "x", "y"]
    assert [plan.bare for plan in plans] == [0, 2, 0]
    assert [(reserve.bare, reserve.tree.budget) for reserve in reserves] == [(2, 2), (2, 2), (0, 0)]
    assert (stats.discarded_leaves, stats.discarded_tokens) == (4, 4 * len(SAID))
    assert len(generate.calls) == 2
    leaves = [leaf for plan in plans + reserves if plan.bare for leaf in plan.tree.leaves()]
    assert len(leaves) == 6
    assert all(leaf.leaf.scored for leaf in leaves)


def test_dapo_replaces_a_replacement_too_and_keeps_what_it_cannot_replace():
    engine, _, plans, reserves = dapo("abxy", "ab", "xyz")
    stats = engine.run(plans, reserves, seed=0)
    # a gives way to x, b to y; then x to z, and nothing is left for y
    assert played(plans, reserves) == ["y", "z"]
    assert stats.discarded_leaves == 6


def test_dapo_expands_the_prompt_that_took_the_place():
    engine, _, plans, reserves = dapo("a", "ab", "x", continuations=4, turns=3)
    engine.run(plans, reserves, seed=0)
    assert played(plans, reserves) == ["b", "x"]
    for plan in (plans[1], reserves[0]):
        assert kinds(plan) == ["bare"] * 2 + ["continuation"] * 4
    assert kinds(plans[0]) == ["bare"] * 2


# Errors


class Broken(Exception):
    pass


def breaking(*args, **kwargs):
    raise Broken("on purpose")


@pytest.mark.parametrize("part", ["generate", "score", "predict", "progress", "tools", "is_mixed"])
def test_an_error_in_any_part_ends_the_run_with_that_error(part):
    generate = breaking if part == "generate" else ScriptedGenerator(say, [END])
    kwargs = {} if part == "generate" else {part: breaking}
    engine = make_engine(generate, lasting(lambda name, number: 2), **{"prefix_allocation": "active", **kwargs})
    plans = plans_of(engine, "a")
    with pytest.raises(Broken, match="on purpose"):
        engine.run(plans, seed=0)


def test_a_reset_that_fails_ends_the_run_with_its_error():
    engine = make_engine(ScriptedGenerator(say, [END]), CallbackEnvironment(breaking, breaking))
    with pytest.raises(Broken, match="on purpose"):
        engine.reset([({"prompt": "a"}, "a")])


def test_what_a_template_cannot_render_is_answered_with_an_error():
    def env_step(state, action, messages):
        content = [{"role": "nobody", "content": "x"}] if len(messages) == 2 else "red"
        return StepResult(observation=content, done=len(messages) > 4)

    template = make_tokenizer().chat_template
    tokenizer = make_tokenizer(
        "{% for m in messages if m.role == 'nobody' %}{{ raise_exception('no such role') }}{% endfor %}" + template
    )
    engine = make_engine(ScriptedGenerator(say, [END]), CallbackEnvironment(env_step, None), tokenizer)
    plan = make_plan(engine, bare=2)
    stats = engine.run([plan], seed=0)
    for leaf in plan.tree.leaves():
        messages = [message["content"] for turn in leaf.path() for message in turn.messages]
        assert messages == ["red", "Error: no such role", "red", "red", "red"]
    assert stats.environment_failures == 2


# Several processes


class Shared:
    """What two processes, here two threads, tell each other; each waits for the other, but not for ever."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=LIMIT)
        self.told = [None, None]


class TwoProcesses:
    def __init__(self, rank, shared):
        self.rank, self.shared, self.calls = rank, shared, []

    def gather(self, kind, value):
        self.calls.append(kind)
        self.shared.told[self.rank] = (kind, value)
        self.shared.barrier.wait()
        told = list(self.shared.told)
        self.shared.barrier.wait()
        assert told[0][0] == told[1][0], "the processes are in different calls"
        return [value for _, value in told]

    def most(self, number):
        return max(self.gather("most", number))

    def totals(self, *numbers):
        return [sum(column) for column in zip(*self.gather("totals", numbers), strict=True)]

    def check(self, error):
        if any(self.gather("check", error is not None)):
            raise error or RuntimeError("another process failed")


def on_two_processes(work, ends_all=False):
    """Runs `work(rank, sync)` for both ranks; their syncs and what they returned or raised. With `ends_all`, a process
    that fails ends the other, as a launcher does."""
    shared = Shared()
    syncs = [TwoProcesses(rank, shared) for rank in range(2)]
    results = [None, None]

    def target(rank):
        try:
            results[rank] = work(rank, syncs[rank])
        except Exception as error:
            results[rank] = error
            if isinstance(error, threading.BrokenBarrierError) or ends_all:
                shared.barrier.abort()

    threads = [threading.Thread(target=target, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)  # who waits in vain for the other gives up before
        assert not thread.is_alive()
    return syncs, results


class Collective(ScriptedGenerator):
    """A generation in which all processes take part, as under sharded weights."""

    def __init__(self, sync, script=say):
        super().__init__(script, [END])
        self.sync = sync

    def __call__(self, requests):
        samples = super().__call__(requests)
        self.sync.gather("generate", None)
        return samples


# Per rank, the names of its prompts; a prompt takes as many turns as its name says
SCHEDULES = [
    (["1"], ["6"]),
    (["3", "1"], []),
    ([], []),
    (["2", "5", "1"], ["1"]),
    (["4"], ["4"]),
    (["1", "1"], ["2", "7"]),
]


@pytest.mark.parametrize("allocation", ["active", "uniform"])
@pytest.mark.parametrize("names", SCHEDULES, ids=str)
def test_processes_make_the_same_calls_though_their_branches_differ(names, allocation):
    def work(rank, sync):
        generate = Collective(sync)
        engine = make_engine(
            generate,
            lasting(lambda name, number: int(name)),
            sync=sync,
            predict=lambda leaves: sync.gather("predict", None),
            prefix_allocation=allocation,
        )
        plans = plans_of(engine, *names[rank])
        engine.run(plans, seed=rank)
        return generate, plans

    syncs, results = on_two_processes(work)
    assert syncs[0].calls == syncs[1].calls
    for (generate, plans), own in zip(results, names, strict=True):
        assert len(generate.calls) == len(results[0][0].calls)
        assert [len(plan.tree.leaves()) for plan in plans] == [4] * len(own)
        # Who has no branch left takes part with a context of its own, for one token
        playing = max(map(span, plans), default=0)
        assert [Request([END], 1)] not in generate.calls[:playing]
        assert all(call == [Request([END], 1)] for call in generate.calls[playing:])


@pytest.mark.parametrize("part", ["score", "reset", "step", "is_mixed", "progress"])
@pytest.mark.parametrize("broken_rank", [0, 1])
def test_an_error_on_one_process_ends_both(part, broken_rank):
    def work(rank, sync):
        broken = rank == broken_rank
        generate = ScriptedGenerator(say, [END])
        environment = lasting(lambda name, number: int(name))
        if broken and part == "reset":
            made = []
            reset = environment.reset
            # The first episodes are reset before the engine runs
            environment.reset = lambda *args: reset(*args) if len(made) < 1 and not made.append(1) else breaking()
        if broken and part == "step":
            environment.env_step = breaking
            environment.episode_class = type("Failing", (environment.episode_class,), {"on_error": breaking})
        kwargs = {name: breaking for name in ("score", "is_mixed", "progress") if broken and name == part}
        if part == "is_mixed" and not broken:
            kwargs["is_mixed"] = lambda tree: True
        engine = make_engine(generate, environment, sync=sync, prefix_allocation="active", **kwargs)
        plans = plans_of(engine, "2")
        engine.run(plans, seed=0)

    syncs, results = on_two_processes(work)
    assert isinstance(results[broken_rank], Broken)
    assert str(results[1 - broken_rank]) == "another process failed"
    assert syncs[0].calls == syncs[1].calls


@pytest.mark.parametrize("part", ["generate", "predict"])
def test_an_error_within_a_call_of_all_processes_is_raised_at_once(part):
    """The other is still in that call: to wait for it would be to wait for ever."""

    def work(rank, sync):
        def collective(*args):
            if rank == 1:
                until(lambda: sync.shared.barrier.n_waiting and sync.shared.told[0][0] == part)  # the other is in it
                breaking()
            sync.gather(part, None)

        generate = collective if part == "generate" else ScriptedGenerator(say, [END])
        engine = make_engine(
            generate,
            lasting(lambda name, number: int(name)),
            sync=sync,
            predict=collective,
            prefix_allocation="active",
        )
        engine.run(plans_of(engine, "2"), seed=0)

    syncs, results = on_two_processes(work, ends_all=True)
    assert isinstance(results[1], Broken)
    assert isinstance(results[0], threading.BrokenBarrierError)
    assert syncs[0].calls[-1] == part and syncs[1].calls == syncs[0].calls[:-1]


def test_one_process_raises_its_own_error():
    sync = OneProcess()
    sync.check(None)
    assert sync.most(3) == 3
    with pytest.raises(Broken):
        sync.check(Broken())
