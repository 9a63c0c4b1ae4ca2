"""The predictor learns beside the policy, and leaves the policy's training as it is without one."""

import random

import pytest
import torch
from datasets import Dataset
from toys import few_words, make_tokenizer, make_trainer, usual

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


def babble(seed):
    """Turns of one to three random words."""
    draw, tokenizer = random.Random(seed), make_tokenizer()
    words = usual(tokenizer, " red green yes no")
    return lambda request: [*draw.choices(words, k=draw.randint(1, 3)), tokenizer.eos_token_id]


def train(output_dir, steps, **kwargs):
    lottery = Lottery(seed=1)
    defaults = {
        "root_allocation": "uniform",
        "prefix_allocation": "random",
        "continuations_per_root": 2,
        "num_generations": 6,
        "per_device_train_batch_size": 48,
        "max_completion_length": 64,
        "max_steps": steps,
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


def fresh_trees(trainer, count=96):
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


def excess(trees):
    """Mean squared distance of value and exact chance, at roots and at prefixes: the Brier score's excess over the
    irreducible one, since E[(v - outcome)^2] = E[(v - p)^2] + E[p (1 - p)]."""
    roots = [(tree.root.value, chance(tree.example["level"])) for tree in trees]
    prefixes = [
        (turn.value, chance(int(turn.messages[-1]["content"].split()[-1])))
        for tree in trees
        for turn in tree.turns()
        if turn.leaf is None
    ]
    assert len(roots) == len(prefixes) == len(trees)
    return [sum((v - p) ** 2 for v, p in pairs) / len(pairs) for pairs in (roots, prefixes)]
