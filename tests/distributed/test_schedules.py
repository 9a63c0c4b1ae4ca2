"""Two processes that need different numbers of rounds: ZeRO-3 and DDP train as one process does on the same trees."""

import functools
import math

import pytest
from launching import forests, largest_difference, launch, policy, results

from trace_trl import selftest
from trace_trl.engine import Stats


pytestmark = pytest.mark.distributed

SEEDS = range(20)
DDP_SEEDS = range(3)  # nothing is gathered for a forward pass there
PART = 4  # as many schedules are trained by one launch, so that no test lasts minutes
RUNS = [
    pytest.param(mode, seed, marks=[pytest.mark.slow] if seed >= PART else [])
    for mode in ("gather", "no-gather")
    for seed in SEEDS
] + [pytest.param("ddp", seed) for seed in DDP_SEEDS]
STEPS = 2
# Adam divides a gradient by its size: one that is nothing but rounding would move its weight as far as any other, and
# the other way on the next kind of processor. With this, a difference of gradients is not magnified.
EPSILON = 1e-3


def trained(mode, seed, folder):
    """The folder where a mode's schedule of `seed` was trained."""
    return trained_part(mode, seed // PART, folder)


@functools.cache
def trained_part(mode, part, folder):
    """Some schedules of a mode, trained by two processes one after the other."""
    out = folder / mode
    out.mkdir(exist_ok=True)
    options = {"task": "schedule", "max_steps": STEPS, "adam_epsilon": EPSILON}
    options["ds3_gather_for_generation"] = mode != "no-gather"
    seeds = DDP_SEEDS if mode == "ddp" else SEEDS[part * PART : (part + 1) * PART]
    jobs = [{"name": f"schedule-{seed}", "seed": seed, **options} for seed in seeds]
    launch("ddp" if mode == "ddp" else "zero3_cpu", out, *jobs)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("schedules")


@pytest.mark.parametrize(("mode", "seed"), RUNS)
def test_case_28_schedules_end_well(folder, mode, seed):
    both = results(trained(mode, seed, folder), f"schedule-{seed}")
    assert len(both) == 2
    for result in both:
        assert result["failed"] == []
        assert len(result["losses"]) == STEPS and all(map(math.isfinite, result["losses"]))
    assert both[0]["head"] == both[1]["head"]


def turns_of_both(out, seeds):
    """Turns that each of two processes needed, per generation of some schedules."""
    both = [results(out, f"schedule-{seed}") for seed in seeds]
    return [
        tuple(generation["turns"] for generation in pair)
        for one, other in both
        for pair in zip(one["generations"], other["generations"], strict=True)
    ]


def test_processes_need_different_numbers_of_turns(folder):
    turns = turns_of_both(trained_part("gather", 0, folder), SEEDS[:PART])
    assert len(turns) == PART * STEPS and sum(first != second for first, second in turns) > len(turns) / 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_number_of_turns_comes_about(folder):
    turns = [
        pair
        for part in range(len(SEEDS) // PART)
        for pair in turns_of_both(trained_part("gather", part, folder), SEEDS[part * PART : (part + 1) * PART])
    ]
    assert {count for pair in turns for count in pair} == {1, 2, 3, 4, 5}


class Replay(selftest.ObservedTrainer):
    """Trains on trees that were rolled out before."""

    forests: list = []

    def _roll_out_training(self, inputs):
        trees = self.forests.pop(0)
        for tree in trees:
            tree.backup(self.args.value_backup)
        self.values.learn(trees)
        self.values.forget()
        stats = Stats()
        stats.seconds["total"] = 1.0
        return trees, stats


def merged(parts):
    """The trees of all processes, those of one prompt joined at their root."""
    trees = {}
    for tree in (tree for part in parts for tree in part):
        whole = trees.setdefault(tree.index, tree)
        whole.remote = []
        if whole is not tree:
            for child in tree.root.children:
                child.parent = whole.root
                whole.root.children.append(child)
    return list(trees.values())


@pytest.mark.parametrize(("mode", "seed"), RUNS)
def test_case_28_one_process_learns_the_same_from_the_same_trees(folder, mode, seed, tmp_path, monkeypatch):
    out, name = trained(mode, seed, folder), f"schedule-{seed}"
    parts = forests(out, name)
    monkeypatch.setattr(selftest, "ObservedTrainer", Replay)
    options = {"max_steps": STEPS, "adam_epsilon": EPSILON, "per_device_train_batch_size": 8}
    args = selftest.make_args(str(tmp_path), seed=seed, **options)
    trainer = selftest.make_trainer(args, results(out, name)[0]["turns"])
    before = selftest.weights(trainer)
    trainer.forests = [merged(generation) for generation in zip(*parts, strict=True)]
    trainer.train()
    after = selftest.weights(trainer)
    assert largest_difference(before, after) > 1e-3
    assert largest_difference(after, policy(out, name)) < 1e-6
