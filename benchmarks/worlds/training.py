"""One training run in a world, a record per step."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from trace_trl import TRACEConfig, TRACETrainer
from trace_trl.metrics import mixed_anchor_counts
from trace_trl.reports import predictions
from trace_trl.tree import RolloutTree, Turn

from . import WORLDS
from .base import World
from .policy import RightPaths, load, success_chances
from .tool_loop import make_tool_loop


TRAIN_ROWS = 4096
TEST_ROWS = 240


class Budget(Protocol):
    """What a run spends: see benchmarks/equal_cost.py."""

    leaves: int
    steps: int
    tokens: int
    group: int
    most_steps: int


Record = dict[str, Any]


def train(
    world_name: str,
    options: dict[str, Any],
    seed: int,
    learning_rate: float,
    budget: Budget,
    write: Callable[[Record], None],
    prepared: Callable[[GRPOTrainer], None] | None = None,
) -> None:
    """Trains the warm-started policy of a world.

    Args:
        options: of [`TRACEConfig`]; `trainer` asks for TRL's own trainer instead, with a hand-written rollout
            (`"trl"`) or its tool loop (`"trl_tools"`); `values` for `"oracle"` or `"constant"` values in place of the
            predictor's.
        write: called with a record before the first step (`step` 0) and after every step.
        prepared: called with the trainer before it trains.
    """
    world = WORLDS[world_name]()
    options = dict(options)
    values, of_trl = options.pop("values", None), options.pop("trainer", None)
    set_seed(seed)
    model, tokenizer = load(world)
    paths = RightPaths(world, tokenizer)
    rows = Dataset.from_list(world.rows(TRAIN_ROWS, f"train {seed}"))
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "seed": seed,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,  # saves memory that models this small do not need
            "per_device_train_batch_size": budget.leaves,
            "generation_batch_size": budget.leaves,
            "num_generations": budget.group,
            "max_completion_length": world.completion_tokens,
            "learning_rate": learning_rate,
            "lr_scheduler_type": "constant",
            "max_steps": budget.most_steps,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        common |= {"model": model, "processing_class": tokenizer, "train_dataset": rows}
        meter = Meter(world, paths, budget, write)
        if of_trl is None:
            trainer: GRPOTrainer = make_trace(world, meter, common, options, values)
        else:
            trainer = TRL_TRAINERS[of_trl](world, meter, common)
        if prepared is not None:
            prepared(trainer)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(meter)
        trainer.train()


# A callback that writes


class Meter(TrainerCallback):
    """Writes a record per step, and ends a run that has spent its budget."""

    def __init__(self, world: World, paths: RightPaths, budget: Budget, write: Callable[[Record], None]):
        self.world, self.paths, self.budget, self.write = world, paths, budget, write
        self.test = world.rows(TEST_ROWS, "test")
        self.generation: Record = {}  # what the trainer tells of the step's generation
        self.tokens = 0
        self.leaves = 0  # discarded ones included
        self.spent_measuring = 0.0  # seconds of the step that are not the trainer's
        self._started = 0.0

    def success(self, model: Any) -> Record:
        """Chance of success in the test tasks, over all and by level."""
        chances = [row[0] for row in success_chances(model, self.paths, self.test)]
        levels: dict[str, list[float]] = {}
        for row, chance in zip(self.test, chances, strict=True):
            levels.setdefault(str(self.world.level(row)), []).append(chance)
        return {
            "success": sum(chances) / len(chances),
            "success_by_level": {level: sum(c) / len(c) for level, c in sorted(levels.items())},
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.write({"step": 0, "tokens": 0, "leaves": 0, **self.success(model)})

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.spent_measuring = 0.0
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self._started - self.spent_measuring
        self.tokens += self.generation["sampled_tokens"]
        self.leaves += self.budget.leaves + self.generation["discarded_leaves"]
        record = {"step": state.global_step, "tokens": self.tokens, "leaves": self.leaves}
        times = {"seconds": seconds, "seconds_measuring": self.spent_measuring}
        self.write({**record, **times, **self.generation, **self.success(model)})
        spent = state.global_step >= self.budget.steps and self.tokens >= self.budget.tokens
        control.should_training_stop = control.should_training_stop or spent


# Trainers


class MeasuredTrainer(TRACETrainer):
    def __init__(self, *args: Any, meter: Meter, stand_in: Any = None, **kwargs: Any):
        self._meter, self._stand_in = meter, stand_in
        super().__init__(*args, **kwargs)

    def _make_values(self) -> Any:
        if self._stand_in is None:
            return super()._make_values()
        self._stand_in.model = self.model
        return self._stand_in

    def _log_rollouts(self, mode: str, trees: list[RolloutTree], stats: Any) -> None:
        super()._log_rollouts(mode, trees, stats)
        started = time.perf_counter()
        logged = {key: values[-1] for key, values in self._metrics[mode].items() if values}
        counts = [mixed_anchor_counts(tree) for tree in trees]
        self._meter.generation = {
            "sampled_tokens": int(logged["rollout/sampled_tokens"]),
            "discarded_leaves": int(logged["rollout/discarded_leaves"]),
            "prefilled_tokens": int(logged["rollout/prefilled_tokens"]),
            "effective_ratio": logged["effective_ratio"],
            "active_prompts": int(logged["rollout/active_prompts"]),
            "mixed_anchors": sum(mixed for mixed, _ in counts),
            "branched_anchors": sum(branched for _, branched in counts),
            "train_success": logged["success_rate"],
            "budget_by_depth": branching_depths(trees),
            "seconds_by_stage": {k.partition("/")[2]: v for k, v in logged.items() if k.startswith("seconds/")},
            "predictor": {
                key.partition("/")[2]: value
                for key, value in logged.items()
                if key.startswith("predictor/") and not math.isnan(value)
            },
            "predictions": [
                (depth, round(value, 4), int(outcome)) for tree in trees for depth, value, outcome in predictions(tree)
            ],
            "roots": self._roots(trees),
        }
        self._meter.spent_measuring += time.perf_counter() - started

    def _roots(self, trees: list[RolloutTree]) -> list[tuple[float, float, int, int]]:
        """Of every prompt its exact and its predicted chance of success, its leaves, and those that succeeded."""
        rows = [tree.example for tree in trees]
        exact = [chances[0] for chances in success_chances(self.model, self._meter.paths, rows)]
        found = []
        for tree, chance in zip(trees, exact, strict=True):
            successes = [leaf.leaf.success for leaf in tree.leaves() if leaf.leaf is not None]
            value = math.nan if tree.root.value is None else tree.root.value
            found.append((round(chance, 4), round(value, 4), len(successes), sum(map(bool, successes))))
        return found


def branching_depths(trees: Sequence[RolloutTree]) -> dict[str, int]:
    """Leaves by the depth of the anchor they were drawn from: 0 for roots."""
    depths: Counter[int] = Counter()
    for tree in trees:
        for leaf in tree.leaves():
            anchor: Turn = tree.root
            if leaf.leaf is not None and leaf.leaf.kind == "continuation":
                anchor = next(node for node in reversed(leaf.path()[:-1]) if len(node.children) > 1)
            depths[anchor.depth] += 1
    return {str(depth): count for depth, count in sorted(depths.items())}


class ExactValues:
    """Stands in for the predictor with the exact chance of success of every anchor.

    Exact up to turns that are not the right ones and lead to success all the same; see [`World`].
    """

    predictor_trainer = None

    def __init__(self, paths: RightPaths):
        self.paths = paths
        self.model: Any = None
        self._rows: dict[Turn, dict[str, Any]] = {}

    def predict_roots(self, candidates: Sequence[Any]) -> None:
        rows = [candidate.example for candidate in candidates]
        for candidate, chances in zip(candidates, success_chances(self.model, self.paths, rows), strict=True):
            candidate.value = chances[0]

    def plant(self, trees: Sequence[RolloutTree], offset: int) -> None:
        self._rows = {tree.root: tree.example for tree in trees}

    def predict_prefixes(self, leaves: Sequence[Turn]) -> None:
        by_root: dict[Turn, list[Turn]] = {}
        for leaf in leaves:
            first = leaf.path()[0]
            assert first.parent is not None
            by_root.setdefault(first.parent, []).append(leaf)
        rows = [self._rows[root] for root in by_root]
        for row, found, chances in zip(
            rows, by_root.values(), success_chances(self.model, self.paths, rows), strict=True
        ):
            ids, ends, _ = self.paths(row)
            for node in {node for leaf in found for node in leaf.path()[:-1]}:
                right = node.depth < len(ends) and node.history_ids() == ids[: ends[node.depth]]
                node.value = chances[node.depth] if right else 0.0

    def forget(self) -> None:
        self._rows = {}


class ConstantValues(ExactValues):
    """A predictor that says 0.5."""

    def predict_roots(self, candidates: Sequence[Any]) -> None:
        for candidate in candidates:
            candidate.value = 0.5

    def predict_prefixes(self, leaves: Sequence[Turn]) -> None:
        for leaf in leaves:
            for node in leaf.path()[:-1]:
                node.value = 0.5


STAND_INS = {"oracle": ExactValues, "constant": ConstantValues}


def make_trace(
    world: World, meter: Meter, common: dict[str, Any], options: dict[str, Any], values: str | None
) -> TRACETrainer:
    arguments = dict(common)
    objects = {name: arguments.pop(name) for name in ("model", "processing_class", "train_dataset")}
    config = TRACEConfig(**arguments, **options, max_turn_length=world.turn_tokens, show_rollout_progress=False)
    return MeasuredTrainer(
        **objects,
        args=config,
        env_step=world.step,
        env_reset=world.reset,
        meter=meter,
        stand_in=None if values is None else STAND_INS[values](meter.paths),
    )


def make_trl(world: World, meter: Meter, common: dict[str, Any]) -> GRPOTrainer:
    """TRL's own trainer, unmodified, with a `rollout_func` that plays the world with all rollouts at once."""
    arguments = dict(common)
    objects = {name: arguments.pop(name) for name in ("model", "processing_class", "train_dataset")}
    tokenizer = objects["processing_class"]
    by_prompt = {row["prompt"]: row for row in objects["train_dataset"]}  # all that a `rollout_func` is given

    def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> Record:
        rows = [by_prompt[prompt] for prompt in prompts]
        states = [world.reset(row) for row in rows]
        prompt_ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
        ids: list[list[int]] = [[] for _ in prompts]
        mask: list[list[int]] = [[] for _ in prompts]
        rewards = [0.0] * len(prompts)
        live = list(range(len(prompts)))
        trainer.generation_config.max_new_tokens = world.turn_tokens
        prefilled = 0
        while live:
            contexts = [prompt_ids[i] + ids[i] for i in live]
            prefilled += sum(map(len, contexts))
            turns, _ = trainer._generate_single_turn(contexts, None, {}, num_generations=1)
            going_on = []
            for i, turn in zip(live, turns, strict=True):
                ids[i] = ids[i] + list(turn)
                mask[i] = mask[i] + [1] * len(turn)
                if turn[-1] != tokenizer.eos_token_id:
                    continue
                result = world.step(states[i], tokenizer.decode(turn, skip_special_tokens=True))
                rewards[i] = result.reward or 0.0
                if not result.done:
                    observation = tokenizer(result.observation, add_special_tokens=False)["input_ids"]
                    ids[i] = ids[i] + observation
                    mask[i] = mask[i] + [0] * len(observation)
                    going_on.append(i)
            live = going_on
        size = trainer.num_generations
        groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
        mixed = sum(0 < sum(group) < size for group in groups)
        meter.generation = {
            "sampled_tokens": sum(map(sum, mask)),
            "discarded_leaves": 0,
            "prefilled_tokens": prefilled,
            "effective_ratio": mixed / len(groups),
            "active_prompts": len(groups),
            "mixed_anchors": mixed,
            "branched_anchors": len(groups),
            "train_success": sum(rewards) / len(rewards),
        }
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, "env_mask": mask, "won": rewards}

    def reward(won: list[float], **kwargs: Any) -> list[float]:
        return won

    return GRPOTrainer(**objects, args=GRPOConfig(**arguments), reward_funcs=[reward], rollout_func=rollout_func)


TRL_TRAINERS = {"trl": make_trl, "trl_tools": make_tool_loop}
