"""Environment calls of a round: together, in order, given up in time, and never in each other's way."""

import asyncio
import ctypes
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from trace_trl.environments import runner as runner_module
from trace_trl.environments.runner import TICK, ConcurrentRunner, EnvironmentTimeout, settle


ROOT = Path(__file__).parent.parent


@pytest.fixture
def release():
    """An event that hung calls wait for; set at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def runner():
    runner = ConcurrentRunner()
    yield runner
    runner.close()


def sleeping(seconds, result):
    def call():
        time.sleep(seconds)
        return result

    return call


def raising(error):
    def call():
        raise error

    return call


async def in_loop(result):
    return asyncio.get_running_loop(), result


def test_results_keep_the_order_of_calls(runner):
    async def number(i):
        await asyncio.sleep(0.002 * (7 - i % 7))
        return i

    functions = [functools.partial(number, i) if i % 3 == 0 else sleeping(0.002 * (5 - i % 5), i) for i in range(40)]
    assert runner.run(functions, timeout=5) == list(range(40))
    assert runner.run([]) == []


def test_calls_run_together(runner):
    calls = 200
    barrier = threading.Barrier(calls)
    # None returns before all are at work
    started = time.monotonic()
    results = runner.run([functools.partial(barrier.wait, 10)] * calls)
    assert sorted(results) == list(range(calls))
    assert time.monotonic() - started < 5


def test_calls_that_only_compute_get_no_more_workers(runner, monkeypatch):
    now = {"clock": 0.0, "cpu": 0.0}
    monkeypatch.setattr(runner_module.time, "monotonic", lambda: now["clock"])
    monkeypatch.setattr(runner_module.time, "process_time", lambda: now["cpu"])
    pace = runner_module._Pace()

    def look(seconds, cpu, waiting):
        now["clock"] += seconds
        now["cpu"] += cpu
        return pace.wants_more(waiting)

    assert look(0.02, 0.0, waiting=100)  # they sleep
    assert not look(0.02, 0.02, waiting=90)  # they compute
    assert not look(0.02, 0.01, waiting=80)  # on a busy machine
    assert look(0.02, 0.002, waiting=70)
    # Nothing moves, since what was lost keeps the CPU
    assert [look(0.2, 0.2, waiting=70) for _ in range(4)] == [False, False, True, True]
    assert not look(0.2, 0.2, waiting=69)
    monkeypatch.undo()

    monkeypatch.setattr(runner_module._Pace, "wants_more", lambda self, waiting: False)
    runner.run([sleeping(0.005, None)] * 100)
    assert len(runner._workers) == runner_module.FIRST_WORKERS


def test_most_workers(release):
    runner = ConcurrentRunner(max_workers=3)
    running, most, lock = 0, 0, threading.Lock()

    def call():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.03)
        with lock:
            running -= 1

    runner.run([call] * 12)
    assert most == 3
    # A lost worker whose call returns after all is not one more
    errors = runner.run([release.wait] * 3, timeout=0.1)
    assert len(runner.run([lambda: 1] * 3)) == 3
    release.set()
    for error in errors:
        error._call.thread.join(5)
        assert not error._call.thread.is_alive()
    runner.run([call] * 12)
    assert most == 3


def test_exceptions_stand_in_their_place(runner):
    async def fail():
        raise ValueError("async")

    errors = [ValueError("plain"), StopIteration("over"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]
    results = runner.run([*map(raising, errors), fail, lambda: 1], timeout=5)
    assert results[:5] == errors
    assert str(results[5]) == "async" and results[6] == 1
    assert runner.run([lambda: 2], timeout=5) == [2]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, StopIteration])
def test_a_coroutine_can_not_end_the_event_loop(runner, error):
    async def call():
        raise error

    result, (loop, answer) = runner.run([call, functools.partial(in_loop, 1)], timeout=5)
    # A coroutine can't raise StopIteration: Python makes it a RuntimeError
    assert isinstance(result, (error, RuntimeError)) and answer == 1
    # Awaited from a worker as well
    assert isinstance(runner.run([lambda: settle(call(), lambda: loop)], timeout=5)[0], (RuntimeError, CancelledError))
    assert runner.run([functools.partial(in_loop, 2)], timeout=5) == [(loop, 2)]


def test_coroutines_run_on_one_loop_over_all_rounds(runner):
    loops = {loop for _ in range(3) for loop, _ in runner.run([functools.partial(in_loop, i) for i in range(5)])}
    loops |= {runner.run([lambda: settle(in_loop(0), lambda: runner.loop)])[0][0]}
    assert len(loops) == 1
    given = asyncio.new_event_loop()
    threading.Thread(target=given.run_forever, daemon=True).start()
    assert ConcurrentRunner(loop=lambda: given).run([functools.partial(in_loop, 0)]) == [(given, 0)]
    given.call_soon_threadsafe(given.stop)


def test_settle_passes_plain_values_and_refuses_a_missing_loop(runner):
    assert settle(3, None) == 3
    with pytest.raises(RuntimeError, match="no event loop"):
        settle(in_loop(1), None)


def test_runs_of_several_threads_and_of_workers_themselves(release):
    runner = ConcurrentRunner()

    def nested(i):
        return sum(runner.run([lambda: i, lambda: 1]))

    # As many as there are workers at first: each waits for calls that need further ones
    results = runner.run([functools.partial(nested, i) for i in range(runner_module.FIRST_WORKERS)], timeout=20)
    assert results == [i + 1 for i in range(runner_module.FIRST_WORKERS)]

    # Another thread's round ends while this one's calls still hang
    hung = threading.Thread(target=runner.run, args=([release.wait] * runner_module.FIRST_WORKERS,), daemon=True)
    hung.start()
    assert runner.run([lambda: 1] * 3, timeout=20) == [1] * 3


def test_case_25_round_lasts_one_timeout_however_many_calls_hang(runner, release):
    # 100 of 200 hang, in front of the others
    functions = [release.wait] * 100 + [functools.partial(int, i) for i in range(100)]
    started = time.monotonic()
    results = runner.run(functions, timeout=1)
    assert 1 <= time.monotonic() - started < 1.9
    assert all(isinstance(result, EnvironmentTimeout) for result in results[:100])
    assert str(results[0]) == "The environment gave no answer within 1 seconds."
    assert results[100:] == list(range(100))
    # Later rounds have workers of their own
    assert runner.run([functools.partial(int, i) for i in range(100)], timeout=20) == list(range(100))
    assert time.monotonic() - started < 10


def test_case_25_more_calls_hang_than_there_may_be_workers(release):
    runner = ConcurrentRunner(max_workers=4)
    started = time.monotonic()
    results = runner.run([release.wait] * 10 + [lambda: 7] * 5, timeout=0.2)
    # 4, 4 and 2 of them at a time
    assert 0.6 <= time.monotonic() - started < 5
    assert results[10:] == [7] * 5 and all(isinstance(result, EnvironmentTimeout) for result in results[:10])


def test_case_25_slow_calls_are_not_given_up_for_waiting():
    runner = ConcurrentRunner(max_workers=2)
    # 14 calls of 0.2 s on two workers: the last ones start after 1.2 s, and have a second of their own
    assert runner.run([sleeping(0.2, i) for i in range(14)], timeout=1) == list(range(14))


def test_case_25_hung_coroutines(runner):
    cancelled = []

    async def hang():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            await asyncio.sleep(30)  # takes no notice

    async def answer():
        await asyncio.sleep(0.02)
        return 1

    started = time.monotonic()
    results = runner.run([hang, answer] * 50, timeout=0.3)
    assert 0.3 <= time.monotonic() - started < 5
    assert all(isinstance(result, EnvironmentTimeout) for result in results[::2])
    assert results[1::2] == [1] * 50
    assert runner.run([answer], timeout=5) == [1]
    assert len(cancelled) == 50


def test_case_25_coroutine_that_blocks_the_loop(runner, release):
    async def block():
        release.wait()

    async def answer():
        return 1

    started = time.monotonic()
    results = runner.run([block, answer, lambda: 2], timeout=0.3)
    assert 0.3 <= time.monotonic() - started < 5
    assert [type(result) for result in results[:2]] == [EnvironmentTimeout] * 2 and results[2] == 2
    assert isinstance(runner.run([answer], timeout=0.1)[0], EnvironmentTimeout)
    release.set()
    assert runner.run([answer], timeout=5) == [1]


def test_case_25_awaitable_of_a_given_up_worker_is_cancelled(runner):
    lock_loop = runner.loop

    async def make_lock():
        return asyncio.Lock()

    lock = asyncio.run_coroutine_threadsafe(make_lock(), lock_loop).result()

    async def hold(seconds):
        async with lock:
            await asyncio.sleep(seconds)
            return "held"

    (result,) = runner.run([lambda: settle(hold(30), lambda: lock_loop)], timeout=0.2)
    assert isinstance(result, EnvironmentTimeout)
    # Else the lock would be held for 30 seconds
    assert runner.run([lambda: settle(hold(0), lambda: lock_loop)], timeout=5) == ["held"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_case_25_worker_ended_from_outside(runner):
    def hang():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(SystemExit))
        while True:
            time.sleep(0.001)

    result, other = runner.run([hang, lambda: 1], timeout=20)
    assert isinstance(result, SystemExit) and other == 1
    # A worker that is ended between two calls is replaced
    small = ConcurrentRunner(max_workers=2)
    small.run([lambda: 1])
    (worker,) = small._workers
    deadly = _Deadly()
    small._calls.put(deadly)
    worker.join(5)
    assert isinstance(deadly.result, RuntimeError)
    assert small.run([lambda: 2], timeout=5) == [2]


class _Deadly:
    """A call whose work ends the thread it runs in, as an exception thrown in from outside does."""

    ended = lost = False
    result = None

    def work(self):
        raise SystemExit

    def end(self, result):
        self.result, self.ended = result, True


def test_case_25_late_results_are_told_once(runner, release):
    late = []
    (error,) = runner.run([lambda: release.wait() and "late"], timeout=0.1)
    error.when_returned(late.append)
    error.when_returned(lambda result: 1 / 0)
    assert late == []
    release.set()
    deadline = time.monotonic() + 5
    while not late and time.monotonic() < deadline:
        time.sleep(0.005)
    assert late == ["late"]
    error.when_returned(late.append)
    assert late == ["late", "late"]

    async def hang():
        await asyncio.sleep(30)

    (error,) = runner.run([hang], timeout=0.05)
    ended = threading.Event()
    error.when_returned(lambda result: ended.set())
    assert ended.wait(5)


def test_timeout_of_a_call_itself_is_no_lost_call(runner):
    (result,) = runner.run([raising(TimeoutError("no route"))], timeout=5)
    assert type(result) is TimeoutError

    async def fail():
        raise TimeoutError("no route")

    (result,) = runner.run([fail], timeout=5)
    assert type(result) is TimeoutError


def test_nothing_of_a_call_is_kept(runner):
    class Thing:
        pass

    thing = Thing()
    reference = weakref.ref(thing)

    def call(thing):
        return [thing]

    runner.run([functools.partial(call, thing)])
    del thing
    gc.collect()
    assert reference() is None


def test_close_lets_workers_go_and_the_runner_work_on(runner):
    runner.run([lambda: 1] * 50)
    workers = list(runner._workers)
    assert workers
    runner.close()
    for worker in workers:
        worker.join(5)
    assert not any(worker.is_alive() for worker in workers)
    assert runner.run([lambda: 1] * 50) == [1] * 50


def test_workers_without_calls_end(monkeypatch):
    monkeypatch.setattr(runner_module, "IDLE", 0.05)
    runner = ConcurrentRunner()
    runner.run([lambda: 1] * 50)
    for worker in list(runner._workers):
        worker.join(5)
    assert not runner._workers
    assert runner.run([lambda: 1] * 50) == [1] * 50


def test_workers_that_end_while_others_start(monkeypatch):
    monkeypatch.setattr(runner_module, "IDLE", 0.0005)
    runner = ConcurrentRunner()
    for number in range(300):
        assert runner.run([lambda: 1] * 20) == [1] * 20
        time.sleep(0.0005 * (number % 3))


def test_system_without_threads_to_give(monkeypatch):
    runner = ConcurrentRunner()
    start, started = threading.Thread.start, []

    def scarce(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    assert runner.run([sleeping(0.01, i) for i in range(12)], timeout=5) == list(range(12))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: raising(RuntimeError("can't start new thread"))())
    with pytest.raises(RuntimeError, match="new thread"):
        ConcurrentRunner().run([lambda: 1])


def test_case_25_ctrl_c_stops_the_round(runner, release):
    main = threading.get_ident()
    assert threading.current_thread() is threading.main_thread()
    threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    ran = []
    started = time.monotonic()
    small = ConcurrentRunner(max_workers=1)
    with pytest.raises(KeyboardInterrupt):
        small.run([release.wait, lambda: ran.append(1)])
    assert time.monotonic() - started < 5
    release.set()
    # Calls that had not begun are dropped
    assert small.run([lambda: 3], timeout=5) == [3] and ran == []


def alarmed():
    """Sets a timer that ends it, as math-verify does."""

    def ring(*_):
        raise ValueError("over")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        while True:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_case_46_one_worker_is_the_thread_that_asks():
    """Calls that use `signal.alarm`, of a runner with one worker: they run in order in the main thread, also those
    that come one by one; coroutines stay on the event loop, with their time limit, also where a call waits for one."""
    small = ConcurrentRunner(max_workers=1)

    def thread():
        return threading.current_thread()

    rung, first, second, (loop, three), late, exits = small.run(
        [alarmed, thread, thread, functools.partial(in_loop, 3), functools.partial(asyncio.sleep, 99), sys.exit],
        timeout=0.5,
    )
    assert isinstance(rung, ValueError) and str(rung) == "over"
    assert first is second is threading.main_thread()
    assert loop is small.loop and three == 3
    assert isinstance(late, EnvironmentTimeout) and isinstance(exits, SystemExit)
    (waited,) = small.run([lambda: settle(asyncio.sleep(99), lambda: small.loop)], timeout=0.1)
    assert isinstance(waited, EnvironmentTimeout)
    told = []
    waited.when_returned(told.append)
    assert told == [None]
    stream = small.stream(timeout=0.1)
    stream.submit("rung", alarmed)
    ((tag, rung),) = stream.collect(5)
    assert tag == "rung" and isinstance(rung, ValueError)
    assert small._workers == set()


def test_case_25_interpreter_exits_while_calls_hang():
    script = """
import asyncio, sys, threading
from trace_trl.environments.runner import ConcurrentRunner
async def hang():
    await asyncio.sleep(1000)
print(len(ConcurrentRunner().run([threading.Event().wait] * 20 + [hang] * 20, timeout=0.1)))
assert "torch" not in sys.modules
"""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT, env=dict(os.environ)
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "40\n", "")
    assert time.monotonic() - started < 20


def test_overhead_of_trivial_calls(runner):
    def trivial():
        return 1

    async def trivially():
        return 1

    for function in (trivial, trivially):
        runner.run([function] * 1024, timeout=60)
        seconds = []
        for _ in range(7):
            # Of the CPU, whatever else it is busy with: about 3 and 10 ms
            started = time.process_time()
            runner.run([function] * 1024, timeout=60)
            seconds.append(time.process_time() - started)
        assert min(seconds) < 0.05


# One by one


def collect_all(stream, count, limit=10.0):
    """What the next `count` calls of a stream came to, in the order in which they were answered."""
    answers, ends = [], time.monotonic() + limit
    while len(answers) < count:
        assert time.monotonic() < ends
        answers += stream.collect(0.01)
    return answers


def test_a_stream_answers_each_call_as_it_ends():
    stream = ConcurrentRunner().stream()
    release = threading.Event()

    def slow():
        assert release.wait(10)
        return "slow"

    async def quick():
        return "async"

    def failing():
        raise ValueError("fails")

    stream.submit("a", slow)
    stream.submit("b", lambda: "plain")
    stream.submit("c", quick)
    stream.submit("d", failing)
    found = dict(collect_all(stream, 3))
    assert found["b"] == "plain" and found["c"] == "async" and str(found["d"]) == "fails"
    assert len(stream) == 1 and stream.collect() == []
    release.set()
    assert collect_all(stream, 1) == [("a", "slow")]
    assert len(stream) == 0 and stream.collect(5.0) == []


def test_calls_of_a_stream_that_wait_get_workers_and_no_more_than_there_are_calls():
    runner = ConcurrentRunner()
    stream = runner.stream()
    everyone = threading.Barrier(100, timeout=20)
    for number in range(100):
        stream.submit(number, everyone.wait)
    ends = time.monotonic() + 20
    answers = []
    while len(answers) < 100 and time.monotonic() < ends:
        # The one who asks computes, as vLLM does
        sum(range(20_000))
        answers += stream.collect()
    assert sorted(number for number, _ in answers) == list(range(100))
    assert not [answer for _, answer in answers if isinstance(answer, BaseException)]
    assert len(runner._workers) <= 100


def test_a_call_of_a_stream_that_takes_too_long_is_given_up():
    stream = ConcurrentRunner().stream(timeout=0.1)
    release, late = threading.Event(), []

    async def hanging():
        await asyncio.sleep(30)

    stream.submit("thread", lambda: release.wait(20) and "late")
    stream.submit("coroutine", hanging)
    found = dict(collect_all(stream, 2))
    assert all(isinstance(answer, EnvironmentTimeout) for answer in found.values())
    assert "within 0.1 seconds" in str(found["thread"])
    found["thread"].when_returned(late.append)
    release.set()
    ends = time.monotonic() + 10
    while not late and time.monotonic() < ends:
        time.sleep(0.01)
    assert late == ["late"]


def test_a_stream_that_is_closed_gives_up_what_is_open():
    runner = ConcurrentRunner()
    stream = runner.stream()
    release, late = threading.Event(), []
    stream.submit("a", lambda: release.wait(20) and "late")
    ends = time.monotonic() + 10
    while not runner._workers and time.monotonic() < ends:
        time.sleep(0.01)
    time.sleep(0.05)
    ((tag, error),) = stream.close()
    assert tag == "a" and len(stream) == 0 and stream.collect() == []
    error.when_returned(late.append)
    release.set()
    while not late and time.monotonic() < ends:
        time.sleep(0.01)
    assert late == ["late"]
    assert runner.run([lambda: 1, lambda: 2]) == [1, 2]


@pytest.mark.parametrize("timeout", [1e10, threading.TIMEOUT_MAX, 10**400])
def test_a_timeout_longer_than_a_thread_can_wait(runner, timeout):
    async def later():
        await asyncio.sleep(0.05)
        return "later"

    assert runner.run([lambda: time.sleep(0.05) or "now", later], timeout) == ["now", "later"]
    stream = runner.stream(timeout)
    stream.submit("tag", lambda: time.sleep(0.05) or "now")
    time.sleep(TICK)  # then it looks after its calls
    assert stream.collect(wait=5) == [("tag", "now")]
