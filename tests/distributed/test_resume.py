"""Six steps at once are three, a new start from the checkpoint, and three more."""

import json
import os
from pathlib import Path

import pytest
from launching import (
    command_of,
    head,
    kill,
    largest_difference,
    launch,
    policy,
    results,
    start,
    worker,
)
from transformers.trainer_utils import get_last_checkpoint

from waiting import until


pytestmark = pytest.mark.distributed

# Numbers that tell how long something took
TIMES = ("time", "runtime", "per_second", "seconds", "total_flos")


def comparable(logs, first_step):
    return [
        {key: value for key, value in entry.items() if not any(part in key for part in TIMES)}
        for entry in logs
        if "loss" in entry and entry["step"] >= first_step
    ]


def assert_close(first, second):
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == pytest.approx(other[key], abs=1e-6, nan_ok=True), key


# Where a generation lasts two steps, step 3 lies in the middle of one
BATCHES = {
    "at a generation's end": {},
    "inside a generation": {"gradient_accumulation_steps": 3, "steps_per_generation": 6},
}


KINDS = [(batch, lora) for batch in BATCHES for lora in (False, True)]


@pytest.fixture(scope="module", params=["one", "zero3_cpu", pytest.param("fsdp2", marks=pytest.mark.slow)])
def played(request, tmp_path_factory):
    """Every kind of run at once, and from its checkpoint."""
    out = tmp_path_factory.mktemp(request.param)
    jobs = []
    for batch, lora in KINDS:
        job = {"task": "train", "folder": f"{batch} {lora}", "lora": lora, "weight_decay": 0.01, **BATCHES[batch]}
        job["shuffle_dataset"] = True  # the six steps take two epochs
        jobs.append(job | {"max_steps": 6, "save_strategy": "steps", "save_steps": 3})
    launch(request.param, out, *[job | {"name": f"six {job['folder']}"} for job in jobs])
    launch(request.param, out, *[job | {"name": f"three {job['folder']}", "resume": "checkpoint-3"} for job in jobs])
    return out


@pytest.mark.parametrize(("batch", "lora"), KINDS)
def test_case_32_three_and_three_are_six(played, batch, lora):
    six, three = (f"{name} {batch} {lora}" for name in ("six", "three"))
    for one, other in zip(results(played, six), results(played, three), strict=True):
        assert_close(comparable(one["logs"], 4), comparable(other["logs"], 4))
        assert len(other["generations"]) == (1 if batch == "inside a generation" else 3)
    assert largest_difference(policy(played, six), policy(played, three)) <= 1e-6
    assert largest_difference(head(played, six), head(played, three)) <= 1e-6


def stopped_while_saving(out: Path, run: Path, command: list[str], halted: Path) -> None:
    """Starts a run and kills it when it stands still in its second save."""
    with (out / "log").open("w") as log:
        process = start(command, log)
    try:
        # One checkpoint is whole before, so that there is progress
        until(lambda: halted.exists() or process.poll() is not None, 250)
    finally:
        kill(process)
    assert halted.exists(), (out / "log").read_text()[-6000:]
    # Python knows of no moment within the writing of a tensor file: the last one is left as one that was being written
    files = [path for path in run.glob("_saving/**/*") if path.is_file()]
    if files:
        newest = max(files, key=lambda path: path.stat().st_mtime_ns)
        os.truncate(newest, newest.stat().st_size // 2)


@pytest.mark.parametrize(
    ("launcher", "halts"),
    [
        pytest.param("one", [(0, 0.0), (0, 0.1), (0, 0.2)], marks=pytest.mark.slow),
        pytest.param("one", [(0, 0.3), (0, 0.4), (0, 0.5)], marks=pytest.mark.slow),
        # In the last of these, the checkpoint is at its place, and old ones are being removed
        ("one", [(0, 0.95), (0, 0.6)]),
        pytest.param("one", [(0, 0.7), (0, 0.8)], marks=pytest.mark.slow),
        pytest.param("zero3_cpu", [(0, 0.5)], marks=pytest.mark.slow),
        ("zero3_cpu", [(1, 0.5)]),
    ],
)
def test_a_run_killed_while_saving_goes_on_from_the_last_whole_checkpoint(launcher, halts, tmp_path):
    """Kills that are spread over a save, each while a process stands still; every start finds the last checkpoint."""
    run = tmp_path / "run"
    job = {"task": "train", "name": "run", "resume": "last", "max_steps": 90, "save_strategy": "steps"}
    job |= {"save_steps": 1, "save_total_limit": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 3}
    cut, last = 0, 0
    for number, (process, share) in enumerate(halts):
        halted = tmp_path / f"halted-{number}"
        halt = {"file": halted.name, "process": process, "share": share}
        command = command_of(launcher, *worker(tmp_path, job | {"halt": halt}))
        stopped_while_saving(tmp_path, run, command, halted)
        whole = get_last_checkpoint(str(run))
        assert whole is not None
        step = json.loads((Path(whole) / "trainer_state.json").read_text())["global_step"]
        assert whole.endswith(f"checkpoint-{step}")
        assert step > last  # a start that did not find the checkpoint would begin anew
        last = step
        cut += (run / "_saving").exists()
    assert cut > 0  # else no kill came while a checkpoint was being written
    launch(launcher, tmp_path, job | {"max_steps": last + 1})
    for result in results(tmp_path, "run"):
        logged = [entry["step"] for entry in result["logs"] if "loss" in entry]
        assert logged == list(range(1, last + 2))  # those of the checkpoint, and one more
    assert not (run / "_saving").exists()
