"""What the training scripts share: arguments, the model with its warm start, and the evaluations around a training."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from smollm2 import MODEL_ID, resolve_model
from tasks import Task
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback
from trl import ModelConfig, ScriptArguments, get_quantization_config

from trace_trl import TRACEConfig, TRACETrainer


logger = logging.getLogger(__name__)

WARM_STARTS = Path(__file__).resolve().parent / "warm_start"

# What differs from TRACEConfig, so that a run without arguments fits two CPU cores. Each is an argument of a script.
DEFAULTS = {
    "model_name_or_path": MODEL_ID,
    "use_cpu": not torch.cuda.is_available(),
    "bf16": False,
    "gradient_checkpointing": False,
    "learning_rate": 1e-4,
    "warmup_steps": 0,
    "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": 8,
    "generation_batch_size": 24,
    "gradient_accumulation_steps": 8,
    "num_generations": 6,
    "num_generations_eval": 1,
    "continuations_per_root": 2,
    "temperature": 1.0,
    "log_trees": True,
    "logging_steps": 1,
    "report_to": "none",
}


@dataclass
class TaskArguments(ScriptArguments):
    """
    Arguments of every training script.

    Args:
        dataset_name (`str`, *optional*):
            Training rows: a file (JSON, JSON lines, parquet; gzipped or not), a folder, or an id on the Hub. Defaults
            to the bundled rows.
        eval_file (`str`, *optional*):
            Rows to evaluate on, likewise; of a data set the split `dataset_test_split`. Defaults to that split of
            `dataset_name` where this is no file, and to the bundled rows otherwise.
        eval_rows (`int`, *optional*, defaults to `16`):
            Rows of an evaluation; `0` for all.
        subset (`str`, *optional*):
            Only rows of this kind, in training and evaluation: their column `subset`. `"all"` for all.
        warm_start (`str`, *optional*):
            LoRA adapter to start from and to go on training, a path or an id on the Hub; `"none"` for the bare model.
            Defaults to the bundled adapter for the default model, and to none for any other.
    """

    eval_file: str | None = field(
        default=None, metadata={"help": "Rows to evaluate on; the bundled ones, or a split, by default."}
    )
    eval_rows: int = field(default=16, metadata={"help": "Rows of an evaluation; 0 for all."})
    subset: str | None = field(default=None, metadata={"help": "Only rows of this kind; 'all' for all."})
    warm_start: str | None = field(
        default=None,
        metadata={
            "help": "LoRA adapter to start from, a path or an id on the Hub; 'none' for the bare model. Defaults to "
            "the bundled adapter for the default model."
        },
    )


def load_datasets(task: Task, args: TaskArguments, **kwargs: Any) -> tuple[Dataset, Dataset]:
    """The training rows and the rows of an evaluation, cut to what the arguments ask for.

    Raises:
        ValueError: if there is no row of `subset`.
    """
    name, config = args.dataset_name, args.dataset_config
    train = task.train_rows(name, config=config, split=args.dataset_train_split, **kwargs)
    if args.eval_file is not None:
        test = task.test_rows(args.eval_file, split=args.dataset_test_split, **kwargs)
    elif name is None or Path(name).is_file():
        test = task.test_rows(**kwargs)
    else:
        test = task.test_rows(name, config=config, split=args.dataset_test_split, **kwargs)
    train, test = (_of_subset(rows, args.subset) for rows in (train, test))
    return Dataset.from_list(train), Dataset.from_list(test[: args.eval_rows or None])


def _of_subset(rows: Sequence[dict], subset: str | None) -> list[dict]:
    kept = [row for row in rows if subset in (None, "all", row["subset"])]
    if not kept:
        kinds = ", ".join(sorted({row["subset"] for row in rows}))
        raise ValueError(f"No row has the subset {subset!r}: there are {kinds}.")
    return kept


def load_model(
    task: Task, script_args: TaskArguments, training_args: TRACEConfig, model_args: ModelConfig
) -> tuple[Any, Any]:
    """The model, with the adapter to start from where there is one, and its tokenizer."""
    name = model_args.model_name_or_path
    adapter = script_args.warm_start
    if adapter is None and name == MODEL_ID:
        if (WARM_STARTS / task.name).is_dir():
            adapter = str(WARM_STARTS / task.name)
        else:
            logger.warning(f"There is no warm start in {WARM_STARTS / task.name}: {name} starts as it is.")
    path = resolve_model(name)
    kwargs = {"revision": model_args.model_revision, "trust_remote_code": training_args.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(path, **kwargs)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=model_args.dtype,
        attn_implementation=model_args.attn_implementation,
        quantization_config=get_quantization_config(model_args),
        **kwargs,
    )
    if path != name:
        # For the model card: the folder tells nobody which model it is
        model.config.base_model_name_or_path = name
    if adapter is None or adapter == "none":
        return model, tokenizer
    if model_args.use_peft:
        raise ValueError(f"The adapter in {adapter} is trained already: drop --use_peft, or set --warm_start none.")
    return PeftModel.from_pretrained(model, adapter, is_trainable=True), tokenizer


def train_and_evaluate(trainer: TRACETrainer, task: Task) -> None:
    """Evaluates, trains, evaluates again, saves the model and prints what came of it."""
    started = time.perf_counter()
    # One line per step tells what a person follows; the full logs are in `trainer_state.json` and `--report_to`
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    output_dir = Path(trainer.args.output_dir)

    before = evaluate_policy(trainer, task)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    after = evaluate_policy(trainer, task)
    trainer.save_model(trainer.args.output_dir)

    if trainer.accelerator.is_main_process:
        results = {"before": before, "after": after}
        (output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        print(f"\n{summary(before, after, trainer.state.log_history)}\n")
        print(f"model       {output_dir}")
        for checkpoint in sorted(output_dir.glob("checkpoint-*")):
            print(f"checkpoint  {checkpoint}")
        if trainer.args.log_trees:
            print(f"trees       {output_dir / 'trees'}")
        print(f"results     {output_dir / 'results.json'}")
        print(f"took        {time.perf_counter() - started:.0f} s")


def evaluate_policy(trainer: TRACETrainer, task: Task) -> dict[str, float]:
    """`trainer.evaluate()` in words, and what the task adds."""
    task.begin_evaluation()
    logged = trainer.evaluate()
    results = {
        "reward": logged["eval_reward"],
        "success rate": logged["eval_success_rate"],
        "turns per episode": logged["eval_rollout/turns_per_leaf"],
    }
    return results | task.evaluation_results(logged)


def summary(before: dict[str, float], after: dict[str, float], history: Sequence[dict]) -> str:
    """A table of the evaluations, and one of the first and last training step."""
    lines = [f"{'evaluation':<28}{'before':>10}{'after':>10}"]
    lines += [f"  {key:<26}{before[key]:>10.3f}{after[key]:>10.3f}" for key in before]
    steps = [entry for entry in history if "effective_ratio" in entry]
    if steps:
        lines += ["", f"{'training':<28}{'first step':>10}{'last step':>10}"]
        for key in ("reward", "success_rate", "effective_ratio", "mixed_anchor_ratio", "predictor/brier", "loss"):
            first, last = (entry.get(key) for entry in (steps[0], steps[-1]))
            if first is not None and last is not None:
                lines.append(f"  {key.replace('_', ' '):<26}{first:>10.3f}{last:>10.3f}")
        mixed = sum(entry["effective_ratio"] > 0 for entry in steps)
        lines.append(f"  {'steps with a mixed tree':<26}{mixed:>10} of {len(steps)}")
    return "\n".join(lines)
