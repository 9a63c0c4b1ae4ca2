"""Mathematics with a Python tool: word problems made by rule, or any data set with problems and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trace_trl.environments.math_answers import MathAccuracy
from trace_trl.environments.math_data import load_problems
from trace_trl.environments.python import python_env

from . import Row, Task
from .word_problems import make_problems


SYSTEM_PROMPT = (
    "Solve the problem with Python. Write a program in a ```python block; you then read what it prints. "
    "When you know the answer, put it in \\boxed{}."
)


def build_prompt(problem: str) -> list[dict[str, str]]:
    """The messages an episode starts with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem}]


def with_prompts(rows: list[Row]) -> list[Row]:
    columns = ("id", "problem", "answer", "subset")
    return [{"prompt": build_prompt(row["problem"]), **{key: row[key] for key in columns}} for row in rows]


class MathTask(Task):
    """
    Args:
        timeout (`float`, *optional*, defaults to `5.0`):
            Seconds of CPU time of a program.
        isolation (`str`, *optional*, defaults to `"strict"`):
            `"limits"` where the kernel can't isolate programs, see [`Sandbox`].
    """

    name = "math"
    reward_name = "right answers"
    metrics = {"programs": "programs per episode", "program_errors": "failed programs"}

    def __init__(self, timeout: float = 5.0, isolation: str = "strict"):
        self.env_reset, self.env_step = python_env(timeout=timeout, isolation=isolation)
        self.reward_funcs = [MathAccuracy(isolation=isolation)]

    def train_rows(self, source: str | Path | None = None, **kwargs: Any) -> list[Row]:
        if source is None:
            return with_prompts(make_problems(400, seed=1))
        # DeepScaleR has rows with an empty answer. What is evaluated on is not thinned out so
        return with_prompts(load_problems(source, skip_faulty=True, **kwargs))

    def test_rows(self, source: str | Path | None = None, **kwargs: Any) -> list[Row]:
        if source is None:
            return with_prompts(make_problems(200, seed=2))
        return with_prompts(load_problems(source, **kwargs))
