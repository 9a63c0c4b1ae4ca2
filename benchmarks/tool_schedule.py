"""
Trains TRL's GRPOTrainer or TRACETrainer, in every process of a launch, on a model whose tool calls follow a schedule.

    accelerate launch --config_file accelerate_configs/zero3_cpu.yaml benchmarks/tool_schedule.py \\
        --trainer trl --seeds 0 1 2

The two are given the same arguments: the same model, tool, prompts and reward. What the model says is fixed by its
prompt, so that a row needs as many tool rounds as the schedule says; it is said by `model.generate`, whose passes all
run, with logits that leave one choice. Progress is told line by line in JSON, for benchmarks/zero3_tool_loop.py and
benchmarks/step_cost.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from engine_overhead import make_tokenizer
from transformers import LogitsProcessor, LogitsProcessorList, Qwen3Config, Qwen3ForCausalLM, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from trace_trl import TRACEConfig, TRACETrainer
from trace_trl.selftest import keep_deepspeed_from_compiling


MOST_ROUNDS = 4
WORDS = "look search find read note answer number the of in a is was red green blue zero one two three four".split()


def lookup(number: int) -> str:
    """
    Looks something up.

    Args:
        number: What to look up.

    Returns:
        What was found.
    """
    return f"{number} is {WORDS[number % len(WORDS)]}"


def reward(completions: list, **kwargs: Any) -> list[float]:
    """Differs between siblings, whatever they say."""
    return [float(random.random() < 0.5) for _ in completions]


class Saying(LogitsProcessor):
    """Leaves each row of one `generate` call the next token of what it is to say."""

    def __init__(self, texts: list[list[int]], start: int, pad: int):
        self.texts, self.start, self.pad = texts, start, pad

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = input_ids.size(1) - self.start
        wanted = [text[position] if position < len(text) else self.pad for text in self.texts]
        forced = torch.full_like(scores, -torch.inf)
        forced[torch.arange(len(wanted)), torch.tensor(wanted)] = 0.0
        return forced


def follow_schedule(model: Any, tokenizer: Any, turn_tokens: int) -> None:
    """Has the model call the tool as often as its prompt says, whoever calls `generate`."""
    generate = model.generate
    draw = random.Random(0)

    def say(context: str) -> list[int]:
        # A process without live branches is given a context of one token
        rounds = max(map(int, re.findall(r"rounds (\d)", context)), default=0)
        thought = " ".join(draw.choices(WORDS, k=turn_tokens))
        text = f"{thought} done"
        if context.count("<tool_response>") < rounds:
            call = {"name": "lookup", "arguments": {"number": draw.randrange(99)}}
            text = f"{thought}\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]

    def scheduled(*args: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        contexts = [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        texts = [say(tokenizer.decode(context)) for context in contexts]
        saying = Saying(texts, input_ids.size(1), tokenizer.pad_token_id)
        return generate(
            *args,
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_processor=LogitsProcessorList([saying]),
            **kwargs,
        )

    model.generate = scheduled


def draw_rounds(seed: int, processes: int, prompts: int) -> list[int]:
    """Tool rounds of every prompt of one pool, the prompts of one process behind those of another."""
    draw = random.Random(seed)
    rounds = []
    for _ in range(processes):
        most = draw.randint(0, MOST_ROUNDS)
        rounds += [draw.randint(0, most) for _ in range(prompts)]
    return rounds


class Clock(TrainerCallback):
    """Seconds of every optimizer step, generation included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)


def make_trainer(options: argparse.Namespace, rounds: list[int] | None, seed: int, output_dir: str) -> GRPOTrainer:
    tokenizer = make_tokenizer([*WORDS, *map(str, range(100))])
    set_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=options.hidden_size,
            intermediate_size=3 * options.hidden_size,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden_size // 32,
            num_key_value_heads=options.hidden_size // 32,
            head_dim=32,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    follow_schedule(model, tokenizer, options.turn_tokens)
    config, trainer = (GRPOConfig, GRPOTrainer) if options.trainer == "trl" else (TRACEConfig, TRACETrainer)
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    args = config(
        output_dir=output_dir,
        seed=seed,
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo" if several else None,
        ds3_gather_for_generation=not options.no_gather,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.leaves // options.micro_batch,
        num_generations=6,
        max_completion_length=2000,
        max_steps=options.steps,
        shuffle_dataset=False,
        learning_rate=1e-4,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = getattr(args, "candidate_pool_size", args.generation_batch_size // 6) // args.world_size
    if rounds is None:
        rounds = [n for step in range(options.steps) for n in draw_rounds(100 * seed + step, args.world_size, prompts)]
    else:
        rounds = rounds * (prompts * args.world_size * options.steps)
    filler = " ".join(random.Random(seed).choices(WORDS, k=options.prompt_tokens))
    rows = [[{"role": "user", "content": f"{filler} {number} rounds {count}"}] for number, count in enumerate(rounds)]
    return trainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=tokenizer,
        tools=[lookup],
    )


def tell(trainer: GRPOTrainer, **event: Any) -> None:
    if trainer.is_world_process_zero():
        print("EVENT " + json.dumps(event), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=["trl", "trace"], required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one training each, one after the other")
    parser.add_argument("--rounds", type=int, help="tool rounds of every prompt, in place of a drawn schedule")
    parser.add_argument("--no-gather", action="store_true", help="ds3_gather_for_generation=False")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps")
    parser.add_argument("--leaves", type=int, default=12, help="of a generation batch, per process")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--turn-tokens", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_deepspeed_from_compiling()
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(options, None if options.rounds is None else [options.rounds], seed, folder)
            tell(trainer, seed=seed, event="started")
            clock = Clock()
            trainer.add_callback(clock)
            trainer.train()
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            tell(trainer, seed=seed, event="finished", seconds=clock.seconds, memory=memory)
    trainer.end()


if __name__ == "__main__":
    main()
