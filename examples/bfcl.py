"""Rows of the BFCL v4 multi-turn task, shared by training, evaluation and the warm start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trace_trl.environments.bfcl import SUBSETS, BFCLEnvironment


class BFCLTask:
    """
    Function calling over several user turns. The environment gives the reward itself.

    Args:
        **kwargs:
            Arguments of [`BFCLEnvironment`].
    """

    name = "bfcl"
    metrics = {
        "user_turns": "user turns played",
        "calls": "calls per episode",
        "failed_calls": "failed calls",
        "invalid": "unreadable calls",
    }

    def __init__(self, **kwargs: Any):
        self.environment = BFCLEnvironment(**kwargs)
        self.env_reset, self.env_step = self.environment.reset, self.environment.step
        self.reward_funcs: list[Callable] = []

    def train_rows(self, subset: str | None = None) -> list[dict[str, Any]]:
        """Rows of the training tasks, 80 % of all, of one subset or of all four."""
        return self.environment.rows(SUBSETS if subset is None else subset, split="train")

    def test_rows(self, subset: str | None = None) -> list[dict[str, Any]]:
        """Rows of the other tasks."""
        return self.environment.rows(SUBSETS if subset is None else subset, split="test")
