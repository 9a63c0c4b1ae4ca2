"""
A Python tool for mathematics: the policy writes programs, reads what they print, and answers.

    problem ── "Let me compute it. ```python .. ```" ── "```output 42 ```"
            ── "The answer is \\boxed{42}."                               episode over, `state.answer` holds this turn

All `python` blocks of a turn are run together, in their order; a turn without one is the answer. Variables stay for
the rest of the episode. Programs run in a [`sandbox`](sandbox/__init__.py) and can't take the trainer down: whatever
they do is an observation. [`PythonTool`] is the same for native tool calls, by TRL's `environment_factory`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .base import StepResult, without_thoughts
from .sandbox import PythonSession, Result, Sandbox, Sessions


# A block that is not closed is one too: a turn can end with its last line
_BLOCK = re.compile(r"```(?:python3?|py)[^\S\n]*\n(.*?)(?:^[^\S\n]*```|\Z)", re.DOTALL | re.IGNORECASE | re.MULTILINE)


def find_code(text: str) -> str | None:
    """
    The program of a turn.

    Args:
        text (`str`):
            One turn.

    Returns:
        `str | None`: its blocks marked as `python`, joined; `None` if there is none. Thoughts are not looked at.
    """
    blocks = _BLOCK.findall(without_thoughts(text))
    code = "\n".join(block.rstrip() for block in blocks).strip("\n")
    return code if code.strip() else None


def render_result(result: Result, limit: int) -> str:
    """
    What the policy reads of a program's run.

    Args:
        result ([`Result`]):
            What it did.
        limit (`int`):
            Largest length in characters. Of a longer text the beginning and the end are kept.

    Returns:
        `str`: output and error; never empty.
    """
    output = result.output.rstrip("\n")
    if result.dropped:
        output += f"\n[{result.dropped} more bytes]"
    error = result.error or ""
    if result.lost:
        error += " The interpreter was started again, all variables are lost."
    text = "\n".join(part for part in (output, error.strip()) if part)
    if len(text) > limit:
        # The last line of an error says what it was
        tail = limit // 2
        text = f"{text[: limit - tail]}\n[{len(text) - limit} characters left out]\n{text[len(text) - tail :]}"
    return text or "[no output]"


@dataclass(slots=True)
class PythonState:
    """
    What one episode did so far.

    Attributes:
        session ([`PythonSession`]): the namespace its programs run in.
        answer (`str` or `None`): the turn that ended the episode; `None` while it runs.
        programs (`int`), errors (`int`): programs run, and how many of them raised, or were ended.
    """

    session: PythonSession
    answer: str | None = None
    programs: int = 0
    errors: int = 0

    def run(self, code: str, limit: int) -> str:
        """Runs a program and counts it; returns what the policy reads."""
        result = self.session.run(code)
        self.programs += 1
        self.errors += result.error is not None
        return render_result(result, limit)

    def fork(self) -> PythonState:
        """An independent copy; its interpreter is started when it is needed, and runs the earlier programs again."""
        return PythonState(self.session.fork(), self.answer, self.programs, self.errors)

    def close(self) -> None:
        self.session.close()


class PythonEnvironment:
    """
    Python as a tool, with text actions.

    Args:
        timeout (`float`, *optional*, defaults to `5.0`):
            Seconds of CPU time of a program.
        wall_timeout (`float`, *optional*):
            Seconds of a program on the clock; three times `timeout` by default.
        memory_mb (`int`, *optional*, defaults to `512`):
            Memory of a program.
        max_observation_chars (`int`, *optional*, defaults to `2000`):
            Largest length of what the policy reads of a program.
        max_idle (`int`, *optional*, defaults to `128`):
            Interpreters kept between two turns. Where more branches are live, some run their earlier programs again.
        isolation (`str`, *optional*, defaults to `"strict"`):
            `"limits"` gives up isolation where the kernel can't do it, see [`Sandbox`].

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        timeout: float = 5.0,
        wall_timeout: float | None = None,
        memory_mb: int = 512,
        max_observation_chars: int = 2000,
        max_idle: int = 128,
        isolation: str = "strict",
    ):
        if max_observation_chars < 1:
            raise ValueError(f"`max_observation_chars` must be at least 1, got {max_observation_chars}.")
        self.max_observation_chars = max_observation_chars
        sandbox = Sandbox(memory_mb=memory_mb, max_output=4 * max_observation_chars, isolation=isolation)
        self.sessions = Sessions(sandbox, timeout, wall_timeout, max_idle)

    def reset(self, example: Mapping[str, Any] | None = None) -> PythonState:
        """
        Starts an episode. It needs nothing of the row.

        Raises:
            SandboxError: if programs can't be isolated on this machine.
        """
        # Here, where an error ends the run: in `step` the policy would read it, turn after turn
        self.sessions.check()
        return PythonState(self.sessions.new())

    def step(self, state: PythonState, action: str, messages: Any = None) -> StepResult:
        """
        Answers one turn and changes `state` in place.

        Args:
            state ([`PythonState`]):
                State of this branch.
            action (`str`):
                The decoded turn.
            messages (`list[dict]`, *optional*):
                Conversation so far; not used.

        Returns:
            [`StepResult`]: a block of output, or `done=True` for a turn without a program.
        """
        code = find_code(action)
        observation = None
        if code is None:
            state.answer = action
        else:
            observation = f"```output\n{state.run(code, self.max_observation_chars)}\n```"
        info = {"programs": state.programs, "program_errors": state.errors}
        return StepResult(observation, done=code is None, info=info)

    def close(self) -> None:
        """Ends all interpreters."""
        self.sessions.close()


def python_env(
    **kwargs: Any,
) -> tuple[Callable[[Mapping[str, Any]], PythonState], Callable[[PythonState, str, Any], StepResult]]:
    """
    The two callbacks of a [`PythonEnvironment`], as [`TRACETrainer`] takes them.

    Args:
        **kwargs:
            Arguments of [`PythonEnvironment`].

    Returns:
        `tuple[Callable, Callable]`: `env_reset(example) -> state` and
        `env_step(state, action, messages) -> StepResult`.

    Example:

    ```python
    env_reset, env_step = python_env(timeout=5.0)
    trainer = TRACETrainer(..., reward_funcs=math_accuracy, env_reset=env_reset, env_step=env_step)
    ```
    """
    environment = PythonEnvironment(**kwargs)
    return environment.reset, environment.step


class PythonTool:
    """
    Python as a native tool: `TRACETrainer(..., environment_factory=PythonTool)`.

    Args:
        environment ([`PythonEnvironment`], *optional*):
            Settings, and where programs run; one with the defaults is shared by all instances.
    """

    _shared: PythonEnvironment | None = None
    _lock = threading.Lock()

    def __init__(self, environment: PythonEnvironment | None = None):
        if environment is None:
            with PythonTool._lock:
                if PythonTool._shared is None:
                    PythonTool._shared = PythonEnvironment()
                environment = PythonTool._shared
        self._environment = environment
        self._state = environment.reset()

    def reset(self, **row: Any) -> None:
        """Starts a new episode."""
        self._state.close()
        self._state = self._environment.reset(row)

    def python(self, code: str) -> str:
        """
        Runs Python code and returns what it prints, and the value of its last line. Variables are kept between calls.

        Args:
            code: The code to run.

        Returns:
            What the code printed, or the error it ended with.
        """
        return self._state.run(str(code), self._environment.max_observation_chars)

    def fork(self) -> PythonTool:
        """An independent copy in the same state."""
        copied = PythonTool(self._environment)
        copied._state = self._state.fork()
        return copied

    def close(self) -> None:
        """Ends the interpreter."""
        self._state.close()
