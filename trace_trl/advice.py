"""
What a run is told, once, when its numbers show a setting under which it can't learn.

Both are functions of what all processes gathered, so that all of them come to the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


PATIENCE = 3  # generations with one kind of outcome until it is said, and the budget is spent without values
MOST_CUT = 0.9  # share of the leaves that a limit ended from which it is said

REMEDIES = {
    "length": "`max_completion_length` (or `max_turn_length`, where that is set)",
    "turns": "`max_turns` (or `max_tool_calling_iterations`, with tools)",
    "overflow": "`max_completion_length`, or shorten the environment's answers",
}


class OutcomeWatch:
    """
    Sees whether `success_threshold` tells rollouts apart.

    Where all rewards lie on one side of it, every rollout has the same outcome. The predictor then learns that one
    outcome, and an allocation by its values narrows to ever fewer prompts, although rewards differ.

    Attributes:
        generations (`int`): how many in a row had one kind of outcome and different rewards.
    """

    def __init__(self, success_threshold: float):
        self.success_threshold = success_threshold
        self.generations = 0
        self._told = False

    @property
    def is_blind(self) -> bool:
        """Whether the budget is to be spent as if nothing were predicted: until outcomes differ."""
        return self.generations >= PATIENCE

    def see(self, successes: Sequence[bool | None], rewards: Sequence[float]) -> str | None:
        """Takes in a generation.

        Args:
            successes: of its leaves, over all processes; `None` for an unscored one.
            rewards: of its scored leaves.

        Returns:
            What to say, the first time.
        """
        outcomes = {success for success in successes if success is not None}
        if len(outcomes) > 1:
            self.generations = 0
        elif rewards and max(rewards) > min(rewards):
            self.generations += 1
        if not self.is_blind or self._told:
            return None
        self._told = True
        outcome = "success" if True in outcomes else "failure"
        return (
            f"For {self.generations} generations every rollout was a {outcome} by `success_threshold="
            f"{self.success_threshold:g}`, while rewards differ: in the last one they lie between {min(rewards):g} "
            f"and {max(rewards):g}. Set `success_threshold` to a reward between those of good and of bad rollouts. "
            "Until outcomes differ, the budget is spent uniformly."
        )


def cut_leaves(metrics: Mapping[str, Any]) -> str | None:
    """What to say of a generation nearly all of whose leaves were ended by a limit; `None` of any other.

    Args:
        metrics: those of `reports.py`.
    """
    shares = {reason: metrics[f"rollout/ended_{reason}"] for reason in REMEDIES}
    # Shares of 0.2 and 0.7 add up to a little less than 0.9; where they are undefined nothing is said
    if not sum(shares.values()) > MOST_CUT - 1e-9:
        return None
    reason = max(shares, key=lambda name: shares[name])
    return (
        f"{sum(shares.values()):.0%} of the rollouts of a generation were cut by a limit ({shares['length']:.0%} by "
        f"tokens, {shares['turns']:.0%} by turns, {shares['overflow']:.0%} by an observation that did not fit): raise "
        f"{REMEDIES[reason]}."
    )
