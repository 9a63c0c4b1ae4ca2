"""The `env_step` callback as an environment: a state and a function, one call per turn of a live branch."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from .base import Action, Environment, Episode, ForkError, Reply, StepResult, UnsupportedError
from .forking import copy_state


EnvStep = Callable[[Any, str, list[dict[str, Any]]], StepResult]
EnvReset = Callable[[dict[str, Any]], Any]


class CallbackEnvironment(Environment):
    """
    Args:
        env_step (`Callable`): `env_step(state, action, messages) -> StepResult`, sync or async.
        env_reset (`Callable`, *optional*): `env_reset(example) -> state`, sync or async. The default state is a copy
            of the dataset row.
        conversational (`bool`): whether observations are rendered as chat messages (of the user) or appended as text.
        loop (`Callable`): gives the event loop async callbacks run on.
    """

    def __init__(
        self,
        env_step: EnvStep,
        env_reset: EnvReset | None = None,
        conversational: bool = True,
        loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ):
        self.env_step = env_step
        self.env_reset = env_reset
        self.conversational = conversational
        self.loop = loop

    def reset(self, example: dict[str, Any], prompt: Any) -> CallbackEpisode:
        # The row is given away as a copy: it comes back in later epochs and must be unchanged then
        example = copy.deepcopy(example)
        if self.env_reset is None:
            return self.episode(example, prompt)
        state = self.env_reset(example)
        if inspect.isawaitable(state):
            state = asyncio.run_coroutine_threadsafe(state, self.loop()).result()  # type: ignore[arg-type,misc]
        return self.episode(state, prompt)

    def episode(self, state: Any, prompt: Any) -> CallbackEpisode:
        is_async = inspect.iscoroutinefunction(_unwrapped(self.env_step))
        return (AsyncCallbackEpisode if is_async else CallbackEpisode)(self, state, prompt)


class CallbackEpisode(Episode):
    def __init__(self, owner: CallbackEnvironment, state: Any, prompt: Any):
        self.owner = owner
        self.state = state
        self.prompt = prompt

    @property
    def environment(self) -> Any:
        return self.state

    def step(self, action: Action) -> Reply:
        return self._reply(self.owner.env_step(self.state, action.text, list(action.messages)))

    def fork(self) -> CallbackEpisode:
        return self.owner.episode(copy_state(self.state), self.prompt)

    def close(self) -> None:
        close = getattr(self.state, "close", None)
        if callable(close):
            close()

    def on_error(self, action: Action, error: BaseException) -> Reply:
        return self._render(Reply(failures=1), f"Error: {error or type(error).__name__}")

    def _reply(self, result: StepResult) -> Reply:
        if not isinstance(result, StepResult):
            raise TypeError(
                f"env_step returned {type(result).__name__}: return a StepResult(observation, done, reward, state)."
            )
        if result.state is not None:
            self.state = result.state
        reply = Reply(done=result.done, reward=result.reward, info=dict(result.info or {}))
        return reply if result.done else self._render(reply, result.observation)

    def _render(self, reply: Reply, observation: Any) -> Reply:
        if observation is None:
            return reply
        if _are_messages(observation):
            check_no_images(observation)
            if not self.owner.conversational:
                observation = "".join(str(message["content"]) for message in observation)
            else:
                reply.messages = [dict(message) for message in observation]
                return reply
        if self.owner.conversational:
            reply.messages = [{"role": "user", "content": str(observation)}]
        else:
            reply.text = str(observation)
        return reply


class AsyncCallbackEpisode(CallbackEpisode):
    is_async = True

    async def step(self, action: Action) -> Reply:  # type: ignore[override]
        return self._reply(await self.owner.env_step(self.state, action.text, list(action.messages)))  # type: ignore[misc]

    def replay(self, action: Action) -> Reply:
        if self.owner.loop is None:
            raise ForkError("An async env_step can't be replayed without an event loop.")
        try:
            return asyncio.run_coroutine_threadsafe(self.step(action), self.owner.loop()).result()
        except UnsupportedError:
            raise
        except Exception as error:
            return self.on_error(action, error)


def check_no_images(messages: list[dict[str, Any]]) -> None:
    """Raises [`UnsupportedError`] if a message's content holds anything but text."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            kinds = {part.get("type") for part in content if isinstance(part, dict)} - {"text"}
            if kinds:
                raise UnsupportedError(
                    f"A message holds content of type {', '.join(sorted(map(str, kinds)))}: TRACETrainer trains on "
                    "text only, so remove it from the prompts and the environment's answers."
                )


def _are_messages(observation: Any) -> bool:
    return (
        isinstance(observation, list)
        and bool(observation)
        and all(isinstance(message, dict) and "role" in message and "content" in message for message in observation)
    )


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__
