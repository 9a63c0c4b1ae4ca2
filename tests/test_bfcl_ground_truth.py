"""All 800 multi-turn entries of BFCL v4: the reward is what the package's own checker says."""

import copy
import json
import os
import random

import pytest

from trace_trl.environments.bfcl import SUBSETS, BFCLEnvironment
from trace_trl.environments.bfcl_calls import Call, format_calls
from trace_trl.environments.bfcl_tasks import load_tasks


PYTHON, JSON = BFCLEnvironment(), BFCLEnvironment(call_format="json")


def entries(subset):
    return [{"id": name} for name in load_tasks(subset)]


def play(environment, row, turns, at_once=True):
    """Plays the calls of each user turn, in one step or one by one, and returns the state and the last result."""
    state = environment.reset(row)
    for calls in turns:
        for step in [calls] if at_once else [[call] for call in calls]:
            if step:
                result = environment.step(state, format_calls(step, environment.call_format))
                assert not result.done and result.reward == 0.0
        result = environment.step(state, "Done.")
    assert result.done
    return state, result


def package_verdict(task, turns, at_once=True):
    """The package's checker on the same decoded calls. It leaves instances and changed tables behind: removed here."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import long_context
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.posting_api import TwitterAPI
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    decoded = [
        [[str(call) for call in step] for step in ([calls] if at_once else [[c] for c in calls]) if step]
        for calls in turns
    ]
    entry = {"id": task.id, "initial_config": task.config, "involved_classes": task.classes}
    tables = {
        name: table
        for name, table in vars(long_context).items()
        if isinstance(table, dict) and not name.startswith("_")
    }
    before = copy.deepcopy(tables)
    try:
        return multi_turn_checker(decoded, task.ground_truth, entry, "", "model")["valid"]
    finally:
        for name in [name for name in vars(multi_turn_utils) if name.endswith("_instance")]:
            delattr(multi_turn_utils, name)
        for name, table in tables.items():
            table.clear()
            table.update(before[name])
        for default in TwitterAPI.post_tweet.__defaults__:
            default.clear()


def without_one_call(turns, random):
    turn = random.choice([turn for turn, calls in enumerate(turns) if calls])
    dropped = random.randrange(len(turns[turn]))
    return [
        [call for position, call in enumerate(calls) if (index, position) != (turn, dropped)]
        for index, calls in enumerate(turns)
    ]


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return value[:-1]
    return {}


def with_one_argument_changed(turns, random):
    places = [
        (turn, position, name)
        for turn, calls in enumerate(turns)
        for position, call in enumerate(calls)
        for name in call.arguments
    ]
    turn, position, name = random.choice(places)
    copied = [list(calls) for calls in turns]
    call = copied[turn][position]
    copied[turn][position] = Call(call.name, {**call.arguments, name: changed(call.arguments[name])})
    return copied


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("environment", [PYTHON, JSON], ids=["python", "json"])
def test_ground_truth_is_rewarded(subset, environment):
    lost = {}
    for number, row in enumerate(entries(subset)):
        state, result = play(environment, row, environment.ground_truth(row), at_once=number % 2 == 0)
        if result.reward != 1.0 or state.invalid or state.lost:
            lost[row["id"]] = state.error
    assert lost == {} and len(entries(subset)) == 200


@pytest.mark.parametrize("subset", SUBSETS)
def test_empty_answers_are_not_rewarded(subset):
    for row in entries(subset):
        state, result = play(PYTHON, row, [[] for _ in PYTHON.ground_truth(row)])
        assert result.reward == 0.0 and "holds no calls" in state.error and state.calls == 0


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("mutate", [without_one_call, with_one_argument_changed])
def test_mutated_ground_truth_is_judged_as_by_the_package(subset, mutate):
    generator = random.Random(f"{subset} {mutate.__name__}")
    different, rejected = {}, 0
    for number, row in enumerate(entries(subset)):
        task = load_tasks(subset)[row["id"]]
        turns = mutate(PYTHON.ground_truth(row), generator)
        at_once = number % 2 == 0
        state, result = play(PYTHON, row, turns, at_once)
        expected = package_verdict(task, turns, at_once)
        rejected += not expected
        if (result.reward == 1.0) != expected:
            different[task.id] = (expected, state.error)
    assert different == {}
    assert rejected > 100, rejected


@pytest.mark.parametrize("subset", SUBSETS)
def test_the_package_accepts_the_ground_truth_too(subset):
    tasks = load_tasks(subset)
    assert all(package_verdict(tasks[row["id"]], PYTHON.ground_truth(row)) for row in entries(subset)[::5])


@pytest.mark.parametrize("subset", SUBSETS)
def test_functions_offered_are_the_package_s(subset, tmp_path_factory):
    os.environ.setdefault("BFCL_PROJECT_ROOT", str(tmp_path_factory.mktemp("bfcl")))  # it makes folders when imported
    from bfcl_eval.utils import load_dataset_entry

    rows = {row["id"]: row for row in PYTHON.rows([subset])}
    for entry in load_dataset_entry(f"multi_turn_{subset}"):
        system, *messages = rows.pop(entry["id"])["prompt"]
        assert system["content"].endswith(
            f"functions in json format that you can invoke.\n{json.dumps(entry['function'], indent=4)}\n"
        )
        assert messages == entry["question"][0]
        held_out = {int(turn): functions for turn, functions in entry.get("missed_function", {}).items()}
        assert load_tasks(subset)[entry["id"]].held_out == held_out
    assert not rows
