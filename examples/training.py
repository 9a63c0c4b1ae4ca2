"""What the training scripts share: arguments, the model with its warm start, and the evaluations around a training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from smollm2 import MODEL_ID, resolve_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback
from trl import ModelConfig, ScriptArguments, get_quantization_config

from trace_trl import TRACEConfig, TRACETrainer


EXAMPLES = Path(__file__).resolve().parent
DATA = EXAMPLES / "data"
WARM_STARTS = EXAMPLES / "warm_start"

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
            Rows to evaluate on, likewise. Defaults to the bundled rows.
        eval_rows (`int`, *optional*, defaults to `16`):
            Rows of an evaluation; `0` for all.
        subset (`str`, *optional*):
            Only rows of this kind, in training and evaluation: their column `subset`.
        warm_start (`str`, *optional*):
            LoRA adapter to start from and to go on training, a path or an id on the Hub; `"none"` for the bare model.
            Defaults to the bundled adapter for the default model, and to none for any other.
    """

    eval_file: str | None = field(
        default=None, metadata={"help": "Rows to evaluate on. Defaults to the bundled ones."}
    )
    eval_rows: int = field(default=16, metadata={"help": "Rows of an evaluation; 0 for all."})
    subset: str | None = field(default=None, metadata={"help": "Only rows of this kind."})
    warm_start: str | None = field(
        default=None,
        metadata={
            "help": "LoRA adapter to start from, a path or an id on the Hub; 'none' for the bare model. Defaults to "
            "the bundled adapter for the default model."
        },
    )


def load_model(
    script_args: TaskArguments, training_args: TRACEConfig, model_args: ModelConfig, warm_start: Path
) -> tuple[Any, Any]:
    """The model, with the adapter to start from where there is one, and its tokenizer."""
    name = model_args.model_name_or_path
    adapter = script_args.warm_start
    if adapter is None and name == MODEL_ID and warm_start.is_dir():
        adapter = str(warm_start)
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
    if adapter is None or adapter == "none":
        return model, tokenizer
    if model_args.use_peft:
        raise ValueError(f"The adapter in {adapter} is trained already: drop --use_peft, or set --warm_start none.")
    return PeftModel.from_pretrained(model, adapter, is_trainable=True), tokenizer


def make_datasets(train: Sequence[dict], test: Sequence[dict], args: TaskArguments) -> tuple[Dataset, Dataset]:
    """Rows as data sets, cut to what the arguments ask for.

    Raises:
        ValueError: if there is no row of `subset`.
    """
    chosen = []
    for rows in (train, test):
        kept = [row for row in rows if args.subset in (None, row["subset"])]
        if not kept:
            kinds = ", ".join(sorted({row["subset"] for row in rows}))
            raise ValueError(f"No row has the subset {args.subset!r}: there are {kinds}.")
        chosen.append(Dataset.from_list(kept))
    return chosen[0], chosen[1].select(range(min(args.eval_rows or len(chosen[1]), len(chosen[1]))))


def train_and_evaluate(
    trainer: TRACETrainer, measure: Callable[[dict[str, float]], dict[str, float]] = lambda logged: {}
) -> None:
    """
    Evaluates, trains, evaluates again, saves the model and prints what came of it.

    Args:
        trainer (`TRACETrainer`):
            Trainer with an `eval_dataset`.
        measure (`Callable`):
            Gives further results of an evaluation that has just ended, from what the trainer logged for it.
    """
    started = time.perf_counter()
    # One line per step tells what a person follows; the full logs are in `trainer_state.json` and `--report_to`
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    output_dir = Path(trainer.args.output_dir)

    before = evaluate_policy(trainer, measure)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    after = evaluate_policy(trainer, measure)
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


def evaluate_policy(
    trainer: TRACETrainer, measure: Callable[[dict[str, float]], dict[str, float]]
) -> dict[str, float]:
    """`trainer.evaluate()` in words, and what `measure` adds."""
    logged = trainer.evaluate()
    results = {
        "reward": logged["eval_reward"],
        "success rate": logged["eval_success_rate"],
        "turns per episode": logged["eval_rollout/turns_per_leaf"],
    }
    return results | measure(logged)


def environment_metrics(names: dict[str, str]) -> Callable[[dict[str, float]], dict[str, float]]:
    """What the environment counted, by the names given; 0 where no episode got as far as the environment."""
    return lambda logged: {name: logged.get(f"eval_env/{key}", 0.0) for key, name in names.items()}


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
