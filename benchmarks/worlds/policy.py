"""Tokenizer and model of a world's policy, and the exact chance of success of a history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import selective_log_softmax

from .base import World


PAD, UNKNOWN = "<pad>", "<unknown>"


def make_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """Whole words, split at blanks."""
    vocabulary = {word: number for number, word in enumerate([PAD, UNKNOWN, *world.words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=world.end, pad_token=PAD, unk_token=UNKNOWN, padding_side="left"
    )


def make_model(tokenizer: Any, hidden_size: int, layers: int, positions: int = 256) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights, for so many `positions`."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=hidden_size // 32,
            num_key_value_heads=hidden_size // 32,
            head_dim=32,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def load(world: World) -> tuple[Any, Any]:
    """The warm-started policy, in float32, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(world.warm_start, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(world.warm_start)


class RightPaths:
    """
    The token ids of the right turns of rows, and what the environment answers them.

    A path is cut into pieces `prompt, turn, observation, turn, .., turn`; `ends[d]` is where the history of depth d,
    after d right turns, ends, and `turns[d]` where the turn behind it does.
    """

    def __init__(self, world: World, tokenizer: Any):
        self.world, self.tokenizer = world, tokenizer
        self._known: dict[str, tuple[list[int], list[int], list[int]]] = {}

    def __call__(self, row: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
        key = repr(sorted(row.items()))
        if key not in self._known:
            self._known[key] = path_of(self.world, self.tokenizer, row, self.world.right_turns(row))
        return self._known[key]


def path_of(
    world: World, tokenizer: Any, row: dict[str, Any], turns: Sequence[str]
) -> tuple[list[int], list[int], list[int]]:
    """Ids of an episode, ends of its histories, and ends of its turns."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    observations, _ = world.play(row, list(turns))
    ids, ends, turn_ends = encode(row["prompt"]), [], []
    for turn, observation in zip(turns, observations, strict=False):
        ends.append(len(ids))
        ids += encode(f"{turn} {world.end}")
        turn_ends.append(len(ids))
        ids += encode(observation)
    return ids[: turn_ends[-1]], ends, turn_ends


@torch.no_grad()
def success_chances(
    model: Any, paths: RightPaths, rows: Sequence[dict[str, Any]], batch_size: int = 256
) -> list[list[float]]:
    """Chance of success of every history that holds right turns only, under the present policy at temperature 1.

        V_d = prod over t >= d of P(turn t is the right one | the right turns before it)

    Returns:
        `list[list[float]]`: for each row the chances after 0, 1, .. right turns.
    """
    training = model.training
    model.eval()
    chances = []
    device = next(model.parameters()).device
    pad = paths.tokenizer.pad_token_id
    for start in range(0, len(rows), batch_size):
        found = [paths(row) for row in rows[start : start + batch_size]]
        width = max(len(ids) for ids, _, _ in found)
        batch = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _, _ in found], device=device)
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        logprobs = selective_log_softmax(logits, batch[:, 1:])
        # sums[p] = log-probability of the tokens up to position p
        sums = torch.nn.functional.pad(logprobs.double().cumsum(dim=1), (1, 0)).tolist()
        for (_, ends, turn_ends), row_sums in zip(found, sums, strict=True):
            steps = [row_sums[stop - 1] - row_sums[end - 1] for end, stop in zip(ends, turn_ends, strict=True)]
            chances.append([math.exp(sum(steps[depth:])) for depth in range(len(steps))])
    model.train(training)
    return chances
