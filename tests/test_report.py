"""Tables and plots of made-up runs, with numbers worked out by hand."""

import json
import math
import re
import sys
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import report
    from reporting.claims import compare, verdicts
    from reporting.numbers import TITLES, Spread, summarise
    from reporting.plots import plot, spread_out
    from reporting.runs import Budget, load
    from reporting.tables import (
        calibration_table,
        chances_table,
        levels_table,
        rates_table,
        seconds_table,
        tokens_table,
    )
finally:
    sys.path.remove(str(BENCHMARKS))


WHOLE = {"leaves": 8, "steps": 4, "tokens": 400, "group": 4}
ORDINARY = [(0, 0.0), (100, 0.2), (200, 0.4), (300, 0.6), (400, 0.8)]  # (tokens, success)


def per_step(value, step):
    return value[step - 1] if isinstance(value, list) else value


def write(folder, method, seed=0, curve=ORDINARY, rate=0.1, options=(), world="chain", budget=WHOLE, **given):
    """A run file. What is `given` of its records is a list with a value a step, or one for all."""
    records = []
    for step, (tokens, success) in enumerate(curve):
        levels = {"2": success, "10": success / 2}
        record = {"step": step, "tokens": tokens, "leaves": 8 * step, "success": success, "success_by_level": levels}
        if step:
            record |= {"seconds": 1.0, "effective_ratio": 0.5, "mixed_anchors": 1, "branched_anchors": 4}
            if method != "grpo_trl":
                record |= {"budget_by_depth": {"0": 8}, "predictor": {}}
            record |= {name: per_step(value, step) for name, value in given.items()}
        records.append(record)
    run = {"world": world, "method": method, "seed": seed, "learning_rate": rate, "options": options, "fraction": 1.0}
    command = f"python benchmarks/equal_cost.py --out {folder} --suite given"
    lines = [{"run": run, "budget": budget, "command": command}, *records, {"complete": True, "seconds": 9.0}]
    name = "".join(f"_{name}={value}" for name, value in options)
    path = folder / world / f"{method}{name}_lr{rate:g}_seed{seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def summary_of(*folders):
    runs, _ = load(folders)
    return summarise(runs)["chain"]


def rising(end, steps=4, tokens=100):
    return [(tokens * step, end * step / steps) for step in range(steps + 1)]


# Files


def test_incomplete_files_are_skipped_and_counted(tmp_path):
    write(tmp_path, "trace", seed=0)
    path = write(tmp_path, "trace", seed=1)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # ended before its last line
    path = write(tmp_path, "trace", seed=2)
    path.write_text(path.read_text()[:-20])  # within it
    path = write(tmp_path, "trace", seed=3)
    path.rename(path.with_suffix(".part"))  # still running
    write(tmp_path, "trace", seed=4).write_text("")
    runs, incomplete = load([tmp_path])
    assert [run.seed for run in runs] == [0]
    assert len(incomplete) == 4


def test_of_one_run_twice_the_longer_counts(tmp_path):
    half = {**WHOLE, "steps": 2, "tokens": 200}
    write(tmp_path / "a", "trace", seed=0, budget=half, curve=ORDINARY[:3])
    write(tmp_path / "a", "trace", seed=1)
    write(tmp_path / "b", "trace", seed=0)
    write(tmp_path / "b", "trace", seed=1, budget=half, curve=ORDINARY[:3])
    runs, incomplete = load([tmp_path / "a", tmp_path / "b"])
    assert not incomplete
    assert {run.seed: (run.budget.steps, run.folder.name) for run in runs} == {0: (4, "b"), 1: (4, "a")}


def test_runs_that_cannot_be_compared(tmp_path):
    write(tmp_path, "trace")
    write(tmp_path, "grpo", budget={**WHOLE, "leaves": 16})
    with pytest.raises(ValueError, match="chain differ"):
        summary_of(tmp_path)


# Numbers


@pytest.fixture
def bent(tmp_path):
    write(tmp_path, "trace", curve=[(0, 0.0), (100, 0.4), (300, 0.8), (400, 0.6), (500, 1.0)])
    return load([tmp_path])[0][0]


def test_success_between_steps(bent):
    assert bent.success(200) == pytest.approx(0.6)
    assert bent.success(900) == 1.0


@pytest.mark.parametrize(
    "success, tokens", [(0.0, 0), (0.2, 50), (0.6, 200), (0.7, 250), (0.8, 300), (0.9, 475), (1.1, math.inf)]
)
def test_tokens_to_first_reach(bent, success, tokens):
    assert bent.tokens_to(success) == pytest.approx(tokens)


def test_mean_success_over_tokens(bent):
    # 0.2 over the first 100 tokens, 0.5 over the next 100, then 0.7 over 100 and again 0.7
    assert bent.mean_success(Budget(8, 4, 200, 4)) == pytest.approx(0.35)
    assert bent.mean_success(Budget(8, 4, 400, 4)) == pytest.approx(0.525)


def test_spread():
    spread = Spread({0: 3.0, 1: 1.0, 2: 2.0})
    assert spread.show(1) == "2.0 [1.0..3.0]"
    assert Spread({0: 1234.5}).show(0) == "1,234"
    assert Spread().show() == "–"
    assert Spread({0: 1.0, 1: math.inf, 2: math.inf}).show(0) == "never [1..never]"
    assert Spread({0: 1.0, 1: math.inf, 2: 3.0}).show(0) == "3 [1..never]"
    assert math.isinf(Spread({0: 1.0, 1: math.inf}).median)


def test_main_numbers(tmp_path):
    curve = [(0, 0.0), (80, 0.1), (160, 0.2), (240, 0.3), (320, 0.4), (480, 0.8)]
    given = {"effective_ratio": [0.2, 0.4, 0.6, 0.8, 1.0], "mixed_anchors": [1, 2, 3, 4, 10]}
    write(tmp_path, "trace", curve=curve, branched_anchors=[4, 4, 4, 8, 10], **given)
    write(tmp_path, "trace", seed=1)
    main = summary_of(tmp_path).main["trace"]
    found = {name: spread[0] for name, spread in main.items()}
    assert found == pytest.approx(
        {
            "effective_ratio": 0.5,  # without the fifth step, which is beyond the budget
            "success_at_leaves": 0.4,
            "success_at_tokens": 0.6,
            "tokens_per_leaf": 10,
            "mixed_anchors": 2.5,
            "mixed_share": 0.5,
        }
    )
    assert main["success_at_leaves"].show(2) == "0.60 [0.40..0.80]"


def test_best_learning_rate_is_that_of_the_median(tmp_path):
    ends = {0.1: (0.2, 0.3, 0.9), 0.2: (0.4, 0.5, 0.6), 0.4: (0.1, 0.2, 1.0)}  # the last has the highest mean of ends
    for rate, successes in ends.items():
        for seed, end in enumerate(successes):
            write(tmp_path, "trace", seed=seed, rate=rate, curve=rising(end))
    write(tmp_path, "grpo", rate=0.1, curve=rising(0.5))
    write(tmp_path, "grpo", rate=0.2, curve=rising(0.6))
    write(tmp_path, "pcl", rate=0.2)
    summary = summary_of(tmp_path)
    chosen = {choice.method: (choice.best, choice.edge) for choice in summary.choices}
    assert chosen == {"grpo": (0.2, "edge!"), "pcl": (0.2, "one rate"), "trace": (0.2, "inside")}
    trace = summary.choices[-1]
    assert {rate: score.median for rate, score in trace.scores.items()} == pytest.approx(
        {0.1: 0.15, 0.2: 0.25, 0.4: 0.1}
    )
    assert sorted(summary.main["trace"]["success_at_leaves"].values()) == pytest.approx([0.4, 0.5, 0.6])
    table = rates_table(summary)
    assert "| GRPO | 0.250 (1) | **0.300 (1)** |  | 0.2 | edge! |" in table
    assert "| TRACE | 0.150 (3) | **0.250 (3)** | 0.100 (3) | 0.2 | inside |" in table


def test_a_rate_swept_at_half_the_budget(tmp_path):
    """It is compared over that half, and what is chosen by it is shown over the whole."""
    half = {**WHOLE, "steps": 2, "tokens": 200}
    write(tmp_path, "trace", rate=0.1, curve=[(0, 0.0), (100, 0.1), (200, 0.2), (300, 0.3), (400, 0.4)])
    write(tmp_path, "trace", rate=0.2, curve=rising(0.3, steps=2), budget=half)
    write(tmp_path, "grpo", rate=0.1, curve=rising(0.5))
    summary = summary_of(tmp_path)
    trace = summary.choices[-1]
    assert {rate: score.median for rate, score in trace.scores.items()} == pytest.approx({0.1: 0.1, 0.2: 0.15})
    assert trace.best == 0.2
    assert list(summary.main) == ["grpo"]
    assert "Left out, without a run of the whole budget at its best learning rate: TRACE." in summary.notes
    write(tmp_path, "trace", rate=0.2, curve=rising(0.9))
    assert summary_of(tmp_path).main["trace"]["success_at_leaves"].median == 0.9


def test_tokens_to_grpo_success(tmp_path):
    for seed, end in enumerate((0.6, 0.8, 0.8)):
        write(tmp_path, "grpo", seed=seed, curve=rising(end))
        write(tmp_path, "trace", seed=seed, curve=rising(1.6, steps=4) if seed else rising(0.6))
    write(tmp_path, "pcl", seed=0, curve=rising(0.7))
    write(tmp_path, "pcl", seed=1, curve=rising(0.7))
    write(tmp_path, "pcl", seed=2, curve=rising(0.8))
    found = summary_of(tmp_path).numbers["tokens_to"]
    assert summary_of(tmp_path).numbers["grpo_final_success"] == 0.8
    assert dict(found["grpo"]["50%"]["tokens"]) == pytest.approx({0: 800 / 3, 1: 200, 2: 200})
    assert found["trace"]["80%"]["tokens"].median == pytest.approx(160)
    assert found["trace"]["80%"]["to_grpo"].median == pytest.approx(0.5)
    assert found["pcl"]["100%"]["tokens"] == {0: math.inf, 1: math.inf, 2: 400}
    rows = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ") for row in lines_of_tokens(tmp_path)}
    assert rows["PCL"][5:] == ["never [400..never]; 1 of 3", "never [1.00..never]"]
    assert rows["TRACE"][5:] == ["200 [200..never]; 2 of 3", "0.50 [0.50..never]"]


def lines_of_tokens(folder):
    return tokens_table(summary_of(folder)).splitlines()


def test_ratios_are_undefined_where_grpo_never_reaches(tmp_path):
    write(tmp_path, "grpo", seed=0, curve=rising(0.6))
    write(tmp_path, "grpo", seed=1, curve=rising(0.8))  # of two, the median 0.7 is reached by one
    write(tmp_path, "trace", curve=rising(2.0))
    summary = summary_of(tmp_path)
    assert summary.numbers["tokens_to"]["grpo"]["100%"]["tokens"].median == math.inf
    assert summary.numbers["tokens_to"]["trace"]["100%"]["to_grpo"] == {}
    verdict = {claim: (word, text) for claim, word, text in verdicts(summary)}["D2"]
    assert verdict[0] == "undecided" and "100%: no ratio" in verdict[1]


def test_gap_closed_is_paired_by_seed(tmp_path):
    ratios = {"uniform": (0.2, 0.3, 0.4), "trace": (0.6, 0.5, 0.5), "trace_oracle": (0.7, 0.7, 0.4)}
    for method, values in ratios.items():
        for seed, value in enumerate(values):
            write(tmp_path, method, seed=seed, effective_ratio=value)
    write(tmp_path, "trace", seed=7, effective_ratio=0.5)  # without a partner
    numbers = summary_of(tmp_path).numbers
    # The third seed's exact values are no better than uniform allocation
    assert dict(numbers["gap_closed_by_seed"]) == pytest.approx({0: 0.8, 1: 0.5})
    assert numbers["gap_closed"] == pytest.approx((0.5 - 0.3) / (0.7 - 0.3))


def test_a_sweep_decides_and_is_not_shown(tmp_path):
    for seed in (100, 101):
        write(tmp_path / "sweep", "trace", seed=seed, rate=0.1, curve=rising(0.4))
        write(tmp_path / "sweep", "trace", seed=seed, rate=0.2, curve=rising(0.6))
    for seed in (0, 1):
        write(tmp_path / "runs", "trace", seed=seed, rate=0.1, curve=rising(0.9))
        write(tmp_path / "runs", "trace", seed=seed, rate=0.2, curve=rising(0.5))
        write(tmp_path / "runs", "grpo", seed=seed, rate=0.3)
    runs, sweep = (load([tmp_path / name])[0] for name in ("runs", "sweep"))
    summary = summarise(runs, sweep)["chain"]
    choices = {choice.method: choice for choice in summary.choices}
    assert choices["trace"].best == 0.2 and list(choices["trace"].scores[0.2]) == [100, 101]
    assert choices["grpo"].best == 0.3 and choices["grpo"].edge == "one rate"
    assert [run.seed for run in summary.runs["trace"]] == [0, 1]
    assert summary.main["trace"]["success_at_leaves"].median == pytest.approx(0.5)
    # Without it the runs themselves decide
    assert {c.method: c.best for c in summarise(runs)["chain"].choices}["trace"] == 0.1


def test_a_method_without_runs_at_the_rate_of_the_sweep_is_named(tmp_path):
    write(tmp_path / "sweep", "trace", seed=100, rate=0.2)
    write(tmp_path / "runs", "trace", rate=0.1)
    write(tmp_path / "runs", "grpo")
    summary = summarise(load([tmp_path / "runs"])[0], load([tmp_path / "sweep"])[0])["chain"]
    assert list(summary.runs) == ["grpo"]
    assert "Left out, without a run of the whole budget at its best learning rate: TRACE." in summary.notes


def times(trace, tools=1.0, by_hand=0.9):
    """What step_speed.py says of a world, from seconds of a step."""

    def spread(median):
        return {"median": median, "least": median / 2, "most": median * 2}

    steps = {"grpo_trl": by_hand, "grpo_tools": tools, "trace": trace}
    return {
        "leaves": 8,
        "methods": {
            method: {"step": spread(step), "leaf": spread(step / 8), "parts": {"sampling": step / 4, "training": 0.5}}
            for method, step in steps.items()
        },
        "ratios": {f"trace / {method}": spread(trace / steps[method]) for method in ("grpo_trl", "grpo_tools")},
    }


def test_seconds_of_other_leaves_are_refused(tmp_path, capsys):
    write(tmp_path / "runs", "trace")
    speed = tmp_path / "speed.json"
    speed.write_text(json.dumps({"command": "", "summary": {"chain": times(0.6) | {"leaves": 4}}}))
    with pytest.raises(SystemExit):
        report.main([str(tmp_path / "runs"), "--check", "--speed", str(speed)])
    assert "measure them with `--leaves 8`" in capsys.readouterr().err


def test_seconds_table(tmp_path):
    write(tmp_path, "trace")
    summary = summary_of(tmp_path)
    summary.numbers["speed"] = times(0.6)
    assert seconds_table(summary).splitlines()[2:] == [
        "| a rollout written for TRL by hand | 0.90 [0.45..1.80] | 112.50 [56.25..225.00] | 0.23 | 0.50 |",
        "| TRL's tool loop | 1.00 [0.50..2.00] | 125.00 [62.50..250.00] | 0.25 | 0.50 |",
        "| TRACE | 0.60 [0.30..1.20] | 75.00 [37.50..150.00] | 0.15 | 0.50 |",
    ]


def test_calibration_by_depth_and_half(tmp_path):
    # Depth, value, outcome of every anchor, by step; the first one saw none
    steps = [[], [(0, 0.5, 1)], [(0, 0.5, 0), (2, 0.9, 1)], [(0, 0.25, 0), (2, 0.6, 0), (2, 0.7, 1)]]
    write(tmp_path, "trace", predictions=steps)
    found = summary_of(tmp_path).numbers["calibration"]
    assert list(found) == ["all", "roots", "depth 2"]
    # Halves: steps 1 and 2, steps 3 and 4
    squares = [[0.25], [0.25, 0.01, 0.0625, 0.36, 0.09]]
    means = [sum(map(sum, squares)) / 6, 0.25, sum(squares[1]) / 5]
    assert [spread.median for spread in found["all"]["brier"]] == pytest.approx(means)
    # Of the values 0.5, 0.9, 0.7 of successes and 0.5, 0.25, 0.6 of failures, 7.5 of 9 pairs are in order
    assert [spread.median for spread in found["all"]["auroc"]][::2] == pytest.approx([7.5 / 9, 1.0])
    assert not found["all"]["auroc"][1]  # one outcome only
    assert found["depth 2"]["auroc"][0].median == 1.0
    # Pooled: 0.5 was right half of the time, which no step by itself shows
    assert found["roots"]["ece"][0].median == pytest.approx(0.25 / 3)
    assert "| depth 2 | 0.153 | 0.333 | 1.000 | –, 0.153 | –, 0.333 | –, 1.000 |" in calibration_table(
        summary_of(tmp_path)
    )


def test_budget_by_chance_of_success(tmp_path):
    # Exact chance, predicted one, leaves, successes of every prompt, by step
    steps = [[(0.0, 0.5, 6, 0)], [(0.05, 0.1, 2, 0)], [(0.3, 0.2, 3, 1), (1.0, 0.9, 5, 5)], [(0.74, 0.5, 4, 4)]]
    write(tmp_path, "trace", roots=steps)
    write(tmp_path, "grpo_trl")
    summary = summary_of(tmp_path)
    found = summary.numbers["budget_by_chance"]
    assert list(found) == ["trace"]
    assert [spread.median for spread in found["trace"].values()] == pytest.approx([0.3, 0.1, 0.35, 0.0, 0.25])
    table = chances_table(summary)
    assert "| Method | below 0.05 | 0.05 to 0.25 | 0.25 to 0.75 | 0.75 to 0.95 | 0.95 and more |" in table
    assert "| TRACE | 0.30 | 0.10 | 0.35 | 0.00 | 0.25 |" in table


def test_ablations_are_cut_to_the_smallest_budget(tmp_path):
    half = {**WHOLE, "steps": 2, "tokens": 200}
    write(tmp_path, "trace", effective_ratio=[0.1, 0.3, 0.9, 0.9])
    for value, end in ((16, 0.5), (4, 0.6)):
        write(tmp_path, "trace", options=[["pool", value]], budget=half, curve=rising(end, steps=2))
    write(tmp_path, "uniform", options=[["pool", 4]])
    found = summary_of(tmp_path).numbers["ablations"]
    assert list(found) == ["pool", "pool (uniform / uniform)"]
    rows = found["pool"]["rows"]
    assert list(rows) == ["default", "4", "16"]
    assert [row["success_at_leaves"].median for row in rows.values()] == pytest.approx([0.4, 0.6, 0.5])
    assert rows["default"]["effective_ratio"].median == pytest.approx(0.2)
    assert summary_of(tmp_path).main["trace"]["effective_ratio"].median == pytest.approx(0.55)


def test_success_by_level(tmp_path):
    write(tmp_path, "trace")
    assert levels_table(summary_of(tmp_path)).splitlines()[::2] == [
        "| Method | Level 2 | Level 10 |",
        "| TRACE | 0.800 | 0.400 |",
    ]


def test_a_run_without_its_tokens_is_noted(tmp_path):
    write(tmp_path, "trace", curve=rising(0.8, tokens=50))
    summary = summary_of(tmp_path)
    assert summary.main["trace"]["success_at_tokens"].median == 0.8
    assert any("Ended before the tokens were spent" in note and "TRACE, 1." in note for note in summary.notes)
    assert any("without complete runs: GRPO (TRL's trainer); GRPO;" in note for note in summary.notes)


# Claims


def verdict(folder, claim):
    return {found: word for found, word, _ in verdicts(summary_of(folder))}[claim]


@pytest.mark.parametrize(
    "trace, grpo, pcl, treepo, word",
    [
        (0.5, 0.2, 0.3, 0.4, "met"),  # 2.5 times
        (0.4, 0.2, 0.3, 0.3, "not met"),  # twice
        (0.95, 0.6, 0.3, 0.4, "met"),  # above 0.9
        (0.5, 0.2, 0.5, 0.4, "not met"),
        (0.5, 0.2, 0.3, 0.6, "not met"),
    ],
)
def test_effective_ratio_claim(tmp_path, trace, grpo, pcl, treepo, word):
    for method, ratio in {"trace": trace, "grpo": grpo, "pcl": pcl, "treepo": treepo}.items():
        write(tmp_path, method, effective_ratio=ratio)
    assert verdict(tmp_path, "D1") == word


@pytest.mark.parametrize("end, word", [(1.7, "met"), (1.5, "not met"), (0.5, "not met")])
def test_tokens_claim(tmp_path, end, word):
    write(tmp_path, "grpo", curve=rising(0.8))
    write(tmp_path, "trace", curve=rising(end))
    assert verdict(tmp_path, "D2") == word


@pytest.mark.parametrize("mixed, word", [((1, 2, 3, 4), "met"), ((1, 1, 3, 4), "not met"), ((1, 2, 4, 4), "not met")])
def test_mixed_anchors_claim(tmp_path, mixed, word):
    for method, value in zip(("uniform", "root_only", "prefix_only", "trace"), mixed, strict=True):
        write(tmp_path, method, mixed_anchors=value)
    assert verdict(tmp_path, "D3, number") == word
    assert verdict(tmp_path, "D3, share") == word  # all have as many anchors that branch
    # The same numbers among fewer branches, and none among none
    write(tmp_path, "uniform", mixed_anchors=1, branched_anchors=1)
    assert verdict(tmp_path, "D3, number") == word
    assert verdict(tmp_path, "D3, share") == "not met"


@pytest.mark.parametrize("trace, word", [(0.75, "met"), (0.5, "not met")])
def test_oracle_claim(tmp_path, trace, word):
    for method, ratio in {"uniform": 0.25, "trace": trace, "trace_oracle": 0.875}.items():
        write(tmp_path, method, effective_ratio=ratio)
    assert verdict(tmp_path, "D4") == word


@pytest.mark.parametrize("seconds, word", [(0.7, "met"), (0.75, "not met"), (0.9, "not met")])
def test_seconds_claim(tmp_path, seconds, word):
    # Below 0.8 of both trainers of TRL, not of one only
    write(tmp_path, "trace")
    summary = summary_of(tmp_path)
    assert verdicts(summary)[-1][1] == "undecided"
    summary.numbers["speed"] = times(seconds)
    assert verdicts(summary)[-1][1] == word


def test_claims_without_their_runs_are_undecided(tmp_path):
    write(tmp_path, "trace")
    found = verdicts(summary_of(tmp_path))
    assert [word for _, word, _ in found] == ["undecided"] * 6
    assert found[0][2] == "no runs of GRPO; PCL; TreePO-style"
    assert found[-1][2] == ("no times (`--speed`) against TRL's tool loop and a rollout written for TRL by hand")


def test_compare(tmp_path):
    for seed, end in enumerate((0.2, 0.4, 0.6)):
        write(tmp_path / "theirs", "trace", seed=seed, curve=rising(end))
    write(tmp_path / "ours", "trace", curve=rising(0.6))
    write(tmp_path / "outside", "trace", curve=rising(0.7), rate=0.3)
    write(tmp_path / "outside", "grpo")
    ours, outside, theirs = (summarise(load([tmp_path / name])[0]) for name in ("ours", "outside", "theirs"))
    lines = compare(ours, theirs)
    assert "chain, TRACE: success, equal leaves 0.600 within 0.200..0.600" in lines
    assert lines[-1] == "6 of 6 within"
    lines = compare(outside, theirs)
    assert "chain, TRACE: success, equal tokens 0.700 outside 0.200..0.600" in lines
    assert "chain, TRACE: learning rates differ, 0.3 and 0.1" in lines
    assert "chain, GRPO: not among the others" in lines
    assert lines[-1] == "4 of 6 within"


def test_compare_with_what_was_published(tmp_path, capsys):
    for seed, end in enumerate((0.2, 0.4, 0.6)):
        write(tmp_path / "theirs", "trace", seed=seed, curve=rising(end))
        write(tmp_path / "theirs", "grpo", seed=seed)
    write(tmp_path / "ours", "trace", curve=rising(0.3))
    write(tmp_path / "ours", "grpo", curve=rising(0.1))
    file = tmp_path / "table.json"
    report.main([str(tmp_path / "theirs"), "--check", "--json", str(file)])
    capsys.readouterr()
    printed = []
    for others in (tmp_path / "theirs", file):
        report.main([str(tmp_path / "ours"), "--compare", str(others)])
        printed.append(capsys.readouterr().out.splitlines()[1:])
    assert printed[0] == printed[1]
    assert "chain, TRACE: success, equal leaves 0.300 within 0.200..0.600" in printed[0]
    assert "chain, GRPO: success, equal leaves 0.100 outside 0.800..0.800" in printed[0]
    assert printed[0][-1] == "10 of 12 within"


def test_nothing_is_within_the_spread_of_another_budget(tmp_path):
    write(tmp_path / "whole", "trace")
    write(tmp_path / "half", "trace", budget={**WHOLE, "steps": 2, "tokens": 200}, curve=ORDINARY[:3])
    ours, theirs = (summarise(load([tmp_path / name])[0]) for name in ("half", "whole"))
    lines = compare(ours, theirs)
    assert "budgets differ" in lines[0]
    assert lines[-1] == "0 of 0 within"


# Page and plots


def test_text_around_the_markers_stays(tmp_path):
    page = tmp_path / "results.md"
    page.write_text(f"# Ours\n\nBefore.\n\n{report.BEGIN}\nold\n{report.END}\n\nAfter.\n")
    for content in ("new", "newer"):
        report.write_page(page, content)
        assert page.read_text() == f"# Ours\n\nBefore.\n\n{report.BEGIN}\n\n{content}\n\n{report.END}\n\nAfter.\n"


def test_a_page_is_made_and_none_is_overwritten(tmp_path):
    report.write_page(tmp_path / "docs" / "new.md", "text")
    assert (tmp_path / "docs" / "new.md").read_text() == f"# Results\n\n{report.BEGIN}\n\ntext\n\n{report.END}\n"
    (tmp_path / "other.md").write_text("A page of something else.")
    with pytest.raises(ValueError, match="lacks the lines"):
        report.write_page(tmp_path / "other.md", "text")
    assert (tmp_path / "other.md").read_text() == "A page of something else."


def test_labels_keep_their_distance():
    heights = spread_out([0.1, 0.5, 0.5, 0.51], gap=0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in zip(heights, heights[1:], strict=False))
    assert heights[0] == 0.1


def strictly(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_everything_at_once(tmp_path, capsys):
    tree = {"budget_by_depth": {"0": 4, "1": 3, "2": 1}}
    scores = {"predictions": ((0, 0.3, 0), (0, 0.6, 1))}
    for seed in range(2):
        for method in TITLES:
            more = {"trace": tree | scores, "uniform": tree}.get(method, {})
            write(tmp_path / "equal_cost", method, seed=seed, curve=rising(0.8 if seed else 0.7), **more)
        write(tmp_path / "few", "trace", seed=seed, options=[["pool", 4]])
    write(tmp_path / "few", "grpo_trl", world="hops")
    folders = [str(tmp_path / name) for name in ("equal_cost", "few")]
    page, numbers, speed = tmp_path / "docs" / "results.md", tmp_path / "all.json", tmp_path / "speed.json"
    timing = "python benchmarks/step_speed.py --out speed.json --repeats 3"
    speed.write_text(json.dumps({"command": timing, "summary": {"chain": times(0.6)}}))
    report.main([*folders, "--page", str(page), "--json", str(numbers), "--check", "--speed", str(speed)])
    text = page.read_text()
    order = ["## Claims", "## Methods at equal cost", "## Plots", "## Learning rates", "## Tokens to GRPO's success"]
    order += ["## Calibration", "## Seconds", "## Success by level", "## Ablations"]
    assert [text.index(heading) for heading in order] == sorted(text.index(heading) for heading in order)

    links = re.findall(r"!\[.+?\]\((.+?)\)", text)
    assert len(links) == 5 + 3  # hops has neither trees nor a predictor
    for link in links:
        assert 2_000 < (page.parent / link).stat().st_size < 120_000
        assert (page.parent / link).read_bytes().startswith(b"\x89PNG")
    assert f"Made by `{timing}`, then `" in text
    tables = len(re.findall(r"^\| ---", text, re.MULTILINE)) - 2  # the claims name no command, seconds another
    assert text.count("Made by `python benchmarks/equal_cost.py --out") == tables + len(links)
    assert f"--out {folders[1]} --suite given`" in text

    found = json.loads(numbers.read_text(), parse_constant=strictly)
    assert found["chain"]["tokens_to"]["grpo"]["100%"]["tokens"]["median"] == "never"
    assert found["hops"]["claims"]["D1"]["verdict"] == "undecided"
    printed = capsys.readouterr().out
    complete = 2 * len(TITLES) + 2 + 1  # of chain: every method and an ablation, twice; of hops one
    assert f"Complete runs: {complete}. Incomplete files, left out: 0." in printed
    assert "D1 chain: not met: TRACE 0.500" in printed


@pytest.mark.parametrize("method", list(TITLES))
def test_any_method_alone(tmp_path, method):
    write(tmp_path, method)
    summary = summary_of(tmp_path)
    assert TITLES[method] in report.render({"chain": summary}, {"chain": {}}, "report", "")
    assert len(plot(summary, tmp_path)) == 3


def test_nothing_to_report(tmp_path, capsys):
    with pytest.raises(SystemExit):
        report.main([str(tmp_path)])
    assert "No complete runs." in capsys.readouterr().err


def test_check_writes_no_page(tmp_path, monkeypatch):
    write(tmp_path / "runs", "trace")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    report.main([str(tmp_path / "runs"), "--check", "--compare", str(tmp_path / "runs")])
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    report.main([str(tmp_path / "runs")])
    assert (tmp_path / "docs" / "results.md").exists()
    assert (tmp_path / "docs" / "results" / "chain_success.png").exists()
    assert "`python benchmarks/report.py runs`" in (tmp_path / "docs" / "results.md").read_text()


def test_discarded_leaves_count_at_equal_leaves(tmp_path):
    """GRPO trains 8 leaves a step, in 4 steps; of the other's 8 leaves a step as many were discarded as kept."""
    for method, leaves in (("grpo", 8), ("dapo", 16)):
        write(tmp_path, method, curve=rising(0.8), leaves=[leaves * step for step in range(1, 5)])
    main = summary_of(tmp_path).main
    assert main["grpo"]["success_at_leaves"].median == pytest.approx(0.8)
    assert main["dapo"]["success_at_leaves"].median == pytest.approx(0.4)
    # Tokens are told per trained leaf
    assert main["dapo"]["tokens_per_leaf"].median == main["grpo"]["tokens_per_leaf"].median == 400 / 32
