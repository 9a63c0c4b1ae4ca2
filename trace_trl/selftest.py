"""
Trains a tiny model for a few steps on all processes of a launch, and says whether they agree.

    accelerate launch --config_file accelerate_configs/zero3.yaml -m trace_trl.selftest

Run it on a cluster before the first real run. Nothing is downloaded: model, tokenizer and questions are made here.
Prompts need different numbers of turns, so that processes run out of live branches at different times, which is where
collective calls made in a process's own loop would hang.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import HfArgumentParser, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

from .config import TRACEConfig
from .environments.base import StepResult
from .trainer import TRACETrainer


MOST_TURNS = 5
PROMPTS = 4  # of a generation, per process
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class SelfTestArguments:
    """
    Args:
        steps (`int`): optimizer steps.
        schedule_seed (`int`): draws how many turns each prompt needs, 1 to 5, and fewer on some processes than others.
    """

    steps: int = field(default=3, metadata={"help": "Optimizer steps."})
    schedule_seed: int = field(default=0, metadata={"help": "Draws how many turns each prompt needs, 1 to 5."})


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    symbols = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    return len(tokenizer) + -len(tokenizer) % 8


def make_model(tokenizer: PreTrainedTokenizerFast, tied: bool = True) -> Qwen3ForCausalLM:
    """A random Qwen3 of some ten thousand parameters."""
    config = Qwen3Config(
        vocab_size=vocabulary_size(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def _all_but(letters: str) -> list[int]:
    tokenizer = make_tokenizer()
    kept = {tokenizer.eos_token_id, *tokenizer(letters)["input_ids"]}
    return [token for token in range(vocabulary_size(tokenizer)) if token not in kept]


def make_dataset(turns: list[int]) -> Dataset:
    """One row per entry of `turns`."""
    prompts = [[{"role": "user", "content": f"{number}: say it in {count}"}] for number, count in enumerate(turns)]
    return Dataset.from_dict({"prompt": prompts, "turns": turns})


def env_reset(example: dict[str, Any]) -> dict[str, Any]:
    return {"turns": example["turns"], "said": ""}


def env_step(state: dict[str, Any], action: str, messages: list[dict[str, Any]]) -> StepResult:
    """An episode lasts as long as its row says. Its outcome depends on all that was said, as a fair coin would."""
    said = f"{state['said']}/{action}"
    if said.count("/") < state["turns"]:
        return StepResult(observation=f"{said.count('/')} said", state={**state, "said": said})
    digest = hashlib.sha256(said.encode()).digest()
    return StepResult(done=True, reward=float(digest[0] % 2))


class ObservedTrainer(TRACETrainer):
    """Remembers what each generation did on this process."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.generations: list[dict[str, Any]] = []

    def _roll_out_training(self, inputs):
        trees, stats = super()._roll_out_training(inputs)
        leaves = [leaf for tree in trees for leaf in tree.leaves()]
        self.generations.append(
            {
                "budgets": {tree.index: tree.budget for tree in trees},
                "leaves": len(leaves),
                "turns": max((leaf.depth for leaf in leaves), default=0),
                "rounds": stats.rounds,
            }
        )
        return trees, stats


def draw_turns(seed: int, processes: int, generations: int) -> list[int]:
    """How many turns each row of the dataset needs: pool by pool, in each the rows of one process behind another's."""
    draw = random.Random(seed)
    turns = []
    for _ in range(processes * generations):
        most = draw.randint(1, MOST_TURNS)
        turns += [draw.randint(1, most) for _ in range(PROMPTS)]
    return turns


def make_trainer(args: TRACEConfig, turns: list[int], **kwargs: Any) -> ObservedTrainer:
    """A trainer of the tiny model on prompts that need that many turns."""
    set_seed(args.seed)
    tokenizer = make_tokenizer()
    return ObservedTrainer(
        model=make_model(tokenizer),
        args=args,
        train_dataset=make_dataset(turns),
        processing_class=tokenizer,
        env_step=env_step,
        env_reset=env_reset,
        **kwargs,
    )


def make_args(output_dir: str, **kwargs: Any) -> TRACEConfig:
    """Options of a self-test; `kwargs` go before them."""
    cpu = not torch.cuda.is_available()
    if cpu:
        keep_deepspeed_from_compiling()
    options: dict[str, Any] = dict(
        output_dir=output_dir,
        use_cpu=cpu,
        bf16=not cpu,
        ddp_backend="gloo" if cpu and int(os.environ.get("WORLD_SIZE", 1)) > 1 else None,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        num_generations=6,  # with a pool factor of 2: pools of 4 prompts a process
        continuations_per_root=2,
        max_completion_length=160,
        max_turn_length=8,
        max_turns=MOST_TURNS,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=False,
        disable_tqdm=True,
        show_rollout_progress=False,
        shuffle_dataset=False,
        # A random model hardly ever ends a turn, unless it has little else to say
        generation_kwargs={"suppress_tokens": _all_but("abc")},
    )
    return TRACEConfig(**(options | kwargs))


def keep_deepspeed_from_compiling() -> None:
    """On a CPU, DeepSpeed would compile a communication of its own at the first run; gloo does without it."""
    try:
        from deepspeed.ops import __compatible_ops__
    except ImportError:
        return
    __compatible_ops__["deepspeed_shm_comm"] = False


def weights(trainer: TRACETrainer) -> dict[str, torch.Tensor]:
    """The policy's full weights in float32 on the CPU, on every process, whatever shards them."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    with gathered(list(model.parameters())):
        return {
            name: getattr(tensor, "full_tensor", lambda t=tensor: t)().detach().cpu().float().clone()
            for name, tensor in model.named_parameters()
        }


def gathered(parameters: list[torch.nn.Parameter]) -> AbstractContextManager:
    """While open, parameters that DeepSpeed ZeRO-3 shards are whole."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Check:
    name: str
    passed: bool
    detail: str


def checks_of(trainer: ObservedTrainer) -> list[Check]:
    """What must hold after training. Called by all processes; every one gets the same answer."""
    args = trainer.args
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    policy = weights(trainer)
    own = {
        "steps": trainer.state.global_step,
        "finite": all(map(math.isfinite, losses)) and all(bool(w.isfinite().all()) for w in policy.values()),
        "policy": fingerprint(policy),
        "head": fingerprint(trainer.predictor.state_dict()) if trainer.predictor is not None else "",
        "generations": trainer.generations,
    }
    everyone = gather_object([own])
    generations = list(zip(*(process["generations"] for process in everyone), strict=False))
    budgets = [_merged([process["budgets"] for process in generation]) for generation in generations]
    share = args.generation_batch_size // len(everyone)
    leaves = sorted({process["leaves"] for generation in generations for process in generation})
    turns = [[process["turns"] for process in generation] for generation in generations]
    rounds = all(len({process["rounds"] for process in generation}) == 1 for generation in generations)
    steps = sorted({process["steps"] for process in everyone})

    def alike(key: str) -> bool:
        return len({process[key] for process in everyone}) == 1

    return [
        Check("every process took every step", steps == [args.max_steps], f"{steps} of {args.max_steps}"),
        Check("losses and weights are finite", all(p["finite"] for p in everyone), f"losses {losses}"),
        Check("the policy is the same on all processes", alike("policy"), own["policy"][:12]),
        Check("the value head is the same on all processes", alike("head"), own["head"][:12]),
        Check(
            "all processes allocate alike",
            all(budget is not None and sum(budget.values()) == args.rollout_budget for budget in budgets),
            f"{len(budgets)} generations of {args.rollout_budget} bare rollouts",
        ),
        Check("every process filled its leaves", leaves == [share], f"{leaves} of {share}"),
        Check("all processes played the same rounds", rounds, f"longest episodes by process: {turns}"),
    ]


def _merged(budgets: list[dict[int, int]]) -> dict[int, int] | None:
    """Budgets of all prompts; `None` if processes differ about one."""
    merged: dict[int, int] = {}
    for budget in budgets:
        if any(merged.get(index, count) != count for index, count in budget.items()):
            return None
        merged |= budget
    return merged


def run(arguments: SelfTestArguments, say: Callable[[str], None] = print) -> bool:
    """Trains and checks. Every process returns whether all checks passed."""
    folder = [tempfile.mkdtemp(prefix="trace-selftest-")]
    args = make_args(folder[0], max_steps=arguments.steps)
    broadcast_object_list(folder)
    args.output_dir = folder[0]
    started = time.monotonic()
    trainer = make_trainer(args, draw_turns(arguments.schedule_seed, args.world_size, arguments.steps))
    trainer.train()
    checks = checks_of(trainer)
    passed = all(check.passed for check in checks)
    if trainer.is_world_process_zero():
        state = trainer.accelerator.state
        say(f"{args.world_size} process(es), {state.distributed_type.value}, {trainer.accelerator.device.type}")
        for check in checks:
            say(f"  {'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.detail}")
        say(f"{'PASSED' if passed else 'FAILED'} in {time.monotonic() - started:.0f} s")
    return passed


def main() -> None:
    (arguments,) = HfArgumentParser(SelfTestArguments).parse_args_into_dataclasses()
    passed = run(arguments)
    # Left to the end of the interpreter, its threads may abort a process that has passed
    PartialState().destroy_process_group()
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
