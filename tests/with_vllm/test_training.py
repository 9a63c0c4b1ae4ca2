"""Training on turns that vLLM samples: its log-probs are the trainer's, and its trees give the same losses."""

from pathlib import Path

import pytest
from running import launch, results, server


pytestmark = pytest.mark.vllm

CLOSE = 1e-4


def check(result, steps=20):
    assert len(result["logs"]) == steps
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in result["logs"]) < CLOSE
    # Every ratio of trainer to sampler is 1, also in rows whose prefix was sampled by another branch
    for end in ("min", "max"):
        ratios = [entry[f"sampling/importance_sampling_ratio/{end}"] for entry in result["logs"]]
        assert ratios == pytest.approx([1.0] * steps, abs=CLOSE)
    assert max(result["advantages"]) < CLOSE
    for loss, other in result["losses"]:
        assert loss == pytest.approx(other, abs=CLOSE)
    assert any(abs(loss) > 10 * CLOSE for loss, _ in result["losses"])
    assert result.get("unfinished", 0) == 0


@pytest.mark.parametrize("mode", ["continuous", pytest.param("lockstep", marks=pytest.mark.slow)])
def test_one_process(mode, tmp_path):
    launch("one", tmp_path, {"task": "train", "name": "run", "vllm_rollout_mode": mode})
    (result,) = results(tmp_path, "run")
    check(result)


@pytest.fixture
def killed_run():
    """The shared memory that a killed run of two processes with one engine leaves behind."""
    left = [Path(f"/dev/shm/-tp:0-[0-1]-cpushm_{rank}") for rank in range(2)]
    made = [path for path in left if not path.exists()]
    for path in made:
        path.touch()
    yield
    for path in made:
        path.unlink()


@pytest.mark.usefixtures("killed_run")
@pytest.mark.parametrize(
    ("launcher", "group", "mode"),
    [
        pytest.param("ddp", 1, "continuous", marks=pytest.mark.slow),
        ("ddp", 2, "continuous"),
        pytest.param("ddp", 2, "lockstep", marks=pytest.mark.slow),
        pytest.param("fsdp2", 1, "lockstep", marks=pytest.mark.slow),
    ],
)
def test_two_processes(launcher, group, mode, tmp_path):
    """With a group of 2, both hold one engine between them (tensor parallelism)."""
    options = {"vllm_tensor_parallel_size": group, "vllm_rollout_mode": mode}
    launch(launcher, tmp_path, {"task": "train", "name": "run", **options})
    both = results(tmp_path, "run")
    assert len(both) == 2
    for result in both:
        check(result)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_server(processes, tmp_path):
    """Weights go to the server by a test's own way (gloo_weights.py): vLLM's needs NCCL."""
    with server(tmp_path / "server.log") as url:
        options = {"vllm_mode": "server", "vllm_server_base_url": url}
        launch({1: "one", 2: "ddp"}[processes], tmp_path, {"task": "train", "name": "run", **options})
    found = results(tmp_path, "run")
    assert len(found) == processes
    for result in found:
        check(result)
        assert all("rollout/cached_tokens" in entry for entry in result["logs"])
