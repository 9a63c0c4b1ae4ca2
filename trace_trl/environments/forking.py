"""
Copies of an environment's state at a prefix, so that continuations start where the factual rollout stood.

Three ways, in this order: the state's own `fork()`, `copy.deepcopy`, and replay (a fresh environment, reset, the
recorded actions again, every answer compared with the recorded one). A prefix whose state none of them restores gets
no continuations.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

from .base import Action, Episode, ForkError, Reply


logger = logging.getLogger(__name__)


def copy_state(state: Any) -> Any:
    """The state's own `fork()`, else `copy.deepcopy`.

    Raises:
        ForkError: if neither works.
    """
    fork = getattr(state, "fork", None)
    try:
        return fork() if callable(fork) else copy.deepcopy(state)
    # Whatever a foreign `__deepcopy__` or `fork` raises (locks, sockets, handles), replay may still do
    except Exception as error:
        raise ForkError(f"{type(state).__name__} can't be copied: {error}") from error


class Snapshot:
    """The state of an episode after some turn. `restore` may be called any number of times."""

    def restore(self) -> Episode:
        """A new episode in that state.

        Raises:
            ForkError: if the state can't be restored.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Frees what the snapshot holds."""


class CopySnapshot(Snapshot):
    def __init__(self, episode: Episode):
        self._episode = episode

    def restore(self) -> Episode:
        return self._episode.fork()

    def close(self) -> None:
        self._episode.close()


class ReplaySnapshot(Snapshot):
    """Plays the recorded turns again. Costs environment steps, only for prefixes that are chosen."""

    def __init__(self, restart: Callable[[], Episode], history: Sequence[tuple[Action, Reply]]):
        self._restart = restart
        self._history = tuple(history)

    def restore(self) -> Episode:
        episode = None
        try:
            episode = self._restart()
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
            raise ForkError(f"Replay failed: {error}") from error


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
        return ReplaySnapshot(restart, history)
