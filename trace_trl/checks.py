"""What a [`TRACETrainer`] refuses at construction, each with a sentence that says what to change."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from datasets import Dataset

from .config import TRACEConfig
from .environments.callback import check_no_images
from .seams import is_conversational


def check_arguments(
    args: Any,
    reward_funcs: Any,
    tools: Any,
    rollout_func: Any,
    environment_factory: Any,
    env_step: Any,
    env_reset: Any,
) -> None:
    """Raises `TypeError` or `ValueError` for arguments that exclude each other or leave something out."""
    if not isinstance(args, TRACEConfig):
        raise TypeError(
            f"`args` is a {type(args).__name__}: pass a `trace_trl.TRACEConfig`, which takes the same options."
        )
    if rollout_func is not None:
        raise ValueError(
            "`rollout_func` replaces the generation that TRACETrainer provides: remove it, and pass the environment "
            "as `env_step`, `tools` or `environment_factory`."
        )
    if env_step is not None and (tools or environment_factory is not None):
        other = "tools" if tools else "environment_factory"
        raise ValueError(f"`env_step` and `{other}` both answer the policy's turns: pass only one of them.")
    if env_reset is not None and env_step is None:
        raise ValueError("`env_reset` makes the state that `env_step` takes: pass `env_step` as well, or remove it.")
    forced = (args.generation_kwargs or {}).get("forced_eos_token_id")
    if forced is not None and (tools or environment_factory is not None or env_step is not None):
        raise ValueError(
            "`generation_kwargs` holds 'forced_eos_token_id', which makes a turn that was cut off look as if it had "
            "ended, so that an environment would run a fragment: remove it."
        )
    # An environment may bring a reward of its own; TRL looks for it
    if not reward_funcs and env_step is None and environment_factory is None:
        raise ValueError(
            "No reward source provided: pass `reward_funcs`, an `env_step` that returns rewards, or an "
            "`environment_factory` whose environment defines `get_reward`."
        )


def check_tool_datasets(*datasets: Any) -> None:
    """Raises `ValueError` for data sets whose first prompt can't list tools."""
    for part in _parts(datasets):
        example = first_row(part)
        if example is not None:
            check_tool_row(example)


def check_tool_row(example: dict[str, Any]) -> None:
    """Raises `ValueError` for a dataset row whose prompt can't list tools."""
    if not row_is_conversational(example):
        raise ValueError(
            f"The prompt {str(example['prompt'])[:80]!r} is no conversation, and only a chat template shows tools to "
            'the policy: make each prompt a list of messages, `[{"role": "user", "content": prompt}]`, or pass no '
            "tools."
        )


def check_vllm_model(model: Any, vllm_mode: str) -> None:
    """Raises `ValueError` for a model that a vLLM beside the trainer can't be started with.

    Args:
        model: the trainer's model, or where it is loaded from.
        vllm_mode: a server has loaded its model by itself.
    """
    if vllm_mode == "colocate" and not isinstance(model, str) and not getattr(model, "name_or_path", ""):
        raise ValueError(
            "vLLM loads the model from a folder or from the Hub, and this one was made in memory: save it with "
            "`save_pretrained`, and pass the folder, or the model loaded from there."
        )


def check_datasets(*datasets: Any, needs_prompt: bool = True) -> None:
    """Raises `ValueError` for data sets without prompts or with images, as far as columns and first rows show them.

    Args:
        needs_prompt: whether rows must have a prompt; an environment may give it instead.
    """
    for part in _parts(datasets):
        columns = column_names(part)
        if needs_prompt and columns and "prompt" not in columns:
            raise ValueError(
                f"The dataset has no column 'prompt' (its columns: {', '.join(sorted(columns))}): rename or add "
                "one, or pass an `environment_factory` whose `reset` gives the prompt."
            )
        images = {"image", "images"} & columns
        if images:
            raise ValueError(
                f"The dataset has the column {', '.join(sorted(images))!r}: TRACETrainer trains on text only, so "
                "remove it (`dataset.remove_columns`), or use TRL's GRPOTrainer."
            )
        example = first_row(part)
        if example is not None and "prompt" in example:
            check_row(example, example["prompt"], needs_prompt)


def check_reward_columns(datasets: Sequence[Any], reserved: Collection[str]) -> None:
    """[`check_columns`] of data sets, as far as they tell their columns."""
    for part in _parts(datasets):
        check_columns(column_names(part), reserved)


def check_columns(names: Iterable[str], reserved: Collection[str]) -> None:
    """Raises `ValueError` for columns whose names reward functions are called with for something else."""
    taken = sorted(set(names) & set(reserved))
    if taken:
        raise ValueError(
            f"The dataset has the column {', '.join(map(repr, taken))}, a name that reward functions are called with "
            "for something else: rename or remove it (`dataset.rename_column`, `dataset.remove_columns`)."
        )


def check_row(example: dict[str, Any], prompt: Any, needs_prompt: bool = True) -> None:
    """Raises `ValueError` for a dataset row whose prompt is neither text nor messages, or that holds images."""
    if prompt is None:
        if needs_prompt:
            raise ValueError(
                "A dataset row has no prompt: give it one or drop it, or pass an `environment_factory` whose `reset` "
                f"gives the prompt. The row is {_start_of(example)}."
            )
    elif not isinstance(prompt, str):
        fault = _fault_of_messages(prompt)
        if fault is not None:
            raise ValueError(
                f"The prompt of a dataset row is {fault}: make it a string, or a list of messages, each a dictionary "
                f"with 'role' and 'content', or drop the row. The row is {_start_of(example)}."
            )
        check_no_images(prompt)
    if any(example.get(key) is not None for key in ("image", "images")):
        raise ValueError("A dataset row holds images: TRACETrainer trains on text only, so remove that column.")


def _fault_of_messages(prompt: Any) -> str | None:
    if not isinstance(prompt, list):
        return f"an object of type {type(prompt).__name__}"
    if not prompt:
        return "an empty list"
    for message in prompt:
        if not isinstance(message, dict):
            return f"a list that holds an object of type {type(message).__name__}"
        for key in ("role", "content"):
            if key not in message:
                return f"a list that holds a message without {key!r}"
    return None


def check_prompt_kinds(rows: Sequence[dict[str, Any]], prompts: Sequence[Any]) -> None:
    """Raises `ValueError` where text and messages are mixed: all prompts of a batch are encoded in one go."""
    for row, prompt in zip(rows, prompts, strict=True):
        if isinstance(prompt, str) != isinstance(prompts[0], str):
            kind, other = ("a string", "messages") if isinstance(prompt, str) else ("messages", "a string")
            raise ValueError(
                f"The prompt of a dataset row is {kind}, that of another {other}: make all prompts the one or the "
                f"other. The row is {_start_of(row)}."
            )


def check_prompt_length(
    example: dict[str, Any], prompt: Any, prompt_ids: list[int], context_length: int | None
) -> None:
    """Raises `ValueError` for a prompt without tokens, or one that leaves no room for a completion."""
    if not prompt_ids:
        raise ValueError(
            "A prompt has no tokens, so there is nothing to sample a completion from: give it some text, or drop the "
            f"row. The row is {_start_of(example)}."
        )
    if context_length is not None and len(prompt_ids) >= context_length:
        raise ValueError(
            f"A prompt has {len(prompt_ids)} tokens, but the model takes {context_length} with its completion: "
            f"shorten or drop the row whose prompt starts with {str(prompt)[:80]!r}."
        )


def check_continuous_batching(args: Any, is_fsdp: bool) -> None:
    """Raises `ValueError` where weights that FSDP shards in float32 would have to be given another precision."""
    if is_fsdp and args.use_transformers_continuous_batching and (args.bf16 or args.fp16):
        raise ValueError(
            "`use_transformers_continuous_batching` can't give weights that FSDP shards half precision: set it to "
            "`False`, or generate with `use_vllm=True`."
        )


def check_trainable(model: Any) -> None:
    """Raises `ValueError` for a model that can't be trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "No parameter of the model requires a gradient, so nothing would be trained: load an adapter with "
            "`is_trainable=True`, or set `requires_grad` of what is to be trained."
        )


def check_evaluation_batch(rows: int, args: Any, generations: int) -> None:
    """Raises `ValueError` for an evaluation batch that holds a part of a prompt's rollouts.

    Args:
        rows: of all processes together.
        args (`TRACEConfig`): gives the batch and the number of processes.
        generations: rollouts of each prompt.
    """
    if rows % generations:
        step = generations // math.gcd(generations, args.world_size)
        lower = args.per_device_eval_batch_size // step * step
        fitting = " or ".join(str(size) for size in (lower, lower + step) if size)
        raise ValueError(
            f"An evaluation batch holds {rows} rows over {args.world_size} process(es), which are not whole "
            f"prompts, since `num_generations_eval` is {generations}: set `per_device_eval_batch_size` to {fitting}."
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raises `ValueError` for a tokenizer that can't say where a turn ends."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no end-of-turn token, so no turn would ever end: set its `eos_token` (`processing_class"
            ".eos_token`) to the token that ends a turn."
        )


def _start_of(example: dict[str, Any]) -> str:
    return repr(str(example)[:80])


def _parts(datasets: Iterable[Any]) -> Iterator[Any]:
    for dataset in datasets:
        yield from dataset.values() if isinstance(dataset, dict) else [dataset]


def column_names(dataset: Any) -> set[str]:
    """The columns of a data set, as far as they are known before it is read."""
    return set(getattr(dataset, "column_names", None) or [])


def first_row(dataset: Any) -> dict[str, Any] | None:
    """The first row of a data set that can be looked at without consuming it."""
    return dataset[0] if isinstance(dataset, Dataset) and len(dataset) else None


def row_is_conversational(example: dict[str, Any]) -> bool:
    prompt = example.get("prompt")
    # A row without a prompt belongs to an environment that gives it
    return prompt is None or bool(prompt) and is_conversational({"prompt": prompt})
