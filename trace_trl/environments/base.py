"""
The contract between the rollout engine and anything that answers the policy.

An environment hands out *episodes*, one per live branch. The engine calls `reset` once per candidate prompt and `step`
once per turn of a live branch, many branches at a time. An episode's state belongs to one branch: at a branching it
is forked, never shared.

    env.reset(example)            -> Episode        the prompt may change: `episode.prompt`
    episode.step(turn)            -> Reply          what the policy reads next, and whether the episode is over
    episode.fork()                -> Episode        an independent copy of the present state, or `ForkError`
"""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..foreign import optional_method
from .runner import EnvironmentTimeout, GetLoop, is_interrupt, settle


logger = logging.getLogger(__name__)
_warning = threading.Lock()


class ForkError(RuntimeError):
    """The state of an episode can't be copied: its prefixes are not eligible for continuations."""


class RunEndingError(Exception):
    """A fault that every step would have again: ends the run at once. Other faults of an environment cost a branch."""


class UnsupportedError(RunEndingError, ValueError):
    """The environment asks for something this trainer does not do (images)."""


class ContractError(RunEndingError, TypeError):
    """The environment's code does not return what it has to."""


@dataclass(slots=True)
class StepResult:
    """What an `env_step(state, action, messages)` callback returns.

    Attributes:
        observation (`str`, `list[dict]` or `None`): what the policy reads next: plain text, chat messages, or nothing.
        done (`bool`): whether the episode ended with this turn. The observation of a last turn is not shown to the
            policy.
        reward (`float` or `None`): on the last step, a terminal reward that is added to `reward_funcs` with weight 1,
            whether the environment or a limit made it the last. On earlier steps it is ignored. A rollout that a limit
            ends with no reward given (it was cut in the middle of a turn, for instance) gets 0 if there are no
            `reward_funcs`.
        state (`Any` or `None`): the new state; `None` keeps the one that was passed in, changed in place or not.
        info (`dict` or `None`): numbers to log; the last ones of each leaf are averaged under `env/<key>`.
    """

    observation: str | list[dict[str, Any]] | None = None
    done: bool = False
    reward: float | None = None
    state: Any = None
    info: dict[str, Any] | None = None


@dataclass(slots=True)
class Action:
    """One finished turn as an environment sees it.

    Attributes:
        text (`str`): the decoded turn, special tokens left out.
        message (`dict`): the assistant message, parsed (`tool_calls` included where the template has them).
        messages (`list[dict]`): the conversation so far, prompt and this turn included. It belongs to the tree and to
            the record for replay: an episode that hands it to foreign code hands out a copy.
        malformed (`bool`): whether the turn holds a tool call that could not be parsed; `message` is its text then.
    """

    text: str
    message: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    malformed: bool = False


@dataclass(slots=True)
class Reply:
    """An environment's answer to a turn, ready to be rendered.

    Attributes:
        messages (`list[dict]`): chat messages to be rendered in one go after the turn (`role` tool, user, ...).
        text (`str` or `None`): raw text to be appended instead, for prompts that are plain strings.
        done (`bool`): the episode is over; nothing is rendered.
        cut (`bool`): with `done`, that a limit of the environment ended it: the leaf counts as truncated.
        reward (`float` or `None`): terminal reward owned by the environment, if this is the last answer.
        calls (`int`), failures (`int`): tool or environment calls made, and how many of them failed.
        info (`dict`): numbers to log.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str | None = None
    done: bool = False
    cut: bool = False
    reward: float | None = None
    calls: int = 1
    failures: int = 0
    info: dict[str, Any] = field(default_factory=dict)


class Episode:
    """One branch's private view of an environment.

    Attributes:
        prompt (`str` or `list[dict]`): what the policy is shown first, a reset observation included.
        environment (`Any`): the object that reward functions receive in `environments`; `None` where there is none.
        loop (`Callable`): gives the event loop of async environments; `None` where there is none.
        by_fork_only (`bool`): whether `fork` may use nothing but the state's own `fork()`.
    """

    prompt: Any
    environment: Any = None
    loop: GetLoop | None = None
    by_fork_only: bool = False
    _lost: tuple[EnvironmentTimeout, ...] = ()

    def step(self, action: Action) -> Reply:
        """Answers one turn; may be a coroutine function. May raise: `on_error` turns any exception into an observation
        that the policy reads."""
        raise NotImplementedError

    def on_error(self, action: Action, error: BaseException) -> Reply:
        """The observation for a turn whose `step` raised or was given up."""
        raise NotImplementedError

    def replay(self, action: Action) -> Reply:
        """`step` with its errors answered, in a worker: plays a recorded turn again."""
        try:
            return settle(self.step(action), self.loop)
        except RunEndingError:
            raise
        except BaseException as error:  # as the runner does: an environment may try to exit
            if is_interrupt(error):
                raise
            return self.on_error(action, error)

    def fork(self) -> Episode:
        """An independent episode in the same state. Raises [`ForkError`] where that is not possible."""
        raise ForkError("This episode can't be forked.")

    def close(self) -> None:
        """Called once when the branch no longer needs its environment."""

    @property
    def closing_may_block(self) -> bool:
        """Whether `close` runs code of the environment, which may hang or raise."""
        return type(self).close is not Episode.close

    def lose(self, error: EnvironmentTimeout) -> None:
        """Notes that a call on this episode was given up, and may still be at work."""
        self._lost += (error,)

    @property
    def is_tainted(self) -> bool:
        """Whether the state is unknown, since a call was given up: it is never forked, nor used for another branch."""
        return bool(self._lost)

    def when_free(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when no call that was given up is at work on this episode any more; at once if none is."""
        if not self._lost:
            callback()  # not from a closure that holds itself, and with it the episode, until garbage is collected
            return
        lost = list(self._lost)

        def proceed(_: Any = None) -> None:
            if lost:
                lost.pop().when_returned(proceed)
            else:
                callback()

        proceed()


class Environment:
    """Hands out episodes. `reset` may be called from several threads at once, each time for another example."""

    _warned: frozenset[str] = frozenset()

    def reset(self, example: dict[str, Any], prompt: Any) -> Episode:
        raise NotImplementedError

    def warn_once(self, kind: str, message: str, error: BaseException | None = None) -> None:
        """Logs the first warning of a kind, with the traceback of `error`."""
        # Asked by many threads at once
        with _warning:
            is_first = kind not in self._warned
            self._warned |= {kind}
        if is_first:
            logger.warning(message, exc_info=error)

    def close(self) -> None:
        """Called when training ends."""


# What `signal`, `sqlite3` and `asyncio` say
_OFF_MAIN_THREAD = re.compile(
    r"only works in main thread|only be used in that same thread|no current event loop in thread"
)

_IMMUTABLE = frozenset({str, int, float, bool, type(None)})


def copy_plain(value: Any) -> Any:
    """A deep copy. Several times faster than `copy.deepcopy` on dictionaries, lists, strings and numbers."""
    kind = type(value)
    if kind is dict:
        return {key: item if type(item) in _IMMUTABLE else copy_plain(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _IMMUTABLE else copy_plain(item) for item in value]
    return value if kind in _IMMUTABLE else copy.deepcopy(value)


def without_thoughts(text: str) -> str:
    """What a reasoning model says behind its thoughts: the text after the last `</think>`, whose `<think>` may stand
    in the prompt, and of it what comes before a thought that has no end."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def describe(error: BaseException) -> str:
    """The text of an error that a policy reads; never empty."""
    try:
        text = str(error) or type(error).__name__
    except Exception:  # of a foreign `__str__`
        return type(error).__name__
    if needs_main_thread(error):
        text += " Set `env_max_workers=1`: synchronous calls then run in the main thread."
    return text


def needs_main_thread(error: BaseException | None) -> bool:
    """Whether an error comes from code that was not run in the thread it needs: it says so, or one that caused it."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if _OFF_MAIN_THREAD.search(" ".join(map(str, error.args))):
            return True
        error = error.__cause__ or error.__context__
    return False


def close_object(target: Any, loop: GetLoop | None, owner: Environment) -> None:
    """Calls the object's own `close()`, sync or async, if it has one. What it raises is logged: it ends nothing."""
    close = optional_method(target, "close")
    if close is not None:
        try:
            settle(close(), loop)
        except Exception as error:
            owner.warn_once("close", f"Closing {type(target).__name__} raised {type(error).__name__}.", error)
