"""
Every name of TRL that this package rests on, in one place: the other modules import them from here.

TRL may change private names in any release. The package therefore pins TRL's minor version. Importing this module
compares it with what is installed, before anything of TRL is imported. When a trainer is constructed, [`check_trl`]
compares TRL's methods with what was built against. An upgrade thus fails with a sentence that names the difference,
not with a wrong number.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

from packaging.specifiers import SpecifierSet


SUPPORTED = SpecifierSet(">=1.16,<1.17")
INSTALL = f"`pip install 'trl{SUPPORTED}'`"


def check_version() -> str:
    """The installed version of TRL.

    Raises:
        ImportError: if it is not one this package was built against. A development version of the next minor release
            is not: `1.17.0.dev0` is no 1.16.
    """
    try:
        installed = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"trace_trl trains with TRL, which is not installed: run {INSTALL}.") from error
    if not SUPPORTED.contains(installed, prereleases=True):
        raise ImportError(
            f"trace_trl builds on private parts of TRL and supports trl{SUPPORTED}, but {installed} is installed: run "
            f"{INSTALL}, or upgrade trace_trl."
        )
    return installed


TRL_VERSION = check_version()

try:
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import parse_response
    from trl.data_utils import apply_chat_template, is_conversational
    from trl.extras.profiling import profiling_context
    from trl.models import unwrap_model_for_generation
    from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc
    from trl.trainer.utils import (
        RepeatSampler,
        get_config_model_id,
        is_async_callable,
        pad,
        repeat_iterable_dataset,
        start_event_loop_in_daemon,
    )
except ImportError as error:
    if (error.name or "").partition(".")[0] != "trl":
        raise
    raise ImportError(
        f"trl {TRL_VERSION} lacks what trace_trl was built against ({error}): run {INSTALL}, or upgrade trace_trl."
    ) from error

__all__ = [
    "EnvironmentFactory",
    "GRPOConfig",
    "GRPOTrainer",
    "RepeatSampler",
    "RewardFunc",
    "RolloutFunc",
    "apply_chat_template",
    "check_trainer",
    "check_trl",
    "get_config_model_id",
    "is_async_callable",
    "is_conversational",
    "pad",
    "parse_response",
    "profiling_context",
    "repeat_iterable_dataset",
    "start_event_loop_in_daemon",
    "unwrap_model_for_generation",
]

# Methods of GRPOTrainer that TRACETrainer overrides, inherited ones included, with their parameters
OVERRIDDEN = {
    "get_train_dataloader": ("self",),
    "_get_train_sampler": ("self", "dataset"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_generate": ("self", "prompts"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "_compute_loss": ("self", "model", "inputs"),
    "log": ("self", "logs", "start_time"),
    "_save": ("self", "output_dir", "state_dict"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_load_best_model": ("self",),
    "_get_output_dir": ("self", "trial"),
    "_push_from_checkpoint": ("self", "checkpoint_folder"),
    "create_model_card": ("self", "model_name", "dataset_name", "tags"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
}

# Methods that are called but not overridden
CALLED = {
    "_get_dataloader": (
        "self",
        "dataset",
        "description",
        "batch_size",
        "sampler_fn",
        "is_training",
        "dataloader_key",
    ),
    "_get_per_token_logps_and_entropies": (
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        *("compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask"),
        *("spatial_shapes", "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
    ),
    "_log_metric": ("self", "name", "value"),
    "_tokenize_prompts": ("self", "prompts"),
}

# What a method of GRPOTrainer looks up by name, and gets from this package
LOOKED_UP = {
    "_prepare_inputs": ("_generate_and_score_completions",),
    "_generate_and_score_completions": (
        "_generate",
        "_calculate_rewards",
        "environment_factories",
        "environments",
        "tools",
        "mask_truncated_completions",
        "_logs",
        "_metrics",
        "_pending_extra_logs",
    ),
    "compute_loss": ("_compute_loss",),
    "_compute_loss": (
        *("_get_per_token_logps_and_entropies", "beta", "top_entropy_quantile", "_entropy_bonus_enabled"),
        "aux_loss_enabled",
    ),
    "log": ("_logs", "log_completions"),
    "_save_checkpoint": ("_get_output_dir",),
    "_tokenize_prompts": ("_batch_environments", "_env_tools", "environment_factories"),
}

# Attributes that GRPOTrainer's constructor sets
ATTRIBUTES = (
    "_dist",
    "_entropy_bonus_enabled",
    "_has_async_funcs",
    "_logs",
    "_metrics",
    "_step",
    "_buffered_inputs",
    "_multi_environment",
    "_pending_extra_logs",
    "_standalone_tools",
    "_tokenizer",
    "aux_loss_enabled",
    "beta",
    "chat_template",
    "chat_template_kwargs",
    "continuous_batching_config",
    "environment_factories",
    "environments",
    "eos_token_ids",
    "mask_truncated_completions",
    "multi_objective_aggregation",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "pad_to_multiple_of",
    "reward_func_names",
    "reward_funcs",
    "reward_processing_classes",
    "reward_weights",
    "scale_rewards",
    "shuffle_dataset",
    "tools",
    "top_entropy_quantile",
    "use_transformers_continuous_batching",
    "use_vllm",
)

# Set as well where transformers generates
TRANSFORMERS_ATTRIBUTES = ("generation_config", "generation_kwargs")

# Set as well where vLLM does
VLLM_ATTRIBUTES = ("_last_loaded_step", "vllm_generation", "vllm_mode")

# What is read, set or called on TRL's VLLMGeneration
VLLM_GENERATION = (
    "_llm_weights_sleeping",
    "enable_sleep_mode",
    "generation_kwargs",
    "llm",
    "min_p",
    "repetition_penalty",
    "structured_outputs_regex",
    "sync_weights",
    "temperature",
    "tensor_parallel_size",
    "top_k",
    "top_p",
    "tp_group",
    "vllm_client",
)

# Set as well where an `environment_factory` is given
ENVIRONMENT_ATTRIBUTES = ("_env_tools", "_environment_pool")

# Set as well where a reward function or a tool is async
ASYNC_ATTRIBUTES = ("async_loop", "async_loop_thread")


def check_trl() -> None:
    """Raises `ImportError` if TRL's methods are not those this package was built against."""
    for name, expected in (OVERRIDDEN | CALLED).items():
        method = getattr(GRPOTrainer, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)
        if found != expected:
            has = f"no GRPOTrainer.{name}" if found is None else f"GRPOTrainer.{name}({', '.join(found)})"
            raise ImportError(
                f"trl {TRL_VERSION} has {has}, but trace_trl was built against {name}({', '.join(expected)}): install "
                "a trl release that trace_trl supports."
            )
    for name, expected in LOOKED_UP.items():
        method = getattr(GRPOTrainer, name, None)
        names = () if method is None else inspect.unwrap(method).__code__.co_names
        missing = [wanted for wanted in expected if wanted not in names]
        if missing:
            raise ImportError(
                f"GRPOTrainer.{name} of trl {TRL_VERSION} does not use {', '.join(missing)}, through which trace_trl "
                "answers it: install a trl release that trace_trl supports."
            )


def check_trainer(trainer: Any) -> None:
    """Raises `ImportError` if a constructed trainer lacks an attribute this package reads."""
    names = list(ATTRIBUTES)
    names += VLLM_ATTRIBUTES if getattr(trainer, "use_vllm", False) else TRANSFORMERS_ATTRIBUTES
    if getattr(trainer, "environment_factories", None) is not None:
        names += ENVIRONMENT_ATTRIBUTES
    if getattr(trainer, "_has_async_funcs", False):
        names += ASYNC_ATTRIBUTES
    missing = [name for name in names if not hasattr(trainer, name)]
    if missing:
        raise ImportError(
            f"trl {TRL_VERSION} no longer sets GRPOTrainer.{', '.join(missing)}, which trace_trl reads: install a "
            "trl release that trace_trl supports."
        )
