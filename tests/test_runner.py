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

from toys import Clock, Hanging
from trace_trl.environments import runner as runner_module
from trace_trl.environments.runner import TICK, ConcurrentRunner, EnvironmentTimeout, settle
from waiting import LIMIT, until


ROOT = Path(__file__).parent.parent


@pytest.fixture
def hanging():
    """Calls that hang until the test ends, so that no thread outlives it."""
    with Hanging() as hanging:
        yield hanging


@pytest.fixture
def clock(monkeypatch, hanging):
    return Clock(monkeypatch, hanging)


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
    assert runner.run(functions, timeout=LIMIT) == list(range(40))
    assert runner.run([]) == []


def test_calls_run_together(runner):
    calls = 200
    barrier = threading.Barrier(calls)
    # None returns before all are at work
    results = runner.run([functools.partial(barrier.wait, LIMIT)] * calls)
    assert sorted(results) == list(range(calls))


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


def test_most_workers(hanging):
    runner = ConcurrentRunner(max_workers=3)
    running, most, lock = 0, 0, threading.Lock()
    three = threading.Barrier(3)

    def call():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait(LIMIT)
        with lock:
            running -= 1

    assert runner.run([call] * 12, timeout=LIMIT) == [None] * 12
    assert most == 3
    # A lost worker whose call returns after all is not one more
    errors = runner.run([hanging] * 3, timeout=0.1)
    assert runner.run([lambda: 1] * 3) == [1] * 3
    hanging.release.set()
    for error in errors:
        error._call.thread.join(LIMIT)
        assert not error._call.thread.is_alive()
    assert runner.run([call] * 12, timeout=LIMIT) == [None] * 12
    assert most == 3 and len(runner._workers) == 3


def test_exceptions_stand_in_their_place(runner):
    async def fail():
        raise ValueError("async")

    errors = [ValueError("plain"), StopIteration("over"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]
    results = runner.run([*map(raising, errors), fail, lambda: 1], timeout=LIMIT)
    assert results[:5] == errors
    assert str(results[5]) == "async" and results[6] == 1
    assert runner.run([lambda: 2], timeout=LIMIT) == [2]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, StopIteration])
def test_a_coroutine_can_not_end_the_event_loop(runner, error):
    async def call():
        raise error

    result, (loop, answer) = runner.run([call, functools.partial(in_loop, 1)], timeout=LIMIT)
    # A coroutine can't raise StopIteration: Python makes it a RuntimeError
    assert isinstance(result, (error, RuntimeError)) and answer == 1
    # Awaited from a worker as well
    assert isinstance(
        runner.run([lambda: settle(call(), lambda: loop)], timeout=LIMIT)[0], (RuntimeError, CancelledError)
    )
    assert runner.run([functools.partial(in_loop, 2)], timeout=LIMIT) == [(loop, 2)]


def test_coroutines_run_on_one_loop_over_all_rounds(runner):
    loops = {loop for _ in range(3) for loop, _ in runner.run([functools.partial(in_loop, i) for i in range(5)])}
    loops |= {runner.run([lambda: settle(in_loop(0), lambda: runner.loop)])[0][0]}
    assert len(loops) == 1
    given = asyncio.new_event_loop()
    thread = threading.Thread(target=given.run_forever, daemon=True)
    thread.start()
    assert ConcurrentRunner(loop=lambda: given).run([functools.partial(in_loop, 0)]) == [(given, 0)]
    given.call_soon_threadsafe(given.stop)
    thread.join(LIMIT)
    given.close()


def test_settle_passes_plain_values_and_refuses_a_missing_loop(runner):
    assert settle(3, None) == 3
    with pytest.raises(RuntimeError, match="no event loop"):
        settle(in_loop(1), None)


def test_runs_of_several_threads_and_of_workers_themselves(hanging):
    runner = ConcurrentRunner()

    def nested(i):
        return sum(runner.run([lambda: i, lambda: 1]))

    # As many as there are workers at first: each waits for calls that need further ones
    results = runner.run([functools.partial(nested, i) for i in range(runner_module.FIRST_WORKERS)], timeout=LIMIT)
    assert results == [i + 1 for i in range(runner_module.FIRST_WORKERS)]

    # Another thread's round ends while this one's calls still hang
    hung = threading.Thread(target=runner.run, args=([hanging] * runner_module.FIRST_WORKERS,), daemon=True)
    hung.start()
    until(lambda: hanging.at_work == runner_module.FIRST_WORKERS)
    assert runner.run([lambda: 1] * 3, timeout=LIMIT) == [1] * 3
    assert hanging.at_work == runner_module.FIRST_WORKERS
    hanging.release.set()
    hung.join(LIMIT)
    assert not hung.is_alive()


def test_case_25_round_lasts_one_timeout_however_many_calls_hang(runner, hanging, clock):
    # 100 of 200 hang, in front of the others
    functions = [hanging] * 100 + [functools.partial(int, i) for i in range(100)]
    results = runner.run(functions, timeout=1)
    assert 1 <= clock.passed < 1.9
    assert all(isinstance(result, EnvironmentTimeout) for result in results[:100])
    assert str(results[0]) == "The environment gave no answer within 1 seconds."
    assert results[100:] == list(range(100))
    # Later rounds have workers of their own
    assert runner.run([functools.partial(int, i) for i in range(100)], timeout=20) == list(range(100))
    assert clock.passed < 1.9 and hanging.at_work == 100


def test_case_25_more_calls_hang_than_there_may_be_workers(hanging, clock):
    runner = ConcurrentRunner(max_workers=4)
    results = runner.run([hanging] * 10 + [lambda: 7] * 5, timeout=0.2)
    # 4, 4 and 2 of them at a time
    assert 0.6 <= clock.passed < 0.8
    assert results[10:] == [7] * 5 and all(isinstance(result, EnvironmentTimeout) for result in results[:10])


def test_case_25_slow_calls_are_not_given_up_for_waiting(clock):
    def slow(i):
        clock.sleep(0.2)
        return i

    # 14 calls of 0.2 s on two workers: the last ones start after 1.2 s, and have a second of their own
    runner = ConcurrentRunner(max_workers=2)
    assert runner.run([functools.partial(slow, i) for i in range(14)], timeout=1) == list(range(14))
    assert 1.4 <= clock.passed < 1.5


def test_case_25_hung_coroutines(runner, hanging, clock):
    async def answer():
        # All are on the loop together
        while hanging.at_work < 50 and not hanging.release.is_set():
            await asyncio.sleep(0.002)
        return 1

    results = runner.run([hanging.on_loop, answer] * 50, timeout=0.3)
    assert 0.3 <= clock.passed < 0.6
    assert all(isinstance(result, EnvironmentTimeout) for result in results[::2])
    assert results[1::2] == [1] * 50
    assert runner.run([answer], timeout=5) == [1]
    # They take no notice
    until(lambda: hanging.cancelled == 50)
    assert hanging.at_work == 50


def test_case_25_coroutine_that_blocks_the_loop(runner, hanging):
    async def block():
        hanging()

    async def answer():
        return 1

    assert runner.run([answer]) == [1]  # the loop runs
    results = runner.run([block, answer, lambda: 2], timeout=2)
    assert hanging.at_work == 1
    assert [type(result) for result in results[:2]] == [EnvironmentTimeout] * 2 and results[2] == 2
    assert isinstance(runner.run([answer], timeout=0.1)[0], EnvironmentTimeout)
    hanging.release.set()
    assert runner.run([answer], timeout=LIMIT) == [1]


def test_case_25_awaitable_of_a_given_up_worker_is_cancelled(runner, hanging, clock):
    lock_loop = runner.loop

    async def make_lock():
        return asyncio.Lock()

    lock = asyncio.run_coroutine_threadsafe(make_lock(), lock_loop).result()

    async def hold(hangs):
        async with lock:
            if hangs:
                await hanging.on_loop(takes_no_notice=False)
            return "held"

    (result,) = runner.run([lambda: settle(hold(True), lambda: lock_loop)], timeout=0.2)
    assert isinstance(result, EnvironmentTimeout)
    # Else the lock would be held until the test ends
    assert runner.run([lambda: settle(hold(False), lambda: lock_loop)], timeout=LIMIT) == ["held"]
    assert hanging.cancelled == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_case_25_worker_ended_from_outside(runner):
    def hang():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(SystemExit))
        while True:
            time.sleep(0.001)

    result, other = runner.run([hang, lambda: 1], timeout=LIMIT)
    assert isinstance(result, SystemExit) and other == 1
    # A worker that is ended between two calls is replaced
    small = ConcurrentRunner(max_workers=2)
    small.run([lambda: 1])
    (worker,) = small._workers
    deadly = _Deadly()
    small._calls.put(deadly)
    worker.join(LIMIT)
    assert isinstance(deadly.result, RuntimeError)
    assert small.run([lambda: 2], timeout=LIMIT) == [2]


class _Deadly:
    """A call whose work ends the thread it runs in, as an exception thrown in from outside does."""

    ended = lost = False
    result = None

    def work(self):
        raise SystemExit

    def end(self, result):
        self.result, self.ended = result, True


def test_case_25_late_results_are_told_once(runner, hanging):
    late = []
    (error,) = runner.run([hanging], timeout=0.1)
    error.when_returned(late.append)
    error.when_returned(lambda result: 1 / 0)
    assert late == []
    hanging.release.set()
    until(lambda: late)
    assert late == ["late"]
    error.when_returned(late.append)
    assert late == ["late", "late"]

    async def hang():
        await asyncio.Event().wait()

    (error,) = runner.run([hang], timeout=0.05)
    ended = threading.Event()
    error.when_returned(lambda result: ended.set())
    assert ended.wait(LIMIT)


def test_timeout_of_a_call_itself_is_no_lost_call(runner):
    (result,) = runner.run([raising(TimeoutError("no route"))], timeout=LIMIT)
    assert type(result) is TimeoutError

    async def fail():
        raise TimeoutError("no route")

    (result,) = runner.run([fail], timeout=LIMIT)
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
    # Once its worker, too, is done with it, which may be after the round
    until(lambda: gc.collect() >= 0 and reference() is None)


def test_close_lets_workers_go_and_the_runner_work_on(runner, monkeypatch):
    monkeypatch.setattr(runner_module, "IDLE", 1e6)  # they do not end by themselves
    runner.run([lambda: 1] * 50)
    workers = list(runner._workers)
    assert workers
    runner.close()
    for worker in workers:
        worker.join(LIMIT)
    assert not any(worker.is_alive() for worker in workers)
    assert runner.run([lambda: 1] * 50) == [1] * 50


def test_workers_without_calls_end(monkeypatch):
    monkeypatch.setattr(runner_module, "IDLE", 0.05)
    runner = ConcurrentRunner()
    runner.run([lambda: 1] * 50)
    workers = list(runner._workers)
    for worker in workers:
        worker.join(LIMIT)
    assert not any(worker.is_alive() for worker in workers) and not runner._workers
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
    assert runner.run([sleeping(0.01, i) for i in range(12)], timeout=LIMIT) == list(range(12))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: raising(RuntimeError("can't start new thread"))())
    with pytest.raises(RuntimeError, match="new thread"):
        ConcurrentRunner().run([lambda: 1])


def test_case_25_ctrl_c_stops_the_round(hanging):
    assert threading.current_thread() is threading.main_thread()
    main = threading.get_ident()

    def main_thread_waits():
        frame = sys._current_frames()[main]
        while frame is not None and frame.f_code is not ConcurrentRunner._wait.__code__:
            frame = frame.f_back
        return frame is not None

    def interrupt():
        # It waits until this call ends: the signal hits nothing else
        until(main_thread_waits)
        signal.pthread_kill(main, signal.SIGINT)
        return hanging()

    ran = []
    small = ConcurrentRunner(max_workers=2)
    with pytest.raises(KeyboardInterrupt):
        small.run([interrupt, hanging, lambda: ran.append(1)])
    assert not hanging.release.is_set()
    hanging.release.set()
    # Calls that had not begun are dropped
    assert small.run([lambda: 3], timeout=LIMIT) == [3] and ran == []


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
runner = ConcurrentRunner()
async def hang():
    await asyncio.Event().wait()
print(len(runner.run([threading.Event().wait] * 20 + [hang] * 20, timeout=0.1)))
# The loop ends what was cancelled before it comes to this: else asyncio complains of it at exit
asyncio.run_coroutine_threadsafe(asyncio.sleep(0), runner.loop).result()
assert "torch" not in sys.modules
"""
    # One that does not exit is ended when this time is over
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT, cwd=ROOT, env=dict(os.environ)
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "40\n", "")


def test_trivial_calls_cost_a_few_steps_each(runner, clock, monkeypatch):
    """Counted in functions of the runner that are entered, in all threads; `make benchmark` measures the time."""
    steps, threads, handed_over = [], [], []

    def count(frame, event, arg):
        if event == "call" and frame.f_code.co_filename == runner_module.__file__:
            steps.append(frame.f_code.co_name)
        if event == "call" and frame.f_code is ConcurrentRunner._work.__code__:
            threads.append(threading.current_thread())

    def trivial():
        return 1

    async def trivially():
        return 1

    monkeypatch.setattr(runner_module, "IDLE", 1e6)
    profiles = sys.getprofile(), threading.getprofile()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        loop = runner.loop
        hand_over = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a: (handed_over.append(a), hand_over(*a))[1])
        for function in (trivial, trivially):
            for _ in range(8):
                steps.clear()
                assert runner.run([function] * 1024, timeout=LIMIT) == [1] * 1024
                assert len(steps) < 10 * 1024
    finally:
        sys.setprofile(profiles[0])
        threading.setprofile(profiles[1])
    # The same workers in each round; coroutines need none, and come to the loop all at once
    assert len(threads) == runner_module.FIRST_WORKERS
    assert len(handed_over) == 8


# One by one


def collect_all(stream, count):
    """What the next `count` calls of a stream came to, in the order in which they were answered."""
    answers = []

    def all_came():
        answers.extend(stream.collect(0.01))
        return len(answers) >= count

    until(all_came)
    return answers


def test_a_stream_answers_each_call_as_it_ends(hanging):
    stream = ConcurrentRunner().stream()

    async def quick():
        return "async"

    def failing():
        raise ValueError("fails")

    stream.submit("a", hanging)
    stream.submit("b", lambda: "plain")
    stream.submit("c", quick)
    stream.submit("d", failing)
    found = dict(collect_all(stream, 3))
    assert found["b"] == "plain" and found["c"] == "async" and str(found["d"]) == "fails"
    assert len(stream) == 1 and stream.collect() == []
    hanging.release.set()
    assert collect_all(stream, 1) == [("a", "late")]
    assert len(stream) == 0 and stream.collect(5.0) == []


def test_calls_of_a_stream_that_wait_get_workers_and_no_more_than_there_are_calls():
    runner = ConcurrentRunner()
    stream = runner.stream()
    everyone = threading.Barrier(100, timeout=LIMIT)
    for number in range(100):
        stream.submit(number, everyone.wait)
    answers = []

    def all_came():
        # The one who asks computes, as vLLM does
        sum(range(20_000))
        answers.extend(stream.collect())
        return len(answers) >= 100

    until(all_came)
    assert sorted(number for number, _ in answers) == list(range(100))
    assert not [answer for _, answer in answers if isinstance(answer, BaseException)]
    assert len(runner._workers) <= 100


def test_a_call_of_a_stream_that_takes_too_long_is_given_up(hanging):
    stream = ConcurrentRunner().stream(timeout=0.1)
    late = []

    async def hang():
        await asyncio.Event().wait()

    stream.submit("thread", hanging)
    stream.submit("coroutine", hang)
    found = dict(collect_all(stream, 2))
    assert all(isinstance(answer, EnvironmentTimeout) for answer in found.values())
    assert "within 0.1 seconds" in str(found["thread"])
    found["thread"].when_returned(late.append)
    hanging.release.set()
    until(lambda: late)
    assert late == ["late"]


def test_a_stream_that_is_closed_gives_up_what_is_open(hanging):
    runner = ConcurrentRunner()
    stream = runner.stream()
    late = []
    stream.submit("a", hanging)
    until(lambda: hanging.at_work)
    ((tag, error),) = stream.close()
    assert tag == "a" and len(stream) == 0 and stream.collect() == []
    # The worker that is still at it counts no more
    assert not runner._workers
    error.when_returned(late.append)
    hanging.release.set()
    until(lambda: late)
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
    assert stream.collect(wait=LIMIT) == [("tag", "now")]
