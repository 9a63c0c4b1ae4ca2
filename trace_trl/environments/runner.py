"""
Runs the environment calls of one round concurrently: threads for plain functions, one event loop for coroutines.

    calls of a round ─┬─ plain functions ─▶ queue ─▶ workers: a few at first, more where calls wait for something
                      └─ coroutines ──────▶ the event loop, all at once

A call that outlasts the timeout is given up. A coroutine is cancelled; a thread can't be stopped, so its worker counts
as lost and another takes its place. A call that waits for a worker gets one within moments, however many calls hang:
a round lasts one timeout at most, unless all of `max_workers` hang. Workers are daemon threads, so a call that never
returns does not keep the interpreter from ending.

With one worker, plain functions run in the thread that asks for them, one by one, and can't be given up: signals, and
what is bound to a thread, work there as they do without threads.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any


GetLoop = Callable[[], asyncio.AbstractEventLoop]

# Enough where calls only compute: more would not be faster, and each thread keeps freed memory of its own. More are
# started when calls are seen to wait for something.
FIRST_WORKERS = max(4, min(16, 2 * (os.cpu_count() or 1)))
TICK = 0.02  # seconds between two looks at a round that has calls without a worker
PATIENCE = 0.5  # seconds until such calls get workers although the CPU is busy: lost calls may be what keeps it so
IDLE = 10.0  # seconds until a worker without calls ends

_working = threading.local()  # `call`: what this worker is at


class EnvironmentTimeout(TimeoutError):
    """A call was given up. What it was called on may still be in use."""

    def __init__(self, message: str, call: _Call | None = None):
        super().__init__(message)
        self._call = call

    def when_returned(self, callback: Callable[[Any], None]) -> None:
        """Calls `callback` with what the call that was given up came to, a result or an exception: at once if it has
        ended since, else in a thread of its own when it ends. Exceptions of `callback` are dropped."""
        if self._call is not None:
            self._call.when_returned(callback)


def settle(value: Any, get_loop: GetLoop | None) -> Any:
    """The result of an awaitable, run on the event loop while this thread waits; any other value as it is.

    Not to be called on the event loop itself. When the call that this worker is at is given up, so is the awaitable.

    Raises:
        RuntimeError: if there is no event loop, or if the awaitable wants to exit (`SystemExit`).
        EnvironmentTimeout: if it takes too long for a call that nobody else can give up.
    """
    if not inspect.isawaitable(value):
        return value
    if get_loop is None:
        if inspect.iscoroutine(value):
            value.close()
        raise RuntimeError("An async function was called where no event loop runs.")
    future = asyncio.run_coroutine_threadsafe(contained(value), get_loop())
    call: _Call | None = getattr(_working, "call", None)
    if call is None:
        return future.result()
    call.cancel_with(future.cancel)
    left = None if call.limit is None else max(0.0, call.started + call.limit - time.monotonic())  # type: ignore[operator]
    try:
        return future.result(left)
    except TimeoutError:
        if future.done():  # its own
            raise
        future.cancel()
        raise EnvironmentTimeout(_overdue(call.limit), call) from None


def _overdue(timeout: float | None) -> str:
    return f"The environment gave no answer within {timeout:g} seconds."


async def contained(awaitable: Awaitable[Any]) -> Any:
    """Awaits, and turns what would end the event loop, and with it every other environment, into a `RuntimeError`."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"An async function raised {type(error).__name__}.") from error


class _Batch:
    """What the calls of one `run` share."""

    def __init__(self, calls: int):
        self.lock = threading.Lock()
        self.left = calls
        self.over = threading.Event()

    def count(self, call: _Call) -> None:
        self.left -= 1
        if not self.left:
            self.over.set()


class _Call:
    __slots__ = (
        "function", "batch", "result", "late", "started", "ended", "lost", "thread", "cancel", "callbacks", "limit"
    )  # fmt: skip

    def __init__(self, function: Callable[[], Any], batch: _Batch):
        self.function: Callable[[], Any] | None = function
        self.batch = batch
        self.result: Any = None
        self.late: Any = None
        self.started: float | None = None
        self.ended = False  # nothing works on it any more
        self.lost = False  # given up: answered with an error
        self.thread: threading.Thread | None = None
        self.cancel: Callable[[], Any] | None = None  # ends what it does, or waits for, on the event loop
        self.callbacks: list[Callable[[Any], None]] | None = None
        self.limit: float | None = None  # seconds for coroutines it waits for, where no other thread looks after it

    def work(self) -> None:
        """Runs a plain function, in a worker, or in the thread that wants its result."""
        with self.batch.lock:
            if self.lost:
                return
            self.thread, self.started = threading.current_thread(), time.monotonic()
        _working.call = self
        try:
            result = self.function()  # type: ignore[misc]
        # A call that exits its thread (SystemExit) is a fault of that environment like any other
        except BaseException as error:
            result = error
        _working.call = None
        self.end(result)
        if is_interrupt(result):
            raise result

    async def play(self) -> None:
        """Runs a coroutine function, on the event loop."""
        try:
            result = await self.function()  # type: ignore[misc]
        except BaseException as error:
            result = error
        self.end(result)

    def end(self, result: Any) -> None:
        with self.batch.lock:
            self.ended, self.function, self.cancel = True, None, None
            if self.lost:
                self.late = result
            else:
                self.result = result
                self.batch.count(self)
        if self.callbacks:
            # Not here: this may be the event loop, which they may need, or hold up
            threading.Thread(target=self._tell, args=(result,), name="trace-environment-late", daemon=True).start()

    def _tell(self, result: Any) -> None:
        for callback in self.callbacks or ():
            _quietly(callback, result)

    def give_up(self, error: BaseException) -> None:
        """Answers the call with `error` unless it is answered already."""
        with self.batch.lock:
            if self.ended or self.lost:
                return
            self.lost, self.result = True, error
            self.ended = self.started is None
            self.batch.count(self)
            cancel = self.cancel
        if cancel is not None:
            cancel()

    def cancel_with(self, cancel: Callable[[], Any]) -> None:
        """Has `cancel` called when the call is given up: at once if it has been."""
        with self.batch.lock:
            self.cancel = cancel
            lost = self.lost
        if lost:
            cancel()

    def when_returned(self, callback: Callable[[Any], None]) -> None:
        with self.batch.lock:
            if not self.ended:
                self.callbacks = [*(self.callbacks or ()), callback]
                return
        _quietly(callback, self.late)


def is_interrupt(error: Any) -> bool:
    """Whether this is Ctrl-C, rather than something that an environment raised."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def _quietly(callback: Callable[[Any], None], result: Any) -> None:
    try:
        callback(result)
    except Exception:
        pass  # of a call that was given up: nobody is left to be told


class ConcurrentRunner:
    """
    Args:
        max_workers (`int`): most threads at work for plain functions. With 1 there are none: plain functions run one
            by one in the thread that calls `run` or `submit`, and have no time limit but for the coroutines that they
            wait for.
        loop (`Callable[[], asyncio.AbstractEventLoop]`): gives the running event loop on which every coroutine runs,
            so that locks made at module level belong to one loop for the whole run. Asked for when first needed.
    """

    def __init__(self, max_workers: int = 1024, loop: GetLoop | None = None):
        self.max_workers = max_workers
        self._get_loop = loop
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers: set[threading.Thread] = set()

    def run(self, functions: Sequence[Callable[[], Any]], timeout: float | None = None) -> list[Any]:
        """Runs all `functions` and returns their results in order; an exception is returned in its function's place.

        Args:
            functions: plain functions or coroutine functions, without arguments.
            timeout (`float` or `None`): seconds each call may take, counted from its start. A call that takes longer
                is answered with [`EnvironmentTimeout`].
        """
        if not functions:
            return []
        batch = _Batch(len(functions))
        calls = [_Call(function, batch) for function in functions]
        try:
            plain = self._begin(calls, timeout)
            self._grow(min(plain, FIRST_WORKERS) - len(self._workers))
            self._wait(batch, calls, timeout)
        except BaseException as error:  # Ctrl-C
            self._give_up([(call, error) for call in calls])
            raise
        return [call.result for call in calls]

    def stream(self, timeout: float | None = None) -> Stream:
        """Runs functions that come one after the other, and whose results are wanted one after the other."""
        return Stream(self, timeout)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._get_loop is None:
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name="trace-environments", daemon=True).start()
                self._get_loop = lambda: loop
        return self._get_loop()

    def close(self) -> None:
        """Lets the workers go. The runner can be used again."""
        with self._lock:
            workers = len(self._workers)
        for _ in range(workers):
            self._calls.put(None)

    def _begin(self, calls: Sequence[_Call], timeout: float | None) -> int:
        """Hands calls to the event loop or to the workers. Returns how many wait for a worker."""
        coroutines = [call for call in calls if inspect.iscoroutinefunction(call.function)]
        if coroutines:
            now = time.monotonic()
            for call in coroutines:
                # Counted from here: one of them may block the loop
                call.started = now
            self.loop.call_soon_threadsafe(_play, coroutines)
        plain = [call for call in calls if call.started is None]
        if self.max_workers == 1:
            for call in plain:
                call.limit = _waitable(timeout)
                call.work()
            return 0
        for call in plain:
            self._calls.put(call)
        return len(plain)

    def _wait(self, batch: _Batch, calls: Sequence[_Call], timeout: float | None) -> None:
        pace, timeout = _Pace(), _waitable(timeout)
        while True:
            pause = TICK if any(call.started is None for call in calls) else None
            if timeout is not None:
                ends = [call.started + timeout for call in calls if call.started and not (call.ended or call.lost)]
                left = max(0.0, min(ends) - time.monotonic()) if ends else TICK
                pause = left if pause is None else min(pause, left)
            if batch.over.wait(pause):
                return
            self._look_after(calls, timeout, pace)

    def _look_after(self, calls: Sequence[_Call], timeout: float | None, pace: _Pace, most: int | None = None) -> None:
        """Gives up the calls whose time is over, and starts workers for those that wait for one, if there are not
        `most` already."""
        waiting = sum(call.started is None for call in calls)
        if timeout is not None:
            text = _overdue(timeout)
            latest = time.monotonic() - timeout
            overdue = [call for call in calls if call.started and call.started <= latest and not call.lost]
            self._give_up([(call, EnvironmentTimeout(text, call)) for call in overdue])
        if waiting and pace.wants_more(waiting):
            more = min(waiting, max(len(self._workers), FIRST_WORKERS))
            self._grow(more if most is None else min(more, most - len(self._workers)))

    def _give_up(self, calls: Sequence[tuple[_Call, BaseException]]) -> None:
        for call, error in calls:
            call.give_up(error)
            if call.lost and call.thread is not None:
                self._forget(call.thread)

    # Workers

    def _grow(self, count: int) -> None:
        """Starts `count` more workers, or as many as are still allowed and possible."""
        if count <= 0:
            return
        with self._lock:
            # A thread may have been ended from outside
            self._workers = {thread for thread in self._workers if thread.is_alive()}
            for _ in range(min(count, self.max_workers - len(self._workers))):
                thread = threading.Thread(target=self._work, name="trace-environment", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads to give
                    if not self._workers:
                        raise
                    return
                self._workers.add(thread)

    def _forget(self, worker: threading.Thread) -> None:
        with self._lock:
            self._workers.discard(worker)

    def _work(self) -> None:
        call = None
        try:
            while True:
                call = self._calls.get(timeout=IDLE)
                if call is None:
                    return
                call.work()
                if call.lost and call.started is not None:
                    return  # another worker has taken this one's place
                call = None  # else what the last call held would be kept alive
        except queue.Empty:
            return
        finally:
            self._forget(threading.current_thread())
            if call is not None and not call.ended:
                call.end(RuntimeError("The thread of an environment call was ended from outside."))


class Stream:
    """
    Calls that begin one after the other and are answered one by one, each as soon as it has ended. What is open when
    the stream is left is given up.

    Args:
        runner ([`ConcurrentRunner`]): lends its workers and its event loop.
        timeout (`float` or `None`): as in [`ConcurrentRunner.run`].
    """

    def __init__(self, runner: ConcurrentRunner, timeout: float | None = None):
        self._runner = runner
        self._timeout = _waitable(timeout)
        self._batch = _Answers()
        self._open: dict[_Call, Any] = {}
        self._pace = _Pace()
        self._looked = time.monotonic()

    def __len__(self) -> int:
        return len(self._open)

    def submit(self, tag: Any, function: Callable[[], Any]) -> None:
        """Begins a call of `function`, plain or a coroutine function, whose answer comes with `tag`."""
        call = _Call(function, self._batch)
        self._open[call] = tag
        if self._runner._begin([call], self._timeout):
            self._runner._grow(min(len(self._open), FIRST_WORKERS) - len(self._runner._workers))

    def collect(self, wait: float = 0.0) -> list[tuple[Any, Any]]:
        """What was answered since the last time, with the tags; an exception stands for the answer of a call that
        raised it, [`EnvironmentTimeout`] for that of one that took too long.

        Args:
            wait (`float`, *optional*, defaults to `0.0`):
                Seconds to wait for the first answer.
        """
        if self._open and time.monotonic() - self._looked >= TICK:
            self._looked = time.monotonic()
            # While this thread computes, a call waits for a worker although one is free: as many as there are calls
            # are enough
            self._runner._look_after(list(self._open), self._timeout, self._pace, most=len(self._open))
        answered = []
        try:
            while self._open:
                call = self._batch.answered.get(timeout=wait) if wait else self._batch.answered.get_nowait()
                answered.append((self._open.pop(call), call.result))
                wait = 0.0
        except queue.Empty:
            pass
        return answered

    def close(self) -> list[tuple[Any, EnvironmentTimeout]]:
        """Gives up what is open. Returns the tags, each with the error that knows when its call has come back."""
        lost = [(call, EnvironmentTimeout("The rollouts were ended.", call)) for call in self._open]
        self._runner._give_up(lost)
        tags = [(self._open[call], error) for call, error in lost]
        self._open.clear()
        return tags


class _Answers(_Batch):
    """What the calls of a stream share."""

    def __init__(self) -> None:
        super().__init__(0)
        self.answered: queue.SimpleQueue[_Call] = queue.SimpleQueue()

    def count(self, call: _Call) -> None:
        self.answered.put(call)


def _waitable(timeout: float | None) -> float | None:
    """`timeout`, or the longest that a thread can wait."""
    return None if timeout is None else min(timeout, threading.TIMEOUT_MAX)


def _cpu_time() -> float:
    """Seconds that all threads but this one have computed."""
    return time.process_time() - time.thread_time()


class _Pace:
    """Tells whether more workers would speed a round up: not where calls only compute, since Python computes in one
    thread at a time."""

    def __init__(self) -> None:
        self.clock, self.cpu = time.monotonic(), _cpu_time()
        self.moved, self.waiting = self.clock, 0

    def wants_more(self, waiting: int) -> bool:
        """Called at every look at a round, with the number of calls that no worker has taken yet."""
        clock, cpu = time.monotonic(), _cpu_time()
        is_computing = cpu - self.cpu > (clock - self.clock) / 4
        if waiting != self.waiting:
            self.moved = clock
        self.clock, self.cpu, self.waiting = clock, cpu, waiting
        return not is_computing or clock - self.moved > PATIENCE


def _play(calls: list[_Call]) -> None:
    """Starts coroutines, on the event loop."""
    loop = asyncio.get_running_loop()
    for call in calls:
        if call.lost:  # the loop was blocked until now
            call.end(None)
            continue
        call.cancel_with(partial(loop.call_soon_threadsafe, loop.create_task(call.play()).cancel))
