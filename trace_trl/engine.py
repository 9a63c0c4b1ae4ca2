"""
The tree rollout engine: keeps all live branches of all prompts, one generation call a round for all of them.

    round:  contexts of all live branches ──▶ generate ──▶ turns ──▶ environments step, together ──▶ replies appended
            └─ prompts whose bare rollouts all ended: score ─▶ values ─▶ prefix allocation ─▶ fork ─▶ new live branches

A prompt's continuations start in the round after its own last bare rollout ended; they share rounds with other
prompts' rollouts, and no prompt waits for another. The engine knows tokens only through a [`Codec`], models only
through a generator, processes only through a [`Sync`].
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from .allocation import PREFIX_ALLOCATORS, reads_values
from .codec import Codec, Turned
from .collecting import collecting_rarely
from .environments.base import Action, Environment, Episode, Reply, RunEndingError, describe, needs_main_thread
from .environments.forking import Snapshot, take_snapshot
from .environments.runner import ConcurrentRunner, EnvironmentTimeout
from .foreign import optional_method
from .generation import Generator, Request, Sample
from .tree import Leaf, RolloutTree, Start, Turn


logger = logging.getLogger(__name__)


class Sync(Protocol):
    """What one process must know of the others. Every call is made by all processes in the same order."""

    def most(self, number: int) -> int:
        """The largest `number` of all processes."""

    def totals(self, *numbers: int) -> list[int]:
        """Each of the `numbers`, added up over all processes."""

    def check(self, error: BaseException | None) -> None:
        """Raises on every process if any passes an error: its own error where there is one."""


class OneProcess:
    def most(self, number: int) -> int:
        return number

    def totals(self, *numbers: int) -> list[int]:
        return list(numbers)

    def check(self, error: BaseException | None) -> None:
        if error is not None:
            raise error


@dataclass(slots=True)
class Limits:
    """Where an episode ends.

    Attributes:
        completion (`int`): tokens of an episode behind its prompt, observations included.
        context (`int` or `None`): tokens the model takes, prompt included.
        turn (`int` or `None`): tokens of one turn.
        turns (`int` or `None`): turns of an episode.
    """

    completion: int
    context: int | None = None
    turn: int | None = None
    turns: int | None = None

    def left(self, branch: Branch) -> int:
        """Tokens that may still follow, observations included; 0 or less if none."""
        history = len(branch.context)
        left = self.completion - (history - len(branch.start.ids))
        return left if self.context is None else min(left, self.context - history)

    def fits(self, branch: Branch, tokens: int) -> bool:
        """Whether an observation of that many tokens may follow (TRL's rule: it may fill the completion, but must
        leave room in the context)."""
        history = len(branch.context) + tokens
        in_context = self.context is None or history < self.context
        return history - len(branch.start.ids) <= self.completion and in_context


@dataclass(slots=True, eq=False)
class RootPlan:
    """What is to be rolled out from one prompt on this process.

    Attributes:
        tree (`RolloutTree`): grows while the engine runs.
        episode (`Episode`): the episode whose `reset` gave the prompt; the first rollout plays it.
        bare (`int`): bare rollouts.
        continuations (`int`): continuations of these.
    """

    tree: RolloutTree
    episode: Episode
    bare: int
    continuations: int = 0
    started: int = 0  # rollouts started so far, of all kinds
    running: int = 0  # bare rollouts still live
    expanded: bool = False
    choices: int = 0  # how often prefixes were chosen
    varies: bool = False  # whether `reset` gave its rollouts different tasks
    snapshots: dict[Turn, Snapshot] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Branch:
    plan: RootPlan
    node: Turn  # the last turn played; the next one is sampled behind it
    episode: Episode
    leaf: Leaf
    start: Start  # what it was shown first
    context: list[int]  # `node.history_ids()`, kept by this branch alone: gathering it in every round takes long
    history: list[tuple[Action, Reply]] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)  # last numbers of the environment


class Acting(NamedTuple):
    branch: Branch
    action: Action
    end: int | None  # the token its turn ended with, `None` if a stop string ended it


@dataclass
class Stats:
    """What one call of `run` did on this process."""

    rounds: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int | None = None  # of these, those in the backend's prefix cache; `None` if it has none
    environment_calls: int = 0
    environment_failures: int = 0
    environment_errors: int = 0  # of the failures, those of steps that raised or were given up
    discarded_leaves: int = 0
    discarded_tokens: int = 0
    unforkable_prefixes: int = 0
    extra_rollouts: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("generation", "environment", "reward", "predictor"), 0.0)
    )
    info: dict[str, list[float]] = field(default_factory=dict)


class TreeRolloutEngine:
    """
    Args:
        generate (`Generator`): one round of generation.
        codec (`Codec`): turns to messages, answers to ids.
        environment (`Environment`): hands out and steps episodes.
        score (`Callable[[list[tuple[RolloutTree, Turn]]], None]`): fills `reward`, `rewards`, `success` of leaves.
            Called with each leaf exactly once, several leaves at a time.
        limits (`Limits`): where an episode ends.
        score_together (`bool`): whether all processes must call `score` together, with no leaves where a process has
            none (a reward model that is sharded).
        predict (`Callable`, *optional*): `predict(leaves)` writes `value` into the prefixes of these leaves' paths.
            Called by all processes together. Needed by an allocator that reads values.
        note (`Callable[[Turn, Any], None]`, *optional*): told the hidden state at the end of a history, where the
            generator gives one.
        prefix_allocation (`str`): name of an allocator of `allocation.py`.
        is_mixed (`Callable[[RolloutTree], bool]`, *optional*): replaces prompts whose rollouts are not mixed by
            reserves (DAPO dynamic sampling).
        runner (`ConcurrentRunner`): steps environments.
        timeout (`float`, *optional*): seconds per environment step.
        sync (`Sync`): the other processes.
        tools (`Callable[[RolloutTree], list]`, *optional*): tools a prompt was rendered with, for parsing its turns.
        encode (`Callable`, *optional*): `encode(rows, prompts)` gives the token ids of prompts. Needed where `reset`
            gives different tasks for one row.
        progress (`Callable[[Stats, int, int], None]`, *optional*): called after every round with leaves done and
            wanted.
        generating (`Callable[[], AbstractContextManager]`): opened by all processes around all rounds of a `run`.
        schedule (`type[Run]`): when branches go on: all of them, round by round, or each as soon as it can
            ([`~trace_trl.continuous.ContinuousRun`]).
    """

    def __init__(
        self,
        generate: Generator,
        codec: Codec,
        environment: Environment,
        score: Callable[[list[tuple[RolloutTree, Turn]]], None],
        limits: Limits,
        score_together: bool = False,
        predict: Callable[[list[Turn]], None] | None = None,
        note: Callable[[Turn, Any], None] | None = None,
        prefix_allocation: str = "active",
        is_mixed: Callable[[RolloutTree], bool] | None = None,
        runner: ConcurrentRunner | None = None,
        timeout: float | None = None,
        sync: Sync | None = None,
        tools: Callable[[RolloutTree], list | None] = lambda tree: None,
        encode: Callable[[list[dict[str, Any]], list[Any]], list[list[int]]] | None = None,
        progress: Callable[[Stats, int, int], None] | None = None,
        generating: Callable[[], AbstractContextManager[Any]] = nullcontext,
        schedule: type[Run] | None = None,
    ):
        self.generate = generate
        self.codec = codec
        self.environment = environment
        self.score = score
        self.score_together = score_together
        self.limits = limits
        self.predict = predict
        self.note = note
        self.prefix_allocation = prefix_allocation
        self.is_mixed = is_mixed
        self.runner = runner or ConcurrentRunner()
        self.timeout = timeout
        self.sync = sync or OneProcess()
        self.tools = tools
        self.encode = encode
        self.progress = progress
        self.generating = generating
        self.schedule = schedule or Run
        self.first_error: BaseException | None = None  # that a step of the last `run` raised
        self._resetting = 0.0  # seconds since the last `run`, which the next one counts
        self._warned = False
        # By the type of environment: whether its `reset` was seen to give different tasks for one row
        self.varying: dict[type, bool] = {}

    def reset(self, examples: Sequence[tuple[dict[str, Any], Any]]) -> list[Episode]:
        """One fresh episode per `(dataset row, prompt)`, all reset concurrently.

        Raises:
            Exception: whatever a `reset` raised: without its task, an episode has no prompt. The others' are closed.
        """
        started = time.perf_counter()
        results = self.runner.run([partial(self.environment.reset, example, prompt) for example, prompt in examples])
        self._resetting += time.perf_counter() - started
        with self.closing_on_error([result for result in results if isinstance(result, Episode)]):
            raise_first(results)
        return results

    @contextmanager
    def closing_on_error(self, episodes: list[Episode]) -> Iterator[None]:
        """Closes `episodes`, those that are appended inside included, if an error leaves the block: until `run` has
        them, nobody else does. No process waits for another in this."""
        try:
            yield
        except BaseException:
            self.close(episodes)
            raise

    def run(self, plans: Sequence[RootPlan], reserves: Sequence[RootPlan] = (), seed: int | None = None) -> Stats:
        """Rolls out every plan: its bare rollouts, then its continuations. Trees are grown in place and scored.

        Args:
            plans: one per prompt of this process; may be empty where other processes have some.
            reserves: candidates that take the place of prompts whose rollouts all agree (with `is_mixed`). A plan that
                was replaced ends with `bare == 0`; a reserve that was used takes over its numbers.
            seed: of the prefix allocator's random choices.
        """
        self.first_error = None
        run = self.schedule(self, list(plans), list(reserves), seed)
        run.stats.seconds["environment"] = self._resetting
        try:
            with collecting_rarely:
                started = time.perf_counter()
                with self.generating():
                    run.stats.seconds["generation"] += time.perf_counter() - started
                    return run.play()
        except _Uncommunicable as error:
            run.abandon()
            raise error.__cause__ from None  # type: ignore[misc]
        except BaseException:
            run.abandon()
            raise
        finally:
            self._resetting = 0.0  # the run has counted its own

    def close(self, owners: Sequence[Episode | Snapshot]) -> None:
        """Closes episodes and snapshots. Whatever that raises, and however long it takes, ends nothing."""
        foreign = []
        for owner in owners:
            if owner.closing_may_block:
                foreign.append(owner.close)
            else:
                owner.close()
        for result in self.runner.run(foreign, self.timeout):
            if isinstance(result, BaseException):
                self.environment.warn_once("close", f"Closing an environment failed: {describe(result)}", result)


def raise_first(results: Sequence[Any]) -> None:
    """Raises the first exception among the results of environment calls, if there is any."""
    for result in results:
        if isinstance(result, Exception):
            if needs_main_thread(result):
                raise RuntimeError(describe(result)) from result
            raise result
        if isinstance(result, BaseException):
            # Would end this process, and leave the others waiting for it
            raise RuntimeError(f"An environment raised {type(result).__name__}.") from result


class _Uncommunicable(BaseException):
    """
    An error within a call that all processes make together. The others are in that call, not at the point where errors
    are shared, so it is raised at once: this process ends, and the launcher ends the rest.
    """


def collective(function: Callable, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        raise _Uncommunicable from error


class Run:
    """State of one `TreeRolloutEngine.run`, whose branches all go on together, round by round."""

    def __init__(
        self,
        engine: TreeRolloutEngine,
        plans: list[RootPlan],
        reserves: list[RootPlan],
        seed: int | None = None,
    ):
        self.engine = engine
        self.limits = engine.limits
        self.plans = plans
        self.reserves = reserves
        self.seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed
        self.stats = Stats()
        self.live: list[Branch] = []
        self.unscored: list[Branch] = []
        self.open = {plan.episode for plan in [*plans, *reserves]}
        self.wanted = sum(plan.bare + plan.continuations for plan in plans)
        self.done = 0

    def play(self) -> Stats:
        error = self._attempt(self._start_bare, self.plans)
        while True:
            self.engine.sync.check(error)
            if not self.engine.sync.most(len(self.live)):
                break
            error = self._attempt(self._play_turn)
            self.engine.sync.check(error)
            error = self._score_all(self._ready())
            self.engine.sync.check(error)
            error = self._expand_ready()
        self.engine.sync.check(self._score_all(self.unscored))
        self.abandon()
        return self.stats

    @staticmethod
    def _attempt(function: Callable, *args: Any) -> BaseException | None:
        try:
            function(*args)
        except Exception as error:
            return error
        return None

    # Starting rollouts

    def _start_bare(self, plans: list[RootPlan]) -> None:
        probed = self._uncompared(plans)
        fresh = self._fresh([(plan, max(plan.bare - 1, int(plan in probed))) for plan in plans])
        for plan in plans:
            if plan in probed:
                episodes = [episode for episode, _ in fresh.pop(plan)]
                self.open.difference_update(episodes)
                self.engine.close(episodes)
            if plan.bare:
                first = plan.episode, plan.tree.start(plan.tree.root)
                for episode, start in [first, *fresh.get(plan, [])]:
                    self._start(plan, plan.tree.root, episode, start, "bare")
                plan.running = plan.bare

    def _start(self, plan: RootPlan, node: Turn, episode: Episode, start: Start, kind: str) -> None:
        leaf = Leaf(kind=kind, rollout=plan.started)
        plan.started += 1
        self.open.add(episode)
        context = list(start.ids) if node is plan.tree.root else node.history_ids()
        self.live.append(Branch(plan, node, episode, leaf, start, context))

    def _fresh(self, counts: Sequence[tuple[RootPlan, int]]) -> dict[RootPlan, list[tuple[Episode, Start]]]:
        """Further episodes from `reset`, per plan, with what each was given."""
        jobs = [plan for plan, count in counts for _ in range(count)]
        if not jobs:
            return {}
        started = time.perf_counter()
        episodes = self.engine.reset([(plan.tree.example, plan.tree.example.get("prompt")) for plan in jobs])
        self.open.update(episodes)
        starts = self._starts(jobs, episodes)
        self.stats.seconds["environment"] += time.perf_counter() - started
        found: dict[RootPlan, list[tuple[Episode, Start]]] = {}
        for plan, episode, start in zip(jobs, episodes, starts, strict=True):
            found.setdefault(plan, []).append((episode, start))
        return found

    def _starts(self, plans: Sequence[RootPlan], episodes: Sequence[Episode]) -> list[Start]:
        """What each episode was given: its plan's prompt, or its own where `reset` answered differently."""
        starts = [plan.tree.start(plan.tree.root) for plan in plans]
        other = []
        for number, (plan, episode) in enumerate(zip(plans, episodes, strict=True)):
            kind = type(episode.environment)
            differs = episode.prompt is not None and episode.prompt != plan.episode.prompt
            self.engine.varying[kind] = self.engine.varying.get(kind, False) or differs
            if differs:
                plan.varies = True
                other.append(number)
        if other:
            if self.engine.encode is None:
                raise ValueError(
                    "An environment's `reset` gave two different tasks for the same dataset row: give the engine "
                    "`encode`, or make `reset` depend only on its arguments (seed it from the row)."
                )
            prompts = [episodes[number].prompt for number in other]
            encoded = self.engine.encode([plans[number].tree.example for number in other], prompts)
            for number, prompt, ids in zip(other, prompts, encoded, strict=True):
                starts[number] = Start(prompt, ids)
        return starts

    def _uncompared(self, plans: Sequence[RootPlan]) -> list[RootPlan]:
        """Plans with a single rollout to branch off, one of each environment whose `reset` was never compared with
        another: it is called once more, for that alone."""
        known = {*self.engine.varying, *(type(plan.episode.environment) for plan in plans if plan.bare > 1)}
        chosen = []
        for plan in plans:
            environment = plan.episode.environment
            has_task = plan.episode.prompt is not None and plan.episode.prompt != plan.tree.example.get("prompt")
            if plan.bare == 1 and plan.continuations and has_task and type(environment) not in known:
                known.add(type(environment))
                if optional_method(environment, "fork") is None:
                    chosen.append(plan)
        return chosen

    # One round

    def _play_turn(self) -> None:
        """Samples the next turn of every live branch, lets environments answer, and ends branches that are over."""
        requests = self._requests(self.live)
        samples = self._generate(requests)
        self._check_samples(requests, samples)
        branches, self.live = self.live, []
        self._answer(self._take_turns(branches, requests, samples))
        self._take_snapshots()
        self._show_progress()

    def _take_turns(
        self, branches: Sequence[Branch], requests: Sequence[Request], samples: Sequence[Sample]
    ) -> list[Acting]:
        """Appends what was sampled to its branches. Returns those that the environment is to answer."""
        turns = self._decode(branches, requests, samples)
        acting: list[Acting] = []
        for branch, sample, turn in zip(branches, samples, turns, strict=True):
            self.stats.turns += 1
            self.stats.sampled_tokens += len(sample.token_ids)
            if sample.cached_tokens is not None:
                self.stats.cached_tokens = (self.stats.cached_tokens or 0) + sample.cached_tokens
            # A root's state is that behind its own prompt
            own = None if branch.node.depth or branch.start.prompt is branch.plan.tree.prompt else branch.start
            if sample.state is not None and self.engine.note is not None and own is None:
                self.engine.note(branch.node, sample.state)
            branch.node = branch.plan.tree.add_turn(
                branch.node,
                sample.token_ids,
                logprobs=sample.logprobs,
                text=turn.text,
                messages=[turn.message] if sample.token_ids else [],
                start=own,
            )
            branch.context += sample.token_ids
            if sample.finish == "length":
                # Cut off: nothing is run from a fragment
                branch.leaf.environment_reward = None
                self._end(branch, "length")
            else:
                end = sample.token_ids[-1] if sample.finish == "eos" else None
                action = Action(turn.text, turn.message, self._messages(branch), turn.malformed)
                acting.append(Acting(branch, action, end))
        return acting

    def _show_progress(self) -> None:
        if self.engine.progress is not None:
            self.engine.progress(self.stats, self.done, self.wanted)

    def _requests(self, branches: Sequence[Branch]) -> list[Request]:
        requests = []
        for branch in branches:
            left = self.limits.left(branch)
            limit = left if self.limits.turn is None else min(left, self.limits.turn)
            requests.append(Request(branch.context, limit, (branch.plan.tree.index, branch.leaf.rollout)))
        return requests

    def _generate(self, requests: list[Request]) -> list[Sample]:
        started = time.perf_counter()
        # A process without live branches takes part: sharded weights are gathered by all
        samples = collective(self.engine.generate, requests or [Request(self.engine.codec.idle_context, 1)])
        self.stats.seconds["generation"] += time.perf_counter() - started
        self.stats.rounds += 1
        self.stats.prefilled_tokens += sum(len(request.context) for request in requests)
        return samples if requests else []

    def _decode(
        self, branches: Sequence[Branch], requests: Sequence[Request], samples: Sequence[Sample]
    ) -> list[Turned]:
        tools = [self.engine.tools(branch.plan.tree) for branch in branches]
        return self.engine.codec.decode_turns(
            [(s.token_ids, r.context, t) for s, r, t in zip(samples, requests, tools, strict=True)]
        )

    def _check_samples(self, requests: Sequence[Request], samples: Sequence[Sample]) -> None:
        """Refuses what can't be the answer to the requests, before any of it is taken for a branch's next turn."""
        name = getattr(self.engine.generate, "__qualname__", type(self.engine.generate).__qualname__)
        if len(samples) != len(requests):
            raise RuntimeError(
                f"The generation backend ({name}) returned {len(samples)} turns for {len(requests)} branches: it must "
                "return one per request, in their order."
            )
        for number, (request, sample) in enumerate(zip(requests, samples, strict=True)):
            if len(sample.token_ids) > request.max_new_tokens:
                raise RuntimeError(
                    f"The generation backend ({name}) returned {len(sample.token_ids)} tokens for branch {number}, "
                    f"which may use {request.max_new_tokens}."
                )

    def _messages(self, branch: Branch) -> list[dict[str, Any]]:
        prompt = branch.start.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return messages + [message for turn in branch.node.path() for message in turn.messages]

    def _answer(self, acting: list[Acting]) -> None:
        started = time.perf_counter()
        replies = self.engine.runner.run(
            [partial(branch.episode.step, action) for branch, action, _ in acting], self.engine.timeout
        )
        self.stats.seconds["environment"] += time.perf_counter() - started
        self._go_on(acting, replies)

    def _go_on(self, acting: Sequence[Acting], replies: Sequence[Any]) -> None:
        """Appends what environments answered, or raised, to the branches. Those that are not over are live."""
        asking: list[tuple[Acting, Reply]] = []
        for act, reply in zip(acting, replies, strict=True):
            branch, action, _ = act
            if isinstance(reply, RunEndingError):
                raise reply
            if isinstance(reply, BaseException):
                if isinstance(reply, EnvironmentTimeout):
                    branch.episode.lose(reply)
                self.engine.first_error = self.engine.first_error or reply
                reply = branch.episode.on_error(action, reply)
                self.stats.environment_errors += reply.failures
            self.stats.environment_calls += reply.calls
            self.stats.environment_failures += reply.failures
            branch.info |= reply.info
            branch.leaf.environment_reward = reply.reward
            if reply.done:
                self._end(branch, "turns" if reply.cut else "final")
            elif self.limits.turns is not None and branch.node.depth >= self.limits.turns:
                self._end(branch, "turns")
            else:
                asking.append((act, reply))
        for (branch, action, _), reply, ids in self._encoded(asking):
            self._continue(branch, action, reply, ids)

    def _encoded(self, asking: list[tuple[Acting, Reply]]) -> Iterator[tuple[Acting, Reply, list[int]]]:
        encode = self.engine.codec.encode_replies
        for (act, reply), ids in zip(asking, encode([(reply, act.end) for act, reply in asking]), strict=True):
            if isinstance(ids, Exception):
                # What the chat template has no form for is answered like any other fault of the environment
                self.stats.environment_failures += 1
                reply = act.branch.episode.on_error(act.action, ids)
                (ids,) = encode([(reply, act.end)])
                if isinstance(ids, Exception):
                    raise ids
            yield act, reply, ids

    def _continue(self, branch: Branch, action: Action, reply: Reply, ids: list[int]) -> None:
        node = branch.node
        if not self.limits.fits(branch, len(ids)):
            # Never sliced: neither ids nor messages tell of it
            self._end(branch, "overflow")
            return
        node.observation_ids = ids
        node.history_length += len(ids)
        branch.context += ids
        node.messages += reply.messages or ([{"role": "user", "content": reply.text}] if reply.text else [])
        branch.history = [*branch.history, (action, reply)]
        if self.limits.left(branch) < 1:
            self._end(branch, "length")
        else:
            self.live.append(branch)

    def _end(self, branch: Branch, reason: str) -> None:
        branch.leaf.reason = reason
        branch.leaf.environment = branch.episode.environment
        branch.node.leaf = branch.leaf
        branch.leaf.info = branch.info
        for key, value in branch.info.items():
            self.stats.info.setdefault(key, []).append(value)
        self.unscored.append(branch)
        self.done += 1
        if branch.leaf.kind == "bare":
            branch.plan.running -= 1

    def _take_snapshots(self) -> None:
        """Keeps the state at every prefix that a continuation may start from."""
        chosen = [branch for branch in self.live if self._wants_snapshot(branch)]
        started = time.perf_counter()
        snapshots = self.engine.runner.run([self._snapshot_of(branch) for branch in chosen], self.engine.timeout)
        self.stats.seconds["environment"] += time.perf_counter() - started
        for branch, snapshot in zip(chosen, snapshots, strict=True):
            self._keep_snapshot(branch, snapshot)

    def _wants_snapshot(self, branch: Branch) -> bool:
        return (
            branch.leaf.kind == "bare"
            and branch.plan.continuations > 0
            and not branch.episode.is_tainted
            and branch.node.depth > 0
            and branch.node not in branch.plan.snapshots
        )

    def _snapshot_of(self, branch: Branch) -> Callable[[], Snapshot]:
        plan = branch.plan
        varies = plan.varies or plan.bare == 1 and self.engine.varying.get(type(branch.episode.environment), False)
        # What `reset` makes anew each time may lie outside of the state: a deep copy would share it
        branch.episode.by_fork_only = varies
        example = plan.tree.example
        restart = None if varies else partial(self.engine.environment.reset, example, example.get("prompt"))
        return partial(take_snapshot, branch.episode, restart, branch.history)

    def _keep_snapshot(self, branch: Branch, snapshot: Any) -> None:
        if isinstance(snapshot, BaseException):
            self._count_unforkable(snapshot)
            if isinstance(snapshot, EnvironmentTimeout):
                # Nor is it tried again in later turns, each of which it would hold up
                branch.episode.lose(snapshot)
                snapshot.when_returned(close_late)
        else:
            branch.plan.snapshots[branch.node] = snapshot

    def _count_unforkable(self, error: BaseException) -> None:
        self.stats.unforkable_prefixes += 1
        if not self.engine._warned:
            self.engine._warned = True
            logger.warning(
                "The environment's state can't be restored at a prefix, which gets no continuations: "
                f"{describe(error)} Give the environment a `fork()` method, or make it deterministic so that its "
                "actions can be replayed. Further ones are counted in `rollout/unforkable_prefixes`."
            )

    # Expansion

    def _ready(self) -> list[Branch]:
        """The bare rollouts of every prompt that has no live one left."""
        early = self.engine.is_mixed is not None
        return [b for b in self.unscored if not b.plan.running and (early or b.plan.continuations)]

    def _score_all(self, branches: list[Branch]) -> BaseException | None:
        if not self.engine.score_together:
            return self._attempt(self._score, branches) if branches else None
        if self.engine.sync.most(len(branches)):
            collective(self._score, branches)
        return None

    def _score(self, branches: list[Branch]) -> None:
        started = time.perf_counter()
        order = {plan: number for number, plan in enumerate(self.plans)}
        branches = sorted(branches, key=lambda branch: (order[branch.plan], branch.leaf.rollout))
        self.engine.score([(branch.plan.tree, branch.node) for branch in branches])
        scored = set(branches)
        self.unscored = [branch for branch in self.unscored if branch not in scored]
        for branch in branches:
            branch.leaf.environment = None
        self.open.difference_update(branch.episode for branch in branches)
        self.engine.close([branch.episode for branch in branches])
        self.stats.seconds["reward"] += time.perf_counter() - started

    def _expand_ready(self) -> BaseException | None:
        """Starts the continuations of every prompt whose bare rollouts were just scored.

        Value passes are collective, so all processes come here in every round and predict if any of them has something
        to.
        """
        ready = [plan for plan in self.plans if plan.bare and not plan.running and not plan.expanded]
        error = self._attempt(self._replace_agreeing, ready) if self.engine.is_mixed is not None else None
        expanding = [plan for plan in ready if plan.bare and plan.continuations]
        if self.engine.predict is not None and reads_values(PREFIX_ALLOCATORS, self.engine.prefix_allocation):
            if self.engine.sync.most(len(expanding)):
                error = self._attempt(self._predict, expanding) or error
        for plan in ready:
            plan.expanded = True
        return error or self._attempt(self._expand, expanding)

    def _predict(self, plans: list[RootPlan]) -> None:
        started = time.perf_counter()
        leaves = [leaf for plan in plans for leaf in plan.tree.leaves()]
        collective(self.engine.predict, leaves)  # type: ignore[arg-type]
        self.stats.seconds["predictor"] += time.perf_counter() - started

    def _replace_agreeing(self, plans: list[RootPlan]) -> None:
        for plan in plans:
            if self.engine.is_mixed(plan.tree) or not self.reserves:  # type: ignore[misc]
                continue
            reserve = self.reserves.pop(0)
            reserve.bare, reserve.continuations = plan.bare, plan.continuations
            reserve.tree.budget = plan.tree.budget
            self.stats.discarded_leaves += plan.bare
            self.stats.discarded_tokens += sum(len(turn.token_ids) for turn in plan.tree.turns())
            self.wanted += plan.bare
            plan.bare = 0
            self._close_snapshots([plan])
            self.plans[self.plans.index(plan)] = reserve
            self._start_bare([reserve])

    def _expand(self, plans: list[RootPlan]) -> None:
        pending = {plan: plan.continuations for plan in plans}
        from_root: list[tuple[RootPlan, int]] = []
        while pending:
            jobs: list[tuple[RootPlan, Turn]] = []
            for plan, count in pending.items():
                chosen = self._choose_prefixes(plan, count)
                jobs += [(plan, node) for node in chosen]
                if not chosen:
                    from_root.append((plan, count))
            pending = self._restore(jobs)
        self._start_extra(from_root)
        self._close_snapshots(plans)

    def _start_extra(self, counts: Sequence[tuple[RootPlan, int]]) -> None:
        """A prompt without an eligible prefix spends its continuations at the root: the batch is always full."""
        for plan, episodes in self._fresh(counts).items():
            self.stats.extra_rollouts += len(episodes)
            for episode, start in episodes:
                self._start(plan, plan.tree.root, episode, start, "extra")

    def _choose_prefixes(self, plan: RootPlan, count: int) -> list[Turn]:
        """Prefixes to continue from, each as often as it was allotted; empty if none is eligible."""
        factual = [(turn, turn.leaf) for turn in plan.tree.leaves() if turn.leaf is not None]
        eligible = [
            (prefix, leaf.success)
            for turn, leaf in factual
            if leaf.kind == "bare" and leaf.success is not None
            for prefix in turn.path()
            if prefix in plan.snapshots
        ]
        if not eligible:
            return []
        values = [0.5 if prefix.value is None else prefix.value for prefix, _ in eligible]
        counts = PREFIX_ALLOCATORS[self.engine.prefix_allocation](
            values,
            [success for _, success in eligible],
            budget=count,
            seed=self._choice_seed(plan),
            certainties=[1.0 if prefix.certainty is None else prefix.certainty for prefix, _ in eligible],
        )
        return [prefix for (prefix, _), repeats in zip(eligible, counts, strict=True) for _ in range(repeats)]

    def _choice_seed(self, plan: RootPlan) -> int:
        """Depends on nothing that other prompts do, nor on when they do it."""
        plan.choices += 1
        return int(np.random.default_rng([self.seed, plan.tree.index, plan.choices]).integers(2**31))

    def _restore(self, jobs: list[tuple[RootPlan, Turn]]) -> dict[RootPlan, int]:
        """Starts a branch per job. Returns how many could not be started, per plan; their prefixes are struck off."""
        started = time.perf_counter()
        snapshots = {node: plan.snapshots[node] for plan, node in jobs}
        episodes = self.engine.runner.run([snapshots[node].restore for _, node in jobs], self.engine.timeout)
        self.stats.seconds["environment"] += time.perf_counter() - started
        return self._start_restored(jobs, snapshots, episodes)

    def _start_restored(
        self, jobs: Sequence[tuple[RootPlan, Turn]], snapshots: dict[Turn, Snapshot], episodes: Sequence[Any]
    ) -> dict[RootPlan, int]:
        failed: dict[RootPlan, int] = {}
        struck_off: list[Snapshot] = []
        for (plan, node), episode in zip(jobs, episodes, strict=True):
            if isinstance(episode, BaseException):
                failed[plan] = failed.get(plan, 0) + 1
                snapshot = plan.snapshots.pop(node, None)
                if snapshot is not None:
                    self._count_unforkable(episode)
                    struck_off.append(snapshot)
                if isinstance(episode, EnvironmentTimeout):
                    snapshots[node].lose(episode)
                    episode.when_returned(close_late)
            else:
                self._start(plan, node, episode, plan.tree.start(node), "continuation")
        self.engine.close(struck_off)
        return failed

    def _close_snapshots(self, plans: Sequence[RootPlan]) -> None:
        self.engine.close([snapshot for plan in plans for snapshot in plan.snapshots.values()])
        for plan in plans:
            plan.snapshots.clear()

    def abandon(self) -> None:
        """Closes what is still open: reserves that were not needed, and, where an error ends the run, all the rest."""
        self._close_snapshots(self.plans)
        self.engine.close(list(self.open))
        self.open.clear()


def close_late(result: Any) -> None:
    """Closes what a call came to that had been given up."""
    if not isinstance(result, (Episode, Snapshot)):
        return
    if result.closing_may_block:
        # Not here: this may be the main thread, where the call ended in the moment it was given up
        threading.Thread(target=_close_alone, args=(result,), name="trace-environment-late", daemon=True).start()
    else:
        result.close()


def _close_alone(owner: Episode | Snapshot) -> None:
    try:
        owner.close()
    except BaseException:
        pass  # nobody is left to be told
