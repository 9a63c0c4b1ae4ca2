"""What benchmarks/step_speed.py measures, and what it makes of it."""

import json
import sys
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import step_speed  # noqa: E402
from step_speed import PARTS, Stopwatch, Timing, measure, show, split, summarise  # noqa: E402


def timing(method, repeat, *steps, world="chain", part=0.25):
    parts = {name: [part * step for step in steps] for name in PARTS}
    return Timing(world, method, repeat, 10, list(steps), [step / 2 for step in steps], parts)


# The machine is twice as slow in the second repeat; one step of a run is held up
FAKES = [
    timing("grpo_trl", 0, 1.0, 1.0, 9.0),
    timing("grpo_tools", 0, 2.0, 2.0, 2.0),
    timing("trace", 0, 0.8, 0.7, 0.9),
    timing("grpo_trl", 1, 2.0, 2.0, 2.0),
    timing("grpo_tools", 1, 4.0, 4.0, 4.0),
    timing("trace", 1, 1.5, 1.5, 1.5),
    timing("grpo_trl", 0, 3.0, world="hops"),
    timing("trace", 0, 1.5, world="hops"),
]


def test_ratios_compare_runs_of_one_repeat():
    ratios = summarise(FAKES)["chain"]["ratios"]
    assert ratios["trace / grpo_trl"] == pytest.approx({"median": 0.775, "least": 0.75, "most": 0.8})
    assert ratios["trace / grpo_tools"] == pytest.approx({"median": 0.3875, "least": 0.375, "most": 0.4})
    assert ratios["grpo_tools / grpo_trl"] == {"median": 2.0, "least": 2.0, "most": 2.0}
    assert summarise(FAKES)["chain"]["cpu_ratios"] == ratios  # half of both
    # Repeats by number, not by place
    assert summarise(FAKES[::-1])["chain"]["ratios"] == ratios


def test_a_run_counts_by_the_median_of_its_steps():
    methods = summarise(FAKES)["chain"]["methods"]
    assert methods["grpo_trl"]["step"] == {"median": 1.5, "least": 1.0, "most": 2.0}
    assert methods["trace"]["leaf"] == pytest.approx({"median": 0.115, "least": 0.08, "most": 0.15})
    assert methods["grpo_trl"]["parts"] == dict.fromkeys(PARTS, 0.375)


def test_worlds_are_apart_and_baselines_that_did_not_run_are_left_out():
    found = summarise(FAKES)["hops"]
    assert list(found["methods"]) == ["grpo_trl", "trace"]
    assert found["ratios"] == {"trace / grpo_trl": {"median": 0.5, "least": 0.5, "most": 0.5}}
    assert summarise([timing("trace", 0, 1.0)])["chain"]["ratios"] == {}
    # A repeat that is not over
    assert summarise([*FAKES, timing("trace", 2, 9.0)])["chain"]["ratios"] == summarise(FAKES)["chain"]["ratios"]


def test_parts_add_up_to_the_step():
    record = {"seconds": 10.0, "seconds_by_stage": {"predictor": 1.0, "generation": 4.0}}
    parts = split(record, {"rollout": 6.0, "sampling": 3.5, "learning": 0.5})
    assert parts == {"sampling": 3.5, "predictor": 1.5, "rest of rollout": 1.5, "training": 3.5}
    parts = split(record | {"seconds_measuring": 0.5}, {"rollout": 6.5, "sampling": 3.5, "learning": 0.5})
    assert parts == {"sampling": 3.5, "predictor": 1.5, "rest of rollout": 1.5, "training": 3.5}
    parts = split({"seconds": 10.0}, {"rollout": 6.0, "sampling": 3.5})
    assert parts == {"sampling": 3.5, "predictor": 0.0, "rest of rollout": 2.5, "training": 4.0}


def test_a_stopwatch_sums_up_calls_and_starts_anew(monkeypatch):
    now = iter([0.0, 1.0, 5.0, 7.0, 20.0, 24.0])
    monkeypatch.setattr(step_speed.time, "perf_counter", lambda: next(now))

    class Owner:
        def double(self, number):
            if number < 0:
                raise ValueError
            return 2 * number

    owner, stopwatch = Owner(), Stopwatch()
    stopwatch.watch(owner, "double", "doubling")
    assert owner.double(3) == 6
    with pytest.raises(ValueError):
        owner.double(-1)
    assert stopwatch.take() == {"doubling": 3.0}
    owner.double(1)
    assert stopwatch.take() == {"doubling": 4.0} and stopwatch.take() == {"doubling": 0.0}


@pytest.mark.parametrize("method", ["grpo_tools", "trace"])
def test_a_run_is_measured_in_all_its_parts(method):
    found = measure("hops", method, repeat=0, steps=2, leaves=24)
    assert (found.world, found.method, found.leaves, len(found.steps)) == ("hops", method, 24, 2)
    for step, *parts in zip(found.steps, *(found.parts[name] for name in PARTS), strict=True):
        assert sum(parts) == pytest.approx(step) and min(parts) >= 0
    assert (sum(found.parts["predictor"]) > 0) == (method == "trace")
    assert len(found.cpu) == 2 and min(found.cpu) > 0
    assert min(found.parts["sampling"] + found.parts["training"]) > 0
    json.dumps(summarise([found]))


def test_the_table_names_all_methods_and_ratios():
    lines = show(summarise(FAKES)).splitlines()
    rows = [line.split()[0] for line in lines if line and "/" not in line]
    assert rows == ["grpo_trl", "grpo_tools", "trace", "grpo_trl", "trace"]
    assert f"{'grpo_tools / grpo_trl':<25}  2.00   2.00..2.00   CPU   2.00   2.00..2.00" in lines


def test_runs_take_turns(monkeypatch, tmp_path, capsys):
    order = []

    class Pool:
        def __init__(self, processes, **kwargs):
            assert processes == 1

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def submit(self, function, world, method, repeat, steps, leaves):
            order.append((repeat, world, method))
            result = timing(method, repeat, 1.0, 1.0, world=world)
            return type("Future", (), {"result": lambda self: result})()

    monkeypatch.setattr(step_speed, "ProcessPoolExecutor", Pool)
    out = tmp_path / "new" / "speed.json"
    step_speed.main(["--repeats", "2", "--worlds", "chain", "--methods", "grpo_trl", "trace", "--out", str(out)])
    assert order == [(r, "chain", m) for r in range(2) for m in ("grpo_trl", "trace")]
    written = json.loads(out.read_text())
    assert len(written["runs"]) == 4 and written["summary"]["chain"]["ratios"]["trace / grpo_trl"]["median"] == 1.0
    assert "chain: trace takes 1.00 of grpo_trl, not below 0.8" in capsys.readouterr().out
