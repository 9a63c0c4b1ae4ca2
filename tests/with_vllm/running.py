"""Starting processes that run vLLM, and reading what they wrote."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from launching import LIMIT, ROOT, command_of, family, kill, results, run  # noqa: E402


HERE = Path(__file__).parent
WORKER = HERE / "vllm_worker.py"
START = 240  # seconds a server may take to start
END = 60  # and to end


def forget_processes() -> None:
    """Takes back what a trainer with vLLM in this process has set for its own process group, before others start."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def launch(launcher: str, out: Path, *jobs: dict[str, Any], timeout: float = LIMIT) -> str:
    """Runs the worker on some jobs in one process or in two, to its end, and returns what it printed.

    Raises:
        AssertionError: if it fails, with the end of its output.
    """
    forget_processes()
    return run(command_of(launcher, str(WORKER), str(out), json.dumps(jobs)), timeout)


@contextlib.contextmanager
def server(log: Path, *options: str) -> Iterator[str]:
    """A vLLM server of the chain world's policy, and its address."""
    port = log.with_suffix(".port")
    command = [sys.executable, str(HERE / "serve.py"), "--model", str(ROOT / "benchmarks/worlds/warm_start/chain")]
    command += ["--host", "127.0.0.1", "--port", "0", "--max-num-seqs", "64", "--max-logprobs", "-1"]
    command += ["--dtype", "float32", "--enforce-eager", "--block-size", "32"]
    command += ["--logprobs-mode", "processed_logprobs", "--worker-extension-cls", "gloo_weights.Extension", *options]
    forget_processes()
    path = os.pathsep.join([str(ROOT), str(HERE)])
    told = {"PYTHONPATH": path, "PORT_FILE": str(port)}
    env = {**os.environ, **told, "VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
    try:
        yield wait_for(port, process, log)
    finally:
        stop(process)


def stop(process: subprocess.Popen) -> None:
    """Asks a server to end, since a killed one leaves shared memory behind, and kills what is still there."""
    everyone = family(process) if process.poll() is None else []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END)
    kill(process, everyone)


def wait_for(port: Path, process: subprocess.Popen, log: Path) -> str:
    """The address of a server, once it answers."""
    ends = time.monotonic() + START
    while time.monotonic() < ends and process.poll() is None:
        if port.exists():
            url = f"http://127.0.0.1:{port.read_text()}"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=60):
                return url
        time.sleep(0.5)
    raise AssertionError(f"the server did not start\n{log.read_text()[-6000:]}")


__all__ = ["LIMIT", "forget_processes", "launch", "results", "server"]
