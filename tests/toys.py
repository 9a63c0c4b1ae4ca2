"""Small things tests are made of: a tokenizer, models, data sets and environments. Nothing is downloaded."""

from __future__ import annotations

import importlib.resources
from functools import lru_cache

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trace_trl import TRACEConfig


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "system user assistant tool Thought Action Observation search lookup finish answer",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "0 1 2 3 4 5 6 7 8 9 10 yes no red green blue left right what is the capital of france",
]


def trl_template(name: str) -> str:
    """A chat template as TRL ships it."""
    return importlib.resources.files("trl").joinpath("chat_templates", f"{name}.jinja").read_text()


@lru_cache(maxsize=None)
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def make_tokenizer(template: str | None = "qwen3", pad_token: str = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE of some 400 tokens: every text has at least two spellings, its merges and its bytes."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()), eos_token="<|im_end|>", pad_token=pad_token
    )
    tokenizer.add_tokens(MARKUP)
    tokenizer.padding_side = "left"
    if template is not None:
        tokenizer.chat_template = trl_template(template) if "{" not in template else template
    return tokenizer


def make_model(seed: int = 0, hidden_size: int = 32, layers: int = 2, **kwargs) -> Qwen3ForCausalLM:
    """A random Qwen3 of a few ten thousand parameters, in float32."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer) + (-len(tokenizer)) % 8,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=kwargs.pop("max_position_embeddings", 1024),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **kwargs,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def make_config(output_dir, cls=TRACEConfig, **kwargs):
    """A configuration for quick runs on a CPU; `cls` may be TRL's own."""
    defaults = dict(
        output_dir=str(output_dir),
        use_cpu=True,
        bf16=False,
        report_to="none",
        learning_rate=1e-3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        max_steps=2,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    if cls is TRACEConfig:
        defaults["show_rollout_progress"] = False
    return cls(**(defaults | kwargs))


QUESTIONS = [
    "what is red",
    "what is green",
    "the quick fox",
    "left or right",
    "the lazy dog",
    "yes or no",
    "1 2 3",
    "0 1",
]


def string_dataset(rows: int = 8) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [QUESTIONS[i % len(QUESTIONS)] for i in range(rows)], "number": list(range(rows))}
    )


def chat_dataset(rows: int = 8) -> Dataset:
    prompts = [[{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "number": list(range(rows))})


def length_reward(completions, **kwargs):
    """A reward that differs between random completions."""
    texts = [c if isinstance(c, str) else "".join(str(m.get("content", "")) for m in c) for c in completions]
    return [len(set(text)) / 20 for text in texts]
