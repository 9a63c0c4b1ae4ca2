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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from .allocation import PREFIX_ALLOCATORS
from .environments.base import Action, Environment, Episode, Reply, UnsupportedError
from .environments.forking import Snapshot, take_snapshot
from .environments.runner import ConcurrentRunner
from .generation import Generator, Request, Sample
from .tree import Leaf, RolloutTree, Turn


logger = logging.getLogger(__name__)


class Sync(Protocol):
    """What one process must know of the others. Every call is made by all processes in the same order."""

    def most(self, number: int) -> int:
        """The largest `number` of all processes."""

    def check(self, error: BaseException | None) -> None:
        """Raises on every process if any passes an error: its own error where there is one."""


class OneProcess:
    def most(self, number: int) -> int:
        return number

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

    def left(self, tree: RolloutTree, turn: Turn) -> int:
        """Tokens that may still follow `turn`, observations included; 0 or less if none."""
        used = turn.history_length - tree.root.history_length
        left = self.completion - used
        return left if self.context is None else min(left, self.context - turn.history_length)

    def fits(self, tree: RolloutTree, turn: Turn, tokens: int) -> bool:
        """Whether an observation of that many tokens may follow `turn` (TRL's rule: it may fill the completion, but
        must leave room in the context)."""
        used = turn.history_length - tree.root.history_length + tokens
        in_context = self.context is None or turn.history_length + tokens < self.context
        return used <= self.completion and in_context


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
    snapshots: dict[Turn, Snapshot] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Branch:
    plan: RootPlan
    node: Turn  # the last turn played; the next one is sampled behind it
    episode: Episode
    leaf: Leaf
    history: list[tuple[Action, Reply]] = field(default_factory=list)
    tainted: bool = False  # the environment's state is unknown (timeout): never forked from here on


@dataclass
class Stats:
    """What one call of `run` did on this process."""

    rounds: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    environment_calls: int = 0
    environment_failures: int = 0
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
        predict (`Callable`, *optional*): `predict(leaves)` writes `value` into the prefixes of these leaves' paths.
            Called by all processes together. Needed by `prefix_allocation="active"`.
        prefix_allocation (`str`): name of an allocator of `allocation.py`.
        is_mixed (`Callable[[RolloutTree], bool]`, *optional*): replaces prompts whose rollouts are not mixed by
            reserves (DAPO dynamic sampling).
        runner (`ConcurrentRunner`): steps environments.
        timeout (`float`, *optional*): seconds per environment step.
        sync (`Sync`): the other processes.
        tools (`Callable[[RolloutTree], list]`, *optional*): tools a prompt was rendered with, for parsing its turns.
        progress (`Callable[[Stats, int, int], None]`, *optional*): called after every round with leaves done and
            wanted.
    """

    def __init__(
        self,
        generate: Generator,
        codec: Any,
        environment: Environment,
        score: Callable[[list[tuple[RolloutTree, Turn]]], None],
        limits: Limits,
        predict: Callable[[list[Turn]], None] | None = None,
        prefix_allocation: str = "active",
        is_mixed: Callable[[RolloutTree], bool] | None = None,
        runner: ConcurrentRunner | None = None,
        timeout: float | None = None,
        sync: Sync | None = None,
        tools: Callable[[RolloutTree], list | None] = lambda tree: None,
        progress: Callable[[Stats, int, int], None] | None = None,
    ):
        self.generate = generate
        self.codec = codec
        self.environment = environment
        self.score = score
        self.limits = limits
        self.predict = predict
        self.prefix_allocation = prefix_allocation
        self.is_mixed = is_mixed
        self.runner = runner or ConcurrentRunner()
        self.timeout = timeout
        self.sync = sync or OneProcess()
        self.tools = tools
        self.progress = progress
        self._warned = False

    def reset(self, examples: Sequence[tuple[dict[str, Any], Any]]) -> list[Episode]:
        """One fresh episode per `(dataset row, prompt)`, all reset concurrently.

        Raises:
            Exception: whatever a `reset` raised: without its task, an episode has no prompt.
        """
        return self._together([partial(self.environment.reset, example, prompt) for example, prompt in examples])

    def run(self, plans: Sequence[RootPlan], reserves: Sequence[RootPlan] = (), seed: int | None = None) -> Stats:
        """Rolls out every plan: its bare rollouts, then its continuations. Trees are grown in place and scored.

        Args:
            plans: one per prompt of this process; may be empty where other processes have some.
            reserves: candidates that take the place of prompts whose rollouts all agree (with `is_mixed`). A plan that
                was replaced ends with `bare == 0`; a reserve that was used takes over its numbers.
            seed: of the prefix allocator's random choices.
        """
        run = _Run(self, list(plans), list(reserves), np.random.default_rng(seed))
        return run.play()

    def _together(self, functions: Sequence[Callable[[], Any]], timeout: float | None = None) -> list[Any]:
        results = self.runner.run(functions, timeout)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


class _Run:
    """State of one `TreeRolloutEngine.run`."""

    def __init__(
        self,
        engine: TreeRolloutEngine,
        plans: list[RootPlan],
        reserves: list[RootPlan],
        random: np.random.Generator,
    ):
        self.engine = engine
        self.limits = engine.limits
        self.plans = plans
        self.reserves = reserves
        self.random = random
        self.stats = Stats()
        self.live: list[_Branch] = []
        self.unscored: list[_Branch] = []
        self.wanted = sum(plan.bare + plan.continuations for plan in plans)
        self.done = 0

    def play(self) -> Stats:
        error = self._attempt(self._start_bare, self.plans)
        while True:
            self.engine.sync.check(error)
            if not self.engine.sync.most(len(self.live)):
                break
            # Generation is left out of the attempt: it is collective itself, an error in it reaches all processes
            requests = self._requests()
            samples = self._generate(requests)
            error = self._attempt(self._take_turns, requests, samples)
            self.engine.sync.check(error)
            error = self._attempt(self._score_ready)
            self.engine.sync.check(error)
            error = self._expand_ready()
        error = self._attempt(self._finish)
        self.engine.sync.check(error)
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
        fresh = self._root_episodes([(plan, plan.bare - 1) for plan in plans if plan.bare > 1])
        for plan in plans:
            if plan.bare:
                episodes = [plan.episode, *fresh.get(plan, [])]
                for episode in episodes:
                    self._start(plan, plan.tree.root, episode, "bare")
                plan.running = plan.bare

    def _start(self, plan: RootPlan, node: Turn, episode: Episode, kind: str) -> None:
        leaf = Leaf(kind=kind, rollout=plan.started)
        plan.started += 1
        self.live.append(_Branch(plan, node, episode, leaf))

    def _root_episodes(self, counts: Sequence[tuple[RootPlan, int]]) -> dict[RootPlan, list[Episode]]:
        """Further episodes in the state `reset` leaves, per plan."""
        jobs = [plan for plan, count in counts for _ in range(count)]
        started = time.perf_counter()
        episodes = self.engine.reset([(plan.tree.example, plan.tree.example.get("prompt")) for plan in jobs])
        self.stats.seconds["environment"] += time.perf_counter() - started
        found: dict[RootPlan, list[Episode]] = {}
        for plan, episode in zip(jobs, episodes, strict=True):
            if episode.prompt is not None and episode.prompt != plan.episode.prompt:
                raise ValueError(
                    "An environment's `reset` gave two different tasks for the same dataset row, so its rollouts can't "
                    "be compared: make `reset` depend only on its arguments (seed it from the row)."
                )
            found.setdefault(plan, []).append(episode)
        return found

    # One round

    def _requests(self) -> list[Request]:
        requests = []
        for branch in self.live:
            left = self.limits.left(branch.plan.tree, branch.node)
            limit = left if self.limits.turn is None else min(left, self.limits.turn)
            requests.append(Request(branch.node.history_ids(), limit))
        return requests

    def _generate(self, requests: list[Request]) -> list[Sample]:
        started = time.perf_counter()
        # A process without live branches takes part: sharded weights are gathered by all
        samples = self.engine.generate(requests or [Request(self.engine.codec.idle_context, 1)])
        self.stats.seconds["generation"] += time.perf_counter() - started
        self.stats.rounds += 1
        self.stats.prefilled_tokens += sum(len(request.context) for request in requests)
        return samples if requests else []

    def _take_turns(self, requests: list[Request], samples: list[Sample]) -> None:
        """Adds the sampled turns, lets environments answer, and ends the branches that are over."""
        acting: list[tuple[_Branch, Sample, Action]] = []
        branches, self.live = self.live, []
        for branch, request, sample in zip(branches, requests, samples, strict=True):
            tree = branch.plan.tree
            self.stats.turns += 1
            self.stats.sampled_tokens += len(sample.token_ids)
            tools = self.engine.tools(tree)
            text, message = self.engine.codec.decode_turn(sample.token_ids, request.context, tools)
            parent = branch.node
            branch.node = tree.add_turn(parent, sample.token_ids, logprobs=sample.logprobs, text=text)
            branch.node.messages = [message] if sample.token_ids else []
            if sample.finish == "length":
                # Cut off: nothing is run from a fragment
                self._end(branch, "length")
            else:
                acting.append((branch, sample, Action(text, message, self._messages(branch))))
        self._answer(acting)
        if self.engine.progress is not None:
            self.engine.progress(self.stats, self.done, self.wanted)

    def _messages(self, branch: _Branch) -> list[dict[str, Any]]:
        prompt = branch.plan.tree.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        return messages + [dict(message) for turn in branch.node.path() for message in turn.messages]

    def _answer(self, acting: list[tuple[_Branch, Sample, Action]]) -> None:
        started = time.perf_counter()
        replies = self.engine.runner.run(
            [partial(branch.episode.step, action) for branch, _, action in acting], self.engine.timeout
        )
        self.stats.seconds["environment"] += time.perf_counter() - started
        asking: list[tuple[_Branch, Sample, Action, Reply]] = []
        for (branch, sample, action), reply in zip(acting, replies, strict=True):
            if isinstance(reply, UnsupportedError):
                raise reply
            if isinstance(reply, BaseException):
                branch.tainted = branch.tainted or isinstance(reply, TimeoutError)
                reply = branch.episode.on_error(action, reply)
            self.stats.environment_calls += reply.calls
            self.stats.environment_failures += reply.failures
            for key, value in reply.info.items():
                self.stats.info.setdefault(key, []).append(float(value))
            if reply.done:
                branch.leaf.environment_reward = reply.reward
                self._end(branch, "turns" if reply.cut else "final")
            elif self.limits.turns is not None and branch.node.depth >= self.limits.turns:
                self._end(branch, "turns")
            else:
                asking.append((branch, sample, action, reply))
        encoded = self.engine.codec.encode_replies([(reply, s.finish == "eos") for _, s, _, reply in asking])
        for (branch, _, action, reply), ids in zip(asking, encoded, strict=True):
            self._continue(branch, action, reply, ids)
        self._take_snapshots()

    def _continue(self, branch: _Branch, action: Action, reply: Reply, ids: list[int]) -> None:
        node, tree = branch.node, branch.plan.tree
        if not self.limits.fits(tree, node, len(ids)):
            # Never sliced: neither ids nor messages tell of it
            self._end(branch, "overflow")
            return
        node.observation_ids = ids
        node.history_length += len(ids)
        node.messages += reply.messages or ([{"role": "user", "content": reply.text}] if reply.text else [])
        branch.history = [*branch.history, (action, reply)]
        if self.limits.left(tree, node) < 1:
            self._end(branch, "length")
        else:
            self.live.append(branch)

    def _end(self, branch: _Branch, reason: str) -> None:
        branch.leaf.reason = reason
        branch.leaf.environment = branch.episode.environment
        branch.node.leaf = branch.leaf
        self.unscored.append(branch)
        self.done += 1
        if branch.leaf.kind == "bare":
            branch.plan.running -= 1

    def _take_snapshots(self) -> None:
        """Keeps the state at every prefix that a continuation may start from."""
        chosen = [
            branch
            for branch in self.live
            if branch.leaf.kind == "bare"
            and branch.plan.continuations
            and not branch.tainted
            and branch.node.depth
            and branch.node not in branch.plan.snapshots
        ]
        jobs = []
        for branch in chosen:
            example, prompt = branch.plan.tree.example, branch.plan.tree.example.get("prompt")
            restart = partial(self.engine.environment.reset, example, prompt)
            jobs.append(partial(take_snapshot, branch.episode, restart, branch.history))
        started = time.perf_counter()
        snapshots = self.engine.runner.run(jobs, self.engine.timeout)
        self.stats.seconds["environment"] += time.perf_counter() - started
        for branch, snapshot in zip(chosen, snapshots, strict=True):
            if isinstance(snapshot, BaseException):
                self._count_unforkable(snapshot)
            else:
                branch.plan.snapshots[branch.node] = snapshot

    def _count_unforkable(self, error: BaseException) -> None:
        self.stats.unforkable_prefixes += 1
        if not self.engine._warned:
            self.engine._warned = True
            logger.warning(
                f"The environment's state can't be restored at a prefix, which gets no continuations: {error} Give "
                "the environment a `fork()` method, or make it deterministic so that its actions can be replayed. Further "
                "ones are counted in `rollout/unforkable_prefixes`."
            )

    # Expansion

    def _score_ready(self) -> None:
        """Scores the bare rollouts of every prompt that has no live one left."""
        early = self.engine.is_mixed is not None
        chosen = [b for b in self.unscored if not b.plan.running and (early or b.plan.continuations)]
        if chosen:
            self._score(chosen)

    def _score(self, branches: list[_Branch]) -> None:
        started = time.perf_counter()
        order = {plan: number for number, plan in enumerate(self.plans)}
        branches = sorted(branches, key=lambda branch: (order[branch.plan], branch.leaf.rollout))
        self.engine.score([(branch.plan.tree, branch.node) for branch in branches])
        scored = set(branches)
        self.unscored = [branch for branch in self.unscored if branch not in scored]
        for branch in branches:
            branch.leaf.environment = None
            branch.episode.close()
        self.stats.seconds["reward"] += time.perf_counter() - started

    def _expand_ready(self) -> BaseException | None:
        """Starts the continuations of every prompt whose bare rollouts were just scored.

        Value passes are collective, so all processes come here in every round and predict if any of them has something
        to.
        """
        ready = [plan for plan in self.plans if plan.bare and not plan.running and not plan.expanded]
        error = self._attempt(self._replace_agreeing, ready) if self.engine.is_mixed is not None else None
        expanding = [plan for plan in ready if plan.bare and plan.continuations]
        predict = self.engine.predict
        if predict is not None and self.engine.prefix_allocation == "active":
            if self.engine.sync.most(len(expanding)):
                started = time.perf_counter()
                predict([leaf for plan in expanding for leaf in plan.tree.leaves()])
                self.stats.seconds["predictor"] += time.perf_counter() - started
        for plan in ready:
            plan.expanded = True
        return error or self._attempt(self._expand, expanding)

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
            self._close_snapshots(plan)
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
        for plan in plans:
            self._close_snapshots(plan)
        # A prompt without an eligible prefix spends its continuations at the root: the batch is always full
        for plan, episodes in self._root_episodes(from_root).items():
            self.stats.extra_rollouts += len(episodes)
            for episode in episodes:
                self._start(plan, plan.tree.root, episode, "extra")

    def _choose_prefixes(self, plan: RootPlan, count: int) -> list[Turn]:
        """Prefixes to continue from, each as often as it was allotted; empty if none is eligible."""
        eligible = [
            (turn, leaf.leaf.success)
            for leaf in plan.tree.leaves()
            if leaf.leaf.kind == "bare" and leaf.leaf.success is not None
            for turn in leaf.path()
            if turn in plan.snapshots
        ]
        if not eligible:
            return []
        values = [0.5 if turn.value is None else turn.value for turn, _ in eligible]
        counts = PREFIX_ALLOCATORS[self.engine.prefix_allocation](
            values, [success for _, success in eligible], budget=count, seed=int(self.random.integers(2**31))
        )
        return [turn for (turn, _), repeats in zip(eligible, counts, strict=True) for _ in range(repeats)]

    def _restore(self, jobs: list[tuple[RootPlan, Turn]]) -> dict[RootPlan, int]:
        """Starts a branch per job. Returns how many could not be started, per plan; their prefixes are struck off."""
        started = time.perf_counter()
        restores = [plan.snapshots[node].restore for plan, node in jobs]
        episodes = self.engine.runner.run(restores, self.engine.timeout)
        self.stats.seconds["environment"] += time.perf_counter() - started
        failed: dict[RootPlan, int] = {}
        for (plan, node), episode in zip(jobs, episodes, strict=True):
            if isinstance(episode, BaseException):
                failed[plan] = failed.get(plan, 0) + 1
                if plan.snapshots.pop(node, None) is not None:
                    self._count_unforkable(episode)
            else:
                self._start(plan, node, episode, "continuation")
        return failed

    @staticmethod
    def _close_snapshots(plan: RootPlan) -> None:
        for snapshot in plan.snapshots.values():
            snapshot.close()
        plan.snapshots.clear()

    def _finish(self) -> None:
        if self.unscored:
            self._score(self.unscored)
        for plan in self.plans:
            self._close_snapshots(plan)
