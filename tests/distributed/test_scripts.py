"""Scripts of `examples/` in two processes."""

import json
import re
from pathlib import Path

import pytest
from launching import ROOT, command_of, run

from tests.toys import make_model, make_tokenizer


pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(max_position_embeddings=8192).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def test_evaluation_plays_every_episode_once(model, tmp_path):
    """Five episodes for two processes with batches of two: the second process runs out of rows before the first."""
    flags = "--task math --rows 5 --max_turns 2 --max_turn_length 8 --max_completion_length 100 --batch_size 2".split()
    script = [str(ROOT / "examples" / "evaluate_model.py"), *flags, "--model", model, "--output_dir", str(tmp_path)]
    output = run(command_of("ddp", *script))
    assert re.search(r"\nrows +5 ", output)
    path = Path(tmp_path) / "episodes.jsonl"
    episodes = list(map(json.loads, path.read_text().splitlines()[1:]))
    assert len({episode["id"] for episode in episodes}) == len(episodes) == 5
    # The same random model says something else on every process
    assert len({str(episode["text"]) for episode in episodes}) == 5
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]))
    output = run(command_of("ddp", *script))
    assert re.search(r"\nrows +5 ", output)
    assert path.read_text().splitlines(keepends=True)[:4] == lines[:4]
    assert len(path.read_text().splitlines()) == 6


def test_a_training_script_reports_once(model, tmp_path):
    """Three rows for two processes: one of them comes twice."""
    flags = {
        "model_name_or_path": model,
        "warm_start": "none",
        "output_dir": tmp_path,
        "max_steps": 1,
        "eval_rows": 3,
        "per_device_eval_batch_size": 2,
        "generation_batch_size": 12,
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 1,
        "num_generations": 2,
        "max_turn_length": 8,
        "ddp_backend": "gloo",
    }
    script = [str(ROOT / "examples" / "train_hotpotqa.py"), *(str(x) for k, v in flags.items() for x in (f"--{k}", v))]
    output = run(command_of("ddp", *script))
    assert "token F1" in output and "effective ratio" in output
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results) == {"before", "after"}
