"""The scripts of `examples/`, run as they are with a small random model: every task trains, evaluates and reports."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from trl import ModelConfig, TrlParser

from tests.toys import make_model, make_tokenizer, make_trainer, speak
from trace_trl import TRACEConfig
from trace_trl.model_card import base_model_id


ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
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
        ("train_bfcl.py", {"subset": "all", "api_class": "all", "call_format": "json"}, ["user turns played"]),
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


EVALUATION = {
    "rows": 3,
    "samples": 2,
    "batch_size": 4,
    "max_turn_length": 8,
    "max_turns": 2,
    "max_completion_length": 200,
}


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
    assert re.search(r"\nsuccess  [\w ]+ of at least 1\n", output)
    for word in ["rows", "samples", "pass@1", "pass@2", "turns", "tokens", "all", *words]:
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
    episodes = list(map(json.loads, again[1:]))
    played = [(episode["id"], episode["sample"]) for episode in episodes]
    assert len(played) == len(set(played)) == 6
    # Other samples of the same policy, not the first ones again
    assert not {str(e["text"]) for e in episodes[:3]} & {str(e["text"]) for e in episodes[3:]}
    before = path.read_text()
    assert "pass@1" in run("evaluate_model.py", **arguments)  # nothing is left to play
    assert path.read_text() == before
    assert re.search(r"\nrows +2 ", run("evaluate_model.py", **arguments | {"rows": 2}))
    with pytest.raises(SystemExit, match="episodes of another setting"):
        run("evaluate_model.py", **arguments | {"temperature": 0.5})
    path.write_text("\n".join([*again[:2], again[2][:20], *again[3:]]))
    damaged = path.read_text()
    with pytest.raises(SystemExit, match="episodes.jsonl, line 3 can't be read"):
        run("evaluate_model.py", **arguments)
    assert path.read_text() == damaged


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"task": "math", "retrieval_url": "http://x"}, "--retrieval_url is for --task hotpotqa"),
        ({"task": "hotpotqa", "docs": "brief"}, "--docs is for --task bfcl"),
        (
            {"task": "math", "max_turns": 2},
            "Give the limits of an episode .* --max_turn_length, --max_completion_length",
        ),
        ({"task": "math", "samples": 0}, "must be at least 1"),
    ],
)
def test_evaluation_arguments(arguments, sentence, run, capsys):
    with pytest.raises(SystemExit):
        run("evaluate_model.py", model="owner/name", **arguments)
    assert re.search(sentence, capsys.readouterr().err)


def test_evaluation_of_an_adapter_and_by_greedy_decoding(run, model, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    arguments = {"task": "math", "output_dir": tmp_path, **EVALUATION, "temperature": 0}
    run("evaluate_model.py", model=tmp_path / "adapter", **arguments)
    episodes = list(map(json.loads, (tmp_path / "episodes.jsonl").read_text().splitlines()[1:]))
    texts = {(episode["id"], str(episode["text"])) for episode in episodes}
    assert len(texts) == 3  # both samples of a row are the same


@pytest.fixture
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_evaluation_measures_what_is_known(on_path, tmp_path):
    """A policy that answers one of three questions right, one half right, one not at all: worked out by hand."""
    from tasks.hotpotqa import SearchTask

    module = runpy.run_path(str(EXAMPLES / "evaluate_model.py"))
    task = SearchTask()
    rows = task.test_rows()[:3]
    for row, answers in zip(rows, (["red"], ["green apple", "apple"], ["blue"]), strict=True):
        row["answers"] = answers
    said = {
        rows[0]["question"]: "Action: finish[the red]",
        rows[1]["question"]: "Action: finish[an apple tree]",
        rows[2]["question"]: "Action: dance[now]",
    }
    policy, tokenizer = make_model(max_position_embeddings=8192), make_tokenizer()
    speak(policy, tokenizer, lambda history: next(turn for question, turn in said.items() if question in history))
    trainer = make_trainer(
        tmp_path,
        model=policy,
        tokenizer=tokenizer,
        dataset=Dataset.from_list(rows),
        reward_funcs=task.reward_funcs,
        env_reset=task.env_reset,
        env_step=task.env_step,
        max_turns=2,
        max_completion_length=1000,
        success_threshold=1.0,
    )
    played = [(row, sample) for row in rows for sample in range(2)]
    trees = trainer.rollout([row for row, _ in played])
    episodes = [module["describe"](tree, *pair, task) for tree, pair in zip(trees, played, strict=True)]
    results = module["summarise"](episodes, task)["all"]
    # 2/3: precision 1/2 and recall 1 for "apple"
    assert results["token F1"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert results["exact match"] == results["pass@1"] == results["pass@2"] == pytest.approx(1 / 3)
    assert results["turns"] == pytest.approx((1 + 1 + 2) / 3)
    assert results["invalid actions"] == pytest.approx((0 + 0 + 2) / 3)
    assert results["cut by a limit"] == pytest.approx(1 / 3)
    assert (results["rows"], results["samples"]) == (3, 2)


def test_an_evaluation_counts_its_own_answers_only(on_path):
    from tasks.hotpotqa import SearchTask

    class State:
        answer = "red"

    task = SearchTask()

    def log_extra(column, values):
        pass

    # In training
    task.reward(environments=[State()] * 3, id=["a", "b", "c"], answers=[["x"]] * 3, log_extra=log_extra)
    task.begin_evaluation()
    rewards = task.reward(
        environments=[State(), State()], id=["a", "b"], answers=[["green", "red"], ["red one"]], log_extra=log_extra
    )
    assert rewards == pytest.approx([1, 2 / 3])
    results = task.evaluation_results({})
    assert results == pytest.approx({"answered": 1.0, "exact match": 0.5, "token F1": (1 + 2 / 3) / 2})
    assert task.reward.answers == []
    # Two processes share three rows: the first fills the last batch up, and is counted once
    task.reward(
        environments=[State()] * 4,
        id=["a", "b", "c", "a"],
        answers=[["red"], ["x"], ["x"], ["red"]],
        log_extra=log_extra,
    )
    assert task.evaluation_results({})["exact match"] == pytest.approx(1 / 3)


def documented_commands():
    pages = [*(ROOT / "docs").glob("*.md"), *EXAMPLES.rglob("README.md"), *EXAMPLES.glob("*.py")]
    for path in sorted(pages):
        text = path.read_text()
        if path.suffix == ".py":
            text = text.split('"""')[1]
        text = re.sub(r"\\\n +", " ", text)
        quoted = re.findall(r"`((?:accelerate launch|python)\s[^`]*?examples/\w+\.py[^`]*)`", text)
        lines = re.findall(r"^ *((?:accelerate launch|python) .*examples/\w+\.py.*)$", text, re.MULTILINE)
        for command in [*quoted, *lines]:
            command = " ".join(command.split("#")[0].split())
            if "..." not in command:
                yield pytest.param(command, id=f"{path.name}: {command[-60:]}")


@pytest.mark.parametrize("command", list(documented_commands()))
def test_documented_commands_are_understood(command, on_path, monkeypatch):
    """Flags exist and values are of their types; budgets fit the number of processes."""
    launcher, name, flags = re.fullmatch(r"(.*?)examples/(\w+\.py)(.*)", command).groups()
    processes = re.search(r"--num_processes (\d+)", launcher)
    for config in re.findall(r"accelerate_configs/\w+\.yaml", launcher):
        assert (ROOT / config).is_file()
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(flags)])
    if not name.startswith("train"):
        parse = runpy.run_path(str(EXAMPLES / name))["parse_arguments"]
        assert parse()
        return
    seen = {}

    def stop(self):
        seen["config"] = parse_args(self)
        raise SystemExit

    parse_args = TrlParser.parse_args_and_config
    monkeypatch.setattr(TrlParser, "parse_args_and_config", stop)
    monkeypatch.setattr(TRACEConfig, "world_size", property(lambda self: int(processes[1]) if processes else 1))
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True, raising=False)
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    _, config, _ = seen["config"]
    if processes:
        assert config.generation_batch_size == 3072
        assert config.generation_batch_size // (1 + config.continuations_per_root) == 1024
        per_step = config.per_device_train_batch_size * int(processes[1]) * config.gradient_accumulation_steps
        assert per_step == config.generation_batch_size


def test_there_are_commands_for_the_paper_s_models():
    commands = [parameter.values[0] for parameter in documented_commands()]
    for name in ("train_hotpotqa.py", "train_bfcl.py", "train_math.py"):
        assert sum(f"--num_processes 8 examples/{name}" in command for command in commands) == 1
    assert len(commands) > 12


@pytest.fixture
def word_problems():
    sys.path.insert(0, str(EXAMPLES))
    try:
        from tasks import word_problems
    finally:
        sys.path.remove(str(EXAMPLES))
    return word_problems


def test_word_problems_have_the_answers_of_their_programs(word_problems):
    problems = word_problems.make_problems(300, seed=5)
    assert problems == word_problems.make_problems(300, seed=5)
    assert len({row["problem"] for row in problems}) == len({row["id"] for row in problems}) == 300
    for row in problems:
        printed = []
        exec(row["program"], {"print": printed.append})
        assert printed == [int(row["answer"])] and printed[0] > 0
        steps = len(row["program"].splitlines()) - 2
        assert row["subset"] == f"{steps} step{'s' * (steps > 1)}"
        assert all(number in row["problem"] for number in re.findall(r"\d+", row["program"]))
    assert {row["subset"] for row in problems} == {"1 step", *(f"{n} steps" for n in range(2, 6))}


def test_no_problem_of_the_evaluation_is_trained_or_shown(word_problems):
    seeds = {1: 400, 2: 200, 10_000: 240}
    train, test, shown = (
        {row["problem"] for row in word_problems.make_problems(count, seed)} for seed, count in seeds.items()
    )
    assert not test & (train | shown)


def test_case_61_a_model_that_is_unpacked_keeps_its_id(on_path, monkeypatch, model):
    """Where the default model comes from a folder, the model card is told its id on the Hub."""
    import training

    monkeypatch.setattr(training, "resolve_model", lambda name: model)
    script_args = SimpleNamespace(warm_start="none")
    loaded, _ = training.load_model(
        None, script_args, SimpleNamespace(trust_remote_code=False), ModelConfig(model_name_or_path="org/small")
    )
    assert base_model_id(loaded) == "org/small"
