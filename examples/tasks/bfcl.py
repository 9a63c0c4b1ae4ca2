"""Function calling over several user turns: BFCL v4 multi-turn. Needs `make setup-bfcl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trace_trl.environments.bfcl import SUBSETS, BFCLEnvironment

from . import Row, Task


API_CLASS = "GorillaFileSystem"  # of the tasks that the small default model is trained on
# What the small default model is shown and asked for
SMALL: dict[str, Any] = {
    "call_format": "python",
    "docs": "brief",
    "max_user_turns": 2,
    "max_observation_chars": 200,
}


class BFCLTask(Task):
    """
    The environment gives the reward itself.

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
        self.reward_funcs = []

    def train_rows(self, source: str | Path | None = None, **kwargs: Any) -> list[Row]:
        """Rows of the training tasks, 80 % of all."""
        return self._rows("train", source, **kwargs)

    def test_rows(self, source: str | Path | None = None, **kwargs: Any) -> list[Row]:
        """Rows of the other tasks."""
        return self._rows("test", source, **kwargs)

    def _rows(
        self, part: str, source: Any, subset: str | None = None, api_class: str | None = None, **kwargs: Any
    ) -> list[Row]:
        if source is not None:
            raise ValueError(f"The tasks come with bfcl-eval, there is no other data set: drop {source!r}.")
        rows = self.environment.rows(SUBSETS if subset is None else subset, split=part)
        if api_class is None:
            return rows
        classes = {row["id"]: self.environment.classes(row) for row in rows}
        known = sorted(set().union(*classes.values()))
        if api_class not in known:
            raise ValueError(f"No task involves the API class {api_class!r}: there are {', '.join(known)}.")
        return [row for row in rows if api_class in classes[row["id"]]]
