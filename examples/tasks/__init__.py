"""
The tasks of the examples, one module each: rows with prompts, environment, rewards, and what is measured.

The training scripts and `evaluate_model.py` know a task by this class only, so that both measure the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


Row = dict[str, Any]

DATA = Path(__file__).resolve().parents[1] / "data"


class Task:
    """
    Attributes:
        name (`str`): as in `--task` and `warm_start/`.
        env_reset (`Callable`), env_step (`Callable`): the environment, as [`TRACETrainer`] takes it.
        reward_funcs (`list[Callable]`): reward functions; none where the environment gives the reward itself.
        reward_name (`str`): what the reward is.
        metrics (`dict[str, str]`): what is measured of an episode besides, by its name in `Leaf.info` (numbers of the
            environment) or `Leaf.extras` (columns that a reward function logs), in words.
    """

    name: str
    env_reset: Callable
    env_step: Callable
    reward_funcs: list[Callable]
    reward_name: str = "reward"
    metrics: dict[str, str]

    def train_rows(self, source: str | Path | None = None, **kwargs: Any) -> list[Row]:
        """
        Args:
            source (`str` or `Path`, *optional*):
                File, folder or Hub id; the bundled rows by default.
            **kwargs:
                `split` and `config` of a data set.

        Returns:
            `list[dict]`: rows with at least `prompt`, `id` and `subset`.
        """
        raise NotImplementedError

    def test_rows(self, source: str | Path | None = None, **kwargs: Any) -> list[Row]:
        """Likewise, rows to evaluate on."""
        raise NotImplementedError

    def begin_evaluation(self) -> None:
        """Called before `trainer.evaluate()`."""

    def evaluation_results(self, logged: dict[str, float]) -> dict[str, float]:
        """Called after it, with what the trainer logged: further results in words. What an environment counts is 0
        where no episode got as far as the environment."""
        return {name: logged.get(f"eval_env/{key}", 0.0) for key, name in self.metrics.items()}
