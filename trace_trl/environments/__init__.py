from .base import Action, Environment, Episode, ForkError, Reply, StepResult, UnsupportedError


__all__ = ["Action", "Environment", "Episode", "ForkError", "Reply", "StepResult", "UnsupportedError"]
