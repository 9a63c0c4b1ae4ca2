"""Rows and prompts of the mathematics task, shared by training, evaluation and the warm start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trace_trl.environments.math_answers import math_accuracy
from trace_trl.environments.math_data import load_problems
from trace_trl.environments.python import python_env


DATA = Path(__file__).resolve().parent / "data"
TRAIN_FILE = DATA / "gsm8k_train_2000.jsonl.gz"
TEST_FILE = DATA / "gsm8k_test.jsonl.gz"

SYSTEM_PROMPT = (
    "Solve the problem with Python. Write a program in a ```python block; you then read what it prints. "
    "When you know the answer, put it in \\boxed{}."
)


def build_prompt(problem: str) -> list[dict[str, str]]:
    """The messages an episode starts with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem}]


def load_rows(source: str | Path, **kwargs: Any) -> list[dict[str, Any]]:
    """Problems with their prompts; see [`load_problems`] for the arguments."""
    rows = load_problems(source, skip_faulty=True, **kwargs)
    return [{"prompt": build_prompt(row["problem"]), **row} for row in rows]


class MathTask:
    """
    Mathematics with a Python tool.

    Args:
        timeout (`float`, *optional*, defaults to `5.0`):
            Seconds of CPU time of a program.
    """

    name = "math"
    metrics = {"programs": "programs per episode", "program_errors": "failed programs"}

    def __init__(self, timeout: float = 5.0):
        self.env_reset, self.env_step = python_env(timeout=timeout)
        self.reward_funcs: list[Callable] = [math_accuracy]

    def train_rows(self, source: str | None = None, **kwargs: Any) -> Sequence[dict]:
        return load_rows(source or TRAIN_FILE, **kwargs)

    def test_rows(self, source: str | None = None, **kwargs: Any) -> Sequence[dict]:
        return load_rows(source or TEST_FILE, **kwargs)
