"""Demonstrations for the mathematics example: word problems with the program that solves them, and the answer."""

from __future__ import annotations

from tasks.math import build_prompt
from tasks.word_problems import make_problems

from trace_trl.environments.python import PythonEnvironment


Messages = list[dict[str, str]]


def build_demonstrations(count: int = 240, seed: int = 0) -> list[Messages]:
    """
    Args:
        count (`int`, *optional*, defaults to `240`):
            Number of demonstrations.
        seed (`int`, *optional*, defaults to `0`):
            Of the problems; other ones than those of training and evaluation.

    Returns:
        `list[list[dict]]`: conversations.
    """
    environment = PythonEnvironment()
    demonstrations = []
    for row in make_problems(count, seed=10_000 + seed):
        turn = f"```python\n{row['program']}\n```"
        state = environment.reset(row)
        observation = str(environment.step(state, turn).observation)
        state.close()
        assert observation == f"```output\n{row['answer']}\n```", row
        demonstrations.append(
            [
                *build_prompt(row["problem"]),
                {"role": "assistant", "content": turn},
                {"role": "user", "content": observation},
                {"role": "assistant", "content": f"The answer is \\boxed{{{row['answer']}}}."},
            ]
        )
    environment.close()
    return demonstrations
