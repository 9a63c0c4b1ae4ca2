"""Tables of `log_completions`: whatever a rollout holds can be printed, and written as Parquet."""

import io
import json
from collections import defaultdict, deque
from contextlib import redirect_stdout

import pandas as pd
import pytest
from trl.trainer.utils import print_prompt_completions_sample, strip_images_from_messages

from toys import call, echo, make_model, make_tokenizer, make_trainer, speak, string_dataset
from trace_trl.tables import loggable


def now() -> str:
    """Tells the time."""
    return "noon"


def table(prompts, completions, extra=None):
    """What TRL makes of its columns: the printed text, and the table as it is read again."""
    count = len(completions)
    logs = {
        "images": deque(),
        "prompt": deque(prompts),
        "completion": deque(completions),
        "rewards": defaultdict(deque, {"reward": deque([0.0] * count)}),
        "advantages": deque([0.0] * count),
        "extra": defaultdict(deque, {name: deque(values) for name, values in (extra or {}).items()}),
    }
    logs = loggable(logs)
    printed, written = io.StringIO(), io.BytesIO()
    with redirect_stdout(printed):
        print_prompt_completions_sample(
            logs["prompt"], logs["completion"], logs["rewards"], logs["advantages"], 1, None, extra=dict(logs["extra"])
        )
    columns = {name: [strip_images_from_messages(value) for value in logs[name]] for name in ("prompt", "completion")}
    pd.DataFrame({**columns, **logs["rewards"], **logs["extra"], "advantage": logs["advantages"]}).to_parquet(written)
    return printed.getvalue(), pd.read_parquet(written)


def assistant(*calls, **fields):
    return [{"role": "assistant", "content": "", "tool_calls": list(calls), **fields}]


def function(arguments, name="look"):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CIRCLE: dict = {}
CIRCLE["self"] = CIRCLE


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


COMPLETIONS = {
    "no arguments": [assistant(function({})), assistant(function({"a": 1}))],
    "arguments of several kinds": [assistant(function({"a": value})) for value in (1, "b", [1], {}, {"c": 2}, None)],
    "arguments as JSON": [assistant(function('{"a": 1}')), assistant(function("[1]"))],
    "arguments that are no object": [assistant(function(value)) for value in ("x", 3, [1], None, "\ud83d")],
    "odd calls": [assistant("look", 3, None, {}, {"function": "look"}, {"name": "look"}, function({}, name=3))],
    "calls that are no list": [[{"role": "assistant", "content": "", "tool_calls": value}] for value in (None, 3)],
    "a circle": [assistant(function(CIRCLE)), assistant(function({1: Unprintable()}))],
    "lone surrogates": [assistant(function({"a": "\ud83d"}), content="\ud83d")],
    "content in blocks": [[{"role": "user", "content": [{"type": "text", "text": "a"}]}], assistant(content=None)],
    "odd content": [[{"role": 3, "content": value}] for value in ([1], {"type": "text"}, [{"type": "image"}], 3)],
    "other fields": [assistant(info={}), assistant(info=[{}], name="x"), [{"role": "assistant"}], []],
    "texts and conversations": ["a", assistant(function({}))],
    "a lone surrogate in a text": ["\ud83d"],
    "no completions": [],
}


@pytest.mark.parametrize("kind", COMPLETIONS)
def test_case_56_any_completion_is_printed_and_written(kind):
    """Tool calls, contents and texts that TRL's table can't hold: each row is there, as text where need be."""
    completions = COMPLETIONS[kind]
    for prompts, answers in ((["go"] * len(completions), completions), (completions, ["go"] * len(completions))):
        _, read = table(prompts, answers)
        assert len(read) == len(completions)


@pytest.mark.parametrize(
    "values",
    [
        *([1, "a"], [{}, {}], [object(), 1], ["\ud83d", "b"], [10**30, 1], [[1], 2], [CIRCLE, None], [b"\xff", "a"]),
        *([Unprintable(), {1: 2}], [["\ud83d"], []], [float("nan"), None]),
    ],
)
def test_case_56_any_extra_column_is_printed_and_written(values):
    """Columns of `log_extra` whose values have no common type."""
    _, read = table(["go"] * 2, ["a"] * 2, {"column": values})
    assert len(read["column"]) == 2


def test_case_56_what_a_table_can_hold_is_as_trl_writes_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    calls = [assistant(function({"a": 1}), function({})), [{"role": "assistant", "content": "no"}]]
    extra = {"numbers": [1, 2.5], "lists": [[1], []], "texts": ["a", "b"], "words": [{"a": 1}, {"a": 2}]}
    printed, read = table([[{"role": "user", "content": "go"}]] * 2, calls, extra)
    assert "look(a=1)" in printed and "look()" in printed
    assert [dict(message) for message in read.prompt[0]] == [{"role": "user", "content": "go"}]
    first, second = (message["function"] for message in read.completion[0][0]["tool_calls"])
    assert json.loads(first["arguments"]) == {"a": 1} and json.loads(second["arguments"]) == {}
    assert read.completion[1][0]["content"] == "no"
    assert list(read.numbers) == [1, 2.5] and list(read.lists[0]) == [1] and list(read.texts) == ["a", "b"]
    assert list(read.words) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("turn", [call("now"), call("echo", text="\ud83d"), call("echo").replace("{}", '"x"')])
def test_case_56_a_log_never_ends_a_run(tmp_path, turn):
    """`log_completions=True` with a tool without arguments, with arguments that are no object, with a surrogate."""
    model = make_model()
    speak(model, make_tokenizer(), lambda context: "done" if "tool_response" in context else turn)
    trainer = make_trainer(
        tmp_path, model=model, tools=[now, echo], log_completions=True, max_completion_length=200, max_steps=1
    )
    trainer.train()
    read = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert len(read) == trainer.args.generation_batch_size
    # What scripts read is as it was
    assert isinstance(trainer._logs["completion"][0][0]["tool_calls"][0], dict)


def test_case_56_evaluation_on_prompts_of_another_kind(tmp_path):
    """Conversations in training, texts in evaluation: TRL keeps the latest of both in one table."""
    trainer = make_trainer(
        tmp_path,
        eval_dataset=string_dataset(2),
        num_generations_eval=1,
        per_device_eval_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        log_completions=True,
        max_steps=1,
    )
    trainer.train()
    assert trainer.state.global_step == 1
