"""
Seconds and memory of an optimizer step under ZeRO-3, TRACETrainer's against GRPOTrainer's, with two processes.

    python benchmarks/step_cost.py

Both train the same model on the same prompts and tool calls, with as many leaves of as many turns (benchmarks/
tool_schedule.py). Every rollout needs equally many tool rounds, so that TRL's tool loop survives. TRACE's leaves share
prefixes, which are sampled once; it also reads values and trains its predictor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("tool_schedule.py")
CONFIG = ROOT / "accelerate_configs" / "zero3_cpu.yaml"


def measure(trainer: str, options: argparse.Namespace) -> tuple[list[float], float]:
    """Seconds of each optimizer step but the first, and peak memory in bytes, of the first process."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG)]
    command += ["--main_process_port", str(options.port), str(WORKER), "--trainer", trainer]
    for name in ("rounds", "steps", "leaves", "micro_batch", "hidden_size", "layers", "turn_tokens", "prompt_tokens"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True)
    events = [line.partition("EVENT ")[2] for line in result.stdout.splitlines() if line.startswith("EVENT ")]
    finished = [event for event in map(json.loads, events) if event["event"] == "finished"]
    if not finished:
        sys.exit(f"{trainer} did not finish:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
    # The first step makes what later ones use again
    return finished[0]["seconds"][1:], finished[0]["memory"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="tool rounds of every rollout")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--leaves", type=int, default=48, help="of a generation batch, per process")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--turn-tokens", type=int, default=24, help="words of a thought")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="words of a prompt")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, taking turns")
    parser.add_argument("--port", type=int, default=29690)
    options = parser.parse_args()

    seconds: dict[str, list[float]] = {"trl": [], "trace": []}
    memory: dict[str, list[float]] = {"trl": [], "trace": []}
    for _ in range(options.repeats):
        for trainer in seconds:
            steps, peak = measure(trainer, options)
            seconds[trainer] += steps
            memory[trainer].append(peak)
    print(f"{'':<14}{'s / step':>10}{'fastest':>10}{'slowest':>10}{'peak GB':>10}")
    for trainer, name in (("trl", "GRPOTrainer"), ("trace", "TRACETrainer")):
        times = seconds[trainer]
        row = [statistics.mean(times), min(times), max(times), max(memory[trainer]) / 1e9]
        print(f"{name:<14}" + "".join(f"{number:>10.2f}" for number in row))
    ratios = [
        statistics.mean(seconds["trace"]) / statistics.mean(seconds["trl"]),
        max(memory["trace"]) / max(memory["trl"]),
    ]
    print(f"TRACETrainer / GRPOTrainer: time {ratios[0]:.2f}, memory {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
