"""No environment: an episode is one turn."""

from __future__ import annotations

from typing import Any

from .base import Action, Environment, Episode, Reply


class SingleTurnEnvironment(Environment):
    def reset(self, example: dict[str, Any], prompt: Any) -> Episode:
        return SingleTurnEpisode(prompt)


class SingleTurnEpisode(Episode):
    def __init__(self, prompt: Any):
        self.prompt = prompt

    def step(self, action: Action) -> Reply:
        return Reply(done=True, calls=0)

    def on_error(self, action: Action, error: BaseException) -> Reply:
        return Reply(done=True, calls=0)

    def fork(self) -> Episode:
        return SingleTurnEpisode(self.prompt)
