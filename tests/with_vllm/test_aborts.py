"""What ends a round in its middle leaves nothing in the engine, and the next generation is as any other."""

import signal
import sys
import threading

import pytest

from trace_trl.environments.runner import ConcurrentRunner, Stream
from trace_trl.generation import Request
from waiting import LIMIT, until


pytestmark = pytest.mark.vllm

MODES = ("continuous", "lockstep")


class Watched:
    """A trainer whose environment does what a test wants."""

    def __init__(self, worker, folder, mode):
        self.step = None
        self.trainer = worker.make_trainer(folder, mode, vllm_rollout_mode=mode, env_step=self.env_step)
        self.world_step = worker.WORLDS["chain"]().step
        self.rows = [dict(row) for row in self.trainer.train_dataset.select(range(12))]
        self.engine = self.trainer.vllm_generation.llm.llm_engine
        self.play()
        self.free = self.free_blocks

    def env_step(self, state, action, messages):
        if self.step is not None:
            self.step()
        return self.world_step(state, action)

    def play(self):
        trees = self.trainer.rollout(self.rows)
        assert [len(tree.leaves()) for tree in trees] == [1] * len(self.rows)
        return trees

    @property
    def free_blocks(self):
        return self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def check_that_nothing_is_left(self):
        assert self.engine.get_num_unfinished_requests() == 0
        assert not self.trainer._backend.is_busy
        assert self.free_blocks == self.free
        self.step = None
        trees = self.play()
        assert all(leaf.leaf.scored for tree in trees for leaf in tree.leaves())
        assert self.free_blocks == self.free


@pytest.fixture(scope="module", params=MODES)
def watched(request, worker, tmp_path_factory):
    return Watched(worker, tmp_path_factory.mktemp("aborts"), request.param)


def test_an_environment_that_times_out_costs_its_own_branch_an_error(watched, monkeypatch):
    started, hanging, lock = [], threading.Event(), threading.Lock()

    def step():
        with lock:
            started.append(None)
            hangs = len(started) == 3
        if hangs:
            hanging.wait(LIMIT)

    watched.step = step
    try:
        with monkeypatch.context() as patch:
            patch.setattr(watched.trainer._engine, "timeout", 3.0)
            trees = watched.play()
    finally:
        hanging.set()
    messages = [m["content"] for tree in trees for turn in tree.turns() for m in turn.messages]
    assert sum("no answer within 3 seconds" in message for message in messages) == 1
    watched.check_that_nothing_is_left()


@pytest.mark.parametrize("place", ["model", "scheduler"])
def test_an_error_of_the_engine(watched, place, monkeypatch):
    core = watched.engine.engine_core.engine_core
    owner, name = {
        "model": (core.model_executor.driver_worker.model_runner.model, "forward"),
        "scheduler": (core.scheduler, "update_from_output"),
    }[place]
    function, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(watched.engine.get_num_unfinished_requests())
        if len(calls) == 5:
            raise RuntimeError("the engine fails here")
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(RuntimeError, match="the engine fails here"):
            watched.play()
    assert calls[-1] > 0, "the engine was in the middle of a round"
    watched.check_that_nothing_is_left()


def test_a_request_that_vllm_refuses(watched):
    backend = watched.trainer._backend
    # An error of vLLM's own
    with pytest.raises(Exception, match="maximum context length"), backend.session():
        backend.submit([("a", Request([5] * 10, 4)), ("b", Request([5] * 10_000, 4))])
    watched.check_that_nothing_is_left()


def waits_for_environments():
    """Whether the main thread is where a round waits for the answers of environments."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        if frame.f_code in (ConcurrentRunner._wait.__code__, Stream.collect.__code__):
            return True
        frame = frame.f_back
    return False


@pytest.mark.parametrize("place", ["environments", "engine", "model"])
def test_ctrl_c_in_the_middle_of_a_round(watched, place, monkeypatch):
    """The signal comes while environments are waited for, between two steps of the engine, or within one."""
    seen, ended, lock, calls = [], threading.Event(), threading.Lock(), []

    def interrupt():
        seen.append(watched.engine.get_num_unfinished_requests())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def step():
        with lock:
            calls.append(None)
            number = len(calls)
        if number == 6:
            # The round goes on until only environments can end it, and does not end before the signal has come
            until(lambda: not watched.engine.get_num_unfinished_requests() and waits_for_environments())
            interrupt()
        if number >= 6:
            ended.wait(LIMIT)

    def interrupted(function):
        def call(*args, **kwargs):
            calls.append(None)
            if len(calls) == 4:
                interrupt()
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        if place == "environments":
            watched.step = step
        elif place == "engine":
            backend = watched.trainer._backend
            patch.setattr(backend, "step", interrupted(backend.step))
        else:
            model = watched.engine.engine_core.engine_core.model_executor.driver_worker.model_runner.model
            patch.setattr(model, "forward", interrupted(model.forward))
        try:
            with pytest.raises(KeyboardInterrupt):
                watched.play()
        finally:
            ended.set()
    assert len(seen) == 1
    assert (seen[0] == 0) == (place == "environments")
    watched.check_that_nothing_is_left()
