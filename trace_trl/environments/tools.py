"""TRL's `tools` and `environment_factory` as an environment: native tool calls, answered in their order."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any

from ..foreign import optional_method, sound, sound_text
from .base import Action, Environment, Episode, Reply, close_object, copy_plain, describe, needs_main_thread
from .callback import are_blocks, as_text, check_no_images
from .forking import copy_state
from .runner import ConcurrentRunner, EnvironmentTimeout, GetLoop, contained, is_interrupt, settle


# Methods of an environment that are not tools; TRL itself knows the first two
RESERVED_METHODS = ("reset", "get_reward", "close", "fork")

CLOSING_TIMEOUT = 60.0  # seconds for what is closed at the end of training

# Stands for the prompt of a row that has none: the environment's reset observation is appended to it, as in TRL
EMPTY_PROMPT = [{"role": "user", "content": ""}]


def environment_tools(environment: Any) -> list[Callable]:
    """The public methods of an environment instance that a policy may call, bound, in alphabetical order."""
    if environment is None:
        return []
    return [getattr(environment, name) for name in _tool_names(type(environment))]  # type: ignore[arg-type]


@lru_cache(maxsize=64)  # asked for with every copy that is made of an environment
def _tool_names(cls: type) -> list[str]:
    # Of the class: getmembers on an instance evaluates properties
    methods = inspect.getmembers(cls, predicate=inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in RESERVED_METHODS]


class ToolEnvironment(Environment):
    """
    Args:
        tools (`list[Callable]`): tools that belong to no environment, shared by all branches.
        factories (`dict[str | None, Callable]` or `None`): environment classes by name, as TRL normalises them: a
            single `environment_factory` has the name `None`.
        idle (`dict[str | None, list]` or `None`): instances already made, by name. Instances are made once and reset
            often, as in TRL: at the end of a branch its instance comes back here, a copy made by forking is closed.
        max_rounds (`int` or `None`): rounds of tool calls of an episode; calls made after that are not run.
        loop (`Callable`): gives the event loop async tools run on.
        max_workers (`int`): most threads that close instances at the end.
    """

    def __init__(
        self,
        tools: list[Callable] | None = None,
        factories: dict[str | None, Callable] | None = None,
        idle: dict[str | None, list] | None = None,
        max_rounds: int | None = None,
        loop: GetLoop | None = None,
        max_workers: int = 1024,
    ):
        self.tools = list(tools or [])
        self.max_workers = max_workers
        self.factories = factories
        self.max_rounds = max_rounds
        self.loop = loop
        self._idle = idle if idle is not None else {}
        self._lock = threading.Lock()

    def name_of(self, example: dict[str, Any]) -> str | None:
        """The name of the environment a dataset row selects.

        Raises:
            ValueError: if the row names an environment that is not there.
        """
        if self.factories is None or None in self.factories:
            return None
        name = example.get("environment")
        if name not in self.factories:
            raise ValueError(
                f"Example has `environment={name!r}`, which is not among the environments passed to "
                f"`environment_factory`. Expected one of: {list(self.factories)}."
            )
        return name

    def reset(self, example: dict[str, Any], prompt: Any) -> ToolEpisode:
        prompt = EMPTY_PROMPT if prompt is None else prompt
        if self.factories is None:
            return ToolEpisode(self, None, None, prompt)
        name = self.name_of(example)
        instance = self._acquire(name)
        try:
            # The row is given away as a copy: other rollouts are reset with it, and rewards read it
            row = copy_plain(example)
            if None not in self.factories:
                # Says which environment a row belongs to where several are mixed: `reset` does not see it, as in TRL
                row.pop("environment")
            prompt = _with_observation(prompt, settle(instance.reset(**row), self.loop))
        except BaseException:
            close_object(instance, self.loop, self)
            raise
        return ToolEpisode(self, name, instance, prompt, pooled=True)

    def _acquire(self, name: str | None) -> Any:
        with self._lock:
            idle = self._idle.setdefault(name, [])
            if idle:
                return idle.pop(0)
        return self.factories[name]()  # type: ignore[index]

    def release(self, name: str | None, instance: Any) -> None:
        with self._lock:
            self._idle.setdefault(name, []).append(instance)

    def close(self) -> None:
        with self._lock:
            instances = [instance for idle in self._idle.values() for instance in idle]
            self._idle.clear()
        # One that hangs keeps neither the others open nor the run from ending
        runner = ConcurrentRunner(self.max_workers)
        runner.run([partial(close_object, instance, self.loop, self) for instance in instances], CLOSING_TIMEOUT)
        runner.close()


class ToolEpisode(Episode):
    def __init__(self, owner: ToolEnvironment, name: str | None, instance: Any, prompt: Any, pooled: bool = False):
        self.owner = owner
        self.name = name
        self.environment = instance
        self.prompt = prompt
        self.loop = owner.loop
        self._pooled = pooled
        self._rounds = 0

    @cached_property
    def _tools(self) -> dict[str, Callable]:
        return {tool.__name__: tool for tool in self.owner.tools + environment_tools(self.environment)}

    def step(self, action: Action) -> Reply:
        calls = action.message.get("tool_calls") or []
        if not calls and not action.malformed:
            return Reply(done=True, calls=0)
        if self.owner.max_rounds is not None and self._rounds >= self.owner.max_rounds:
            return Reply(done=True, cut=True, calls=0)
        self._rounds += 1
        if not calls:
            return Reply(
                messages=[_tool_message("unknown", {"error": "The tool call could not be parsed as JSON."})],
                failures=1,
            )
        results = [self._call(call) for call in calls]
        # Coroutines of one turn run together; results keep the order of the calls
        waiting = [result for _, result in results if inspect.isawaitable(result)]
        if waiting:
            answers = iter(settle(_gather(waiting), self.loop))
            results = [(name, next(answers) if inspect.isawaitable(r) else r) for name, r in results]
        failures = sum(isinstance(result, BaseException) for _, result in results)
        messages = [_tool_message(name, result) for name, result in results]
        return Reply(messages=messages, calls=len(calls), failures=failures)

    def _call(self, call: Any) -> tuple[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            function = call if isinstance(call, dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            return "unknown", ValueError("The tool call names no tool.")
        try:
            if name not in self._tools:
                raise ValueError(f"Tool {name} not found.")
            arguments = function.get("arguments")
            if not isinstance(arguments, dict):
                raise ValueError(f"The arguments of tool {name} must be a JSON object.")
            # A copy: the message that holds them stays as it was sampled
            return name, self._tools[name](**copy_plain(arguments))
        except BaseException as error:  # a tool may try to exit
            if is_interrupt(error):
                raise
            if needs_main_thread(error):
                self.owner.warn_once("thread", f"Tool {name} failed: {describe(error)}", error)
            return name, error

    def on_error(self, action: Action, error: BaseException) -> Reply:
        if isinstance(error, EnvironmentTimeout):
            self.owner.warn_once("timeout", f"A tool was given up: {error} Later ones are only counted.")
        names = [_name(call) for call in action.message.get("tool_calls") or [{}]]
        messages = [_tool_message(name, error) for name in names]
        return Reply(messages=messages, calls=len(names), failures=len(names))

    def fork(self) -> ToolEpisode:
        instance = None if self.environment is None else copy_state(self.environment, self.loop, self.by_fork_only)
        episode = ToolEpisode(self.owner, self.name, instance, self.prompt)
        episode.by_fork_only = self.by_fork_only
        episode._rounds = self._rounds
        return episode

    def close(self) -> None:
        self.when_free(self._close)

    @property
    def closing_may_block(self) -> bool:
        return self.is_tainted or not self._pooled and optional_method(self.environment, "close") is not None

    def _close(self) -> None:
        instance, self.environment = self.environment, None
        if instance is None:
            return
        if self._pooled and not self.is_tainted:
            self.owner.release(self.name, instance)
        else:
            close_object(instance, self.loop, self.owner)


async def _gather(awaitables: list) -> list[Any]:
    return await asyncio.gather(*map(contained, awaitables), return_exceptions=True)


def _name(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else "unknown"


def _tool_message(name: str, result: Any) -> dict[str, Any]:
    """A tool's result, or what it raised, as TRL shows it to the policy."""
    if isinstance(result, BaseException):
        result = {"error": describe(result)}
    content = as_text(result) if are_blocks(result) else str(result)
    return {"role": "tool", "name": name, "content": sound_text(content)}


def _with_observation(prompt: Any, observation: Any) -> Any:
    """The prompt with a reset observation appended to its last message, the row left untouched (as TRL does)."""
    if observation is None:
        return prompt
    is_in_blocks = are_blocks(observation)
    text = sound_text(as_text(observation))
    if isinstance(prompt, str):
        return prompt + text
    content = prompt[-1]["content"]
    if isinstance(content, str):
        content += text
    else:
        content = content + (sound(observation) if is_in_blocks else [{"type": "text", "text": text}])
    messages = prompt[:-1] + [{**prompt[-1], "content": content}]
    check_no_images(messages)
    return messages
