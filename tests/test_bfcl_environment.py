"""BFCL environment: how calls are read, how user turns follow each other, and that branches never share state."""

import decimal
import gc
import json
import keyword
import random
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_trl.environments.base import Action
from trace_trl.environments.bfcl import SUBSETS, BFCLEnvironment, bfcl_env
from trace_trl.environments.bfcl_calls import Call, format_calls, parse_calls
from trace_trl.environments.bfcl_tasks import Backend, load_tasks
from trace_trl.environments.callback import CallbackEnvironment


FILES = {"id": "multi_turn_base_0"}  # files and tweets, four user turns
MATH = {"id": "multi_turn_base_15"}  # with mathematics


def started(row=FILES, **kwargs):
    environment = BFCLEnvironment(**kwargs)
    return environment, environment.reset(row)


def tool_call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def actions_of(environment, row, at_once=True):
    """The turns of a policy that follows the ground truth."""
    for calls in environment.ground_truth(row):
        for step in [calls] if at_once else [[call] for call in calls]:
            if step:
                yield format_calls(step, environment.call_format)
        yield "Done."


def play(environment, state, actions):
    result = None
    for action in actions:
        result = environment.step(state, action)
    return result


def dump(value, seen=None):
    """Everything that a state consists of, as plain data; times of files left out, they are the clock's."""
    seen = {} if seen is None else seen
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, dict):
        return [(key, dump(item, seen)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [dump(item, seen) for item in value]
    if hasattr(value, "__dict__"):
        if id(value) in seen:
            return f"object {seen[id(value)]}"
        seen[id(value)] = len(seen)
        return [type(value).__name__, *((k, dump(v, seen)) for k, v in vars(value).items() if k != "_last_modified")]
    return value


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.builds(Call, NAMES, st.dictionaries(NAMES, LITERALS, max_size=3)), min_size=1, max_size=3)


@settings(max_examples=200)
@given(CALLS, st.sampled_from(["python", "json"]))
def test_calls_are_read_back_as_written(calls, call_format):
    text = format_calls(calls, call_format)
    if call_format == "json" and any("</tool_call>" in str(call) for call in calls):
        return  # a text may not hold the closing tag, in BFCL neither
    assert parse_calls(text, call_format) == (calls, 0)
    assert parse_calls(f"<think>\n[no()] <tool_call>{{}}</tool_call>\n</think>\n\n{text}\n", call_format) == (calls, 0)
    assert parse_calls(f"<think>\nperhaps {text}", call_format) == ([], 0)
    if call_format == "python":
        assert parse_calls(f"\n```python\n{text}\n```\n") == (calls, 0)
        assert parse_calls(f"```{text}```") == (calls, 0)


@settings(max_examples=200)
@given(st.text(max_size=60) | st.text("[]()<>{}='\"ab,.*:1-\\\n", max_size=60), st.sampled_from(["python", "json"]))
def test_any_text_is_answered(text, call_format):
    calls, unreadable = parse_calls(text, call_format)
    assert unreadable >= 0 and all(isinstance(call, Call) for call in calls)
    environment, state = started(call_format=call_format)
    result = environment.step(state, text)
    assert not result.done and result.observation and state.steps == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[cd(folder='a'), ls()]", [Call("cd", {"folder": "a"}), Call("ls")]),
        ("cd(folder='a'), ls()", [Call("cd", {"folder": "a"}), Call("ls")]),
        ("ls()", [Call("ls")]),
        ("```json\n[ls()]\n```", [Call("ls")]),
        ("[cd('a')]", [Call("cd", {}, ("a",))]),
        (
            "[f(x=-1, y=+2.5, z=(1, [True]), w={'a': None})]",
            [Call("f", dict(x=-1, y=2.5, z=(1, [True]), w={"a": None}))],
        ),
        ("[API.ls()]", [Call("API.ls")]),
        ("[]", []),
        ("", []),
        ("Done.", []),
        ("Done", []),
        ("I will call [ls()]", []),
        ("[ls(), 3]", []),
        ("[ls() for _ in range(3)]", []),
        ("[ls()", [Call("ls")]),
        ("[ls(]", []),
        ("[cd(folder='a\x00')]", []),
        ("x = [ls()]", []),
    ],
)
def test_python_calls(text, expected):
    assert parse_calls(text)[0] == expected


@pytest.mark.parametrize(
    "argument",
    [
        "__import__('os').system('touch hacked')",
        "pwd()",
        "folder",
        "().__class__.__base__",
        "lambda: 1",
        "f'{1}'",
        "[x for x in 'ab']",
        "'a' * 10**9",
        "10**10**10",
        "1 if True else 2",
        "not 1",
        "-'a'",
        "-True",
        "1e999",
        "b'a'",
        "1j",
        "...",
        "{1, 2}",
        "{**{}}",
        "{f(): 1}",
        "'a'[0]",
        "(x := 1)",
        "0x" + "f" * 9000,
        "true",
    ],
)
def test_an_argument_that_is_no_literal_fails_its_call_with_a_sentence(argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in (f"[cd(folder={argument}), pwd()]", f"[cd({argument}), pwd()]"):
        environment, state = started()
        result = environment.step(state, text)
        assert "Error during execution: " in result.observation and "rgument" in result.observation
        assert "current_working_directory" in result.observation  # the other call is run
        assert (state.calls, state.failed_calls, state.invalid, state.turn) == (2, 1, 1, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["[cd(*'a')]", "[cd(**{'folder': 'a'})]", "[ls()()]", "[(lambda: 1)()]", "['a'.upper()]"]
)
def test_nothing_but_a_plain_call_is_made(text):
    environment, state = started()
    assert "Error during execution" in environment.step(state, text).observation
    assert state.failed_calls == 1


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "(" * 50_000,
        "[cd(folder=" + "[" * 5_000 + "]" * 5_000 + ")]",
        "[cd(folder=" + "-" * 50_000 + "1)]",
        "[cd(folder=" + "not " * 20_000 + "1)]",
        "[cd(folder=" + "1+" * 40_000 + "1)]",
        "[" + "f(" * 5_000 + ")" * 5_000 + "]",
        "[f" + "()" * 40_000 + "]",
        "[a" + ".a" * 40_000 + "()]",
        "[cd(folder=" + "9" * 10_000 + ")]",
        "[cd(folder='" + "a" * 200_000 + "')]",
        "<tool_call>" * 9_000,
        "<tool_call>" + "[" * 90_000 + "</tool_call>",
        '<tool_call>{"name": "cd", "arguments": {"folder": ' + "[" * 40_000 + "]" * 40_000 + "}}</tool_call>",
        '<tool_call>{"name": "cd", "arguments": {"folder": ' + "9" * 10_000 + "}}</tool_call>",
        '<tool_call>{"name": "cd", "arguments": {"folder": NaN}}</tool_call>',
    ],
)
@pytest.mark.parametrize("call_format", ["python", "json"])
def test_texts_that_would_exhaust_a_parser_are_answered(text, call_format):
    environment, state = started(call_format=call_format)
    with ThreadPoolExecutor(1) as pool:  # as the trainer steps: threads may have smaller stacks
        result = pool.submit(environment.step, state, text).result()
    assert not result.done and result.observation and state.calls == state.failed_calls


@pytest.mark.parametrize(
    ("text", "names", "unreadable"),
    [
        (tool_call("ls"), ["ls"], 0),
        ("Sure.\n" + tool_call("cd", folder="a") + "\n" + tool_call("ls"), ["cd", "ls"], 0),
        ('<tool_call>{"name": "ls", "arguments": {}}</tool_call>', ["ls"], 0),
        ('<tool_call>{"name": "ls", "arguments": "{}"}</tool_call>', ["ls"], 0),
        (tool_call("ls") + "<tool_call>{no json</tool_call>", ["ls"], 1),
        ("<tool_call>{no json</tool_call>", [], 1),
        (tool_call("ls") + '<tool_call>{"name": "ls"}</tool_call>', [], 1),
        ("<tool_call>[1]</tool_call>", [], 1),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', [], 1),
        ('<tool_call>\n{"name": "ls", "arguments": {}}', [], 1),
        ("[ls()]", [], 0),
    ],
)
def test_json_calls(text, names, unreadable):
    calls, missed = parse_calls(text, "json")
    assert ([call.name for call in calls], missed) == (names, unreadable)


def test_results_come_back_as_one_user_message_or_as_tool_messages():
    environment, state = started()
    observation = environment.step(state, "[cd(folder='document'), fly(to='moon')]").observation
    assert observation == repr(
        [
            {"role": "tool", "name": "cd(folder='document')", "content": '{"current_working_directory": "document"}'},
            {"role": "tool", "name": "fly(to='moon')", "content": "Error during execution: name 'fly' is not defined"},
        ]
    )
    environment, state = started(call_format="json")
    assert environment.step(
        state, tool_call("cd", folder="document") + tool_call("touch", file_name="a")
    ).observation == [
        {"role": "tool", "name": "cd", "content": '{"current_working_directory": "document"}'},
        {"role": "tool", "name": "touch", "content": "None"},
    ]


def test_only_public_methods_can_be_called():
    environment, state = started()
    names = [
        "_load_scenario",
        "__init__",
        "__class__",
        "print",
        "exit",
        "GorillaFileSystem",
        "instances",
        "_current_dir",
    ]
    observation = environment.step(state, f"[{', '.join(f'{name}()' for name in names)}]").observation
    assert observation.count("is not defined") == len(names) == state.failed_calls
    observation = environment.step(state, "[cd(place='a'), cd(), ls(a=True, b=1)]").observation
    assert observation.count("Error during execution: GorillaFileSystem.") == 3


def test_results_are_cut_for_the_policy_alone():
    row = {"id": "multi_turn_base_0"}
    environment, state = started(row, max_observation_chars=12)
    observation = environment.step(state, "[cat(file_name='a'), cd(folder='document')]").observation
    assert '\'{"error": "c ...\'' in observation
    assert state.results[0] == """{"error": "cat: 'a': No such file or directory"}"""
    state = environment.reset(row)
    assert play(environment, state, actions_of(environment, row)).reward == 1.0


def test_a_lone_surrogate_is_not_shown():
    environment, state = started(call_format="json")
    text = '<tool_call>{"name": "cd", "arguments": {"\\ud800": "\\ud800"}}</tool_call>'
    for message in environment.step(state, text).observation:
        message["content"].encode()


@pytest.mark.parametrize(
    "call",
    [
        "power(base=9, exponent=9999999999)",
        "power(base=-10, exponent=10000)",
        "logarithm(value=2, base=3, precision=1000000000)",
        "logarithm(value=2, base=3, precision='1000000000')",
        "logarithm(value='1e999999999999', base=3, precision=4000)",
        "square_root(number=2, precision=1000000000)",
        "round_number(number=5, decimal_places=-1000000000)",
        "round_number(number=5, decimal_places=1e300)",
        "logarithm(value=2, base=3, precision=1e308)",
        "power(base=2.5, exponent=1000000.0)",
    ],
)
def test_calls_that_would_compute_for_ever_are_refused(call):
    environment, state = started(MATH)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(environment.step, state, f"[{call}]").result(timeout=60)
    assert state.calls == 1 and "is not defined" not in state.results[0]
    assert state.failed_calls == 1 or "1e9999" in call


def test_mathematics_leaves_the_precision_of_others_alone():
    import mpmath

    before = mpmath.mp.dps, decimal.getcontext().prec
    environment, state = started(MATH)
    environment.step(state, "[logarithm(value=2, base=3, precision=50), square_root(number=2, precision=50)]")
    assert "0.6309297535714574370995271143427608542995856401" in state.results[0]
    assert "1.4142135623730950488016887242096980785696718753769" in state.results[1]
    assert (mpmath.mp.dps, decimal.getcontext().prec) == before
    environment.step(state, "[power(base=2, exponent=-5000), power(base=2, exponent=8)]")
    assert state.results[2:] == ['{"result": 0.0}', '{"result": 256}']


def test_a_directory_copied_into_itself_is_an_answer_and_loses():
    environment, state = started()
    observation = environment.step(
        state, "[mkdir(dir_name='a'), cp(source='a', destination='a'), du(), find(), mkdir(dir_name='b')]"
    ).observation
    assert "recursion" in observation
    other = state.fork()
    assert environment.step(other, "[rm(file_name='b')]").reward == 0.0
    result = play(environment, state, ["Done."] * 4)
    assert result.done and result.reward == 0.0 and state.lost


def test_what_a_branch_stores_is_in_no_other_episode():
    """`post_tweet` has lists as default arguments, and keeps them in the tweet that `mention` extends."""
    environment, state = started()
    login = "authenticate_twitter(username='analyst_pro', password='Kj8#mP9$vL2')"
    play(
        environment, state, [f"[{login}, post_tweet(content='a'), mention(tweet_id=3, mentioned_usernames=['@bob'])]"]
    )
    assert state.instances["TwitterAPI"].tweets[3]["mentions"] == ["@bob"]
    play(environment, state, ["[post_tweet(content='b')]"])
    assert state.instances["TwitterAPI"].tweets[4]["mentions"] == []
    # What the policy reads is what it wrote, although the state now holds the list
    text = "[post_tweet(content='c', mentions=['@a']), mention(tweet_id=5, mentioned_usernames=['@b'])]"
    assert "post_tweet(content='c', mentions=['@a'])" in environment.step(state, text).observation
    assert state.instances["TwitterAPI"].tweets[5]["mentions"] == ["@a", "@b"]
    # long_context states come with cards from a table of the module
    travel = next(name for name, task in load_tasks("long_context").items() if "TravelAPI" in task.classes)
    one, two = (environment.reset({"id": travel}) for _ in range(2))
    cards = [state.fork().backend for state in (one, two)]
    for backend in cards:
        backend.call(Call("get_all_credit_cards"))
    first, second = (backend.instances["TravelAPI"].credit_card_list for backend in cards)
    assert first == second and all(first[card] is not second[card] for card in first)


def test_user_turns_follow_each_other():
    environment, state = started()
    turns = state.task.turns
    result = environment.step(state, "[cd(folder='document')]")
    assert (result.reward, result.done, state.turn, state.turn_steps) == (0.0, False, 0, 1)
    for turn in range(1, 4):
        result = environment.step(state, "I have done that.")
        assert result.observation == turns[turn] and not result.done and state.turn == turn and state.turn_steps == 0
    result = environment.step(state, "Done.")
    assert result.done and result.reward == 0.0 and result.observation is None
    assert "User turn 0" in state.error and state.lost
    assert result.info == {"user_turns": 4, "steps": 5, "calls": 1, "failed_calls": 0, "invalid": 0}
    assert environment.step(state, "[ls()]").done and state.steps == 5


@pytest.mark.parametrize("docs", ["json", "signatures"])
@pytest.mark.parametrize("call_format", ["python", "json"])
def test_held_out_functions_are_given_at_their_turn(docs, call_format):
    environment = BFCLEnvironment(call_format=call_format, docs=docs)
    row = next(row for row in environment.rows(["miss_func"]) if row["id"] == "multi_turn_miss_func_0")
    state = environment.reset(row)
    (turn, functions), *_ = state.task.held_out.items()
    assert [function["name"] for function in functions] == ["sort"]
    listed = '"name": "sort"' if docs == "json" else "sort(file_name"
    assert listed not in row["prompt"][0]["content"]
    for _ in range(turn):
        result = environment.step(state, "Done.")
    (message,) = result.observation
    assert message["role"] == "user"
    assert message["content"].endswith("\nI have updated some more functions you can choose from. What about now?")
    assert ("'name': 'sort'" if docs == "json" else listed) in message["content"]
    # A turn whose ground truth is empty asks for nothing, so that silence there loses nothing
    assert state.task.ground_truth[2] == []


def test_a_function_held_out_can_be_guessed_as_in_the_package():
    environment, state = started({"id": "multi_turn_miss_func_0"})
    assert "sort: a: No such file" in environment.step(state, "[sort(file_name='a')]").observation


def test_too_many_steps_in_a_user_turn_lose():
    environment, state = started(max_steps_per_turn=3)
    actions = list(actions_of(environment, FILES))
    play(environment, state, ["[ls()]"] * 2 + actions[:1])
    assert not state.lost and environment.step(state, actions[1]).done is False and state.turn == 1
    results = [environment.step(state, "[ls()]") for _ in range(4)]
    assert [result.done for result in results] == [False, False, False, True]
    assert results[-1].reward == 0.0 and "more than 3 steps" in state.error and results[-1].observation is None


def test_the_first_user_turns_alone():
    environment, state = started(max_user_turns=2)
    actions = list(actions_of(environment, FILES))
    assert len(actions) == 4
    result = play(environment, state, actions)
    assert result.done and result.reward == 1.0 and state.turn == 2
    environment, state = started(max_user_turns=99)
    assert play(environment, state, actions_of(environment, FILES)).reward == 1.0


def test_an_episode_may_stop_when_it_is_lost():
    environment, state = started(stop_when_lost=True)
    result = environment.step(state, "Done.")
    assert result.done and result.reward == 0.0 and state.turn == 1
    state = environment.reset(FILES)
    assert play(environment, state, actions_of(environment, FILES)).reward == 1.0


@pytest.mark.parametrize("subset", SUBSETS)
def test_both_formats_are_rewarded_alike(subset):
    for index in range(0, 200, 20):
        row = {"id": f"multi_turn_{subset}_{index}"}
        played = []
        for call_format in ("python", "json"):
            environment, state = started(row, call_format=call_format)
            result = play(environment, state, actions_of(environment, row, at_once=False))
            played.append((result.reward, result.info, state.results, dump(state.instances)))
        assert played[0] == played[1] and played[0][0] == 1.0


@pytest.mark.parametrize("subset", SUBSETS)
def test_a_fork_and_its_origin_go_on_as_if_played_alone(subset):
    """Fifty episodes over all subsets, forked anywhere, the two branches stepped in turns."""
    generator = random.Random(subset)
    environment = BFCLEnvironment()
    for index in generator.sample(range(200), {"base": 14}.get(subset, 12)):
        row = {"id": f"multi_turn_{subset}_{index}"}
        truth = list(actions_of(environment, row, at_once=False))
        other = list(actions_of(environment, {"id": f"multi_turn_{subset}_{generator.randrange(200)}"}, at_once=False))
        cut = generator.randrange(len(truth))
        branches = [truth[cut:], other[cut:] + ["Done."] * 9]
        state = environment.reset(row)
        play(environment, state, truth[:cut])
        kept = state.fork()
        before = dump(kept.instances), list(kept.results)
        states = [state, state.fork().fork()]
        for step in range(max(map(len, branches))):
            for branch, actions in zip(states, branches, strict=True):
                play(environment, branch, actions[step : step + 1])
        assert (dump(kept.instances), kept.results) == before
        assert states[0].done and not states[0].lost and states[1].done
        for branch, actions in zip(states, branches, strict=True):
            alone = environment.reset(row)
            play(environment, alone, truth[:cut] + actions)
            assert dump(branch.instances) == dump(alone.instances)
            for name in ("results", "turn", "steps", "calls", "failed_calls", "invalid", "error", "done"):
                assert getattr(branch, name) == getattr(alone, name)


def test_a_fork_shares_no_object_that_either_side_has_called():
    environment, state = started()
    play(environment, state, ["[cd(folder='document')]"])
    fork = state.fork()
    assert fork.results is not state.results and isinstance(fork.backend, Backend)
    for branch in (state, fork):
        play(environment, branch, ["[touch(file_name='new'), posting_get_login_status()]"])
    for name in state.instances:
        assert state.instances[name] is not fork.instances[name]
    play(environment, fork, ["[rm(file_name='new')]"])
    assert "new" in state.instances["GorillaFileSystem"]._current_dir.contents


def test_episodes_in_threads_are_as_those_played_one_by_one():
    """With functions that go through module globals: precision of logarithms, and the weather of long_context."""
    environment = BFCLEnvironment()
    rows = [
        {"id": f"multi_turn_{subset}_{index}"} for subset in ("base", "long_context") for index in range(0, 120, 3)
    ]

    def played(row):
        state = environment.reset(row)
        actions = list(actions_of(environment, row))
        for name, call in (
            ("MathAPI", "logarithm(value={0}, base=10, precision={0})"),
            ("VehicleControlAPI", "get_outside_temperature_from_google()"),
        ):
            if name in state.instances:
                number = 5 + int(row["id"].rpartition("_")[2])
                actions[1:1] = [f"[{call.format(number)}]"] * 3
        result = play(environment, state, actions)
        return state.results, state.error, result.reward

    expected = [played(row) for row in rows]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(played, rows * 2)) == expected * 2


class Finalized:
    """In a cycle, so that the garbage collector runs Python code, at which another thread may take over."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        for _ in range(100):
            pass


def test_calls_may_be_read_by_several_threads_at_once():
    text = "[" + ", ".join(f"f(a=[[{i}, [{i}]], {{'b': ({i},)}}])" for i in range(40)) + "]"
    expected = parse_calls(text, "python")

    def read(_):
        for _ in range(5):
            Finalized()
        return parse_calls(text, "python")

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(8) as pool:
            # CPython 3.11 raises a SystemError in most of these where parsers are not kept apart
            assert all(found == expected for found in pool.map(read, range(100)))
    finally:
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)


def test_functions_that_go_through_module_globals_may_be_called_at_once():
    car = next(name for name, task in load_tasks("long_context").items() if "VehicleControlAPI" in task.classes)
    environment = BFCLEnvironment()

    def computed(precision):
        state = environment.reset(MATH)
        play(environment, state, [f"[logarithm(value=2, base=3, precision={precision})]"] * 20)
        return state.results

    def weather(_):
        state = environment.reset({"id": car})
        play(environment, state, ["[get_outside_temperature_from_google()]"] * 20)
        return state.results

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for function in (computed, weather):
            expected = [function(precision) for precision in range(5, 45)]
            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(function, range(5, 45))) == expected
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_variant_of_a_test_task_is_in_train(seed):
    environment = BFCLEnvironment(docs="signatures")
    train, test = (environment.rows(split=split, seed=seed) for split in ("train", "test"))
    everything = environment.rows()
    assert (len(train), len(test), len(everything)) == (640, 160, 800)
    assert sorted(row["id"] for row in train + test) == sorted(row["id"] for row in everything)
    tasks = [{row["id"].rpartition("_")[2] for row in rows} for rows in (train, test)]
    assert not tasks[0] & tasks[1] and len(tasks[1]) == 40
    for subset in SUBSETS:
        assert environment.rows([subset], split="test", seed=seed) == [row for row in test if row["subset"] == subset]
    if seed:
        assert test != environment.rows(split="test")


def test_the_default_split_stays_as_it_is():
    rows = BFCLEnvironment(docs="signatures").rows("base", split="test")
    assert [int(row["id"].rpartition("_")[2]) for row in rows][:8] == [10, 18, 24, 25, 35, 37, 52, 55]


def test_rows_fit_into_a_dataset():
    from datasets import Dataset

    rows = BFCLEnvironment().rows(["base", "miss_func"])[::40]
    dataset = Dataset.from_list(rows)
    assert dataset[:] == {key: [row[key] for row in rows] for key in ("prompt", "id", "subset")}
    assert BFCLEnvironment().reset(dataset[1]).task.id == rows[1]["id"]


def test_signatures_are_one_line_a_function():
    environment = BFCLEnvironment(docs="signatures")
    for subset in SUBSETS:
        for row in environment.rows([subset]):
            lines = row["prompt"][0]["content"].split("that you can invoke.\n")[1]
            functions = environment.reset(row).task.functions
            assert [line.split("(")[0] for line in lines.strip().split("\n")] == [f["name"] for f in functions]
            assert all(line.count("  # ") == 1 and line.endswith(".") for line in lines.strip().split("\n"))
    (system, _) = environment.prompt(load_tasks("base")["multi_turn_base_0"])
    assert "\ntail(file_name: str, lines: int = 10)  # Display the last part of a file" in system["content"]
    assert "\nfind(path: str = '.', name: str = None)  # Find any file" in system["content"]
    car = next(name for name, task in load_tasks("base").items() if "VehicleControlAPI" in task.classes)
    (system, _) = environment.prompt(load_tasks("base")[car])
    assert "activateParkingBrake(mode: 'engage' | 'release')  # Activates the parking brake" in system["content"]
    assert "door: list['driver' | 'passenger' | 'rear_left' | 'rear_right'])  # Locks the doors" in system["content"]


def test_brief_prompts_are_signatures_alone():
    brief, long = BFCLEnvironment(docs="brief"), BFCLEnvironment(docs="signatures")
    for subset in SUBSETS:
        for short, row in zip(brief.rows([subset]), long.rows([subset]), strict=True):
            head, *lines = short["prompt"][0]["content"].split("\n")
            described = row["prompt"][0]["content"].split("that you can invoke.\n")[1].strip().split("\n")
            assert lines == [line.split("  # ")[0] for line in described]
            assert short["prompt"][1:] == row["prompt"][1:]
    assert head.endswith("Say Done. when it is done.")


def test_the_json_prompt_is_what_qwen3_s_template_makes_of_tools():
    import trl
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    environment = BFCLEnvironment(call_format="json")
    task = load_tasks("base")["multi_turn_base_0"]
    system, user = environment.prompt(task)
    tools = [json.loads(line) for line in system["content"].split("<tools>\n")[1].split("\n</tools>")[0].split("\n")]
    assert [tool["name"] for tool in tools] == [function["name"] for function in task.functions]
    (by_template,), _ = render_jinja_template(conversations=[[user]], tools=tools, chat_template=template)
    (by_message,), _ = render_jinja_template(conversations=[[system, user]], chat_template=template)
    assert by_message == by_template


def test_the_trainer_s_callback_environment_plays_an_episode():
    for call_format in ("python", "json"):
        env_reset, env_step = bfcl_env(call_format=call_format, docs="signatures", max_user_turns=2)
        environment = BFCLEnvironment(call_format=call_format)
        episode = CallbackEnvironment(env_step, env_reset).reset(FILES, [])
        replies = []
        for text in actions_of(environment, FILES):
            fork = episode.fork()
            action = Action(text, {"role": "assistant", "content": text}, [])
            replies.append(episode.step(action))
            if replies[-1].done:
                break
            again = fork.step(action)
            assert (again.messages, again.info) == (replies[-1].messages, replies[-1].info)
        assert replies[-1].done and replies[-1].reward == 1.0 and replies[-1].info["user_turns"] == 2
        roles = {message["role"] for reply in replies for message in reply.messages}
        assert roles == ({"user"} if call_format == "python" else {"user", "tool"})


@pytest.mark.parametrize(
    "row", [{}, {"id": None}, {"id": "multi_turn_base_200"}, {"id": "simple_0"}, {"id": "base_0"}]
)
def test_a_row_of_another_dataset_is_refused(row):
    with pytest.raises(ValueError, match="names no multi-turn entry"):
        BFCLEnvironment().reset(row)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"call_format": "xml"},
        {"docs": "none"},
        {"max_steps_per_turn": 0},
        {"max_user_turns": 0},
        {"max_observation_chars": 0},
    ],
)
def test_wrong_arguments_are_refused(kwargs):
    with pytest.raises(ValueError, match="must be"):
        bfcl_env(**kwargs)


def test_wrong_subsets_and_splits_are_refused():
    with pytest.raises(ValueError, match="no subset 'composite'"):
        BFCLEnvironment().rows(["composite"])
    with pytest.raises(ValueError, match="`split` must be"):
        BFCLEnvironment().rows(split="dev")


def test_the_package_is_asked_for_when_it_is_needed_and_writes_nothing(tmp_path):
    program = """
import sys
sys.modules.update(dict.fromkeys(["bfcl_eval"][:int(sys.argv[1])]))
from trace_trl.environments.bfcl import BFCLEnvironment
environment = BFCLEnvironment()
assert "bfcl_eval" not in sys.modules or sys.argv[1] == "1"
try:
    state = environment.reset({"id": "multi_turn_base_0"})
    environment.prompt(state.task)
    environment.step(state, "[ls()]")
    environment.step(state, "Done.")
except ImportError as error:
    print(error)
assert "bfcl_eval.constants.eval_config" not in sys.modules  # makes folders beside the package
"""
    for missing, expected in (("1", "make setup-bfcl"), ("0", "")):
        ran = subprocess.run([sys.executable, "-c", program, missing], capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, ran.stderr
        assert expected in ran.stdout and bool(expected) == bool(ran.stdout)


def test_instances_are_kept_as_long_as_episodes_of_their_task_live():
    """Long trainings visit all tasks; memory does not grow with them."""
    environment = BFCLEnvironment()
    row, other = environment.rows("base")[:2]
    task = load_tasks("base")[row["id"]]
    first, second = environment.reset(row), environment.reset(row)
    assert first.loaded is second.loaded is first.fork().loaded
    assert environment.reset(other).loaded is not first.loaded
    kept = weakref.ref(first.loaded)
    del first
    environment.step(second, "Done.")
    assert task._loaded() is kept() is not None
    del second
    assert task._loaded() is kept() is None
    state = environment.reset(row)
    for calls in environment.ground_truth(row):
        environment.step(state, format_calls(calls, "python"))
        result = environment.step(state, "Done.")
    assert result.reward == 1.0


def test_episodes_of_one_task_in_many_threads():
    environment = BFCLEnvironment()
    rows = environment.rows("base")[:4]

    def play(row):
        state = environment.reset(row)
        for calls in environment.ground_truth(row):
            environment.step(state, format_calls(calls, "python"))
            result = environment.step(state, "Done.")
        return result.reward

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, rows * 12)) == [1.0] * 48
