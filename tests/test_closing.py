"""What is opened while a batch is prepared is closed, whatever becomes of it, and no `close()` holds a run up."""

import threading

import pytest
from datasets import Dataset

from toys import (
    Clock,
    CounterEnvironment,
    Hanging,
    ScriptedGenerator,
    chat_dataset,
    make_engine,
    make_plan,
    make_tokenizer,
    make_trainer,
    usual,
)
from trace_trl import StepResult
from trace_trl import trainer as trainer_module
from trace_trl.engine import close_late
from trace_trl.environments.callback import CallbackEnvironment
from waiting import until


@pytest.fixture
def hanging():
    with Hanging() as hanging:
        yield hanging


@pytest.fixture
def clock(monkeypatch, hanging):
    return Clock(monkeypatch, hanging)


class State:
    """What `env_reset` returns. Each class derived by `fresh` has records of its own."""

    made: list
    closed: list
    closers: set

    @classmethod
    def fresh(cls):
        return type(cls.__name__, (cls,), {"made": [], "closed": [], "closers": set()})

    def __init__(self, example):
        self.number = example.get("number")
        type(self).made.append(self)

    def close(self):
        type(self).closed.append(self)
        type(self).closers.add(threading.current_thread())


class Hangs(State):
    hanging: Hanging

    def close(self):
        super().close()
        self.hanging()


class Exits(State):
    def close(self):
        super().close()
        raise SystemExit(0)


def finish(state, action, messages):
    return StepResult(done=True, reward=1.0)


# The states of candidates that got no rollout, of which the default pool has as many as of the others


@pytest.mark.parametrize("cls", [Hangs, Exits])
def test_closing_a_state_that_no_plan_took_does_not_hold_up_or_end_the_run(tmp_path, cls, hanging, clock, caplog):
    cls = cls.fresh()
    cls.hanging = hanging
    trainer = make_trainer(tmp_path, env_reset=cls, env_step=finish, env_timeout=0.5, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
    assert hanging.at_work == (len(cls.made) if issubclass(cls, Hangs) else 0)
    assert sorted(map(id, cls.closed)) == sorted(map(id, cls.made))
    assert threading.main_thread() not in cls.closers
    assert caplog.text.count("Closing an environment failed") == 1


def test_what_a_call_that_was_given_up_came_to_is_closed_elsewhere():
    """The call may end in the moment it is given up: then the main thread is told of it."""
    cls = Exits.fresh()
    close_late(CallbackEnvironment(finish, cls).reset({}, "go"))
    until(lambda: cls.closers)
    assert threading.main_thread() not in cls.closers


# Batches that can't be prepared


def counter(**methods):
    return type("Counter", (CounterEnvironment.fresh(),), methods)


def train_in_vain(trainer, message):
    with pytest.raises(Exception, match=message) as error:
        trainer.train()
    return error.value


def assert_all_closed(cls, made):
    assert len(cls.instances) == made
    assert sorted(map(id, cls.closed)) == sorted(map(id, cls.instances))


def make_counting_trainer(tmp_path, cls, dataset=None):
    return make_trainer(
        tmp_path,
        environment_factory=cls,
        reward_funcs=None,
        dataset=chat_dataset(4) if dataset is None else dataset,
        generation_batch_size=8,
        candidate_pool_factor=2.0,
    )


def test_instances_are_closed_where_the_reset_of_another_row_raises(tmp_path):
    def reset(self, number=0, **row):
        if number == 3:
            raise RuntimeError("row 3")
        return CounterEnvironment.reset(self, number, **row)

    cls = counter(reset=reset)
    train_in_vain(make_counting_trainer(tmp_path, cls), "^row 3$")
    assert_all_closed(cls, made=4)


def test_states_are_closed_where_the_reset_of_another_row_raises(tmp_path):
    cls = State.fresh()

    def env_reset(example):
        if example["number"] == 3:
            raise SystemExit(1)
        return cls(example)

    trainer = make_trainer(
        tmp_path, dataset=chat_dataset(4), env_reset=env_reset, env_step=finish, generation_batch_size=8
    )
    train_in_vain(trainer, "An environment raised SystemExit")
    assert len(cls.made) == 3
    assert sorted(map(id, cls.closed)) == sorted(map(id, cls.made))


def test_instances_are_closed_where_a_prompt_is_too_long(tmp_path):
    prompts = [[{"role": "user", "content": "x " * (3000 if i == 3 else 3)}] for i in range(4)]
    cls = counter()
    dataset = Dataset.from_dict({"prompt": prompts, "number": list(range(4))})
    train_in_vain(make_counting_trainer(tmp_path, cls, dataset), "^A prompt has 6")
    assert_all_closed(cls, made=4)


def fail(*args, **kwargs):
    raise ArithmeticError("nobody foresaw this")


@pytest.mark.parametrize("where", ["predict_roots", "plant", "allocate", "make_plans", "_tokenize_prompts"])
def test_instances_are_closed_where_a_later_step_raises(tmp_path, monkeypatch, where):
    cls = counter()
    trainer = make_counting_trainer(tmp_path, cls)
    owners = [owner for owner in (trainer_module, trainer.values, trainer) if hasattr(owner, where)]
    monkeypatch.setattr(owners[0], where, fail)
    assert isinstance(train_in_vain(trainer, "^nobody foresaw this$"), ArithmeticError)
    assert_all_closed(cls, made=4)


@pytest.mark.parametrize("number", [1, 2])
def test_instances_are_closed_where_another_process_fails(tmp_path, monkeypatch, number):
    """This process has prepared an engine (0), candidates (1) or plans (2), and learns that another one could not."""
    cls = counter()
    trainer = make_counting_trainer(tmp_path, cls)
    asked = []

    def check(error):
        assert error is None
        asked.append(error)
        if len(asked) > number:
            raise RuntimeError("Process 1 failed, which ends all processes.")

    monkeypatch.setattr(trainer._sync, "check", check)
    train_in_vain(trainer, "^Process 1 failed")
    assert len(asked) == number + 1
    assert_all_closed(cls, made=4)


def test_an_error_is_not_hidden_by_what_closing_raises(tmp_path):
    cls = Exits.fresh()
    trainer = make_trainer(tmp_path, env_reset=cls, env_step=finish)
    trainer.values.predict_roots = fail
    assert isinstance(train_in_vain(trainer, "^nobody foresaw this$"), ArithmeticError)
    assert cls.made and sorted(map(id, cls.closed)) == sorted(map(id, cls.made))


# Environments that make another task up with each reset: every rollout plays its own


class NotCopied(State):
    def fork(self):
        raise AssertionError("nothing branches off")

    def __deepcopy__(self, memo):
        raise TypeError("not to be copied")


def test_case_41_instances_of_made_up_tasks_are_closed_once():
    """Another task at every reset, a state that can't be copied, 4 rollouts: each has its own state, closed once."""
    cls = NotCopied.fresh()

    class Environment(CallbackEnvironment):
        def reset(self, example, prompt):
            episode = super().reset(example, prompt)
            episode.prompt = [{"role": "user", "content": f"task {len(cls.made)}"}]
            return episode

    tokenizer = make_tokenizer()
    turn = [*usual(tokenizer, "red"), tokenizer.eos_token_id]
    engine = make_engine(
        ScriptedGenerator(lambda request: turn, [tokenizer.eos_token_id]), Environment(finish, cls), timeout=20
    )
    engine.run([make_plan(engine, bare=4)])
    assert len(cls.made) == 4
    assert sorted(map(id, cls.closed)) == sorted(map(id, cls.made))
