"""
Runs the environment calls of one round concurrently: threads for plain functions, one event loop for coroutines.

A call that outlasts the timeout is given up, not stopped (Python can't stop a thread): its worker is counted as lost
and replaced, so that the calls of other branches, now and in later rounds, find a free one. Workers are daemon
threads, so a call that never returns does not keep the interpreter from ending.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any


class EnvironmentTimeout(TimeoutError):
    """A call was given up. The object it was called on may still be in use by the lost thread."""


class _Call:
    __slots__ = ("function", "result", "started")

    def __init__(self, function: Callable[[], Any]):
        self.function = function
        self.result: Future = Future()
        self.started: float | None = None


class ConcurrentRunner:
    """
    Args:
        max_workers (`int`): most threads at work for plain functions.
        loop (`Callable[[], asyncio.AbstractEventLoop]`): gives the running event loop on which every coroutine runs,
            so that locks made at module level belong to one loop for the whole run. Asked for when first needed.
    """

    def __init__(self, max_workers: int = 64, loop: Callable[[], asyncio.AbstractEventLoop] | None = None):
        self.max_workers = max_workers
        self._get_loop = loop
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers = 0

    def run(self, functions: Sequence[Callable[[], Any]], timeout: float | None = None) -> list[Any]:
        """Runs all `functions` and returns their results in order; an exception is returned in its function's place.

        Args:
            functions: plain functions or coroutine functions, without arguments.
            timeout (`float` or `None`): seconds each call may take, counted from its start.
        """
        coroutines = [function for function in functions if inspect.iscoroutinefunction(function)]
        pending = None
        if coroutines:
            pending = asyncio.run_coroutine_threadsafe(_gather(coroutines, timeout), self.loop)
        calls = [_Call(function) for function in functions if not inspect.iscoroutinefunction(function)]
        for call in calls:
            self._calls.put(call)
        self._grow(len(calls))
        answers = iter([self._wait(call, timeout) for call in calls])
        awaited = iter(pending.result() if pending is not None else [])
        return [next(awaited) if inspect.iscoroutinefunction(function) else next(answers) for function in functions]

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._get_loop is None:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="trace-environments", daemon=True).start()
            self._get_loop = lambda: loop
        return self._get_loop()

    def close(self) -> None:
        for _ in range(self._workers):
            self._calls.put(None)
        self._workers = 0

    def _grow(self, calls: int) -> None:
        for _ in range(self._workers, min(calls, self.max_workers)):
            self._add_worker()

    def _add_worker(self) -> None:
        self._workers += 1
        threading.Thread(target=self._work, name="trace-environment", daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not call.result.set_running_or_notify_cancel():
                continue
            call.started = time.monotonic()
            try:
                result = call.function()
            # A call that exits its thread (SystemExit) is a fault of that environment like any other
            except BaseException as error:  # noqa: B036
                result = error
            call.result.set_result(result)
            if call.started == 0:  # given up meanwhile: another worker has taken this one's place
                return

    def _wait(self, call: _Call, timeout: float | None) -> Any:
        if timeout is None:
            return call.result.result()
        while True:
            started = call.started
            left = timeout if started is None else started + timeout - time.monotonic()
            try:
                return call.result.result(timeout=max(left, 0.0))
            except TimeoutError:
                # A call still in the queue is waiting for a worker; its own time has not begun
                if started is None or call.result.done():
                    continue
                call.started = 0
                self._workers -= 1
                self._add_worker()
                return EnvironmentTimeout(f"The environment gave no answer within {timeout:g} seconds.")


async def _gather(functions: Sequence[Callable[[], Any]], timeout: float | None) -> list[Any]:
    async def call(function):
        try:
            return await asyncio.wait_for(function(), timeout)
        except TimeoutError:
            return EnvironmentTimeout(f"The environment gave no answer within {timeout:g} seconds.")
        except asyncio.TimeoutError:  # its own class before Python 3.11
            return EnvironmentTimeout(f"The environment gave no answer within {timeout:g} seconds.")

    return await asyncio.gather(*[call(function) for function in functions], return_exceptions=True)
