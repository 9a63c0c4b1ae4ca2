"""
Copies of an environment's state at a prefix, so that continuations start where the factual rollout stood.

Three ways, in this order: the state's own `fork()`, `copy.deepcopy`, and replay (a fresh environment, reset, the
recorded actions again, every answer compared with the recorded one). A prefix whose state none of them restores gets
no continuations.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..foreign import optional_method
from .base import Action, Episode, ForkError, Reply, describe
from .runner import EnvironmentTimeout, GetLoop, settle


def copy_state(state: Any, loop: GetLoop | None = None, by_fork_only: bool = False) -> Any:
    """The state's own `fork()`, sync or async; `copy.deepcopy` if it has none, or if that fails.

    Args:
        state: what is to be copied; it must not change.
        loop: gives the event loop an async `fork()` runs on.
        by_fork_only: whether `copy.deepcopy` is ruled out, since it would share what the state has outside of it.

    Raises:
        ForkError: if neither works, or if `fork()` raises it: then nothing else is tried.
    """
    fork = optional_method(state, "fork")
    problem = ""
    if fork is not None:
        try:
            copied = settle(fork(), loop)
        except ForkError:
            raise
        except Exception as error:
            problem = f"its fork() raised {type(error).__name__} ({describe(error)}), and "
        else:
            if copied is not None and copied is not state:
                return copied
            problem = f"its fork() returned {'nothing' if copied is None else 'itself'}, and "
    if by_fork_only:
        raise ForkError(
            f"{type(state).__name__} can't be copied: {problem}its `reset` gave different tasks for one dataset row, "
            "so a deep copy might share what it made outside, such as files."
        )
    try:
        return copy.deepcopy(state)
    # Whatever a foreign `__deepcopy__` raises (locks, sockets, handles), replay may still do
    except Exception as error:
        raise ForkError(
            f"{type(state).__name__} can't be copied: {problem}deepcopy raised {type(error).__name__} "
            f"({describe(error)})."
        ) from error


class Snapshot:
    """The state of an episode after some turn. `restore` may be called any number of times."""

    def restore(self) -> Episode:
        """A new episode in that state.

        Raises:
            ForkError: if the state can't be restored.
        """
        raise NotImplementedError

    def lose(self, error: EnvironmentTimeout) -> None:
        """Notes that a `restore` was given up, and may still be at work."""

    def close(self) -> None:
        """Frees what the snapshot holds."""

    @property
    def closing_may_block(self) -> bool:
        """Whether `close` runs code of the environment, which may hang or raise."""
        return False


class CopySnapshot(Snapshot):
    def __init__(self, episode: Episode):
        self._episode = episode
        self._lock = threading.Lock()

    def restore(self) -> Episode:
        # Several continuations of one prefix are restored at once, and a `fork()` need not be safe for threads
        with self._lock:
            return self._episode.fork()

    def lose(self, error: EnvironmentTimeout) -> None:
        self._episode.lose(error)

    def close(self) -> None:
        self._episode.close()

    @property
    def closing_may_block(self) -> bool:
        return self._episode.closing_may_block


class ReplaySnapshot(Snapshot):
    """Plays the recorded turns again. Costs environment steps, only for prefixes that are chosen."""

    def __init__(self, restart: Callable[[], Episode], prompt: Any, history: Sequence[tuple[Action, Reply]]):
        self._restart = restart
        self._prompt = prompt
        self._history = tuple(history)

    def restore(self) -> Episode:
        episode = None
        try:
            episode = self._restart()
            if episode.prompt != self._prompt:
                raise ForkError("The environment's `reset` gave another task than the first time.")
            for action, recorded in self._history:
                reply = episode.replay(copy.deepcopy(action))
                if (reply.messages, reply.text, reply.done) != (recorded.messages, recorded.text, recorded.done):
                    raise ForkError("The environment answered a replayed action differently: it is not deterministic.")
            return episode
        except Exception as error:
            if episode is not None:
                episode.close()
            if isinstance(error, ForkError):
                raise
            raise ForkError(f"Replay failed: {describe(error)}") from error


def take_snapshot(
    episode: Episode, restart: Callable[[], Episode] | None, history: Sequence[tuple[Action, Reply]]
) -> Snapshot:
    """A snapshot by the cheapest way that works.

    Args:
        episode: the live episode; it goes on unchanged.
        restart: makes a fresh, reset episode, or `None` if that is not possible.
        history: the turns played so far and their answers.

    Raises:
        ForkError: if the state can't be copied and there is no `restart`.
    """
    try:
        return CopySnapshot(episode.fork())
    except ForkError:
        if restart is None:
            raise
        return ReplaySnapshot(restart, episode.prompt, history)
