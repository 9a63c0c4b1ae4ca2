"""
The contract between the rollout engine and anything that answers the policy.

An environment hands out *episodes*, one per live branch. The engine calls `reset` once per candidate prompt and `step`
once per turn of a live branch, many branches at a time. An episode's state belongs to one branch: at a branching it is
    forked, never shared.

    env.reset(example)            -> Episode        the prompt may change: `episode.prompt`
    episode.step(turn)            -> Reply          what the policy reads next, and whether the episode is over
    episode.fork()                -> Episode        an independent copy of the present state, or `ForkError`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class ForkError(RuntimeError):
    """The state of an episode can't be copied: its prefixes are not eligible for continuations."""


class UnsupportedError(ValueError):
    """The environment asks for something this trainer does not do (images): ends the run, unlike other faults."""


@dataclass(slots=True)
class StepResult:
    """What an `env_step(state, action, messages)` callback returns.

    Attributes:
        observation (`str`, `list[dict]` or `None`): what the policy reads next: plain text, chat messages, or nothing.
        done (`bool`): whether the episode ended with this turn. The observation of a last turn is not shown to the
            policy.
        reward (`float` or `None`): on the last step, a terminal reward that is added to `reward_funcs` with weight 1.
            On earlier steps it is ignored.
        state (`Any` or `None`): the new state; `None` keeps the one that was passed in, changed in place or not.
        info (`dict` or `None`): numbers to log; averaged over leaves under `env/<key>`.
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
        messages (`list[dict]`): the conversation so far, prompt and this turn included; a copy, free to be changed.
    """

    text: str
    message: dict[str, Any]
    messages: Sequence[dict[str, Any]]


@dataclass(slots=True)
class Reply:
    """An environment's answer to a turn, ready to be rendered.

    Attributes:
        messages (`list[dict]`): chat messages to be rendered in one go after the turn (`role` tool, user, ...).
        text (`str` or `None`): raw text to be appended instead, for prompts that are plain strings.
        done (`bool`): the episode is over; nothing is rendered.
        cut (`bool`): with `done`, that a limit of the environment ended it: the leaf counts as truncated.
        reward (`float` or `None`): terminal reward owned by the environment.
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
        is_async (`bool`): whether `step` is a coroutine function.
    """

    prompt: Any
    environment: Any = None
    is_async: bool = False

    def step(self, action: Action) -> Reply:
        """Answers one turn. May raise: `on_error` turns any exception into an observation that the policy reads."""
        raise NotImplementedError

    def on_error(self, action: Action, error: BaseException) -> Reply:
        """The observation for a turn whose `step` raised or was given up."""
        raise NotImplementedError

    def replay(self, action: Action) -> Reply:
        """`step` with its errors answered, from a plain thread: plays a recorded turn again."""
        try:
            return self.step(action)
        except UnsupportedError:
            raise
        except Exception as error:
            return self.on_error(action, error)

    def fork(self) -> Episode:
        """An independent episode in the same state. Raises [`ForkError`] where that is not possible."""
        raise ForkError("This episode can't be forked.")

    def close(self) -> None:
        """Called once when the branch no longer needs its environment."""


class Environment:
    """Hands out episodes. `reset` may be called from several threads at once, each time for another example."""

    def reset(self, example: dict[str, Any], prompt: Any) -> Episode:
        raise NotImplementedError

    def close(self) -> None:
        """Called when training ends."""
