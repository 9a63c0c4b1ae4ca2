"""Which environment the arguments of a trainer ask for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .base import Environment
from .callback import CallbackEnvironment
from .none import SingleTurnEnvironment
from .tools import RESERVED_METHODS, ToolEnvironment


def make_environment(trainer: Any, codec: Any, loop: Callable[[], Any]) -> Environment:
    """
    Args:
        trainer (`TRACETrainer`): gives `env_step`, `tools` or `environment_factory`, and the limits of an episode.
        codec (`Codec`): tells conversations from plain text.
        loop (`Callable`): gives the event loop async environments run on.
    """
    if trainer.env_step is not None:
        return CallbackEnvironment(trainer.env_step, trainer.env_reset, codec.conversational, loop)
    if not trainer.tools and trainer.environment_factories is None:
        return SingleTurnEnvironment()
    max_turns = trainer.args.max_turns
    # What a tool answers to the last turn nobody would read
    rounds = [trainer.args.max_tool_calling_iterations, None if max_turns is None else max_turns - 1]
    return ToolEnvironment(
        trainer._standalone_tools,
        factories=trainer.environment_factories,
        # TRL made one instance of each environment to look at its methods
        idle=None if trainer.environment_factories is None else trainer._environment_pool,
        max_rounds=min((limit for limit in rounds if limit is not None), default=None),
        loop=loop,
        max_workers=trainer.args.env_max_workers,
    )


def drop_reserved_tools(trainer: Any) -> None:
    """Takes `close` and `fork` of environments off the tools that TRL offers to the policy."""
    if trainer.environment_factories is not None:
        for name, tools in trainer._env_tools.items():
            trainer._env_tools[name] = [tool for tool in tools if not _is_reserved(tool)]
        trainer.tools = [tool for tool in trainer.tools if not _is_reserved(tool)]


def _is_reserved(tool: Callable) -> bool:
    return inspect.ismethod(tool) and tool.__name__ in RESERVED_METHODS
