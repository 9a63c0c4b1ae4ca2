"""What a world is."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from trace_trl import StepResult


WARM_STARTS = Path(__file__).with_name("warm_start")


class World(ABC):
    """
    A task of several turns in a language of whole words.

    A row holds its `prompt`, a string, and all that the environment needs. In every state one turn is right: a rollout
    succeeds (reward 1) by the right turns, one after the other. In the chain world it does by nothing else; in hops it
    may by luck, where a wrong way ends at the right name (one wrong way in fifty), or by heart. So the chance of
    success from any history is a product of chances that one pass over the right turns gives
    (`policy.success_chances`): what a rollout can only sample is known, in hops from below.

    Attributes:
        name (`str`): of the world.
        policy (`str`): folder of its warm-started policy, which several worlds may train.
        words (`list[str]`): its vocabulary.
        end (`str`): the word that ends a turn.
        turn_tokens (`int`): tokens of a turn, that word included.
        completion_tokens (`int`): most tokens of an episode behind its prompt, observations included.
    """

    name: ClassVar[str]
    policy: ClassVar[str]
    words: ClassVar[list[str]]
    end: ClassVar[str]
    turn_tokens: ClassVar[int]
    completion_tokens: ClassVar[int]

    @property
    def warm_start(self) -> Path:
        return WARM_STARTS / self.policy

    @abstractmethod
    def row(self, draw: random.Random) -> dict[str, Any]:
        """One task."""

    @abstractmethod
    def level(self, row: dict[str, Any]) -> int:
        """How long the task is: symbols, hops."""

    @abstractmethod
    def right_turns(self, row: dict[str, Any]) -> list[str]:
        """The turns of a success, each without the word that ends it."""

    @abstractmethod
    def reset(self, example: dict[str, Any]) -> dict[str, Any]:
        """`env_reset` of [`~trace_trl.TRACETrainer`]."""

    @abstractmethod
    def step(self, state: dict[str, Any], action: str, messages: Any = None) -> StepResult:
        """`env_step` of [`~trace_trl.TRACETrainer`]."""

    @abstractmethod
    def demonstration(self, row: dict[str, Any], draw: random.Random) -> list[str]:
        """The turns that a demonstrator, who makes mistakes, takes in this task."""

    def rows(self, count: int, seed: str) -> list[dict[str, Any]]:
        """Tasks. Those of one seed are always the same, and start with those of a smaller `count`."""
        draw = random.Random(f"{self.name} {seed}")
        return [self.row(draw) for _ in range(count)]

    def play(self, row: dict[str, Any], turns: list[str]) -> tuple[list[str], float]:
        """What the environment answers to these turns, until the episode ends, and its reward."""
        state, observations, reward = self.reset(dict(row)), [], 0.0
        for turn in turns:
            result = self.step(state, turn)
            observations.append(str(result.observation or ""))
            reward = result.reward or 0.0
            if result.done:
                break
        return observations, reward
