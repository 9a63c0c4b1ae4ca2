"""The `env_step` callback as an environment: a state and a function, one call per turn of a live branch."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any

from ..foreign import nests_deeper, optional_method, shown, sound, sound_text
from .base import (
    Action,
    ContractError,
    Environment,
    Episode,
    Reply,
    StepResult,
    UnsupportedError,
    close_object,
    copy_plain,
    describe,
)
from .forking import copy_state
from .runner import EnvironmentTimeout, GetLoop, settle


EnvStep = Callable[[Any, str, list[dict[str, Any]]], StepResult | Awaitable[StepResult]]
EnvReset = Callable[[dict[str, Any]], Any]

# Blocks that are no text, in the forms of chat templates, of OpenAI's and of Anthropic's messages and of MCP
_MEDIA = frozenset(
    ("image", "image_url", "input_image", "video", "video_url", "input_video", "audio", "audio_url", "input_audio")
)
_MEDIUM_KEYS = _MEDIA.union(("type", "url", "path", "base64", "data", "source", "mimeType", "format", "detail"))


class CallbackEnvironment(Environment):
    """
    Args:
        env_step (`Callable`): `env_step(state, action, messages) -> StepResult`, sync or async.
        env_reset (`Callable`, *optional*): `env_reset(example) -> state`, sync or async. The default state is a copy
            of the dataset row.
        conversational (`bool`): whether observations are rendered as chat messages (of the user) or appended as text.
        loop (`Callable`): gives the event loop async callbacks run on.

    Raises:
        TypeError: if a callback can't be called with these arguments.
    """

    def __init__(
        self,
        env_step: EnvStep,
        env_reset: EnvReset | None = None,
        conversational: bool = True,
        loop: GetLoop | None = None,
    ):
        _check_signature("env_step", env_step, "state", "action", "messages")
        if env_reset is not None:
            _check_signature("env_reset", env_reset, "example")
        self.env_step = env_step
        self.env_reset = env_reset
        self.conversational = conversational
        self.loop = loop
        self.episode_class = AsyncCallbackEpisode if _is_async(env_step) else CallbackEpisode

    def reset(self, example: dict[str, Any], prompt: Any) -> CallbackEpisode:
        # The row is given away as a copy: it comes back in later epochs and must be unchanged then
        state = copy_plain(example)
        if self.env_reset is not None:
            state = settle(self.env_reset(state), self.loop)
        return self.episode_class(self, state, prompt)


class CallbackEpisode(Episode):
    def __init__(self, owner: CallbackEnvironment, state: Any, prompt: Any):
        self.owner = owner
        self.loop = owner.loop
        self.prompt = prompt
        self.environment = state

    def step(self, action: Action) -> Reply:
        return self._reply(settle(self._call(action), self.loop))

    def _call(self, action: Action) -> Any:
        return self.owner.env_step(self.environment, action.text, copy_plain(list(action.messages)))

    def fork(self) -> CallbackEpisode:
        episode = type(self)(self.owner, copy_state(self.environment, self.loop, self.by_fork_only), self.prompt)
        episode.by_fork_only = self.by_fork_only
        return episode

    def close(self) -> None:
        self.when_free(self._close)

    def _close(self) -> None:
        state, self.environment = self.environment, None
        close_object(state, self.loop, self.owner)

    @property
    def closing_may_block(self) -> bool:
        return self.is_tainted or optional_method(self.environment, "close") is not None

    def on_error(self, action: Action, error: BaseException) -> Reply:
        kind = "timeout" if isinstance(error, EnvironmentTimeout) else "error"
        text = f"Error: {describe(error)}"
        self.owner.warn_once(kind, f"env_step failed, the policy reads {text!r}. Later ones are only counted.", error)
        return self._render(Reply(failures=1), text)

    def _reply(self, result: StepResult) -> Reply:
        if not isinstance(result, StepResult):
            kind = "nothing" if result is None else f"an object of type {type(result).__name__}"
            raise ContractError(
                f"env_step returned {kind} ({shown(result)}): return `trace_trl.StepResult(observation=.., done=.., "
                "reward=..)`."
            )
        if result.state is not None:
            self.environment = result.state
        reward = None if result.reward is None else float(result.reward)
        reply = Reply(done=bool(result.done), reward=reward, info=self._numbers(result.info or {}))
        return reply if reply.done else self._render(reply, result.observation)

    def _numbers(self, info: dict[str, Any]) -> dict[str, float]:
        numbers = {}
        for key, value in info.items():
            try:
                number = math.nan if isinstance(value, (str, bytes)) else float(value)
            # Whatever a foreign `__float__` raises; of a number too large, an OverflowError
            except Exception:
                number = math.nan
            if math.isfinite(number):
                numbers[sound_text(str(key))] = number
            else:
                self.owner.warn_once(
                    f"info {shown(key)}", f"`info[{shown(key)}]` of a StepResult is not logged: {shown(value)}"
                )
        return numbers

    def _render(self, reply: Reply, observation: Any) -> Reply:
        if observation is None or isinstance(observation, list) and not observation:
            return reply
        if type(observation) is str:
            messages = [{"role": "user", "content": observation}]
        else:
            if not _are_messages(observation):
                observation = [{"role": "user", "content": observation}]
            messages = [{**message, "content": as_text(message["content"])} for message in observation]
            if nests_deeper(messages):
                raise ValueError("env_step returned a message that is nested too deep.")
            messages = copy_plain(messages)
        messages = sound(messages)
        if self.owner.conversational:
            # Templates look a tool's name up
            reply.messages = [{"name": "tool", **m} if m["role"] == "tool" else m for m in messages]
        else:
            reply.text = "".join(message["content"] for message in messages)
        return reply


class AsyncCallbackEpisode(CallbackEpisode):
    async def step(self, action: Action) -> Reply:  # type: ignore[override]
        return self._reply(await self._call(action))


def check_no_images(messages: list[dict[str, Any]]) -> None:
    """Raises [`UnsupportedError`] if the content of a prompt's message holds anything but text."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            _refuse({part.get("type") for part in content if isinstance(part, dict)} - {"text"})


def _refuse(kinds: set[Any]) -> None:
    if kinds:
        raise UnsupportedError(
            f"A message holds content of type {', '.join(sorted(map(str, kinds)))}: TRACETrainer trains on text only, "
            "so remove it from the prompts and the environment's answers."
        )


def _are_messages(observation: Any) -> bool:
    return (
        isinstance(observation, list)
        and bool(observation)
        and all(isinstance(message, dict) and "role" in message and "content" in message for message in observation)
    )


def are_blocks(content: Any) -> bool:
    """Whether this is message content in blocks of text, `[{"type": "text", "text": ..}, ..]`. Other lists of
    dictionaries with a type, as web services answer them, are not.

    Raises:
        UnsupportedError: if it holds a block of another medium, alone or among anything else.
    """
    if not isinstance(content, list):
        return False
    _refuse({part["type"] for part in content if _is_medium(part)})
    return bool(content) and all(isinstance(p, dict) and p.get("type") == "text" and "text" in p for p in content)


def _is_medium(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _MEDIA:
        return False
    # `{"type": "image", "name": "red.png", "size": 7}` is an entry of a listing
    return kind in part or all(value is None or key in _MEDIUM_KEYS for key, value in part.items())


def as_text(content: Any) -> str:
    """Message content as text: that of its blocks joined, nothing for `None`, `str()` of anything else.

    Raises:
        UnsupportedError: for images and other media.
    """
    if are_blocks(content):
        return "".join(str(part["text"]) for part in content)
    return "" if content is None else str(content)


def _is_async(function: Any) -> bool:
    """Whether a call gives a coroutine, as far as can be told; looks into partial functions and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _check_signature(name: str, function: Any, *parameters: str) -> None:
    if not callable(function):
        raise TypeError(f"`{name}` is a {type(function).__name__}: pass a function {name}({', '.join(parameters)}).")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise TypeError(f"`{name}` is called as {name}({', '.join(parameters)}), but is {name}{signature}.") from error
