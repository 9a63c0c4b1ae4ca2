"""Starting processes that run vLLM, and reading what they wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from launching import command_of, results, run  # noqa: E402


WORKER = Path(__file__).with_name("vllm_worker.py")


def launch(processes: int, out: Path, *jobs: dict[str, Any], timeout: float = 400) -> str:
    """Runs the worker on some jobs in one process or in two, to its end, and returns what it printed.

    Raises:
        AssertionError: if it fails, with the end of its output.
    """
    command = command_of({1: "one", 2: "ddp"}[processes], str(WORKER), str(out), json.dumps(jobs))
    return run(command, timeout)


__all__ = ["launch", "results"]
