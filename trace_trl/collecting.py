"""How often Python looks for garbage while a forest grows."""

from __future__ import annotations

import gc
import threading


class CollectingRarely:
    """
    While the engine runs, Python looks for garbage after every 100,000 new objects instead of 700.

    A forest is made of many small objects that all stay. Python takes their number for a sign of garbage, and goes
    through every object of the process, those of torch and transformers included, once or twice in a generation: that
    takes longer than a round of the engine.
    """

    THRESHOLD = 100_000

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = gc.get_threshold()
                # 0 is a user's choice: no garbage is looked for at all
                if 0 < self._before[0] < self.THRESHOLD:
                    gc.set_threshold(self.THRESHOLD, *self._before[1:])

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                gc.set_threshold(*self._before)


collecting_rarely = CollectingRarely()
