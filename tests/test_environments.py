"""The three ways to bring an environment, and none: what comes in, what the policy reads, what becomes of faults."""

import asyncio
import copy
import functools
import inspect
import threading

import pytest
import torch

from toys import (
    AsyncCounterEnvironment,
    Clock,
    CounterEnvironment,
    Hanging,
    Irreproducible,
    LockHolder,
    ResetFails,
    SocketOwner,
    WithoutTools,
    as_bytes,
    as_dict,
    as_int,
    as_none,
    async_echo,
    call,
    echo,
    exiting,
    failing,
    huge,
    make_tokenizer,
    roll_out,
    texts,
    usual,
)
from trace_trl import StepResult
from trace_trl.engine import Limits, RootPlan
from trace_trl.environments.base import Action, ContractError, UnsupportedError
from trace_trl.environments.callback import CallbackEnvironment
from trace_trl.environments.none import SingleTurnEnvironment
from trace_trl.environments.runner import ConcurrentRunner
from trace_trl.environments.tools import CLOSING_TIMEOUT, RESERVED_METHODS, ToolEnvironment, environment_tools
from trace_trl.generation import Sample
from trace_trl.tree import RolloutTree
from waiting import until


LOOP = ConcurrentRunner()  # gives the event loop of environments without a trainer


def loop():
    return LOOP.loop


def turn_of(history):
    """1 for the first turn of an episode."""
    return history.count("<|im_start|>assistant")


def act(text, messages=(), **message):
    return Action(text, {"role": "assistant", "content": text, **message}, list(messages))


# `env_step`: its forms


def count_step(state, action, messages):
    """Changes the state in place; three steps make an episode."""
    state["steps"] = state.get("steps", 0) + 1
    if state["steps"] == 3:
        return StepResult(done=True, reward=float(state["number"]))
    return StepResult(f"{action} was step {state['steps']} of {state['number']}")


async def async_count_step(state, action, messages):
    await asyncio.sleep(0.001)
    return count_step(state, action, messages)


class Stepper:
    def __call__(self, state, action, messages):
        return count_step(state, action, messages)

    def step(self, state, action, messages):
        return count_step(state, action, messages)


class AsyncStepper:
    async def __call__(self, state, action, messages):
        return await async_count_step(state, action, messages)

    async def step(self, state, action, messages):
        return await async_count_step(state, action, messages)


def with_prefix(prefix, state, action, messages):
    return count_step(state, action, messages)


async def async_with_prefix(prefix, state, action, messages):
    return await async_count_step(state, action, messages)


def persistent_step(state, action, messages):
    """Leaves the state as it is and returns a new one."""
    copied = dict(state)
    return_value = count_step(copied, action, messages)
    return_value.state = copied
    return return_value


FORMS = {
    "function": count_step,
    "partial": functools.partial(with_prefix, "prefix"),
    "callable object": Stepper(),
    "bound method": Stepper().step,
    "partial of an object": functools.partial(Stepper()),
    "returns the state": persistent_step,
    "async function": async_count_step,
    "async partial": functools.partial(async_with_prefix, "prefix"),
    "async callable object": AsyncStepper(),
    "async bound method": AsyncStepper().step,
    "async partial of an object": functools.partial(AsyncStepper()),
    "plain function that returns a coroutine": lambda s, a, m: async_count_step(s, a, m),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reset", ["none", "sync", "async"])
def test_every_form_of_env_step_and_env_reset(form, reset):
    def env_reset(example):
        return {"number": example["number"] + 1}

    async def async_env_reset(example):
        await asyncio.sleep(0)
        return env_reset(example)

    environment = CallbackEnvironment(
        FORMS[form], {"none": None, "sync": env_reset, "async": async_env_reset}[reset], loop=loop
    )
    rows = [{"prompt": [{"role": "user", "content": "go"}], "number": number} for number in (4, 6)]
    # A coroutine needs no worker
    assert inspect.iscoroutinefunction(environment.reset(rows[0], "go").step) == form.startswith("async")
    trees, stats, _ = roll_out(environment, lambda history: "red", rows, bare=2, continuations=4)
    for tree, row in zip(trees, rows, strict=True):
        number = row["number"] + (reset != "none")
        leaves = tree.leaves()
        assert len(leaves) == 6
        for leaf in leaves:
            assert texts(leaf) == ["red", f"red was step 1 of {number}", "red", f"red was step 2 of {number}", "red"]
            assert leaf.leaf.reward == number and leaf.leaf.reason == "final"
        assert {leaf.leaf.kind for leaf in leaves} == {"bare", "continuation"}
    assert stats.environment_failures == stats.unforkable_prefixes == 0


def test_env_step_is_given_the_conversation_as_text_and_messages():
    given = []

    def env_step(state, action, messages):
        given.append((action, copy.deepcopy(messages)))
        messages[0]["content"] = "changed"
        messages.append({"role": "user", "content": "more"})
        return StepResult("and?", done=len(given) == 3)

    rows = [{"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]}]
    (tree,), _, engine = roll_out(
        CallbackEnvironment(env_step), lambda history: f"red {turn_of(history)}", rows, bare=1
    )
    assert [action for action, _ in given] == ["red 1", "red 2", "red 3"]
    assert given[2][1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "red 1"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "red 2"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "red 3"},
    ]
    assert engine.histories[1].endswith(
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\nred 1<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tree.prompt == rows[0]["prompt"]


# Lists of dictionaries that are no content in blocks, although they look like it
LISTS = [
    (value, str(value))
    for value in (
        [{"type": "restaurant", "name": "Chez"}],
        [{"type": "text", "name": "comment"}],
        [{"type": "text", "text": "a"}, {"type": "restaurant"}],
        [{"type": "image", "name": "red.png", "size": 7}, {"type": "folder", "name": "more"}],
        [{"type": ["image"]}],
        ["a", {"type": "restaurant"}],
    )
]
IMAGE = {"type": "image", "image": object()}
MEDIA = [
    [IMAGE],
    [{"type": "image"}],
    [{"type": "image", "text": None, "url": "red.png"}],
    [{"type": "image_url", "image_url": {"url": "red.png"}}],
    [{"type": "input_audio", "input_audio": {"data": ""}}],
    [{"type": "text", "text": "caption"}, {"type": "video", "video": "red.mp4"}],
    ["caption", IMAGE],
    ["caption", IMAGE | {"caption": "red"}],
]
SURROGATES = [
    ("bad \ud800 text", "bad \ufffd text"),
    ([{"type": "text", "text": "\ud800"}], "\ufffd"),
    (b"\xff".decode("utf-8", "surrogateescape"), "\ufffd"),
]


@pytest.mark.parametrize(
    ("observation", "content"),
    [
        ("seen", "seen"),
        (7, "7"),
        (0, "0"),
        (b"raw", "b'raw'"),
        ({"a": 1}, "{'a': 1}"),
        (["a", "b"], "['a', 'b']"),
        ([{"text": "no role"}], "[{'text': 'no role'}]"),
        ([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "one two"),
        (False, "False"),
        *LISTS,
        *SURROGATES,
    ],
)
def test_observations_of_any_type_are_read_as_text(observation, content):
    for conversational in (True, False):
        environment = CallbackEnvironment(
            lambda state, action, messages: StepResult(observation), None, conversational
        )
        prompt = [{"role": "user", "content": "go"}] if conversational else "go"
        reply = environment.reset({"prompt": prompt}, prompt).step(act("red"))
        assert reply.failures == 0
        if conversational:
            assert (reply.messages, reply.text) == ([{"role": "user", "content": content}], None)
        else:
            assert (reply.messages, reply.text) == ([], content)


def test_observations_may_be_messages():
    answered = [
        {"role": "tool", "content": "four"},
        {"role": "tool", "name": "add", "content": [{"type": "text", "text": "fi"}, {"type": "text", "text": "ve"}]},
        {"role": "user", "content": None},
        {"role": "user", "content": 6},
        {"role": "user", "content": [{"type": "error", "text": "x"}]},
        {"role": "user", "content": "\ud800", "extra": {"\udfff": ("\ud800",)}},
    ]
    environment = CallbackEnvironment(lambda state, action, messages: StepResult(answered))
    reply = environment.reset({}, None).step(act("red"))
    assert reply.messages == [
        {"role": "tool", "name": "tool", "content": "four"},
        {"role": "tool", "name": "add", "content": "five"},
        {"role": "user", "content": ""},
        {"role": "user", "content": "6"},
        {"role": "user", "content": "[{'type': 'error', 'text': 'x'}]"},
        {"role": "user", "content": "\ufffd", "extra": {"\ufffd": ["\ufffd"]}},
    ]
    assert answered[0] == {"role": "tool", "content": "four"}  # the environment's own list is left alone
    (tree,), _, engine = roll_out(environment, lambda history: "red", bare=1, limits=Limits(10_000, turns=2))
    assert "<tool_response>\nfour\n</tool_response>\n<tool_response>\nfive\n</tool_response>" in engine.histories[1]
    environment = CallbackEnvironment(lambda state, action, messages: StepResult(answered), conversational=False)
    assert environment.reset({}, "go").step(act("red")).text == "fourfive6[{'type': 'error', 'text': 'x'}]\ufffd"


def test_messages_nested_too_deep_are_a_fault_of_the_environment():
    nested = []
    for _ in range(490):
        nested = [nested]
    message = {"role": "user", "content": "seen", "extra": nested}
    environment = CallbackEnvironment(lambda state, action, messages: StepResult([message]))
    (tree,), stats, _ = roll_out(environment, lambda history: "red", bare=1, limits=Limits(10_000, turns=2))
    assert texts(tree.leaves()[0])[1] == "Error: env_step returned a message that is nested too deep."
    assert stats.environment_failures == 2


@pytest.mark.parametrize("observation", [None, []])
def test_no_observation(observation):
    environment = CallbackEnvironment(lambda state, action, messages: StepResult(observation))
    _, _, engine = roll_out(environment, lambda history: "red", bare=1, limits=Limits(10_000, turns=2))
    assert engine.histories[1].endswith("red<|im_end|>\n<|im_start|>assistant\n")
    # A turn that a stop string ended goes on where it stopped
    tokenizer = make_tokenizer()
    stopped = Sample(usual(tokenizer, "red"), "stop")
    _, _, engine = roll_out(environment, lambda history: stopped, bare=1, limits=Limits(10_000, turns=2))
    assert engine.histories[1].endswith("<|im_start|>assistant\nred")


@pytest.mark.parametrize(
    "answer", [None, "text", ("text", True), {"observation": "text"}, 7, [], StepResult], ids=lambda a: str(type(a))
)
def test_case_51_what_is_no_step_result_ends_the_run(answer):
    """`env_step` returns `None`, a dictionary, a tuple as Gymnasium does: every step would, so the first one says what
    to return, to the developer and not to the policy."""
    environment = CallbackEnvironment(lambda state, action, messages: answer)
    with pytest.raises(
        ContractError, match=r"env_step returned .*return `trace_trl.StepResult\(observation="
    ) as error:
        roll_out(environment, lambda history: "red", bare=2, limits=Limits(10_000, turns=2))
    assert isinstance(error.value, TypeError)
    assert ("nothing" if answer is None else type(answer).__name__) in str(error.value)


@pytest.mark.parametrize(
    "result",
    [
        lambda: StepResult("seen", reward="much"),
        lambda: StepResult("seen", info=["a"]),
        lambda: StepResult(done=True, reward=object()),
    ],
)
def test_wrong_values_inside_a_result_end_nothing(result):
    environment = CallbackEnvironment(lambda state, action, messages: result())
    (tree,), stats, _ = roll_out(environment, lambda history: "red", bare=1, limits=Limits(10_000, turns=2))
    assert stats.environment_failures == 2
    assert texts(tree.leaves()[0])[1].startswith("Error: ")


@pytest.mark.parametrize("error", [ValueError("no such thing"), ValueError(), KeyError("key"), SystemExit(2)])
def test_exceptions_become_observations(error):
    def env_step(state, action, messages):
        if len(messages) == 2:
            raise error
        return StepResult(done=True, reward=1.0)

    async def async_env_step(state, action, messages):
        return env_step(state, action, messages)

    for function in (env_step, async_env_step):
        for conversational in (True, False):
            environment = CallbackEnvironment(function, conversational=conversational, loop=loop)
            (tree,), stats, engine = roll_out(
                environment, lambda history: "red", bare=2, continuations=2, conversational=conversational
            )
            assert {leaf.leaf.reason for leaf in tree.leaves()} == {"final"}
            assert len(tree.leaves()) == 4
            expected = f"Error: {str(error) or type(error).__name__}"
            assert {texts(leaf)[1] for leaf in tree.leaves()} == {expected}
            assert expected in engine.histories[-1]
            assert stats.environment_failures == 2  # once per bare rollout; a state that raised can be forked


def test_an_error_that_can_not_be_shown():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def env_step(state, action, messages):
        raise Mute

    environment = CallbackEnvironment(env_step)
    assert environment.reset({}, None).on_error(act("red"), Mute()).messages[0]["content"] == "Error: Mute"


def test_reward_of_the_last_step_alone():
    def env_step(state, action, messages):
        steps = state["steps"] = state.get("steps", 0) + 1
        return StepResult("on", done=steps == state["last"], reward=steps if steps < 3 else None)

    def rewards(last, **limits):
        rows = [{"prompt": [{"role": "user", "content": "go"}], "last": last}]
        limits = {"completion": 10_000} | limits
        (tree,), _, _ = roll_out(
            CallbackEnvironment(env_step), lambda history: "red", rows, bare=1, limits=Limits(**limits)
        )
        (leaf,) = tree.leaves()
        return leaf.leaf.environment_reward, leaf.leaf.reason

    assert rewards(last=1) == (1, "final")
    assert rewards(last=2) == (2, "final")
    assert rewards(last=3) == (None, "final")
    # The turn limit makes the second step the last one
    assert rewards(last=5, turns=2) == (2, "turns")
    # An observation that does not fit makes the first step the last one. "red" and its end are 2 tokens
    ids = len(usual(make_tokenizer(), "red")) + 1
    assert rewards(last=5, completion=ids + 1) == (1, "overflow")


def test_a_turn_cut_off_has_no_reward_of_an_earlier_step():
    tokenizer = make_tokenizer()

    def say(history):
        return "red" if turn_of(history) == 1 else Sample(usual(tokenizer, "red"), "length")

    environment = CallbackEnvironment(lambda state, action, messages: StepResult("on", reward=1.0))
    (tree,), _, _ = roll_out(environment, say, bare=1)
    assert tree.leaves()[0].leaf.reason == "length" and tree.leaves()[0].leaf.environment_reward is None


def test_info_is_logged_per_leaf(caplog):
    def env_step(state, action, messages):
        steps = state["steps"] = state.get("steps", 0) + 1
        info = {"steps": steps, "flag": True, "first": 1.0} if steps == 1 else {"steps": steps, "flag": False}
        info |= {"text": "12", "list": [1], "nothing": float("nan"), "large": 10**400, "unprintable": 10**5000}
        info |= {"vector": torch.tensor([1.0, 2.0])}
        return StepResult("on", done=steps == state["last"], info=info)

    rows = [{"prompt": [{"role": "user", "content": "go"}], "last": last} for last in (1, 2, 4)]
    _, stats, _ = roll_out(CallbackEnvironment(env_step), lambda history: "red", rows, bare=1)
    assert {key: sorted(values) for key, values in stats.info.items()} == {
        "steps": [1.0, 2.0, 4.0],
        "flag": [0.0, 0.0, 1.0],
        "first": [1.0, 1.0, 1.0],
    }
    assert sum("is not logged" in record.getMessage() for record in caplog.records) == 6


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"env_step": 7}, "`env_step` is a int: pass a function env_step(state, action, messages)."),
        (
            {"env_step": lambda state, action: None},
            "`env_step` is called as env_step(state, action, messages), but is",
        ),
        ({"env_step": count_step, "env_reset": lambda: None}, "`env_reset` is called as env_reset(example), but is"),
        ({"env_step": count_step, "env_reset": {}}, "`env_reset` is a dict: pass a function env_reset(example)."),
    ],
)
def test_callbacks_that_can_not_be_called(arguments, sentence):
    with pytest.raises(TypeError) as caught:
        CallbackEnvironment(**arguments)
    assert sentence in str(caught.value)


def test_images_in_observations_are_refused():
    for content in MEDIA:
        for observation in ([{"role": "user", "content": content}], content):
            environment = CallbackEnvironment(lambda state, action, messages, o=observation: StepResult(o))
            with pytest.raises(UnsupportedError, match="image|audio|video"):
                roll_out(environment, lambda history: "red", bare=1)


# ReAct text


@pytest.mark.parametrize("conversational", [True, False])
@pytest.mark.parametrize("ends_with", ["stop string", "end token"])
def test_react_text(conversational, ends_with):
    tokenizer = make_tokenizer()
    turns = ["Thought: look\nAction: search[fox]", "Thought: done\nAction: finish[red]"]

    def env_step(state, action, messages):
        if "finish[" in action:
            return StepResult(done=True, reward=float(action.endswith("finish[red]")))
        return StepResult(f"\nObservation: {action.split('search[')[1].rstrip(']')} is red.\n")

    def say(history):
        ids = usual(tokenizer, turns["Observation: fox" in history])
        return Sample(ids, "stop") if ends_with == "stop string" else Sample([*ids, tokenizer.eos_token_id], "eos")

    (tree,), _, engine = roll_out(
        CallbackEnvironment(env_step, conversational=conversational), say, bare=2, conversational=conversational
    )
    assert {leaf.leaf.reward for leaf in tree.leaves()} == {1.0}
    # Either way the turn is closed once, by the policy or by the template
    if conversational:
        between = "<|im_end|>\n<|im_start|>user\n\nObservation: fox is red.\n<|im_end|>\n<|im_start|>assistant\n"
    else:
        between = ("<|im_end|>" if ends_with == "end token" else "") + "\nObservation: fox is red.\n"
    assert engine.histories[-1].endswith(turns[0] + between)
    for leaf in tree.leaves():
        sampled = [tokenizer.decode(turn.token_ids) for turn in leaf.path()]
        assert sampled == [turn + ("<|im_end|>" if ends_with == "end token" else "") for turn in turns]


# `tools`


def roll_out_tools(tools, turns, **kwargs):
    """One rollout that says `turns` and then "done". Returns its texts, stats and histories."""

    def say(history):
        at = turn_of(history) - 1
        return turns[at] if at < len(turns) else "done"

    environment = ToolEnvironment(tools, loop=loop)
    (tree,), stats, engine = roll_out(environment, say, bare=1, tools=lambda tree: tools, **kwargs)
    (leaf,) = tree.leaves()
    assert leaf.leaf.reason == "final"
    return texts(leaf), stats, engine.histories


@pytest.mark.parametrize(
    ("tool", "content"),
    [
        (as_dict, "{'a': [1, 2], 'b': None}"),
        (as_none, "None"),
        (as_bytes, "b'\\xffraw'"),
        (as_int, "7"),
        (failing, "{'error': 'this tool always fails'}"),
        (exiting, "{'error': '1'}"),
    ],
)
def test_tool_results_of_any_type_are_read_as_text(tool, content):
    said, stats, histories = roll_out_tools([tool], [call(tool.__name__)])
    assert said[1] == content and said[-1] == "done"
    assert f"<tool_response>\n{content}\n</tool_response>" in histories[-1]
    assert stats.environment_failures == (tool in (failing, exiting))


@pytest.mark.parametrize(("result", "content"), LISTS + SURROGATES)
def test_tool_results_that_are_no_blocks_and_no_utf8(result, content):
    def answer():
        """Answers."""
        return result

    said, stats, _ = roll_out_tools([answer], [call("answer")])
    assert said[1] == content and stats.environment_failures == 0


@pytest.mark.parametrize("result", MEDIA)
def test_images_in_tool_results_are_refused(result):
    def answer():
        """Answers."""
        return result

    with pytest.raises(UnsupportedError, match="image|audio|video"):
        roll_out_tools([answer], [call("answer")])


def test_calls_that_are_nested_too_deep_or_no_utf8():
    nested = '<tool_call>\n{"name":"echo","arguments":{"text":' + "[" * 490 + "]" * 490 + "}}\n</tool_call>"
    unclosed = '<tool_call>\n{"name":"echo","arguments":' + '{"text":' * 1100
    for turn in (nested, unclosed):
        said, stats, _ = roll_out_tools([echo], [turn])
        assert said == [turn, "{'error': 'The tool call could not be parsed as JSON.'}", "done"]
        assert stats.environment_failures == 1
    said, _, _ = roll_out_tools([echo], ['<tool_call>\n{"name":"echo","arguments":{"text":"\\ud800"}}\n</tool_call>'])
    assert said[1] == "\ufffd"


def test_tools_sync_and_async_answer_in_the_order_of_calls():
    turn = "\n".join(
        [call("async_echo", text="one"), call("echo", text="two"), call("failing"), call("async_echo", text="four")]
    )
    said, stats, _ = roll_out_tools([echo, async_echo, failing], [turn])
    assert said[1:5] == ["one", "two", "{'error': 'this tool always fails'}", "four"]
    assert (stats.environment_calls, stats.environment_failures) == (4, 1)


def test_async_tools_of_a_turn_run_together():
    arrived = []

    async def meet() -> str:
        """Waits until three are here."""
        arrived.append(True)
        while len(arrived) < 3:
            await asyncio.sleep(0.001)
        return "met"

    said, _, _ = roll_out_tools([meet], ["\n".join([call("meet")] * 3)])
    assert said[1:4] == ["met"] * 3


def test_async_tool_that_exits_is_its_own_fault_only():
    async def leave() -> str:
        """Leaves."""
        raise SystemExit(3)

    said, _, _ = roll_out_tools([leave, async_echo], [call("leave") + "\n" + call("async_echo", text="here")])
    assert said[1] == "{'error': 'An async function raised SystemExit.'}" and said[2] == "here"


def test_huge_tool_result_ends_the_leaf():
    environment = ToolEnvironment([huge])
    (tree,), _, _ = roll_out(
        environment, lambda history: call("huge"), bare=2, limits=Limits(200), tools=lambda tree: [huge]
    )
    assert {leaf.leaf.reason for leaf in tree.leaves()} == {"overflow"}
    assert all(len(texts(leaf)) == 1 and not leaf.observation_ids for leaf in tree.leaves())


# `environment_factory`


def factory_environment(*classes, **named):
    factories = named or {None: classes[0]}
    return ToolEnvironment([], factories=factories, loop=loop)


def environment_schema(environment):
    """Tools for parsing, as the trainer passes them; of instances that `__init__` never saw."""
    instances = {name: factory.__new__(factory) for name, factory in environment.factories.items()}
    return lambda tree: environment_tools(instances[environment.name_of(tree.example)])


def roll_out_environment(environment, say, rows, **kwargs):
    return roll_out(environment, say, rows, tools=environment_schema(environment), **kwargs)


def rows_of(*numbers, **columns):
    return [{"prompt": [{"role": "user", "content": "Hello."}], "number": number, **columns} for number in numbers]


@pytest.mark.parametrize("cls", [CounterEnvironment, AsyncCounterEnvironment])
def test_environment_class(cls):
    cls = cls.fresh()
    environment = factory_environment(cls)

    def say(history):
        return call("add", amount=turn_of(history)) if turn_of(history) < 3 else "done"

    trees, stats, _ = roll_out_environment(environment, say, rows_of(4, 6), bare=2, continuations=2)
    for tree, number in zip(trees, (4, 6), strict=True):
        assert tree.prompt == [{"role": "user", "content": f"Hello. Task {number}."}]
        assert len(tree.leaves()) == 4
        for leaf in tree.leaves():
            assert texts(leaf)[1::2] == ["count 1", "count 3"]
    assert stats.environment_failures == 0


def test_environments_by_name():
    class Other:
        def __init__(self):
            self.word = None

        def reset(self, word, **row):
            assert "environment" not in row
            self.word = word

        def shout(self) -> str:
            """Shouts."""
            return self.word.upper()

    counter = CounterEnvironment.fresh()
    environment = factory_environment(count=counter, shout=Other)
    rows = rows_of(1, environment="count", word="red") + rows_of(2, environment="shout", word="red")

    def say(history):
        turns = [call("add", amount=2), call("shout"), "done"]
        return turns[turn_of(history) - 1]

    trees, stats, _ = roll_out_environment(environment, say, rows, bare=1)
    assert [texts(tree.leaves()[0])[1::2] for tree in trees] == [
        ["count 2", "{'error': 'Tool shout not found.'}"],
        ["{'error': 'Tool add not found.'}", "RED"],
    ]
    assert trees[1].prompt == rows[1]["prompt"]  # a reset without an observation
    assert stats.environment_failures == 2
    assert counter.resets == [{"number": 1, "word": "red", "prompt": rows[0]["prompt"]}]


@pytest.mark.parametrize("row", [{"environment": "chess"}, {}])
def test_unknown_environment_is_named(row):
    environment = factory_environment(count=CounterEnvironment.fresh())
    with pytest.raises(ValueError, match=r"`environment=.*not among the environments.*Expected one of: \['count'\]"):
        environment.reset({"prompt": [], **row}, [{"role": "user", "content": "go"}])


def test_reset_that_fails_ends_the_run_and_closes_the_instance():
    cls = ResetFails.fresh()
    with pytest.raises(RuntimeError, match="there is no task"):
        roll_out(factory_environment(cls), lambda history: "red", rows_of(1))
    assert cls.closed == cls.instances and len(cls.closed) == 1


def test_reset_that_exits_does_not_end_the_process():
    class Leaves:
        def reset(self, **row):
            raise SystemExit(0)

    with pytest.raises(RuntimeError, match="SystemExit"):
        roll_out(factory_environment(Leaves), lambda history: "red", rows_of(1))


@pytest.mark.parametrize(
    ("prompt", "observation", "shown"),
    [
        ("go", " now", "go now"),
        ("go", 7, "go7"),
        ("go", None, "go"),
        ("go", [{"type": "text", "text": " a"}, {"type": "text", "text": "b"}], "go ab"),
        ([{"role": "user", "content": "go"}], " now", [{"role": "user", "content": "go now"}]),
        ([{"role": "user", "content": "go"}], [{"type": "text", "text": " a"}], [{"role": "user", "content": "go a"}]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "go"}]}],
            " now",
            [{"role": "user", "content": [{"type": "text", "text": "go"}, {"type": "text", "text": " now"}]}],
        ),
        (None, "Task.", [{"role": "user", "content": "Task."}]),
        ("go", "\ud800", "go\ufffd"),
        (None, [{"type": "text", "text": "\ud800"}], [{"role": "user", "content": "\ufffd"}]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "go"}]}],
            [{"type": "text", "text": "\ud800"}],
            [{"role": "user", "content": [{"type": "text", "text": "go"}, {"type": "text", "text": "\ufffd"}]}],
        ),
        (
            None,
            [{"role": "user", "content": "a"}],
            [{"role": "user", "content": "[{'role': 'user', 'content': 'a'}]"}],
        ),
        *((None, value, [{"role": "user", "content": content}]) for value, content in LISTS),
    ],
)
def test_reset_observation_is_appended_to_the_prompt(prompt, observation, shown):
    class Given:
        def reset(self, **row):
            return observation

    before = copy.deepcopy(prompt)
    assert factory_environment(Given).reset({"prompt": prompt}, prompt).prompt == shown
    assert prompt == before


@pytest.mark.parametrize("observation", MEDIA)
def test_images_in_reset_observations_are_refused(observation):
    class Given:
        def reset(self, **row):
            return observation

    for prompt in ("go", None, [{"role": "user", "content": [{"type": "text", "text": "go"}]}]):
        with pytest.raises(UnsupportedError, match="image|audio|video"):
            factory_environment(Given).reset({}, prompt)


def test_environment_without_tools_is_one_turn():
    environment = factory_environment(WithoutTools)
    (tree,), stats, _ = roll_out_environment(environment, lambda history: "yes", rows_of(1), bare=2, continuations=2)
    assert tree.prompt == [{"role": "user", "content": "Hello. Say yes."}]
    assert [leaf.depth for leaf in tree.leaves()] == [1] * 4
    assert stats.extra_rollouts == 2  # there is no prefix to continue from


def test_no_environment_is_one_turn():
    (tree,), stats, _ = roll_out(SingleTurnEnvironment(), lambda history: "yes", bare=2, continuations=2)
    assert [(leaf.depth, leaf.leaf.reason) for leaf in tree.leaves()] == [(1, "final")] * 4
    assert (stats.environment_calls, stats.extra_rollouts) == (0, 2)


# Case 21


def test_case_21_reset_task_is_in_the_prompt_of_every_branch():
    for cls in (CounterEnvironment, LockHolder):  # copied, replayed
        cls = cls.fresh()
        environment = factory_environment(cls)

        def say(history):
            return call("add", amount=1) if turn_of(history) < 3 else "done"

        (tree,), stats, engine = roll_out_environment(environment, say, rows_of(5), bare=2, continuations=4)
        assert len(tree.leaves()) == 6 and stats.extra_rollouts == stats.unforkable_prefixes == 0
        assert all("<|im_start|>user\nHello. Task 5.<|im_end|>" in history for history in engine.histories)
        assert engine.generate.requests and all(
            request.context[: len(tree.prompt_ids)] == tree.prompt_ids for request in engine.generate.requests
        )


# Case 22


@pytest.mark.parametrize("cls", [LockHolder, SocketOwner])
def test_case_22_what_can_not_be_copied_is_replayed(cls, caplog):
    cls = cls.fresh()
    environment = factory_environment(cls)

    def say(history):
        return call("add", amount=turn_of(history)) if turn_of(history) < 4 else "done"

    (tree,), stats, _ = roll_out_environment(environment, say, rows_of(5), bare=2, continuations=6)
    assert {leaf.leaf.kind for leaf in tree.leaves()} == {"bare", "continuation"} and len(tree.leaves()) == 8
    assert {tuple(texts(leaf)[1::2]) for leaf in tree.leaves()} == {("count 1", "count 3", "count 6")}
    assert stats.unforkable_prefixes == 0 and not caplog.records
    environment.close()
    assert sorted(map(id, cls.closed)) == sorted(map(id, cls.instances))


def test_case_22_what_can_not_be_replayed_either_gets_no_continuations(caplog):
    cls = Irreproducible.fresh()

    def say(history):
        return call("add", amount=1) if turn_of(history) < 4 else "done"

    environment = factory_environment(cls)
    trees, stats, engine = roll_out_environment(environment, say, rows_of(5, 6), bare=2, continuations=4)
    for tree in trees:
        # The batch is full all the same
        kinds = [leaf.leaf.kind for leaf in tree.leaves()]
        assert kinds == ["bare"] * 2 + ["extra"] * 4
        assert len(tree.root.children) == 6
    # Each of two rollouts of two prompts has three prefixes, all of which were tried
    assert stats.unforkable_prefixes == 12 and stats.extra_rollouts == 8
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "can't be restored at a prefix" in warnings[0] and "fork()" in warnings[0]
    environment.close()
    assert sorted(map(id, cls.closed)) == sorted(map(id, cls.instances))


def test_case_22_only_the_prefix_that_can_not_be_restored_is_left_out():
    """A state that holds a lock from its second step on, and answers no replay."""
    answers = iter(range(1000))

    def env_step(state, action, messages):
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] == 2:
            state["lock"] = threading.Lock()
        return StepResult(f"answer {next(answers)}", done=state["steps"] == 4)

    (tree,), stats, _ = roll_out(CallbackEnvironment(env_step), lambda history: "red", bare=2, continuations=8)
    branched = {
        turn.parent.depth
        for leaf in tree.leaves()
        if leaf.leaf.kind == "continuation"
        for turn in leaf.path()
        if len(turn.parent.children) > 1 and turn.parent.depth
    }
    assert branched == {1}
    assert stats.extra_rollouts == 0 and stats.unforkable_prefixes == 4


# Case 24


def spoil(value):
    """Changes everything inside a row."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            spoil(item)
    value.clear()


def test_case_24_rows_are_not_changed():
    row = {"prompt": [{"role": "user", "content": "go"}], "facts": [["a", {"b": [1]}]], "number": 3}
    before = copy.deepcopy(row)

    def env_step(state, action, messages):
        spoil(state["row"])
        spoil(messages)
        return StepResult("on", done=turn_of(action) > 2 or len(state) > 3, state={**state, len(state): 1})

    def env_reset(example):
        assert example == before
        state = {"row": copy.deepcopy(example)}
        spoil(example)
        return state

    for reset in (env_reset, None):
        step = env_step if reset else lambda state, action, messages: spoil(state) or StepResult("on")
        limits = Limits(10_000, turns=4)
        trees, stats, _ = roll_out(
            CallbackEnvironment(step, reset), lambda h: "red", [row, row], bare=2, continuations=4, limits=limits
        )
        assert row == before and stats.environment_failures == 0
        assert all(tree.example == before and tree.prompt == before["prompt"] for tree in trees)

    class Spoils:
        def reset(self, **given):
            assert given == before
            spoil(given)
            return " now"

        def take(self, things: list) -> str:
            """Takes.

            Args:
                things: what to take.
            """
            taken = copy.deepcopy(things)
            spoil(things)
            return str(taken)

    def say(history):
        return call("take", things=[["a"], {"b": 1}]) if turn_of(history) < 3 else "done"

    trees, _, _ = roll_out_environment(factory_environment(Spoils), say, [row, row], bare=2, continuations=4)
    assert row == before
    for tree in trees:
        for leaf in tree.leaves():
            assert texts(leaf)[1::2] == ["[['a'], {'b': 1}]"] * 2
            calls = leaf.path()[0].messages[0]["tool_calls"]
            assert calls[0]["function"]["arguments"] == {"things": [["a"], {"b": 1}]}


# Case 25


def same(some, others):
    """Numbers of those of `others` that are among `some`, the same objects."""
    return [number for number, other in enumerate(others) if any(one is other for one in some)]


@pytest.fixture
def hanging():
    with Hanging() as hanging:
        yield hanging


@pytest.fixture
def clock(monkeypatch, hanging):
    return Clock(monkeypatch, hanging)


def test_case_25_hung_steps_hold_up_nothing(hanging, clock):
    closed = []

    class State:
        def __init__(self, number):
            self.number, self.steps = number, 0

        def close(self):
            closed.append(self.number)

    def env_step(state, action, messages):
        state.steps += 1
        if state.steps == 1 and state.number % 2:
            hanging()
        return StepResult(f"answer {state.steps} of {state.number}", done=state.steps == 3)

    environment = CallbackEnvironment(env_step, lambda example: State(example["number"]))
    trees, stats, _ = roll_out(
        environment, lambda history: "red", rows_of(*range(60)), bare=2, continuations=4, timeout=0.8
    )
    # 60 calls hang, then 120, each time together
    assert 2 * 0.8 <= clock.passed < 3 * 0.8
    for number, tree in enumerate(trees):
        leaves = tree.leaves()
        assert len(leaves) == 6
        bare = [texts(leaf)[1::2] for leaf in leaves if leaf.leaf.kind == "bare"]
        if number % 2:
            error = "Error: The environment gave no answer within 0.8 seconds."
            assert bare == [[error, f"answer 2 of {number}"]] * 2
            # Its state is unknown from then on, so there is no prefix to continue from
            assert [leaf.leaf.kind for leaf in leaves[2:]] == ["extra"] * 4
        else:
            assert bare == [[f"answer 1 of {number}", f"answer 2 of {number}"]] * 2
            assert [leaf.leaf.kind for leaf in leaves[2:]] == ["continuation"] * 4
    assert stats.environment_failures == 30 * 2 + 30 * 4
    # A state is closed when the call that was given up lets go of it
    assert hanging.at_work == 180 and not any(number % 2 for number in closed)
    before = len(closed)
    hanging.release.set()
    until(lambda: len(closed) >= before + 180)
    assert len([number for number in closed if number % 2]) == 180


def test_case_25_hung_coroutine_step(hanging, clock):
    closed = []

    class State:
        def __init__(self, example):
            self.number, self.steps = example["number"], 0

        async def close(self):
            await asyncio.sleep(0)
            closed.append(self)

    async def env_step(state, action, messages):
        state.steps += 1
        if state.number == 1 and state.steps == 1:
            await hanging.on_loop()
        return StepResult(f"answer {state.steps}", done=state.steps == 3)

    environment = CallbackEnvironment(env_step, State, loop=loop)
    # Steps and `close` are on one loop, as under a trainer
    limits = {"timeout": 0.6, "runner": LOOP}
    trees, stats, _ = roll_out(environment, lambda history: "red", rows_of(0, 1), bare=2, continuations=2, **limits)
    assert [leaf.leaf.kind for leaf in trees[0].leaves()] == ["bare"] * 2 + ["continuation"] * 2
    assert [leaf.leaf.kind for leaf in trees[1].leaves()] == ["bare"] * 2 + ["extra"] * 2
    assert stats.environment_failures == 4
    # 2 rollouts, 2 prefixes of either and 2 continuations; the other prompt's four are still in use
    assert [state.number for state in closed] == [0] * 8
    assert hanging.at_work == 4
    hanging.release.set()
    until(lambda: len(closed) >= 12)
    assert len({id(state) for state in closed}) == len(closed) == 12


def test_case_25_tool_that_hangs_or_exits(hanging, clock):
    hang = hanging.tool()
    tools = [hang, echo, exiting]
    turn = call("echo", text="one") + "\n" + call("hang")
    leaving = call("echo", text="kept") + "\n" + call("exiting")
    said, stats, _ = roll_out_tools(tools, [turn, leaving, call("echo", text="two")], timeout=0.6)
    error = "{'error': 'The environment gave no answer within 0.6 seconds.'}"
    assert said[1:3] == [error, error]
    assert said[4:6] == ["kept", "{'error': '1'}"] and said[7] == "two"
    assert stats.environment_failures == 3


def test_case_25_instance_in_use_by_a_hung_call_is_not_used_again(hanging, clock):
    class Slow(CounterEnvironment):
        def hang(self) -> str:
            """Hangs."""
            return hanging()

    cls = Slow.fresh()
    environment = factory_environment(cls)

    def say(history):
        return call("hang") if turn_of(history) == 1 else "done"

    roll_out_environment(environment, say, rows_of(1), bare=2, timeout=0.6)
    assert environment._idle == {None: []} and not same(cls.closed, cls.instances)
    trees, _, _ = roll_out_environment(environment, lambda history: "done", rows_of(1), bare=2)
    assert len(cls.instances) == 4 and len(environment._idle[None]) == 2
    hanging.release.set()
    until(lambda: len(same(cls.closed, cls.instances)) >= 2)
    assert same(cls.closed, cls.instances) == same(cls.instances[:2], cls.instances)


def test_case_25_close_that_hangs_or_fails_ends_nothing(hanging, clock, caplog):
    def env_step(state, action, messages):
        return StepResult(done=True, reward=1.0)

    class State:
        def __init__(self, example):
            self.number = example["number"]

        def close(self):
            if self.number == 0:
                hanging()
            if self.number == 1:
                raise OSError("already closed")

    trees, _, _ = roll_out(CallbackEnvironment(env_step, State), lambda h: "red", rows_of(0, 1, 2), timeout=0.6)
    assert [leaf.leaf.reward for tree in trees for leaf in tree.leaves()] == [1.0] * 6
    messages = [record.getMessage() for record in caplog.records]
    # One warning of either
    assert len(messages) == 1 and messages[0].startswith("Closing")


class AttrDict(dict):
    __getattr__ = dict.__getitem__


class Unconnected:
    """Its properties raise where the engine looks for methods that a state may have."""

    def __init__(self, example=None):
        pass

    @property
    def close(self):
        raise RuntimeError("not connected")

    fork = close


class Attributed:
    close = fork = 7

    def __init__(self, example=None):
        pass


@pytest.mark.parametrize("cls", [AttrDict, Unconnected, Attributed])
def test_states_whose_attributes_fail_end_nothing(cls, caplog):
    environment = CallbackEnvironment(lambda state, action, messages: StepResult("on", done=len(messages) > 3), cls)
    (tree,), stats, _ = roll_out(environment, lambda history: "red", rows_of(1), bare=2, continuations=2)
    assert [leaf.leaf.reason for leaf in tree.leaves()] == ["final"] * 4
    assert stats.environment_failures == stats.unforkable_prefixes == 0 and not caplog.records

    class WithTools(cls):
        def __init__(self, example=None):
            pass

        def reset(self, **row):
            return None

        def look(self) -> str:
            """Looks."""
            return "seen"

    environment = factory_environment(WithTools)
    (tree,), stats, _ = roll_out_environment(
        environment,
        lambda history: call("look") if turn_of(history) == 1 else "done",
        rows_of(1),
        bare=2,
        continuations=2,
    )
    environment.close()
    assert [texts(leaf)[1] for leaf in tree.leaves()] == ["seen"] * 4
    assert stats.environment_failures == stats.unforkable_prefixes == 0 and not caplog.records


# Case 27


class Furnished(CounterEnvironment):
    """Everything that is no tool."""

    forks: list

    @classmethod
    def fresh(cls):
        cls = super().fresh()
        cls.forks = []
        return cls

    def fork(self):
        copied = copy.copy(self)
        type(self).forks.append(copied)
        return copied

    def _private(self):
        """Private."""

    @property
    def valuable(self):
        raise RuntimeError("properties are not looked at")

    attribute = len


def test_case_27_only_tools_are_offered():
    assert [tool.__name__ for tool in environment_tools(Furnished.fresh()())] == ["add"]
    assert environment_tools(None) == []
    assert set(RESERVED_METHODS) == {"reset", "get_reward", "close", "fork"}


@pytest.mark.parametrize("name", ["close", "reset", "fork", "get_reward", "_private", "__init__", "valuable", ""])
def test_case_27_what_is_no_tool_is_not_called(name):
    cls = Furnished.fresh()
    environment = factory_environment(cls)

    def say(history):
        return call(name) if turn_of(history) == 1 else "done"

    (tree,), stats, _ = roll_out_environment(environment, say, rows_of(1), bare=1)
    (leaf,) = tree.leaves()
    assert "error" in texts(leaf)[1] and stats.environment_failures == 1
    assert len(cls.resets) == 1 and cls.closed == cls.forks == []


class NumberedTasks(CounterEnvironment):
    def reset(self, **row):
        super().reset(**row)
        return f" Task {len(type(self).resets)}."


@pytest.mark.parametrize(("cls", "kind"), [(NumberedTasks, "extra"), (CounterEnvironment, "continuation")])
def test_case_41_a_single_rollout_of_a_row_is_copied_only_where_resets_agree(cls, kind):
    """One bare rollout of each of two prompts, with two continuations each: `reset` is called once more to see whether
    it gives the same task again. If not, nothing is copied: each rollout has an instance of its own."""
    cls = cls.fresh()
    played = []

    def say(history):
        return call("add", amount=1) if turn_of(history) < 3 else "done"

    def score(leaves):
        for _, turn in leaves:
            played.append(turn.leaf.environment)
            turn.leaf.reward, turn.leaf.rewards, turn.leaf.success = 1.0, [1.0], True

    trees, _, _ = roll_out_environment(
        factory_environment(cls), say, rows_of(1, 2), bare=1, continuations=2, score=score
    )
    assert [sorted(leaf.leaf.kind for leaf in tree.leaves()) for tree in trees] == [["bare", kind, kind]] * 2
    copies = [instance for instance in played if instance not in cls.instances]
    assert len(copies) == (4 if kind == "continuation" else 0)
    assert len(cls.resets) == 2 + 1 + (4 if kind == "extra" else 0)


def test_case_27_environments_are_closed_once():
    cls = Furnished.fresh()
    environment = factory_environment(cls)
    seen = []

    def say(history):
        return call("add", amount=1) if turn_of(history) < 4 else "done"

    def score(leaves):
        for _, turn in leaves:
            seen.append(turn.leaf.environment)
            assert turn.leaf.environment not in cls.closed
            turn.leaf.reward, turn.leaf.rewards, turn.leaf.success = 1.0, [1.0], len(seen) % 2 == 0

    (tree,), _, _ = roll_out_environment(environment, say, rows_of(1), bare=2, continuations=4, score=score)
    # 3 prefixes of 2 rollouts were kept, 4 of these continued
    assert len(cls.forks) == 6 + 4 and len(cls.instances) == 2
    assert len(seen) == 6 and len({id(instance) for instance in seen}) == 6
    assert sorted(map(id, cls.closed)) == sorted(map(id, cls.forks))
    # What was made by the factory is kept for the next generation
    assert {id(instance) for instance in environment._idle[None]} == {id(instance) for instance in cls.instances}
    roll_out_environment(environment, say, rows_of(1), bare=2)
    assert len(cls.instances) == 2 and len(cls.closed) == len(cls.forks) == 10
    environment.close()
    assert sorted(map(id, cls.closed)) == sorted(map(id, cls.forks + cls.instances))
    environment.close()
    assert len(cls.closed) == len(cls.forks) + 2


def test_case_27_instances_are_closed_although_one_hangs_or_fails(hanging, clock, caplog):
    class Closing(CounterEnvironment):
        def close(self):
            if self is self.instances[0]:
                hanging()
            if self is self.instances[1]:
                raise OSError("already closed")
            super().close()

    cls = Closing.fresh()
    environment = factory_environment(cls)
    for episode in [environment.reset({}, "go") for _ in range(5)]:
        episode.close()
    environment.close()
    assert same(cls.closed, cls.instances) == [2, 3, 4]
    assert CLOSING_TIMEOUT <= clock.passed < CLOSING_TIMEOUT + 1
    assert [record.getMessage() for record in caplog.records] == ["Closing Closing raised OSError."]


def test_case_27_states_of_callbacks_are_closed_once():
    made, closed = [], []

    class State:
        def __init__(self, example=None):
            self.steps = 0
            made.append(self)

        def fork(self):
            copied = State()
            copied.steps = self.steps
            return copied

        async def close(self):
            closed.append(self)

    def env_step(state, action, messages):
        assert state not in closed
        state.steps += 1
        return StepResult("on", done=state.steps == 4)

    environment = CallbackEnvironment(env_step, State, loop=loop)
    roll_out(environment, lambda history: "red", rows_of(1, 2), bare=2, continuations=4)
    assert len(made) == 2 * (2 + 6 + 4)
    assert sorted(map(id, made)) == sorted(map(id, closed))


def test_case_27_unused_reserves_and_replaced_prompts_are_closed():
    cls = CounterEnvironment.fresh()
    environment = factory_environment(cls)
    (tree,), _, engine = roll_out_environment(environment, lambda history: "done", rows_of(1), bare=2)
    rows = rows_of(1, 2, 3, 4)
    episodes = engine.reset([(row, row["prompt"]) for row in rows])
    trees = [RolloutTree.from_prompt(e.prompt, [1, 2], row) for e, row in zip(episodes, rows, strict=True)]
    plans = [RootPlan(tree, episode, bare=0) for tree, episode in zip(trees, episodes, strict=True)]
    plans[0].bare = 2
    mixed = iter([False, True])
    engine.is_mixed = lambda tree: next(mixed)
    engine.run(plans[:1], plans[1:], seed=0)
    assert [plan.bare for plan in plans] == [0, 2, 0, 0]
    # 5: four were reset at once, and two rollouts of the first need one more
    assert len(environment._idle[None]) == len(cls.instances) == 5 and not same(cls.closed, cls.instances)
