"""What a [`TRACETrainer`] refuses at construction, each with a sentence that says what to change."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl.data_utils import is_conversational

from .config import TRACEConfig
from .environments.callback import check_no_images


def check_arguments(args, tools, rollout_func, environment_factory, env_step, env_reset) -> None:
    """Raises `TypeError` or `ValueError` for arguments that exclude each other."""
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


def check_datasets(*datasets: Any) -> None:
    """Raises `ValueError` for data sets with images, as far as columns and first rows show them."""
    for dataset in datasets:
        for part in dataset.values() if isinstance(dataset, dict) else [dataset]:
            images = {"image", "images"} & set(getattr(part, "column_names", None) or [])
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
    if not isinstance(prompt, str):
        check_no_images(prompt)
    if any(example.get(key) is not None for key in ("image", "images")):
        raise ValueError("A dataset row holds images: TRACETrainer trains on text only, so remove that column.")


def first_row(dataset: Any) -> dict[str, Any] | None:
    """The first row of a data set that can be looked at without consuming it."""
    return dataset[0] if isinstance(dataset, Dataset) and len(dataset) else None


def row_is_conversational(example: dict[str, Any]) -> bool:
    # A row without a prompt belongs to an environment that gives it
    return "prompt" not in example or is_conversational({"prompt": example["prompt"]})
