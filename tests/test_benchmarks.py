"""The benchmarks start and print what they promise, on a scale that takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script, *arguments):
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_engine_overhead():
    """It watches parts of the engine by name, which a change of the engine may take away."""
    output = run("engine_overhead.py", "--rollouts", "12", "--repeats", "1", "--kinds", "chat", "string", "tools")
    rows = [line.split() for line in output.splitlines() if line.startswith(("chat", "string", "tools"))]
    assert [row[:2] for row in rows] == [["chat", "36"], ["string", "36"], ["tools", "36"]]
    assert "Largest mean" in output


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["trl", "trace"])
def test_tool_schedule(trainer):
    output = run("tool_schedule.py", "--trainer", trainer, "--steps", "1", "--rounds", "1")
    events = [line for line in output.splitlines() if line.startswith("EVENT ")]
    assert ['"started"' in events[0], '"finished"' in events[1]] == [True, True]


def test_env_throughput():
    names = ["server", "bfcl", "python"]
    output = run("env_throughput.py", "--episodes", "100", "--at_once", "16", "--environments", *names)
    rows = [line.split() for line in output.splitlines() if line.startswith(("server", "bfcl", "python"))]
    assert [row[0] for row in rows] == names
    assert all(int(row[1]) >= 100 and float(row[5]) > 0 for row in rows)
