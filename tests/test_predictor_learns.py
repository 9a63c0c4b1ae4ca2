"""The predictor learns beside the policy, and leaves the policy's training as it is without one."""

import random

import torch
from datasets import Dataset

from toys import few_words, make_model, make_trainer
from trace_trl import StepResult
from trace_trl.engine import RootPlan
from trace_trl.tree import RolloutTree


QUESTIONS = ("the lazy dog", "what is red", "left or right", "is the quick fox green", "1 2 3")


def chance(level):
    """Levels 0 .. 9 stand for chances of success of 0.05 .. 0.95."""
    return 0.05 + 0.1 * level


class Lottery:
    """The prompt names a level, the first answer revises it by a fair coin, and the outcome is drawn with its chance.

    Whatever the policy says, nothing changes: the exact value of every anchor is known.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self, row):
        return {"level": row["level"], "revised": False}

    def step(self, state, action, messages):
        level = state["level"]
        if state["revised"]:
            return StepResult(done=True, reward=float(self.random.random() < chance(level)))
        state["revised"] = True
        state["level"] += self.random.choice((-1, 1)) * min(level, 9 - level)
        return StepResult(observation=f" so the level is {state['level']}")


def rows(count, seed):
    draw = random.Random(seed)
    levels = [draw.randrange(10) for _ in range(count)]
    return [{"prompt": f"{draw.choice(QUESTIONS)} level {level}", "level": level} for level in levels]


def train(output_dir, **kwargs):
    """30 steps of 8 bare rollouts and 16 continuations."""
    lottery = Lottery(seed=1)
    defaults = {
        "root_allocation": "uniform",
        "prefix_allocation": "random",
        "continuations_per_root": 2,
        "num_generations": 6,
        "per_device_train_batch_size": 24,
        "max_completion_length": 96,
        "max_steps": 30,
        "generation_kwargs": few_words("yes no"),
        "env_max_workers": 1,  # the lottery's numbers are drawn in one order
        "train_predictor": True,
        "logging_steps": 10,
    }
    trainer = make_trainer(
        output_dir,
        dataset=Dataset.from_list(rows(400, seed=2)),
        env_step=lottery.step,
        env_reset=lottery.reset,
        reward_funcs=None,
        **(defaults | kwargs),
    )
    trainer.train()
    return trainer


def fresh_trees(trainer, count=128):
    """Rollouts from rows that were not trained on, with the values of all their anchors."""
    trainer.model.train()
    candidates, episodes = trainer._candidates(rows(count, seed=3))
    plans = [
        RootPlan(RolloutTree.from_prompt(c.prompt, c.prompt_ids, c.example, index=index), episode, bare=1)
        for index, (c, episode) in enumerate(zip(candidates, episodes, strict=True))
    ]
    trainer._engine.run(plans)
    trainer.values.predict_prefixes([leaf for plan in plans for leaf in plan.tree.leaves()])
    return [plan.tree for plan in plans]


def excess(pairs):
    """Mean squared distance of value and exact chance: the Brier score's excess over the irreducible one, since
    E[(v - outcome)^2] = E[(v - p)^2] + E[p (1 - p)]."""
    return sum((value - exact) ** 2 for value, exact in pairs) / len(pairs)


def test_the_predictor_learns_and_the_policy_does_not_notice(tmp_path):
    trainer = train(tmp_path / "with")
    trees = fresh_trees(trainer)
    roots = [(tree.root.value, chance(tree.example["level"])) for tree in trees]
    prefixes = [
        (turn.value, chance(int(turn.messages[-1]["content"].split()[-1])))
        for tree in trees
        for turn in tree.turns()
        if turn.leaf is None
    ]
    assert len(roots) == len(prefixes) == len(trees)
    for pairs in (roots, prefixes):
        assert {round(20 * exact) for _, exact in pairs} >= {1, 3, 5, 9, 11, 15, 17, 19}
        assert excess([(0.5, exact) for _, exact in pairs]) > 0.08  # as far as an untrained one is
        assert excess(pairs) < 0.03

    other = train(tmp_path / "without", train_predictor=False)
    assert other.predictor is None
    weights, without = trainer.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in without.items())
    assert not all(torch.equal(weights[name], weight) for name, weight in make_model().state_dict().items())
