"""
Which schedules of tool rounds TRL's GRPOTrainer and TRACETrainer get through under ZeRO-3, with two processes.

    python benchmarks/zero3_tool_loop.py

In each of 20 random schedules, prompts need 0 to 4 tool rounds, and more on one process than on the other. A training
is two optimizer steps on a tiny model; it finishes, crashes, or hangs (no answer within `--limit` seconds). What
benchmarks/tool_schedule.py trains is started again behind each that did not finish.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("tool_schedule.py")
CONFIG = ROOT / "accelerate_configs" / "zero3_cpu.yaml"


def play(trainer: str, gather: bool, seeds: list[int], limit: float, port: int) -> dict[int, tuple[str, str]]:
    """What became of each schedule, and the last line of its error."""
    outcomes: dict[int, tuple[str, str]] = {}
    left = list(seeds)
    while left:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG)]
        command += ["--main_process_port", str(port), str(WORKER), "--trainer", trainer]
        command += [] if gather else ["--no-gather"]
        command += ["--seeds", *map(str, left)]
        port += 1
        outcome, error, done = watch(command, limit)
        for seed in done:
            outcomes[seed] = "finishes", ""
        left = [seed for seed in left if seed not in done]
        if left and outcome != "finishes":
            outcomes[left[0]] = outcome, error
            print(f"{trainer} gather={gather} schedule {left[0]}: {outcome} {error[:160]}", flush=True)
            left.pop(0)
    return outcomes


def watch(command: list[str], limit: float) -> tuple[str, str, list[int]]:
    """Runs the worker until it ends or says nothing for `limit` seconds behind a start."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:  # type: ignore[union-attr]
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    done: list[int] = []
    error = ""
    deadline = time.monotonic() + 120  # for the start of the processes
    while True:
        try:
            line = lines.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            stop(process)
            return "hangs", "", done
        if line is None:
            return ("finishes" if process.wait() == 0 else "crashes"), error, done
        if line.startswith("EVENT "):
            event = json.loads(line.removeprefix("EVENT "))
            deadline = time.monotonic() + limit
            if event["event"] == "finished":
                done.append(event["seed"])
        elif "Error" in line and not error:
            error = line.strip()


def stop(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", nargs="+", default=["trl", "trace"], choices=["trl", "trace"])
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--limit", type=float, default=60, help="seconds until a training counts as hanging")
    parser.add_argument("--port", type=int, default=29710)
    options = parser.parse_args()

    started = time.monotonic()
    print(f"{'':<14}{'gather':>8}{'finishes':>10}{'crashes':>10}{'hangs':>8}")
    for trainer in options.trainers:
        for gather in (True, False):
            outcomes = play(trainer, gather, list(range(options.schedules)), options.limit, options.port)
            counts = [sum(kind == name for kind, _ in outcomes.values()) for name in ("finishes", "crashes", "hangs")]
            name = "GRPOTrainer" if trainer == "trl" else "TRACETrainer"
            print(f"{name:<14}{'on' if gather else 'off':>8}{counts[0]:>10}{counts[1]:>10}{counts[2]:>8}", flush=True)
            errors = sorted({error for _, error in outcomes.values() if error})
            for error in errors[:3]:
                print(f"    {error[:150]}")
    print(f"{options.schedules} schedules each, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
