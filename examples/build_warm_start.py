# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "trace-trl[peft,examples]",
# ]
# ///

"""
Builds a warm start: demonstrations of one task, and a LoRA adapter trained on them.

SmolLM2-135M-Instruct knows none of the tasks: it ends every episode at once and is never right, so no prompt has mixed
outcomes and there is nothing to learn from. Here it is shown episodes that are made of bundled training rows only, see
`examples/demonstrations/`.

    python examples/build_warm_start.py --task hotpotqa               # about 10 minutes on two cores
    python examples/evaluate_model.py --task hotpotqa --adapter examples/warm_start/hotpotqa --rows 40 --samples 3

The loss is taken on what the assistant says and at a temperature above 1: the model then learns a sharper distribution
than that of the demonstrations, which at this size it needs in order to get through an episode of a hundred tokens,
sampled at temperature 1, without a slip.
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from smollm2 import MODEL_ID, resolve_model


TASKS = ("hotpotqa", "math", "bfcl")
WARM_STARTS = Path(__file__).resolve().parent / "warm_start"
IGNORED = -100  # label of a token that carries no loss


def encode(messages: Sequence[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """
    A conversation as token ids and labels.

    The ids are those of the chat template over all messages, which are also those of a rollout: the prompt, then turn
    by turn what was sampled up to the end-of-turn token, and the observation as the template renders it behind that.

    Args:
        messages (`list[dict]`):
            Conversation that ends with an assistant message.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer with a chat template.

    Returns:
        `tuple[list[int], list[int]]`: ids and labels, equally long; labels are `-100` but for what the assistant says,
        its end-of-turn tokens included.
    """

    def render(count: int, **kwargs: Any) -> list[int]:
        return tokenizer.apply_chat_template(messages[:count], return_dict=False, **kwargs)

    ids = render(len(messages))
    labels = [IGNORED] * len(ids)
    for position, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(render(position, add_generation_prompt=True))
            end = ids.index(tokenizer.eos_token_id, start) + 1
            labels[start:end] = ids[start:end]
    return ids, labels


# Training


def make_batches(lengths: Sequence[int], batch_size: int, rng: random.Random) -> list[list[int]]:
    """Positions in random batches of similar length, so that little is padded."""
    order = rng.sample(range(len(lengths)), len(lengths))
    batches = []
    for start in range(0, len(order), 8 * batch_size):
        group = sorted(order[start : start + 8 * batch_size], key=lengths.__getitem__)
        batches += [group[first : first + batch_size] for first in range(0, len(group), batch_size)]
    rng.shuffle(batches)
    return batches


def train(args: argparse.Namespace) -> None:
    """Trains the adapter and saves it."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    path = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    demonstrations = importlib.import_module(f"demonstrations.{args.task}").build_demonstrations(seed=args.seed)
    examples = [encode(messages, tokenizer) for messages in demonstrations]
    batches = make_batches([len(ids) for ids, _ in examples], args.batch_size, rng)
    tokens = sum(len(ids) for ids, _ in examples)
    print(f"{len(examples)} demonstrations, {tokens} tokens, {len(batches)} steps", flush=True)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules=args.target_modules.split(","), task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, config)
    inner = model.get_base_model()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=0.0)
    warmup = 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * (0.525 + 0.475 * math.cos(math.pi * step / len(batches))),
    )
    model.train()
    started = time.perf_counter()
    for step, batch in enumerate(batches, start=1):
        longest = max(len(examples[position][0]) for position in batch)
        padded = [
            [row + [fill] * (longest - len(row)) for row, fill in zip(examples[position], (0, IGNORED), strict=True)]
            for position in batch
        ]
        ids = torch.tensor([row[0] for row in padded])
        labels = torch.tensor([row[1] for row in padded])[:, 1:]
        attention = torch.tensor([[int(i < len(examples[p][0])) for i in range(longest)] for p in batch])
        said = labels != IGNORED
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            hidden = inner.model(input_ids=ids, attention_mask=attention).last_hidden_state[:, :-1]
            # Logits of the assistant's tokens only: those of all would take a fifth of the time.
            logits = inner.lm_head(hidden[said]).float()
        loss = torch.nn.functional.cross_entropy(logits / args.loss_temperature, labels[said])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0 or step == len(batches):
            print(f"step {step:4d}  loss {loss.item():.3f}  {time.perf_counter() - started:.0f} s", flush=True)

    # A run that started from a local copy would leave its path here.
    model.peft_config["default"].base_model_name_or_path = args.model
    readme = Path(args.output_dir) / "README.md"
    card = readme.read_text(encoding="utf-8") if readme.is_file() else None
    model.save_pretrained(args.output_dir)
    if card is not None:
        # PEFT adds its own lines to a model card that is there.
        readme.write_text(card, encoding="utf-8")
    weights = Path(args.output_dir) / "adapter_model.safetensors"
    halved = {name: tensor.to(torch.float16) for name, tensor in load_file(weights).items()}
    save_file(halved, weights, metadata={"format": "pt"})
    print(f"{args.output_dir}: {weights.stat().st_size / 1e6:.1f} MB")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Builds the warm start of a training script.")
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--model", default=MODEL_ID, help="Base model.")
    parser.add_argument("--output_dir", help="Folder of the adapter. Defaults to examples/warm_start/TASK.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--target_modules", default="q_proj,k_proj,v_proj,o_proj")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--loss_temperature", type=float, default=1.5)
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=torch.backends.mkldnn.is_available() and torch.cpu._is_amx_tile_supported(),
        help="Compute in bfloat16, which pays on CPUs with AMX.",
    )
    args = parser.parse_args()
    args.output_dir = args.output_dir or str(WARM_STARTS / args.task)
    return args


if __name__ == "__main__":
    train(parse_arguments())
