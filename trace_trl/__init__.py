"""TRACE for TRL: tree rollout allocation for multi-turn agents. See README.md and docs/algorithm.md."""

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__


# Imported when first used, so that the pure parts (`trace_trl.allocation`, `trace_trl.simulate`, ..) need neither
# torch nor TRL
_LAZY = {
    "TRACEConfig": "config",
    "TRACETrainer": "trainer",
    "StepResult": "environments.base",
    "SuccessPredictor": "predictor",
    "RolloutTree": "tree",
    "Turn": "tree",
    "allocate_prefixes": "allocation",
    "allocate_roots": "allocation",
}

__all__ = [*_LAZY, "__version__"]

if TYPE_CHECKING:
    from .allocation import allocate_prefixes, allocate_roots
    from .config import TRACEConfig
    from .environments.base import StepResult
    from .predictor import SuccessPredictor
    from .trainer import TRACETrainer
    from .tree import RolloutTree, Turn


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
