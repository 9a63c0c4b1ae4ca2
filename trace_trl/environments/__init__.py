from .base import (
    Action,
    ContractError,
    Environment,
    Episode,
    ForkError,
    Reply,
    RunEndingError,
    StepResult,
    UnsupportedError,
)


__all__ = [
    "Action",
    "ContractError",
    "Environment",
    "Episode",
    "ForkError",
    "Reply",
    "RunEndingError",
    "StepResult",
    "UnsupportedError",
]
