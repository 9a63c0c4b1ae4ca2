"""What a [`TRACETrainer`] refuses at construction, each with a sentence that says what to change."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl.data_utils import is_conversational

from .config import TRACEConfig
from .environments.callback import check_no_images


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
    # An environment may bring a reward of its own; TRL looks for it
    if not reward_funcs and env_step is None and environment_factory is None:
        raise ValueError(
            "Nothing gives a reward: pass `reward_funcs`, an `env_step` that returns rewards, or an "
            "`environment_factory` whose environment defines `get_reward`."
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
    for dataset in datasets:
        for part in dataset.values() if isinstance(dataset, dict) else [dataset]:
            columns = set(getattr(part, "column_names", None) or [])
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
                check_row(example, example["prompt"])


def check_row(example: dict[str, Any], prompt: Any) -> None:
    """Raises `ValueError` for a dataset row that holds images."""
    if prompt is not None and not isinstance(prompt, str):
        check_no_images(prompt)
    if any(example.get(key) is not None for key in ("image", "images")):
        raise ValueError("A dataset row holds images: TRACETrainer trains on text only, so remove that column.")


def check_prompt_length(prompt: Any, prompt_ids: list[int], context_length: int | None) -> None:
    """Raises `ValueError` for a prompt that leaves no room for a completion."""
    if context_length is not None and len(prompt_ids) >= context_length:
        raise ValueError(
            f"A prompt has {len(prompt_ids)} tokens, but the model takes {context_length} with its completion: "
            f"shorten or drop the row whose prompt starts with {str(prompt)[:80]!r}."
        )


def first_row(dataset: Any) -> dict[str, Any] | None:
    """The first row of a data set that can be looked at without consuming it."""
    return dataset[0] if isinstance(dataset, Dataset) and len(dataset) else None


def row_is_conversational(example: dict[str, Any]) -> bool:
    # A row without a prompt belongs to an environment that gives it
    return "prompt" not in example or is_conversational({"prompt": example["prompt"]})
