"""The benchmark of rollouts on vLLM starts and prints what it promises, on a scale that takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest
from running import LIMIT, forget_processes


pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm_rollouts.py"


@pytest.mark.parametrize(
    ("what", "options", "promised"),
    [
        (
            "prefill",
            ["--prompt-tokens", "100", "--turns", "2"],
            "Trees with the cache, of linear rollouts without it:",
        ),
        ("continuous", ["--turns-list", "2", "--delay", "0.1", "--repeats", "1"], "identical"),
        ("tool_loop", ["--turns", "2", "--delays", "0", "--repeats", "1"], "TRACETrainer of GRPOTrainer:"),
    ],
)
def test_benchmark(what, options, promised):
    forget_processes()
    command = [sys.executable, str(SCRIPT), what, "--leaves", "12", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 0, result.stderr[-6000:]
    assert promised in result.stdout
