"""Waiting for what another thread or process does, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable


LIMIT = 60.0  # seconds: what does not come in that time does not come


def until(happened: Callable[[], object], limit: float = LIMIT) -> None:
    """Returns once `happened()` is true.

    Raises:
        AssertionError: if it is not true after `limit` seconds.
    """
    ends = time.monotonic() + limit
    while not happened():
        assert time.monotonic() < ends, f"not within {limit} seconds"
        time.sleep(0.002)
