"""TRL's `tools` and `environment_factory` as an environment: native tool calls, answered in their order."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable
from typing import Any

from .base import Action, Environment, Episode, Reply
from .callback import check_no_images
from .forking import copy_state


# Methods of an environment that are not tools; TRL itself knows the first two
RESERVED_METHODS = ("reset", "get_reward", "close", "fork")


def environment_tools(environment: Any) -> list[Callable]:
    """The public methods of an environment instance that a policy may call, bound, in alphabetical order."""
    if environment is None:
        return []
    return [
        getattr(environment, name)
        # Looked up on the class: getmembers on the instance evaluates properties
        for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)
        if not name.startswith("_") and name not in RESERVED_METHODS
    ]


class ToolEnvironment(Environment):
    """
    Args:
        tools (`list[Callable]`): tools that belong to no environment, shared by all branches.
        factories (`dict[str | None, Callable]` or `None`): environment classes by name, as TRL normalises them: a
            single `environment_factory` has the name `None`.
        idle (`dict[str | None, list]` or `None`): instances already made, by name. Instances are made once and reset
            often, as in TRL; only copies made by forking are closed when their branch ends.
        max_rounds (`int` or `None`): rounds of tool calls of an episode; calls made after that are not run.
        malformed (`Callable[[str], bool]`): whether a turn that holds no parsable call was meant as one.
        loop (`Callable`): gives the event loop async tools run on.
    """

    def __init__(
        self,
        tools: list[Callable] | None = None,
        factories: dict[str | None, Callable] | None = None,
        idle: dict[str | None, list] | None = None,
        max_rounds: int | None = None,
        malformed: Callable[[str], bool] = lambda text: False,
        loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ):
        self.tools = list(tools or [])
        self.factories = factories
        self.max_rounds = max_rounds
        self.malformed = malformed
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
        if self.factories is None:
            return ToolEpisode(self, None, None, prompt)
        name = self.name_of(example)
        instance = self._acquire(name)
        # `environment` is a control field where several are mixed, so `reset` does not see it there
        routed = None not in self.factories
        observation = instance.reset(**{k: v for k, v in example.items() if not (routed and k == "environment")})
        if inspect.isawaitable(observation):
            observation = asyncio.run_coroutine_threadsafe(observation, self.loop()).result()  # type: ignore
        return ToolEpisode(self, name, instance, _with_observation(prompt, observation), pooled=True)

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
        for instance in instances:
            _close(instance)


class ToolEpisode(Episode):
    def __init__(self, owner: ToolEnvironment, name: str | None, instance: Any, prompt: Any, pooled: bool = False):
        self.owner = owner
        self.name = name
        self.environment = instance
        self.prompt = prompt
        self._pooled = pooled
        self._tainted = False
        self._rounds = 0
        self._tools = {tool.__name__: tool for tool in owner.tools + environment_tools(instance)}
        self.is_async = False

    def step(self, action: Action) -> Reply:
        calls = action.message.get("tool_calls") or []
        if not calls and not self.owner.malformed(action.text):
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
        waiting = [result for _, result in results if asyncio.iscoroutine(result)]
        if waiting:
            answers = iter(asyncio.run_coroutine_threadsafe(_gather(waiting), self.owner.loop()).result())  # type: ignore
            results = [(n, next(answers) if asyncio.iscoroutine(r) else r) for n, r in results]
        failures = sum(isinstance(result, Exception) for _, result in results)
        messages = [_tool_message(n, {"error": str(r)} if isinstance(r, Exception) else r) for n, r in results]
        check_no_images(messages)
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
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            if not isinstance(arguments, dict):
                raise ValueError(f"The arguments of tool {name} must be a JSON object.")
            return name, self._tools[name](**arguments)
        except Exception as error:
            return name, error

    def on_error(self, action: Action, error: BaseException) -> Reply:
        # After a timeout the instance may still be in use by the lost thread
        self._tainted = self._tainted or isinstance(error, TimeoutError)
        calls = action.message.get("tool_calls") or [{}]
        names = [_name(call) for call in calls]
        messages = [_tool_message(name, {"error": str(error) or type(error).__name__}) for name in names]
        return Reply(messages=messages, calls=len(names), failures=len(names))

    def fork(self) -> ToolEpisode:
        instance = None if self.environment is None else copy_state(self.environment)
        episode = ToolEpisode(self.owner, self.name, instance, self.prompt)
        episode._rounds = self._rounds
        return episode

    def close(self) -> None:
        instance, self.environment = self.environment, None
        if instance is None:
            return
        if self._pooled and not self._tainted:
            self.owner.release(self.name, instance)
        elif not self._tainted:
            _close(instance)


async def _gather(coroutines: list) -> list[Any]:
    return await asyncio.gather(*coroutines, return_exceptions=True)


def _name(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else "unknown"


def _tool_message(name: str, result: Any) -> dict[str, Any]:
    # A list of content blocks passes through, as in TRL; anything else is shown as text
    blocks = isinstance(result, list) and bool(result) and all(isinstance(p, dict) and "type" in p for p in result)
    if blocks and all(part["type"] == "text" for part in result):
        return {"role": "tool", "name": name, "content": "".join(str(part.get("text", "")) for part in result)}
    return {"role": "tool", "name": name, "content": result if blocks else str(result)}


def _with_observation(prompt: Any, observation: Any) -> Any:
    """The prompt with a reset observation appended to its last message, the row left untouched (as TRL does)."""
    if observation is None:
        return prompt
    if isinstance(prompt, str):
        return prompt + str(observation)
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    messages = prompt[:-1] + [{**prompt[-1], "content": content + observation}]
    check_no_images(messages)
    return messages


def _close(instance: Any) -> None:
    close = getattr(instance, "close", None)
    if callable(close):
        close()
