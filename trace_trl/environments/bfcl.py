"""
BFCL v4 multi-turn: agents that call the functions of file systems, brokers, cars and travel agencies for a user.

    user turn 1 ── [cd(folder='docs'), ls()] ── results ── [cat(file_name='a')] ── results ── "It says .."
    user turn 2 ── [post_tweet(content='..')] ── results ── "Done."      checked at the end of every user turn
    user turn 3 ── ..                                                    episode over: reward 1 or 0

An episode has several user turns, and each is a loop of its own: turns of the policy that hold calls are answered with
their results, the first one without any ends the user's turn, and the user's next message follows. The reward is what
the package's `multi_turn_checker` decides: after every user turn that needs calls, the policy's API instances must be
in the state that the ground truth leads to, and the results so far must include those of the ground truth.

Where this differs from the package's pipeline
- arguments must be literals. The package turns a bare name into text, evaluates sums, and drops arguments given by
  position; here these are bound, and the others make the call fail;
- fences that name a language, and tags without line breaks, are read as well;
- a user turn of too many steps ends the episode at 0, also if it is the last, which the package would still check;
- a limit of the trainer (`max_turns`, `max_completion_length`) may end an episode, which is then not done right;
- numbers that compute for minutes are refused;
- what the package's classes keep in module globals, and so share between episodes and with the ground truth, is kept
  apart;
- `multi_turn_irrelevance_checker` is not asked: the package defines it, and its runner doesn't ask it either.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .base import StepResult
from .bfcl_calls import CALL_FORMATS, Call, parse_calls
from .bfcl_tasks import DOCS, SUBSETS, Backend, LoadedTask, Task, load_tasks, package, system_message, user_messages


DEFAULT_SEED = 0


@dataclass(slots=True)
class BFCLState:
    """
    What one episode did so far.

    Attributes:
        task ([`Task`][trace_trl.environments.bfcl_tasks.Task]): the entry; read-only, shared by all episodes.
        loaded ([`LoadedTask`][trace_trl.environments.bfcl_tasks.LoadedTask]): its API instances and those that the
            ground truth leads to, likewise.
        backend ([`Backend`][trace_trl.environments.bfcl_tasks.Backend]): this branch's API instances,
            `backend.instances` by class name.
        results (`list[str]`): results of all calls so far.
        turn (`int`): user turns that ended.
        turn_steps (`int`): turns of the policy with calls in the present user turn.
        steps (`int`): turns of the policy.
        calls (`int`), failed_calls (`int`): calls made, and those among them that were answered with an error.
        invalid (`int`): calls that could not be made or read: arguments that are no literals, broken syntax.
        error (`str` or `None`): why the episode is lost.
        done (`bool`): whether the episode is over.
    """

    task: Task
    loaded: LoadedTask
    backend: Backend
    results: list[str] = field(default_factory=list)
    turn: int = 0
    turn_steps: int = 0
    steps: int = 0
    calls: int = 0
    failed_calls: int = 0
    invalid: int = 0
    error: str | None = None
    done: bool = False

    @property
    def lost(self) -> bool:
        """Whether the episode can't be won any more."""
        return self.error is not None

    @property
    def instances(self) -> dict[str, Any]:
        """The API instances by class name, to be looked at only: branches share them until one calls them."""
        return self.backend.instances

    def fork(self) -> BFCLState:
        """An independent copy. API instances are copied by the next call on them, on either side."""
        copied = BFCLState(self.task, self.loaded, self.backend.fork(), list(self.results))
        for name in ("turn", "turn_steps", "steps", "calls", "failed_calls", "invalid", "error", "done"):
            setattr(copied, name, getattr(self, name))
        return copied


class BFCLEnvironment:
    """
    Plays the multi-turn entries of BFCL v4. Needs the package bfcl-eval, which `make setup-bfcl` installs.

    Args:
        call_format (`str`, *optional*, defaults to `"python"`):
            How the policy writes calls. `"python"`: `[cd(folder='docs'), ls()]`, with BFCL's prompt for models without
            native calls; results come back as one user message. `"json"`: Qwen3's
            `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, with the system message of its chat template;
            results come back as tool messages.
        docs (`str`, *optional*, defaults to `"json"`):
            How functions are described: `"json"`, as in BFCL, some 37,000 characters a prompt;
            `"signatures"`, one line per function, a tenth of that; `"brief"`, these lines without a description and in
            place of BFCL's prompt a short one, for small models that are trained on demonstrations.
        max_steps_per_turn (`int`, *optional*, defaults to `20`):
            Turns of the policy with calls in one user turn. One more, and the episode is lost.
        max_user_turns (`int`, *optional*):
            Plays and checks the first user turns only.
        stop_when_lost (`bool`, *optional*, defaults to `False`):
            Ends an episode with the first user turn that the checker rejects.
        max_observation_chars (`int`, *optional*):
            Largest length of a result as the policy reads it. The checker always sees all of it.

    Example:

    ```python
    >>> environment = BFCLEnvironment()
    >>> state = environment.reset({"id": "multi_turn_base_0"})
    >>> environment.step(state, "[cd(folder='document')]").observation
    '[{\\'role\\': \\'tool\\', \\'name\\': "cd(folder=\\'document\\')", \\'content\\': \\'{"current_working_directory": "document"}\\'}]'
    ```
    """  # noqa: E501

    def __init__(
        self,
        call_format: str = "python",
        docs: str = "json",
        max_steps_per_turn: int = 20,
        max_user_turns: int | None = None,
        stop_when_lost: bool = False,
        max_observation_chars: int | None = None,
    ):
        if call_format not in CALL_FORMATS or docs not in DOCS:
            raise ValueError(
                f"`call_format` must be one of {CALL_FORMATS} and `docs` one of {DOCS}, got {call_format!r}, {docs!r}."
            )
        for name, value in (
            ("max_steps_per_turn", max_steps_per_turn),
            ("max_user_turns", max_user_turns),
            ("max_observation_chars", max_observation_chars),
        ):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self.call_format = call_format
        self.docs = docs
        self.max_steps_per_turn = max_steps_per_turn
        self.max_user_turns = max_user_turns
        self.stop_when_lost = stop_when_lost
        self.max_observation_chars = max_observation_chars

    def rows(
        self, subsets: Iterable[str] = SUBSETS, split: str | None = None, seed: int = DEFAULT_SEED
    ) -> list[dict[str, Any]]:
        """
        The rows of a dataset.

        Args:
            subsets (`Iterable[str]`, *optional*):
                Some of `"base"`, `"long_context"`, `"miss_func"`, `"miss_param"`, all by default.
            split (`str`, *optional*):
                `"train"` for four fifths of the tasks, `"test"` for the others. All variants of a task, which have the
                same index in every subset, are in the same split.
            seed (`int`, *optional*, defaults to `0`):
                Which tasks go where.

        Returns:
            `list[dict]`: rows `{"prompt": [system message, user message], "id": .., "subset": ..}`.
        """
        if split not in (None, "train", "test"):
            raise ValueError(f"`split` must be None, 'train' or 'test', got {split!r}.")
        rows = []
        for subset in [subsets] if isinstance(subsets, str) else subsets:
            tasks = load_tasks(subset)
            order = list(range(len(tasks)))
            random.Random(seed).shuffle(order)
            train = set(order[: len(order) * 4 // 5])
            for task in tasks.values():
                if split is None or (task.index in train) == (split == "train"):
                    rows.append({"prompt": self.prompt(task), "id": task.id, "subset": subset})
        return rows

    def classes(self, example: Mapping[str, Any]) -> set[str]:
        """Names of the API classes that a row involves."""
        return set(self._task(example).classes)

    def prompt(self, task: Task) -> list[dict[str, str]]:
        """The system message with the functions offered, and the user's first message."""
        system = system_message(task, self.call_format, self.docs)
        return [{"role": "system", "content": system}, *user_messages(task, 0, self.docs)]

    def reset(self, example: Mapping[str, Any]) -> BFCLState:
        """Starts an episode for a row with an `id` column."""
        task = self._task(example)
        loaded = task.load()
        return BFCLState(task, loaded, loaded.start())

    def _task(self, example: Mapping[str, Any]) -> Task:
        name = str(example.get("id"))
        subset = name.removeprefix("multi_turn_").rpartition("_")[0]
        task = load_tasks(subset).get(name) if subset in SUBSETS else None
        if task is None:
            raise ValueError(f"The row's `id` names no multi-turn entry of BFCL v4: {example.get('id')!r}.")
        return task

    def ground_truth(self, example: Mapping[str, Any]) -> list[list[Call]]:
        """The calls that each user turn of a row needs, arguments by name, such as for demonstrations:
        [`format_calls`][trace_trl.environments.bfcl_calls.format_calls] writes them in either format."""
        task = self._task(example)
        instances = task.load().start()
        return [[task.named(call, instances) for call in task.calls(turn)] for turn in range(self._turns(task))]

    def step(self, state: BFCLState, action: str, messages: Any = None) -> StepResult:
        """
        Answers one turn of the policy and changes `state` in place.

        Args:
            state ([`BFCLState`]):
                State of this branch.
            action (`str`):
                The decoded turn.
            messages (`list[dict]`, *optional*):
                Conversation so far; not used.

        Returns:
            [`StepResult`]: the results of the calls or the user's next message; at the end `done=True` and reward 1 or
            0. Before, the reward is 0: that of an episode which some limit ends.
        """
        if state.done:
            return self._result(state)
        calls, unreadable = parse_calls(action, self.call_format)
        state.steps += 1
        state.invalid += unreadable + sum(call.problem is not None for call in calls)
        if not calls:
            return self._end_turn(state)
        shown = []
        for call in calls:
            result, failed = state.backend.call(call)
            state.results.append(result)
            state.calls += 1
            state.failed_calls += failed
            shown.append((call, self._cut(result)))
        state.turn_steps += 1
        if state.turn_steps > self.max_steps_per_turn:
            state.error = state.error or f"User turn {state.turn} took more than {self.max_steps_per_turn} steps."
            state.done = True
            return self._result(state)
        if self.call_format == "json":
            return self._result(
                state, [{"role": "tool", "name": call.name, "content": result} for call, result in shown]
            )
        return self._result(
            state, _printable(repr([{"role": "tool", "name": str(call), "content": result} for call, result in shown]))
        )

    def _end_turn(self, state: BFCLState) -> StepResult:
        if not state.lost:
            state.error = _check(state)
        state.turn += 1
        state.turn_steps = 0
        state.done = state.turn >= self._turns(state.task) or (state.lost and self.stop_when_lost)
        return self._result(state, None if state.done else user_messages(state.task, state.turn, self.docs))

    def _turns(self, task: Task) -> int:
        return min(len(task.turns), self.max_user_turns or len(task.turns))

    def _result(self, state: BFCLState, observation: str | list[dict[str, Any]] | None = None) -> StepResult:
        info = {
            "user_turns": state.turn,
            "steps": state.steps,
            "calls": state.calls,
            "failed_calls": state.failed_calls,
            "invalid": state.invalid,
        }
        reward = float(state.done and not state.lost)
        return StepResult(observation, done=state.done, reward=reward, info=info)

    def _cut(self, result: str) -> str:
        result = _printable(result)
        limit = self.max_observation_chars
        return result if limit is None or len(result) <= limit else result[:limit] + " ..."


def _check(state: BFCLState) -> str | None:
    """Why the package's checker rejects the user turn that now ends."""
    if not state.task.ground_truth[state.turn]:
        return None  # something is missing, so that no calls are needed: nothing is checked, not even that none came
    checker = package("eval_checker.multi_turn_eval.multi_turn_checker")
    expected, instances = state.loaded.reference(state.turn)
    if not state.turn_steps:
        return f"User turn {state.turn} holds no calls."
    try:
        verdict = checker.state_checker(state.instances, instances)
        if verdict["valid"]:
            verdict = checker.response_checker(state.results, expected, state.turn)
    except RecursionError:  # a directory was copied into itself
        return f"User turn {state.turn} left a state that can't be compared."
    return None if verdict["valid"] else f"User turn {state.turn}: {verdict['error_message']}"


def _printable(text: str) -> str:
    """Text without lone surrogates, which JSON can spell and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def bfcl_env(
    call_format: str = "python",
    docs: str = "json",
    max_steps_per_turn: int = 20,
    max_user_turns: int | None = None,
    stop_when_lost: bool = False,
    max_observation_chars: int | None = None,
) -> tuple[Callable[[Mapping[str, Any]], BFCLState], Callable[[BFCLState, str, Any], StepResult]]:
    """
    The two callbacks of a [`BFCLEnvironment`], as [`TRACETrainer`] takes them, with its arguments.

    Returns:
        `tuple[Callable, Callable]`: `env_reset(example) -> state` and
        `env_step(state, action, messages) -> StepResult`.

    Example:

    ```python
    dataset = Dataset.from_list(BFCLEnvironment(call_format="json").rows(["base"], split="train"))
    env_reset, env_step = bfcl_env(call_format="json", stop_when_lost=True)
    trainer = TRACETrainer(..., train_dataset=dataset, env_reset=env_reset, env_step=env_step)
    ```
    """
    environment = BFCLEnvironment(
        call_format=call_format,
        docs=docs,
        max_steps_per_turn=max_steps_per_turn,
        max_user_turns=max_user_turns,
        stop_when_lost=stop_when_lost,
        max_observation_chars=max_observation_chars,
    )
    return environment.reset, environment.step
