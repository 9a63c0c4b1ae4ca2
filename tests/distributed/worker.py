"""
What the processes of a distributed test run. Started by a launcher, or on its own for one process.

    worker.py OUT JOBS

JOBS is a JSON list; each job names a task below, and its arguments. Starting processes takes longer than most jobs, so
several are done one after the other. Each writes what the test looks at into the folder OUT, one file per process.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification
from transformers.trainer_utils import get_last_checkpoint


os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1]))

from trace_trl import checkpoints, selftest  # noqa: E402
from trace_trl import trainer as trainer_module  # noqa: E402
from waiting import until  # noqa: E402


class RecordingTrainer(selftest.ObservedTrainer):
    """Keeps pools, and the trees of every generation as they were when rows were made of them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.forests = []
        self.pools = []

    def _candidates(self, inputs):
        candidates, episodes = super()._candidates(inputs)
        self.pools.append([candidate.prompt for candidate in candidates])
        return candidates, episodes

    def _roll_out_training(self, inputs):
        trees, stats = super()._roll_out_training(inputs)
        self.forests.append(pickle.dumps(trees))
        return trees, stats


selftest.ObservedTrainer = RecordingTrainer  # type: ignore[misc]


def make_trainer(out: Path, name: str, turns: list[int] | None, lora: bool = False, **options: Any):
    args = selftest.make_args(str(out / name), **options)
    if turns is None:
        turns = selftest.draw_turns(args.seed, args.world_size, generations=3)
    peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return selftest.make_trainer(args, turns, peft_config=peft_config if lora else None)


def write(out: Path, name: str, trainer: RecordingTrainer, **more: Any) -> None:
    """One JSON file per process, its trees, and on the first process the policy's weights."""
    policy = selftest.weights(trainer)
    process = trainer.args.process_index
    checks = selftest.checks_of(trainer)
    result = {
        "failed": [f"{check.name}: {check.detail}" for check in checks if not check.passed],
        "logs": trainer.state.log_history,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "head": selftest.fingerprint(trainer.predictor.state_dict()),
        "generations": trainer.generations,
        "pools": trainer.pools,
        "turns": list(trainer.train_dataset["turns"]),
        **more,
    }
    (out / f"{name}.{process}.json").write_text(json.dumps(result))
    with open(out / f"{name}.{process}.trees", "wb") as file:
        pickle.dump(trainer.forests, file)
    if process == 0:
        torch.save(policy, out / f"{name}.policy")
        torch.save(trainer.predictor.state_dict(), out / f"{name}.head")


def schedule(out: Path, name: str, **options: Any) -> None:
    """Trains on random schedules."""
    trainer = make_trainer(out, name, None, **options)
    trainer.train()
    write(out, name, trainer)


def train(
    out: Path,
    name: str,
    folder: str | None = None,
    resume: str | None = None,
    save_to: str | None = None,
    halt: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """
    Args:
        folder: output folder, where it is not that of `name`.
        resume: checkpoint in it to go on from; `"last"` for the last one if there is any.
        save_to: folder to save the model in.
        halt: where a process is to stand still in its second save: arguments of [`Halt`].
    """
    trainer = make_trainer(out, folder or name, None, **options)
    if halt is not None and halt.pop("process") == trainer.args.process_index:
        Halt(trainer, out, **halt)
    output_dir = trainer.args.output_dir
    if resume == "last":
        resume = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    elif resume is not None:
        resume = os.path.join(output_dir, resume)
    trainer.train(resume_from_checkpoint=resume)
    if save_to is not None:
        trainer.save_model(str(out / save_to))
    write(out, name, trainer)


class Halt:
    """Lets a process stand still in its second save, before one of the changes to files that a save consists of.

    Args:
        out: folder in which `file` appears when the process stands; it holds the change that is not made any more.
        share: how many changes are made before, as a share of those of the first save. Where the second has fewer,
            the process stands still at its end.
    """

    CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")

    def __init__(self, trainer: Any, out: Path, file: str, share: float):
        self.file, self.share = out / file, share
        self.save = trainer._save_checkpoint
        trainer._save_checkpoint = self.saving
        self.counts: list[int] = []  # changes of every save
        self.is_saving = False
        sys.addaudithook(self.hear)

    def saving(self, *args: Any) -> None:
        self.counts.append(0)
        self.is_saving = True
        self.save(*args)
        self.is_saving = False
        if len(self.counts) == 2:
            self.stand("end")

    def hear(self, event: str, args: tuple) -> None:
        if not self.is_saving or threading.current_thread() is not threading.main_thread():
            return
        if event in self.CHANGES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
            if len(self.counts) == 2 and self.counts[1] >= self.share * self.counts[0]:
                self.is_saving = False
                self.stand(f"{event} {args[0]}")
            self.counts[-1] += 1

    def stand(self, change: str) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(f"{change}: {self.counts}")
        part.rename(self.file)
        time.sleep(600)  # until it is killed; a test's own end kills it as well
        os._exit(1)


def allocate(out: Path, name: str, **options: Any) -> None:
    """Generates with weights that stay as they are, and a head that tells prompts apart."""
    fixed = {"learning_rate": 0.0, "train_predictor": False, "shuffle_dataset": True}
    turns = [1 + number % 5 for number in range(12 * selftest.PROMPTS)]
    trainer = make_trainer(out, name, turns, **fixed, **options)
    if trainer.predictor is not None:
        output = trainer.predictor.output.weight
        with torch.no_grad():
            output.copy_(20 * torch.randn(output.shape, generator=torch.Generator().manual_seed(1)))
    trainer.train()
    process = trainer.args.process_index
    result = {"pools": trainer.pools, "generations": trainer.generations}
    (out / f"{name}.{process}.json").write_text(json.dumps(result))


def unlucky(out: Path, name: str, **options: Any) -> None:
    """The second process's prompts are answered at once: they have no prefix to continue from."""
    trainer = make_trainer(out, name, [5, 5, 1, 1], root_allocation="uniform", max_steps=2, **options)
    trainer.train()
    trees = [tree for generation in trainer.forests for tree in pickle.loads(generation)]
    write(out, name, trainer, kinds=[leaf.leaf.kind for tree in trees for leaf in tree.leaves()])


def disagree(out: Path, name: str) -> None:
    """Two processes that go apart behind each other's back."""
    trainer = make_trainer(out, name, None, max_steps=1)
    trainer.train()
    with torch.no_grad():
        trainer.predictor.output.bias += trainer.args.process_index
    trainer.generations[0]["leaves"] += trainer.args.process_index
    trainer.generations[0]["rounds"] += trainer.args.process_index
    write(out, name, trainer)


def allotted(out: Path, name: str, counts: list[int], **options: Any) -> None:
    """Trains with given numbers of bare rollouts."""
    allocate = trainer_module.allocate
    trainer_module.allocate = lambda *args, **kwargs: counts
    try:
        train(out, name, **options)
    finally:
        trainer_module.allocate = allocate


def judged(out: Path, name: str, **options: Any) -> None:
    """A reward model, which DeepSpeed shards as it shards the policy, beside the environment's rewards."""
    tokenizer = selftest.make_tokenizer()
    torch.manual_seed(3)
    config = selftest.make_model(tokenizer).config
    config.num_labels = 1
    judge = AutoModelForSequenceClassification.from_config(config)
    args = selftest.make_args(str(out / name), max_steps=2, **options)
    turns = selftest.draw_turns(args.seed, args.world_size, generations=3)
    trainer = selftest.make_trainer(args, turns, reward_funcs=[judge], reward_processing_classes=[tokenizer])
    trainer.train()
    trees = [tree for generation in trainer.forests for tree in pickle.loads(generation)]
    write(out, name, trainer, rewards=[leaf.leaf.rewards[0] for tree in trees for leaf in tree.leaves()])


def own_disks(out: Path, name: str) -> None:
    """Saves into a folder that both processes see, then each into one of its own, as on nodes that share no disk; and
    goes on from the latter, where only the first process finds the head."""
    first = make_trainer(out, "shared", None, max_steps=1, save_strategy="steps", save_steps=1)
    first.train()
    process = first.args.process_index
    found = {"shared": sorted(os.listdir(out / "shared" / "checkpoint-1"))}
    # accelerate calls the second process a main one if it is the first of its node
    type(first.accelerator).is_local_main_process = property(lambda self: True)  # type: ignore[assignment,method-assign]
    second = make_trainer(out, f"own{process}", None, max_steps=1, save_strategy="steps", save_steps=1)
    second.train()
    path = out / f"own{process}" / "checkpoint-1"
    found["own"] = sorted(os.listdir(path))
    trained = selftest.fingerprint(second.predictor.state_dict())
    with torch.no_grad():
        second.predictor.output.bias += 1 + process
    assert checkpoints.load_head(second.predictor, str(path))
    found["heads"] = [trained, selftest.fingerprint(second.predictor.state_dict())]
    (out / f"{name}.{process}.json").write_text(json.dumps(found))


def resharded(out: Path, name: str) -> None:
    """Looks, where vLLM's weights would be pushed, for parameters that FSDP2 left whole."""
    trainer = make_trainer(out, name, None, max_steps=2)
    whole = []
    session = trainer._engine.generating

    def looking():
        parameters = trainer.model.named_parameters()
        whole.append([name for name, parameter in parameters if not isinstance(parameter, DTensor)])
        return session()

    trainer._engine.generating = looking
    trainer.train()
    write(out, name, trainer, whole=whole)


def noted(out: Path, name: str, **options: Any) -> None:
    """Reads the states again that sampling had."""
    trainer = make_trainer(out, name, [5, 4, 3, 5] * 4, max_steps=2, **options)
    differences = []
    values, forget = trainer.values, trainer.values.forget

    def reading() -> None:
        anchors = list(values._features)
        read = values.hidden_states.read(
            [anchor.history_ids() for anchor in anchors], [[anchor.history_length - 1] for anchor in anchors]
        )
        differences.extend(
            (values._features[anchor] - states[0]).abs().max().item()
            for anchor, states in zip(anchors, read, strict=True)
            if anchor.depth
        )
        forget()

    values.forget = reading
    trainer.train()
    write(out, name, trainer, differences=differences)


class Broken(Exception):
    pass


def failing(out: Path, name: str) -> None:
    """Something raises on the second process only, in its second generation."""
    trainer = make_trainer(out, name, [1, 2, 3, 4] * 8, max_steps=6)
    process = trainer.args.process_index

    def broken(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step and process == 1:
                raise Broken(f"broken by {name}")
            return function(*args, **kwargs)

        return call

    owner, method = {
        "reset": (trainer._engine.environment, "reset"),
        "reward": (trainer.scorer, "_rewards"),
        "generation": (trainer._engine, "generate"),
        "prefixes": (trainer._engine, "predict"),
    }[name]
    setattr(owner, method, broken(getattr(owner, method)))
    # Within a call of all processes, the other can't be told
    train_to_the_error(out, trainer, both=name in ("reset", "reward"))


def mixed_prompts(out: Path, name: str) -> None:
    """The second process is given strings, the first one messages."""
    trainer = make_trainer(out, name, None, max_steps=1)

    def collate(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "prompt": row["prompt"][0]["content"]} for row in rows]

    if trainer.args.process_index == 1:
        trainer.data_collator = collate
    train_to_the_error(out, trainer, both=True)


def train_to_the_error(out: Path, trainer: Any, both: bool) -> None:
    """Trains until it fails, and writes the error down; where `both` processes have one, waits for that of the other,
    since the launcher ends both when the first has ended."""
    try:
        trainer.train()
    except Exception as error:
        process = trainer.args.process_index
        result = {"error": f"{type(error).__name__}: {error}", "ddp_timeout": trainer.args.ddp_timeout}
        part = out / f"error.{process}.part"
        part.write_text(json.dumps(result))
        part.rename(out / f"error.{process}.json")
        if both:
            until((out / f"error.{1 - process}.json").exists)
        raise


TASKS = {
    function.__name__: function
    for function in (
        schedule,
        train,
        allocate,
        allotted,
        unlucky,
        judged,
        disagree,
        own_disks,
        resharded,
        noted,
        failing,
        mixed_prompts,
    )
}


def main() -> None:
    out = Path(sys.argv[1])
    for job in json.loads(sys.argv[2]):
        TASKS[job.pop("task")](out, **job)
        gc.collect()
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
