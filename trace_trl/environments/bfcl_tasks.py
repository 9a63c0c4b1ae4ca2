"""
The multi-turn tasks of BFCL v4 as the package bfcl-eval ships them, and the API classes they are played on.

    Task ── what a task consists of; read-only, loaded once and shared by all of its episodes
      ├── start       its API instances before the first call
      └── reference   what the ground truth answers in each user turn, and the instances after it
    Backend ── API instances of one branch

A [`Backend`] is forked by sharing: an instance is copied by whoever calls it next. Most calls touch one class of
several, and a branch that only ends a user turn touches none, so this saves most of the copying.

The package's own executor is not used, since it evaluates text and keeps instances in module globals. What else of its
classes outlives an episode is kept out here: default arguments that are lists, two module globals that answers pass
through, and dictionaries of module globals that long_context states would share.
"""

from __future__ import annotations

import contextlib
import copy
import decimal
import functools
import importlib
import inspect
import json
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import copy_plain
from .bfcl_calls import MAX_BITS, Call, parse_calls


SUBSETS = ("base", "long_context", "miss_func", "miss_param")
DOCS = ("json", "signatures", "brief")

# Qwen3's chat template writes the tools of a conversation like this
_QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{functions}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
_BRIEF = (
    "Do what the user asks for by calling functions, such as [cd(folder='docs'), ls(a=True)]. Say Done. when it is "
    "done.\n{functions}"
)
# The package appends this to the functions offered from the start, not to those held out
_HINT = " Note that the provided function is in Python 3 syntax."
_TYPES = {"string": "str", "integer": "int", "float": "float", "boolean": "bool", "array": "list", "dict": "dict"}
_CHOICES = re.compile(r"\[Enum\]: (\[[^\]]*\])")


# Digits of precision; mpmath and decimal would otherwise compute for as long as a model's number tells them to.
_MAX_DIGITS = 4_000
# Functions that go through a global of a module: the precision of mpmath, of decimal, and a table of weather.
_GLOBAL_FUNCTIONS = frozenset({"logarithm", "square_root", "get_outside_temperature_from_google"})
_GLOBALS_LOCK = threading.Lock()


def package(name: str) -> Any:
    """A module of bfcl-eval. None of those used here writes the folders that `bfcl_eval.utils` would.

    Raises:
        ImportError: if the package is not installed.
    """
    try:
        return importlib.import_module(f"bfcl_eval.{name}")
    except ImportError as error:
        raise ImportError(
            "BFCL needs the package bfcl-eval: run `make setup-bfcl`, or "
            "`pip install --no-deps bfcl-eval==2026.3.23 filelock mpmath`."
        ) from error


class Backend:
    """
    The API instances of one branch.

    Args:
        instances (`dict[str, Any]`):
            One instance per class name, shared with other backends until it is called.
        owners (`Mapping[str, str]`):
            Which class each function belongs to.
    """

    __slots__ = ("_own", "instances", "owners")

    def __init__(self, instances: dict[str, Any], owners: Mapping[str, str]):
        self.instances = instances
        self.owners = owners
        self._own: set[str] = set()

    def fork(self) -> Backend:
        """A backend in the same state. From now on both copy an instance before they call it."""
        self._own = set()
        return Backend(dict(self.instances), self.owners)

    def call(self, call: Call) -> tuple[str, bool]:
        """
        Runs one call.

        Returns:
            `tuple[str, bool]`: the text of its result, as BFCL writes it, and whether it failed: because it can't be
            made, because it raised, or because its result is an error.
        """
        try:
            if call.problem is not None:
                raise ValueError(call.problem)
            # Every public method may be called, offered or held out: BFCL runs and scores what a model guessed
            if call.name not in self.owners:
                raise NameError(f"name '{call.name}' is not defined")
            owner = self.owners[call.name]
            if owner not in self._own:
                self.instances[owner] = copy.deepcopy(self.instances[owner])
                self._own.add(owner)
            return _run(getattr(self.instances[owner], call.name), call)
        except Exception as error:  # whatever the classes raise at odd arguments is an answer
            return f"Error during execution: {error}", True


def _run(method: Any, call: Call) -> tuple[str, bool]:
    # Lists among the arguments become part of the state, and the call is shown later
    positional, arguments = copy_plain(list(call.positional)), copy_plain(call.arguments)
    signature = _signature(method.__func__)
    try:
        given = signature.bind(None, *positional, **arguments).arguments
    except TypeError:
        pass  # the call itself raises it with BFCL's message
    else:
        _check_sizes(call.name, given)
        for name, parameter in signature.parameters.items():
            if isinstance(parameter.default, list | dict | set) and name not in given:
                arguments[name] = copy.deepcopy(parameter.default)
    with _globals_of(call.name):
        result = method(*positional, **arguments)
        failed = isinstance(result, dict) and "error" in result
        if isinstance(result, dict):
            with contextlib.suppress(TypeError, ValueError):
                return json.dumps(result), failed
        return str(result), failed


@functools.cache  # of the few functions of the eight classes
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _check_sizes(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuses what would compute for minutes, or for ever."""
    if name == "power":
        base, exponent = arguments["base"], arguments["exponent"]
        # Where this is exceeded, BFCL fails too: it can't print the number
        if isinstance(base, int) and isinstance(exponent, int) and (base.bit_length() - 1) * exponent > MAX_BITS:
            raise ValueError("The result is too large a number.")
    for parameter in ("precision", "decimal_places"):
        digits = 0
        with contextlib.suppress(TypeError, ValueError):  # the function itself refuses what is no number
            digits = int(arguments.get(parameter, 0))
        if abs(digits) > _MAX_DIGITS:
            raise ValueError(f"`{parameter}` may be at most {_MAX_DIGITS}.")


@contextlib.contextmanager
def _globals_of(name: str) -> Iterator[None]:
    if name not in _GLOBAL_FUNCTIONS:
        yield
        return
    import mpmath

    with _GLOBALS_LOCK, decimal.localcontext(), mpmath.workdps(mpmath.mp.dps):
        yield


@dataclass(eq=False, repr=False)
class Task:
    """
    One entry of a subset.

    Attributes:
        id (`str`): such as `"multi_turn_miss_func_17"`.
        subset (`str`), index (`int`): its two parts; entries with the same index are variants of one task.
        classes (`list[str]`): the API classes involved.
        config (`dict`): their initial states.
        turns (`list[list[dict]]`): the user's messages of each turn; none where held-out functions are given.
        functions (`list[dict]`): documentation of the functions offered from the start.
        held_out (`dict[int, list[dict]]`): documentation of the functions given at the start of a later turn.
        ground_truth (`list[list[str]]`): the calls that each turn needs.
    """

    id: str
    subset: str
    index: int
    classes: list[str]
    config: dict[str, Any]
    turns: list[list[dict[str, str]]]
    functions: list[dict[str, Any]]
    held_out: dict[int, list[dict[str, Any]]]
    ground_truth: list[list[str]]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: weakref.ref[LoadedTask] | None = None

    def load(self) -> LoadedTask:
        """The task's API instances, the same for all who hold them at a time. Nobody but its episodes does, so that a
        training that visits all tasks keeps those of the tasks that are being played."""
        with self._lock:
            loaded = None if self._loaded is None else self._loaded()
            if loaded is None:
                loaded = LoadedTask(self)
                self._loaded = weakref.ref(loaded)
            return loaded

    def calls(self, turn: int) -> list[Call]:
        """The ground truth's calls in this turn."""
        return parse_calls(f"[{', '.join(self.ground_truth[turn])}]")[0]

    @staticmethod
    def named(call: Call, backend: Backend) -> Call:
        """The call with all of its arguments by name; `backend` has the function."""
        method = getattr(backend.instances[backend.owners[call.name]], call.name)
        names = list(_signature(method.__func__).parameters)[1:]
        return Call(call.name, {**dict(zip(names, call.positional, strict=False)), **call.arguments})

    def make_instances(self) -> Backend:
        """API instances in their initial states."""
        backend = package("constants.executable_backend_config")
        package("eval_checker.multi_turn_eval.func_source_code.math_api")  # says so if mpmath is missing
        instances, owners = {}, {}
        for name in self.classes:
            cls = getattr(importlib.import_module(backend.CLASS_FILE_PATH_MAPPING[name]), name)
            instance = cls()
            if name not in backend.STATELESS_CLASSES:
                instance._load_scenario(
                    copy.deepcopy(self.config.get(name, {})), long_context=self.subset == "long_context"
                )
            # The loader puts in dictionaries of the module, which the package's own executor would change
            instances[name] = copy.deepcopy(instance)
            methods = inspect.getmembers(cls, inspect.isfunction)
            owners.update({method: name for method, _ in methods if not method.startswith("_")})
        return Backend(instances, owners)


class LoadedTask:
    """A task's API instances, and what its ground truth does to them. Used from many threads."""

    def __init__(self, task: Task):
        self._task = task
        self._lock = threading.Lock()
        self._start = task.make_instances()
        self._after: list[tuple[list[str], dict[str, Any]]] = []
        self._reference = self._start.fork()

    def start(self) -> Backend:
        """The API instances before the first call, to be called by the caller alone."""
        with self._lock:
            return self._start.fork()

    def reference(self, turn: int) -> tuple[list[str], dict[str, Any]]:
        """The results of the ground truth in this turn, and the instances after it. They depend on nothing that a
        policy does, so that they are made once; nobody may change them."""
        with self._lock:
            while len(self._after) <= turn:
                calls = self._task.calls(len(self._after))
                results = [self._reference.call(call)[0] for call in calls]
                self._after.append((results, self._reference.instances))
                self._reference = self._reference.fork()
            return self._after[turn]


_TASKS: dict[str, dict[str, Task]] = {}
_TASKS_LOCK = threading.Lock()


def load_tasks(subset: str) -> dict[str, Task]:
    """
    The tasks of a subset by their ids, in the order of their indices.

    Raises:
        ImportError: if bfcl-eval is not installed.
        ValueError: if there is no such subset.
    """
    if subset not in SUBSETS:
        raise ValueError(f"There is no subset {subset!r}, only: {', '.join(SUBSETS)}.")
    with _TASKS_LOCK:
        if subset not in _TASKS:
            _TASKS[subset] = _read(subset)
        return _TASKS[subset]


def _read(subset: str) -> dict[str, Task]:
    category = package("constants.category_mapping")
    file_names = package("constants.executable_backend_config").MULTI_TURN_FUNC_DOC_FILE_MAPPING
    data = Path(category.__file__).parents[1] / "data"
    file_name = f"{category.VERSION_PREFIX}_multi_turn_{subset}.json"
    entries = _lines(data / file_name)
    answers = {entry["id"]: entry["ground_truth"] for entry in _lines(data / "possible_answer" / file_name)}
    documents = {
        name: _lines(data / "multi_turn_func_doc" / file_names[name])
        for name in {name for entry in entries for name in entry["involved_classes"]}
    }
    tasks = {}
    for entry in entries:
        # The column `excluded_function` is not read, as in the package: those functions are offered and run
        offered = [document for name in entry["involved_classes"] for document in documents[name]]
        missed = entry.get("missed_function", {})
        held_out = {
            int(turn): [next(document for document in offered if document["name"] == name) for name in names]
            for turn, names in missed.items()
        }
        names = {name for names in missed.values() for name in names}
        tasks[entry["id"]] = Task(
            id=entry["id"],
            subset=subset,
            index=int(entry["id"].rpartition("_")[2]),
            classes=entry["involved_classes"],
            config=entry["initial_config"],
            turns=entry["question"],
            functions=[document for document in offered if document["name"] not in names],
            held_out=held_out,
            ground_truth=answers[entry["id"]],
        )
    return tasks


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def system_message(task: Task, call_format: str, docs: str) -> str:
    """Tells the functions offered and how to call them: BFCL's prompt, or the one that Qwen3's chat template makes."""
    documents = [{**document, "description": document["description"] + _HINT} for document in task.functions]
    if docs != "json":
        functions = "\n".join(_line(document, docs) for document in task.functions)
    elif call_format == "json":
        functions = "\n".join(map(json.dumps, documents))
    else:
        functions = json.dumps(documents, indent=4)
    if call_format == "json":
        return _QWEN_TOOLS.format(functions=functions)
    if docs == "brief":
        return _BRIEF.format(functions=functions)
    return _bfcl_prompt("json" if docs == "json" else "Python", functions)


def user_messages(task: Task, turn: int, docs: str) -> list[dict[str, str]]:
    """What the user says in this turn."""
    if turn not in task.held_out:
        return [{"role": message["role"], "content": message["content"]} for message in task.turns[turn]]
    documents = task.held_out[turn]
    # As the package hands them to open models in both formats: the system message can't change any more
    functions = str(documents) if docs == "json" else "\n".join(_line(document, docs) for document in documents)
    sentence = package("constants.default_prompts").DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
    return [{"role": "user", "content": sentence.format(functions=functions)}]


def _bfcl_prompt(kind: str, functions: str) -> str:
    prompts = package("constants.default_prompts")
    style = prompts.PROMPT_STYLE_TEMPLATES["classic"]
    return prompts.PROMPT_TEMPLATE_MAPPING["plaintext"].format(
        persona=style["persona"],
        task=style["task"],
        tool_call_format=style["tool_call_no_tag"].format(
            output_format=prompts.OUTPUT_FORMAT_MAPPING["python"], param_types=prompts.PARAM_TYPE_MAPPING["python"]
        ),
        multiturn_behavior=style["multiturn_behavior"],
        available_tools=style["available_tools"].format(format=kind, functions=functions),
    )


def _line(document: Mapping[str, Any], docs: str) -> str:
    """`cd(folder: str)  # Change the current working directory to the specified folder.`"""
    parameters = document["parameters"]
    shown = []
    for name, parameter in parameters["properties"].items():
        choices = _CHOICES.search(parameter["description"])
        kind = _TYPES[parameter["type"]]
        if choices:
            values = " | ".join(map(repr, json.loads(choices[1])))
            kind = f"list[{values}]" if kind == "list" else values
        elif kind == "list":
            kind = f"list[{_TYPES[parameter['items']['type']]}]"
        text = f"{name}: {kind}"
        if name not in parameters["required"]:
            default = parameter.get("default", "None")
            text += f" = {None if default == 'None' else default!r}"
        shown.append(text)
    signature = f"{document['name']}({', '.join(shown)})"
    if docs == "brief":
        return signature
    about = document["description"].rpartition("Tool description: ")[2]
    return f"{signature}  # {about.split('. ')[0].strip().rstrip('.')}."
