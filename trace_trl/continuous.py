"""
Rollouts that go on one by one: a branch's next turn is asked for as soon as its own environment has answered, so that
a slow environment or a long turn holds up no other branch.

    live ──▶ sampling ──▶ answering ──▶ (snapshot) ──▶ live          each branch at its own pace
      ▲        one token of all of them a step            │
      └── forked from the prefixes of prompts whose bare rollouts all ended, and were scored

What is sampled, answered and allocated is what [`~trace_trl.engine.Run`] does; only when it is done differs. From the
same turns it grows the same trees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from .engine import Acting, Branch, RootPlan, Run, Stats, close_late, collective
from .environments.base import Episode
from .environments.forking import Snapshot
from .environments.runner import Stream
from .generation import Request, Sample
from .tree import Turn


IDLE = 0.005  # seconds a process waits for an environment when nothing is sampled: others may be at work
# How long a process goes on by itself. A reduction waits for the slowest one, and for what a device has under way; but
# a process that is through with its rollouts waits as long for what follows
STRIDE = 0.1  # seconds, with an engine of its own
STEPS = 8  # steps of an engine that several hold, which have to make equally many


class _Restoring:
    """Prefixes of one prompt that are being restored, to be continued together, in the order they were chosen in."""

    def __init__(self, plan: RootPlan, nodes: Sequence[Turn]):
        self.plan = plan
        self.jobs = [(plan, node) for node in nodes]
        self.snapshots = {node: plan.snapshots[node] for node in nodes}
        self.episodes: list[Episode | BaseException | None] = [None] * len(nodes)
        self.left = len(nodes)


# What a call of an environment is for


class _Reply(NamedTuple):
    acting: Acting


class _Snapshot(NamedTuple):
    branch: Branch


class _Restore(NamedTuple):
    batch: _Restoring
    number: int


class ContinuousRun(Run):
    """One `TreeRolloutEngine.run`, whose generator is a [`~trace_trl.generation.TurnStream`].

    Time is cut into ticks, of which all processes make the same number: a tick begins with one reduction, which tells
    whether there is anything that all must do together. Then each goes on by itself for a while, sampling one token of
    every turn under way in each step of its engine.

    All processes stop while one of them scores its leaves or reads values. So they do it together, once as many
    prompts are ready as there are processes, or nothing else is left to do: no more often than one process would.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.calls: Stream = self.engine.runner.stream(self.engine.timeout)
        self.sampling: dict[int, tuple[Branch, Request]] = {}
        self.submitted = 0

    def play(self) -> Stats:
        sync = self.engine.sync
        error = self._attempt(self._start_bare, self.plans)
        while True:
            # Continuations are scored with the next bare rollouts, or at the end: few calls, of many leaves each
            own = len({branch.plan for branch in self._ready() if branch.leaf.kind == "bare"})
            numbers = error is not None, self._under_way(), len(self.live), own, 1
            failed, alive, new, ready, processes = sync.totals(*numbers)
            if failed:
                sync.check(error)
            if not (alive or ready):
                break
            if ready >= (processes if alive else 1):
                sync.check(self._score_all(self._ready()))
                sync.check(self._expand_ready())
            if self.engine.generate.is_shared:  # type: ignore[attr-defined]
                error = self._go_on_together(bool(new))
            else:
                error = self._go_on_alone(STRIDE if processes > 1 else 0.0)
        sync.check(self._score_all(self.unscored))
        for plan in self.plans:
            order_children(plan.tree.root)
        self.abandon()
        return self.stats

    def _go_on_alone(self, seconds: float) -> BaseException | None:
        ends = time.perf_counter() + seconds
        while True:
            if self.live:
                collective(self._submit)
            error = self._attempt(self._listen, collective(self._sample))
            if error is not None or not self._under_way() or time.perf_counter() >= ends:
                return error

    def _go_on_together(self, new: bool) -> BaseException | None:
        """With the other processes that hold the engine: an error of one does not keep it from stepping with them."""
        if new:
            collective(self._submit)
        error = None
        for _ in range(STEPS):
            turns = collective(self._sample)
            error = error or self._attempt(self._listen, turns)
            if not self.engine.generate.is_busy:  # type: ignore[attr-defined]
                break
        return error

    def _under_way(self) -> int:
        return len(self.live) + len(self.sampling) + len(self.calls)

    # Turns

    def _submit(self) -> None:
        """Asks for the next turn of every live branch."""
        started = time.perf_counter()
        branches, self.live = self.live, []
        requests = []
        for branch, request in zip(branches, self._requests(branches), strict=True):
            self.submitted += 1
            self.sampling[self.submitted] = branch, request
            requests.append((self.submitted, request))
            self.stats.prefilled_tokens += len(request.context)
        self.stats.rounds += bool(requests)
        self.engine.generate.submit(requests)  # type: ignore[attr-defined]
        self.stats.seconds["generation"] += time.perf_counter() - started

    def _sample(self) -> list[tuple[int, Sample]]:
        generate: Any = self.engine.generate
        if not generate.is_busy:
            return []
        started = time.perf_counter()
        turns = generate.step()
        self.stats.seconds["generation"] += time.perf_counter() - started
        return turns

    def _listen(self, turns: Sequence[tuple[int, Sample]]) -> None:
        """Hands turns that ended to their environments, and goes on with what environments have answered."""
        if turns:
            branches, requests = zip(*(self.sampling.pop(key) for key, _ in turns), strict=True)
            samples = [sample for _, sample in turns]
            self._check_samples(requests, samples)
            for act in self._take_turns(branches, requests, samples):
                self.calls.submit(_Reply(act), partial(act.branch.episode.step, act.action))
        is_idle = bool(self.calls) and not self.live and not self.engine.generate.is_busy  # type: ignore[attr-defined]
        started = time.perf_counter()
        answers = self.calls.collect(IDLE if is_idle else 0.0)
        self.stats.seconds["environment"] += time.perf_counter() - started
        self._hear_replies([(tag.acting, answer) for tag, answer in answers if isinstance(tag, _Reply)])
        for tag, answer in answers:
            if isinstance(tag, _Snapshot):
                self._keep_snapshot(tag.branch, answer)
                self.live.append(tag.branch)
            elif isinstance(tag, _Restore):
                self._hear_restored(tag, answer)
        if turns or answers:
            self._show_progress()

    def _hear_replies(self, replies: Sequence[tuple[Acting, Any]]) -> None:
        waiting, self.live = self.live, []
        self._go_on([act for act, _ in replies], [answer for _, answer in replies])
        for branch in self.live:
            if self._wants_snapshot(branch):
                # Its environment is left alone until its state is kept
                self.calls.submit(_Snapshot(branch), self._snapshot_of(branch))
            else:
                waiting.append(branch)
        self.live = waiting

    # Expansion

    def _expand(self, plans: list[RootPlan]) -> None:
        for plan in plans:
            self._expand_one(plan, plan.continuations)

    def _expand_one(self, plan: RootPlan, count: int) -> None:
        nodes = self._choose_prefixes(plan, count) if count else []
        if not nodes:
            self._start_extra([(plan, count)] if count else [])
            self._close_snapshots([plan])
            return
        batch = _Restoring(plan, nodes)
        for number, node in enumerate(nodes):
            self.calls.submit(_Restore(batch, number), batch.snapshots[node].restore)

    def _hear_restored(self, tag: _Restore, episode: Any) -> None:
        batch = tag.batch
        batch.episodes[tag.number] = episode
        batch.left -= 1
        if not batch.left:
            failed = self._start_restored(batch.jobs, batch.snapshots, batch.episodes)
            self._expand_one(batch.plan, failed.get(batch.plan, 0))

    def abandon(self) -> None:
        for tag, error in self.calls.close():
            lost: Episode | Snapshot
            if isinstance(tag, _Reply):
                lost = tag.acting.branch.episode
            elif isinstance(tag, _Snapshot):
                lost = tag.branch.episode
                error.when_returned(close_late)
            else:
                lost = tag.batch.snapshots[tag.batch.jobs[tag.number][1]]
                error.when_returned(close_late)
            # Closed when nothing is at work on it any more
            lost.lose(error)
        super().abandon()


def order_children(root: Turn) -> None:
    """Puts children into the order in which the rollouts that made them were started, as a run of rounds has them."""
    first: dict[Turn, int] = {}
    order: Callable[[Turn], int] = first.__getitem__
    for turn in reversed(list(root.turns())):
        turn.children.sort(key=order)
        first[turn] = turn.leaf.rollout if turn.leaf is not None else min(map(order, turn.children), default=0)
