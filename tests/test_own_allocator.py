"""An allocator that a script adds to a registry: chosen by name, given the predicted values, and asked every time."""

import numpy as np
import pytest

from toys import make_tokenizer, make_trainer
from trace_trl import StepResult
from trace_trl.allocation import PREFIX_ALLOCATORS, ROOT_ALLOCATORS, Allocator, reads_values


END = make_tokenizer().eos_token_id


def trainer_of(tmp_path, monkeypatch, roots, prefixes):
    """A trainer with allocators of one's own, and what they were given."""
    given = {"roots": [], "prefixes": []}

    def by_roots(values, *, budget, max_per_root, group_size, seed=None, certainties=None, headroom_exponent=0.0):
        given["roots"].append(list(values))
        return ROOT_ALLOCATORS["uniform"](
            values, budget=budget, max_per_root=max_per_root, group_size=group_size, seed=seed
        )

    def by_prefixes(values, successes, *, budget, seed=None, certainties=None):
        given["prefixes"].append(list(values))
        return PREFIX_ALLOCATORS["uniform"](values, successes, budget=budget, seed=seed)

    monkeypatch.setitem(ROOT_ALLOCATORS, "own", roots(by_roots))
    monkeypatch.setitem(PREFIX_ALLOCATORS, "own", prefixes(by_prefixes))
    steps = []

    def env_step(state, action, messages):
        steps.append(action)
        return StepResult("go on", done=len(messages) > 4, reward=float(len(steps) % 2))

    options = dict(root_allocation="own", prefix_allocation="own", per_device_train_batch_size=12, num_generations=4)
    options |= dict(reward_funcs=None, script=lambda request: [7, END], env_step=env_step, max_completion_length=400)
    return make_trainer(tmp_path, **options, max_steps=3), given


@pytest.mark.parametrize("entry", [lambda function: function, Allocator], ids=["a function", "an Allocator"])
def test_case_53_an_allocator_of_ones_own_is_given_the_values(tmp_path, monkeypatch, entry):
    trainer, given = trainer_of(tmp_path, monkeypatch, entry, entry)
    assert trainer.args.needs_predictor and trainer.predictor is not None
    trainer.train()
    assert len(given["roots"]) == 3 and given["prefixes"]
    # The head was trained twice before the third generation
    for values in (given["roots"][-1], given["prefixes"][-1]):
        assert values and not np.allclose(values, 0.5)


def test_one_that_reads_no_values_needs_no_predictor(tmp_path, monkeypatch):
    def blind(function):
        return Allocator(function, reads_values=False)

    trainer, given = trainer_of(tmp_path, monkeypatch, blind, blind)
    assert not trainer.args.needs_predictor and trainer.predictor is None
    trainer.train()
    assert {value for values in (*given["roots"], *given["prefixes"]) for value in values} == {0.5}
    assert not reads_values(ROOT_ALLOCATORS, "own") and not reads_values(ROOT_ALLOCATORS, "dapo")
