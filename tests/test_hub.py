"""Pushing to the Hub and loading back, against a Hub on loopback; the model card's section; saved value heads."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from hub_jobs import REPOS
from hub_server import TOKEN, HubServer, blob_id, is_ignored
from trace_trl import SuccessPredictor, hub, model_card


# The first test waits for both jobs: half a minute where nothing else runs
pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
HEADING = "### Rollout budget and success predictor (TRACE)"


def run_job(server: HubServer, home: Path, job: str, *args) -> None:
    """Runs a job of `hub_jobs.py` with nothing but the loopback Hub to speak to, and an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {
        "HF_ENDPOINT": server.endpoint,
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(HERE.parent),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, str(HERE / "hub_jobs.py"), job, *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def hub_run(tmp_path_factory):
    """A Hub that was pushed to, and what the processes that pushed and loaded saw."""
    folder = tmp_path_factory.mktemp("hub")
    with HubServer() as server:
        run_job(server, folder / "home", "push", folder)
        commits = server.repos["tester/full"]
        first = next(commit for commit in commits if commit.message == "Training in progress, step 1, checkpoint")
        run_job(server, folder / "other_home", "load", folder, first.oid)
    return SimpleNamespace(
        server=server, folder=folder, pushed=torch.load(folder / "pushed"), loaded=torch.load(folder / "loaded")
    )


def messages(run, repo: str) -> list[str]:
    return [commit.message for commit in run.server.repos[repo]]


# Pushed and loaded back


@pytest.mark.parametrize("repo", REPOS)
def test_pushed_repo_gives_the_same_logits_and_values(hub_run, repo):
    pushed, loaded = hub_run.pushed[repo], hub_run.loaded[repo]
    assert torch.equal(loaded["logits"], pushed["logits"])
    torch.testing.assert_close(loaded["values"], pushed["values"], rtol=0, atol=1e-6)
    assert (pushed["values"] - 0.5).abs().max() > 1e-3  # trained: an untrained head says 0.5 of everything


def test_repo_root_holds_model_head_and_card(hub_run):
    common = {"README.md", "value_head.safetensors", "value_head_config.json", "tokenizer.json"}
    models = ("model.safetensors", "adapter_model.safetensors", "model.safetensors")
    for repo, model in zip(REPOS, models, strict=True):
        files = hub_run.server.files(repo)
        assert common | {model} <= set(files)
        assert json.loads(files["value_head_config.json"]) == {"input_size": 32, "hidden_size": 256}
    assert json.loads(hub_run.server.files("tester/adapter")["adapter_config.json"])["base_model_name_or_path"] == (
        "tester/base"
    )


def test_strategies_push_when_they_say(hub_run):
    progress = [f"Training in progress, step {step}" for step in (1, 2)]
    both = [message for step in progress for message in (step, f"{step}, checkpoint")]
    assert messages(hub_run, "tester/full") == ["initial commit", *both]
    assert messages(hub_run, "tester/adapter") == ["initial commit", *progress]
    assert messages(hub_run, "tester/end") == ["initial commit", "End of training", "Once more"]


def test_every_push_brings_the_head_of_its_step(hub_run):
    full = hub_run.pushed["tester/full"]["values"]
    assert (hub_run.loaded["earlier"] - full).abs().max() > 1e-4
    torch.testing.assert_close(hub_run.loaded["last"], full, rtol=0, atol=1e-6)
    for repo in ("tester/full", "tester/adapter"):
        heads = [
            commit.files["value_head.safetensors"]
            for commit in hub_run.server.repos[repo]
            if re.fullmatch(r"Training in progress, step \d", commit.message)
        ]
        assert len(heads) == len(set(heads)) == 2
        local = hub_run.folder / repo.split("/")[1]
        assert heads == [(local / f"checkpoint-{step}" / "value_head.safetensors").read_bytes() for step in (1, 2)]


def test_training_goes_on_from_a_downloaded_checkpoint(hub_run):
    resumed, straight = hub_run.loaded["resumed"], hub_run.pushed["tester/full"]
    assert resumed["steps"] == [1, 2]
    assert torch.equal(resumed["logits"], straight["logits"])
    assert torch.equal(resumed["values"], straight["values"])


def test_unfinished_checkpoints_and_trees_stay_at_home(hub_run):
    paths = {path for commits in hub_run.server.repos.values() for commit in commits for path in commit.files}
    assert "last-checkpoint/trace_state_0.pt" in paths
    assert not [path for path in paths if "_saving" in path]
    assert not [path for path in paths if path.startswith("checkpoint-")]
    assert not [path for path in paths if path.startswith("trees/")]
    # They were there
    assert (hub_run.folder / "end" / "_saving" / "checkpoint-9").exists()
    for name in ("adapter", "end"):
        assert list((hub_run.folder / name / "trees").glob("*.jsonl"))
        assert ".gitignore" in hub_run.server.files(f"tester/{name}")
    assert ".gitignore" not in hub_run.server.files("tester/full")  # logged no trees


def test_the_loopback_hub_answered_all_that_was_asked(hub_run):
    assert hub_run.server.unknown == []


def test_what_is_not_there_is_said(hub_run):
    errors = hub_run.loaded["errors"]
    assert "tester/base holds no value_head_config.json" in errors["tester/base"]
    assert "that TRACETrainer pushed" in errors["tester/base"]
    assert "correct the name, or pass the `token`" in errors["tester/nowhere"]
    assert "There is no folder" in errors[str(hub_run.folder / "nowhere")]


# Model card


@pytest.mark.parametrize("repo", REPOS)
def test_card_of_a_pushed_repo(hub_run, repo):
    for commit in hub_run.server.repos[repo][1:]:
        text = commit.files["README.md"].decode()
        _, header, body = text.split("---\n", 2)
        data = yaml.safe_load(header)
        assert {"trl", "grpo", "trace"} <= set(data["tags"])
        for line in (HEADING, "### Framework versions", "@article{trace2026,"):
            assert body.count(line) == 1
        assert body.index("## Training procedure") < body.index(HEADING) < body.index("### Framework versions")
        assert "4 bare rollouts from a pool of 6 prompts" in body and "4 x (1 + 2) = 12 leaves" in body
        assert f'SuccessPredictor.from_pretrained("{repo}")' in body
        assert f'AutoModelForCausalLM.from_pretrained("{repo}")' in body and "pipeline(" not in body
        assert re.search(r"^\| 1 \| \d\.\d{3} \| ", body, re.MULTILINE)
        assert "| Brier score | ECE, 10 bins | AUROC |" in body
    assert data.get("base_model") == (None if repo == "tester/end" else "tester/base")


def test_card_keeps_what_the_caller_said(hub_run):
    first = hub_run.server.repos["tester/end"][1].files["README.md"].decode()
    assert "- mine\n" in first and "tester/questions" in first


def test_card_of_a_later_push_knows_later_steps(hub_run):
    card = hub_run.server.files("tester/full")["README.md"].decode()
    curve = re.findall(r"^\| (\d+) \| (\d\.\d{3}) \| ", card, re.MULTILINE)
    assert [step for step, _ in curve] == ["1", "2"]
    state = json.loads(hub_run.server.files("tester/full")["last-checkpoint/trainer_state.json"])
    logged = [entry for entry in state["log_history"] if "effective_ratio" in entry]
    assert [f"{entry['effective_ratio']:.3f}" for entry in logged] == [ratio for _, ratio in curve]
    scored = [entry["predictor/brier"] for entry in logged if "predictor/auroc" in entry]
    assert f"\n| {sum(scored) / len(scored):.3f} | " in card


# The section, by hand


def section(log_history, **kwargs) -> str:
    options = dict(bare=16, continuations=2, leaves=48, pool=12, methods={"root_allocation": "active"}, has_head=True)
    return model_card.trace_section(log_history, **(options | kwargs))


def entry(step: int, **kwargs) -> dict:
    return {"step": step, "loss": 0.0, **{name.replace("__", "/"): value for name, value in kwargs.items()}}


def test_section_of_two_steps_by_hand():
    history = [
        entry(
            10,
            effective_ratio=0.25,
            mixed_anchor_ratio=0.5,
            predictor__brier=0.2,
            predictor__ece=0.1,
            predictor__auroc=0.6,
        ),
        {"step": 10, "eval_reward": 1.0},
        entry(20, effective_ratio=0.75, predictor__brier=0.1, predictor__ece=0.2, predictor__auroc=0.8),
        {"step": 20, "train_runtime": 3.0},
    ]
    assert section(history, repo="me/agent") == "\n".join(
        [
            HEADING,
            "",
            "Each generation drew 16 bare rollouts from a pool of 12 prompts, and 2 continuations per bare rollout "
            "from turn-level prefixes: 16 x (1 + 2) = 48 leaves (`root_allocation=active`).",
            "",
            "Effective ratio: share of the prompts with rollouts whose outcomes were mixed.",
            "Mixed anchors: the same for all from which several rollouts went on, prompts and turns inside rollouts.",
            "",
            "| Step | Effective ratio | Mixed anchors |",
            "| --- | --- | --- |",
            "| 10 | 0.250 | 0.500 |",
            "| 20 | 0.750 | - |",
            "",
            "Success predictor on outcomes it had not seen, mean over the last logged steps, 10 to 20 (a constant 0.5 "
            "has a Brier score of 0.25):",
            "",
            "| Brier score | ECE, 10 bins | AUROC |",
            "| --- | --- | --- |",
            "| 0.150 | 0.150 | 0.700 |",
            "",
            "The value head gives the chance of success at the last token of a conversation, before the next turn:",
            "",
            "```python",
            "from trace_trl import SuccessPredictor",
            'predictor = SuccessPredictor.from_pretrained("me/agent")',
            "value = predictor(model(**inputs, output_hidden_states=True).hidden_states[-1][:, -1])",
            "```",
            "",
        ]
    )


def curve_steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^\| (\d+) \| \d\.\d{3} \| ", text, re.MULTILINE)]


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        (1, [1]),
        (10, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (91, [1, 11, 21, 31, 41, 51, 61, 71, 81, 91]),
        (12, [1, 2, 3, 5, 6, 7, 8, 10, 11, 12]),  # 0, 1.2, 2.4, 3.7, 4.9, 6.1, 7.3, 8.6, 9.8, 11 from the first
    ],
)
def test_curve_has_at_most_ten_even_steps(steps, shown):
    history = [
        entry(step, effective_ratio=step / 100, predictor__brier=step / 100, predictor__auroc=step / 100)
        for step in range(1, steps + 1)
    ]
    text = section(history)
    assert curve_steps(text) == shown
    scored = range(max(1, steps - 9), steps + 1)  # the last ten
    mean = f"{sum(scored) / len(scored) / 100:.3f}"
    assert f"\n| {mean} | - | {mean} |\n" in text
    over = f"steps, {scored[0]} to {scored[-1]} (" if steps > 1 else "step 1 ("
    assert over in text


def test_section_passes_over_what_was_not_measured():
    history = [
        entry(1, effective_ratio=float("nan"), predictor__auroc=None, predictor__brier=float("inf")),
        entry(2, effective_ratio=0.5, predictor__auroc=0.9),
    ]
    text = section(history)
    assert curve_steps(text) == [2] and "nan" not in text and "inf" not in text
    assert "mean over step 2 (" in text and "| - | - | 0.900 |" in text
    assert '"path/to/this/folder"' in text
    bare = section([entry(1, loss=1.0)], has_head=False, continuations=0, leaves=16)
    assert "16 x (1 + 0) = 16 leaves" in bare
    assert "|" not in bare and "SuccessPredictor" not in bare


def test_case_50_calibration_on_one_kind_of_outcome_is_not_told():
    """Without both outcomes there is no AUROC, and a head that knows the one outcome has a Brier score near 0."""
    alike = [entry(step, effective_ratio=0.0, predictor__brier=0.0001, predictor__ece=0.001) for step in range(1, 9)]
    assert "Brier" not in section(alike)
    mixed = entry(9, effective_ratio=0.5, predictor__brier=0.2, predictor__ece=0.1, predictor__auroc=0.7)
    assert "mean over step 9 (" in section([*alike, mixed]) and "| 0.200 | 0.100 | 0.700 |" in section([*alike, mixed])


def test_a_step_trained_twice_is_told_once():
    text = section([entry(1, effective_ratio=0.1), entry(2, effective_ratio=0.2), entry(2, effective_ratio=0.9)])
    assert curve_steps(text) == [1, 2] and "| 2 | 0.900 |" in text and "0.200" not in text


def test_section_stands_before_the_framework_versions_once():
    card = "# Model Card\n\nText.\n\n### Framework versions\n\n- TRL: 1\n\n## Citations\n"
    first = model_card.insert_section(card, section([]))
    assert first.startswith(f"# Model Card\n\nText.\n\n{HEADING}\n\nEach generation")
    assert first.endswith("```\n\n### Framework versions\n\n- TRL: 1\n\n## Citations\n")
    assert model_card.insert_section(first, section([])) == first
    second = model_card.insert_section(first, section([entry(3, effective_ratio=0.5)], has_head=False))
    assert second.count(HEADING) == 1 and second.count("### Framework versions") == 1
    assert "| 3 | 0.500 |" in second and "SuccessPredictor" not in second


def test_section_stands_at_the_end_of_a_card_without_versions():
    once = model_card.insert_section("# Mine\n", section([]))
    assert once.startswith(f"# Mine\n\n{HEADING}\n") and once.endswith("```\n")
    assert model_card.insert_section(once, section([])) == once


# Pieces of a push


@pytest.mark.parametrize(
    ("strategy", "main", "always", "running", "pushes"),
    [
        ("every_save", True, False, None, True),
        ("every_save", True, False, False, True),
        ("every_save", True, False, True, False),
        ("checkpoint", True, True, True, True),
        ("end", True, True, None, False),
        ("all_checkpoints", False, True, None, False),
    ],
)
def test_head_is_brought_only_where_transformers_pushes(strategy, main, always, running, pushes):
    trainer = SimpleNamespace(
        is_world_process_zero=lambda: main, args=SimpleNamespace(hub_strategy=strategy, hub_always_push=always)
    )
    if main:  # other processes have none
        trainer.push_in_progress = None if running is None else SimpleNamespace(is_done=lambda: not running)
    assert hub.will_push(trainer) is pushes


def test_gitignore_of_the_user_stays(tmp_path):
    hub.keep_trees_local(tmp_path)
    written = (tmp_path / ".gitignore").read_text()
    assert is_ignored("trees/trees-000001.jsonl", written)
    assert not any(is_ignored(path, written) for path in ("model.safetensors", "rollout-trees/trees-000001.jsonl"))
    (tmp_path / ".gitignore").write_text("")
    hub.keep_trees_local(tmp_path)
    assert (tmp_path / ".gitignore").read_text() == ""


def test_loopback_hub_names_blobs_as_git_does():
    # git hash-object of a file that holds "hello\n"
    assert blob_id(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


# Value heads from folders


def test_head_from_a_folder_and_its_subfolder(tmp_path):
    head = SuccessPredictor(8, hidden_size=4)
    with torch.no_grad():
        head.output.weight.normal_(generator=torch.Generator().manual_seed(0))
    head.save_pretrained(tmp_path / "run" / "checkpoint-3")
    states = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    for arguments in (dict(repo_or_path=tmp_path / "run" / "checkpoint-3"), dict(subfolder="checkpoint-3")):
        again = SuccessPredictor.from_pretrained(**({"repo_or_path": str(tmp_path / "run")} | arguments))
        assert torch.equal(again(states), head(states))
    with pytest.raises(
        FileNotFoundError, match="run holds no value_head_config.json: pass a folder that TRACETrainer"
    ):
        SuccessPredictor.from_pretrained(tmp_path / "run")
    (tmp_path / "run" / "checkpoint-3" / "value_head.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"\(subfolder checkpoint-3\) holds no value_head.safetensors"):
        SuccessPredictor.from_pretrained(tmp_path / "run", subfolder="checkpoint-3")


def test_no_such_folder_while_offline(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no folder outputs/none, and the Hub could not be asked"):
        SuccessPredictor.from_pretrained("outputs/none", cache_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no folder .*no repo of this name"):
        SuccessPredictor.from_pretrained(tmp_path / "a" / "b")
