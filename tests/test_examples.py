"""The scripts of `examples/`, run as they are with a small random model: every task trains, evaluates and reports."""

import itertools
import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.toys import make_model, make_tokenizer


EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TRAINING = {
    "warm_start": "none",
    "max_steps": 1,
    "eval_rows": 2,
    "generation_batch_size": 6,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 6,
    "num_generations": 2,
    "max_turns": 2,
    "max_turn_length": 8,
    "max_completion_length": 200,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(max_position_embeddings=8192).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def start(script, **arguments):
        flags = [part for key, value in arguments.items() for part in (f"--{key}", str(value))]
        monkeypatch.setattr(sys, "argv", [script, *flags])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return start


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("train_hotpotqa.py", {"subset": "comparison"}, ["exact match", "token F1", "answered"]),
        ("train_math.py", {}, ["programs per episode", "failed programs"]),
        ("train_bfcl.py", {}, ["user turns played", "calls per episode", "unreadable calls"]),
        ("train_bfcl.py", {"subset": "miss_func", "call_format": "json"}, ["user turns played"]),
    ],
)
def test_training_script(script, arguments, words, run, model, tmp_path):
    output = run(script, model_name_or_path=model, output_dir=tmp_path, **TRAINING, **arguments)
    for word in ["evaluation", "before", "after", "reward", "success rate", "effective ratio", *words]:
        assert word in output
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["before"]) == set(results["after"]) >= {"reward", "success rate", *words}
    assert (tmp_path / "model.safetensors").is_file()


def test_a_subset_that_is_not_there_is_named(run, model, tmp_path):
    with pytest.raises(ValueError, match="No row has the subset 'bridges': there are bridge, comparison."):
        run("train_hotpotqa.py", model_name_or_path=model, output_dir=tmp_path, **TRAINING, subset="bridges")


EVALUATION = {"rows": 3, "samples": 2, "batch_size": 4, "max_turn_length": 8, "max_turns": 2}


@pytest.mark.parametrize(
    ("task", "arguments", "words"),
    [
        ("hotpotqa", {}, ["exact match", "searches", "bridge"]),
        ("hotpotqa", {"data": EXAMPLES / "data" / "2wikimultihopqa_dev_164.jsonl.gz"}, ["exact match"]),
        ("math", {"data": EXAMPLES / "data" / "math500.jsonl.gz"}, ["programs per episode"]),
        ("bfcl", {"docs": "brief", "subset": "long_context"}, ["calls per episode", "long_context"]),
    ],
)
def test_evaluation(task, arguments, words, run, model, tmp_path):
    output = run("evaluate_model.py", task=task, model=model, output_dir=tmp_path, **EVALUATION, **arguments)
    for word in ["rows", "samples", "pass@1", "pass@2", "reward", "turns", "tokens", "all", *words]:
        assert word in output
    results = json.loads((tmp_path / "results.json").read_text())["results"]["all"]
    assert (results["rows"], results["samples"]) == (3, 2)
    assert 1 <= results["turns"] <= 2 and 1 <= results["tokens"] <= 16


def test_an_evaluation_goes_on_where_it_was_stopped(run, model, tmp_path):
    arguments = {"task": "math", "model": model, "output_dir": tmp_path, **EVALUATION}
    run("evaluate_model.py", **arguments)
    path = tmp_path / "episodes.jsonl"
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 6
    # Stopped in the middle of a line
    path.write_text("\n".join(lines[:4]) + "\n" + lines[4][:20])
    run("evaluate_model.py", **arguments)
    again = path.read_text().splitlines()
    assert again[:4] == lines[:4]
    played = [(episode["id"], episode["sample"]) for episode in map(json.loads, again[1:])]
    assert len(played) == len(set(played)) == 6
    before = path.read_text()
    assert "pass@1" in run("evaluate_model.py", **arguments)  # nothing is left to play
    assert path.read_text() == before
    with pytest.raises(SystemExit, match="episodes of another setting"):
        run("evaluate_model.py", **arguments | {"temperature": 0.5})


def test_pass_at_k_is_the_share_of_draws_with_a_success(run, monkeypatch):
    pass_at_k = runpy.run_path(str(EXAMPLES / "evaluate_model.py"))["pass_at_k"]
    for samples in range(1, 7):
        for successes in range(samples + 1):
            outcomes = [True] * successes + [False] * (samples - successes)
            for k in range(1, samples + 1):
                draws = list(itertools.combinations(outcomes, k))
                assert pass_at_k(successes, samples, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_mathematics_demonstrations():
    sys.path.insert(0, str(EXAMPLES))
    try:
        from demonstrations import math as made
    finally:
        sys.path.remove(str(EXAMPLES))
    answer = "Sold 48/2 = <<48/2=24>>24 in May.\nIn all 48+24 = $<<48+24=72>>72.\n#### 72"
    program = made.program_of(answer)
    assert program == "# Sold 48/2\na = 48/2\n# In all 48+24\nb = 48+a\nprint(b)"
    assert made.program_of("So 20% of 5 is <<20%*5=1>>1.\n#### 1") is None
    assert made.program_of("No calculation.\n#### 1") is None
