"""Starting several processes, and reading what they wrote."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

from waiting import until


ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
EVERY_PROCESS = Path(__file__).with_name("every_process")
LIMIT = 280.0  # seconds of a launch, ten times what it takes, and less than a test may take
# Options of torchrun, which `accelerate launch` gives to it as well: the launcher binds ports that the system chooses,
# on this machine's own interface. A port that is found free here may be another's by the time it is used.
OWN_PORTS = {"PET_STANDALONE": "1", "PET_LOCAL_ADDR": "127.0.0.1"}


def command_of(launcher: str, *script: str) -> list[str]:
    """A command that runs a script, or a module behind `-m`, in two processes or in one.

    Args:
        launcher: name of a file in accelerate_configs/, `"ddp"` for torchrun, `"zero2"` for ZeRO-2 on the CPU, `"one"`
            for a single process.
    """
    if launcher == "one":
        return [sys.executable, *script]
    if launcher == "ddp":
        # `accelerate launch` starts one process where there is no accelerator
        start = ["torch.distributed.run", "--nproc_per_node", "2"]
    else:
        config = ROOT / "accelerate_configs" / f"{'zero3_cpu' if launcher == 'zero2' else launcher}.yaml"
        start = ["accelerate.commands.launch", "--config_file", str(config)]
        if launcher == "zero2":
            start += ["--deepspeed_config_file", str(WORKER.with_name("zero2_cpu.json"))]
        if launcher == "fsdp2":
            start += ["--num_processes", "2", "--mixed_precision", "no"]
    return [sys.executable, "-m", *start, *script]


def worker(out: Path, *jobs: dict[str, Any]) -> list[str]:
    return [str(WORKER), str(out), json.dumps(jobs)]


def start(command: list[str], output: int | TextIO) -> subprocess.Popen:
    """Starts a command whose output goes to a pipe or a file."""
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
    path = os.pathsep.join([str(ROOT), str(EVERY_PROCESS)])
    env = {**os.environ, **quiet, **OWN_PORTS, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)


def launch(launcher: str, out: Path, *jobs: dict[str, Any], timeout: float = LIMIT, ok: bool = True) -> str:
    """Runs the worker on some jobs, to its end, and returns what it printed.

    Raises:
        AssertionError: if it fails, with the end of its output; with `ok=False`, if it does not.
    """
    return run(command_of(launcher, *worker(out, *jobs)), timeout, ok)


def run(command: list[str], timeout: float = LIMIT, ok: bool = True) -> str:
    """Runs a command as `launch` does."""
    process = start(command, subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end within {timeout} seconds\n{last_words(process)[-6000:]}") from None
    except BaseException:
        kill(process)
        raise
    assert (process.returncode == 0) == ok, f"exit status {process.returncode}\n{output[-6000:]}"
    return output


def last_words(process: subprocess.Popen) -> str:
    """Ends a launcher and the processes it started, and returns what they printed: where each of them was, too."""
    everyone = family(process)
    workers = everyone[1:] or everyone
    for member in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER
    with contextlib.suppress(AssertionError):
        until(lambda: all(map(has_ended, workers)))
    kill(process, everyone)
    return process.communicate(timeout=60)[0]


def family(process: subprocess.Popen) -> list[psutil.Process]:
    """A launcher and the processes it started, which are in sessions of their own."""
    launcher = psutil.Process(process.pid)
    return [launcher, *launcher.children(recursive=True)]


def kill(process: subprocess.Popen, everyone: list[psutil.Process] | None = None) -> None:
    """Ends a launcher and the processes it started, all at once."""
    everyone = everyone or family(process)
    for member in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    until(lambda: all(map(has_ended, everyone)))


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def results(out: Path, name: str) -> list[dict[str, Any]]:
    """What each process wrote."""
    return [json.loads(path.read_text()) for path in sorted(out.glob(f"{name}.*.json"))]


def forests(out: Path, name: str) -> list[list[list]]:
    """The trees of each process's generations."""
    return [
        [pickle.loads(generation) for generation in pickle.loads(path.read_bytes())]
        for path in sorted(out.glob(f"{name}.*.trees"))
    ]


def policy(out: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(out / f"{name}.policy", weights_only=True)


def head(out: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(out / f"{name}.head", weights_only=True)


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)
