"""
Every private name of TRL that this package rests on, in one place.

TRL may change private names in any release. The package therefore pins TRL's minor version, and [`check_trl`] compares
what is installed with what was built against when a trainer is constructed: an upgrade fails with a sentence that names the
difference, not with a wrong number.
"""

from __future__ import annotations

import inspect
from typing import Any

import trl
from packaging.version import Version


SUPPORTED = (Version("1.16.0"), Version("1.17.0"))  # from the first up to, but without, the second

# Methods of GRPOTrainer that TRACETrainer overrides, with their parameters
OVERRIDDEN = {
    "get_train_dataloader": ("self",),
    "_get_train_sampler": ("self", "dataset"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_generate": ("self", "prompts"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
}

# Methods of GRPOTrainer that are called but not overridden
CALLED = {
    "_tokenize_prompts": ("self", "prompts"),
    "_log_metric": ("self", "name", "value"),
    "_compute_loss": ("self", "model", "inputs"),
    "_prepare_inputs": ("self", "generation_batch"),
}

# Attributes that GRPOTrainer's constructor sets
ATTRIBUTES = (
    "_buffered_inputs",
    "_dist",
    "_has_async_funcs",
    "_is_vlm",
    "_logs",
    "_metrics",
    "_multi_environment",
    "_pending_extra_logs",
    "_standalone_tools",
    "_step",
    "_tokenizer",
    "chat_template",
    "chat_template_kwargs",
    "environment_factories",
    "environments",
    "eos_token_ids",
    "generation_config",
    "generation_kwargs",
    "mask_truncated_completions",
    "max_tool_calling_iterations",
    "multi_objective_aggregation",
    "num_generations_eval",
    "reward_func_names",
    "reward_funcs",
    "reward_processing_classes",
    "reward_weights",
    "scale_rewards",
    "tools",
    "use_transformers_continuous_batching",
)

# Set as well where an `environment_factory` is given
ENVIRONMENT_ATTRIBUTES = ("_env_tools", "_environment_pool")


def check_trl() -> None:
    """Raises `ImportError` if the installed TRL is not one this package was built against."""
    version = Version(trl.__version__)
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        raise ImportError(
            f"trace_trl builds on private parts of TRL and supports trl>={SUPPORTED[0]},<{SUPPORTED[1]}, but {version} "
            f"is installed: run `pip install 'trl>={SUPPORTED[0]},<{SUPPORTED[1]}'`, or upgrade trace_trl."
        )
    for name, expected in (OVERRIDDEN | CALLED).items():
        method = getattr(trl.GRPOTrainer, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)
        if found != expected:
            raise ImportError(
                f"trl {version} has GRPOTrainer.{name}{'' if found is None else found}, but trace_trl was built "
                f"against {name}{expected}: install a trl release that trace_trl supports."
            )


def check_trainer(trainer: Any) -> None:
    """Raises `ImportError` if a constructed trainer lacks an attribute this package reads."""
    names = ATTRIBUTES + (ENVIRONMENT_ATTRIBUTES if trainer.environment_factories is not None else ())
    missing = [name for name in names if not hasattr(trainer, name)]
    if missing:
        raise ImportError(
            f"trl {trl.__version__} no longer sets GRPOTrainer.{', '.join(missing)}, which trace_trl reads: install a "
            "trl release that trace_trl supports."
        )
