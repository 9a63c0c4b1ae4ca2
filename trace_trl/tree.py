"""
The one data structure that travels from the rollout engine to the training rows.

    prompt (root, depth 0)
      ├── turn 1 ── turn 2 ── turn 3 = leaf     bare rollout 0: sampled from the root
      │               └────── turn 3'= leaf     continuation: sampled from the prefix (turn 1, turn 2)
      └── turn 1'── turn 2'= leaf               bare rollout 1

A [`Turn`] stores only what was added by that turn: the token ids the policy sampled, their log-probs, and the token
ids the environment answered. A path is read by walking up the parents, so no list is ever shared and extended by two
branches. The root is a turn of depth 0 that sampled nothing and whose observation is the prompt: the history `H_t` of
TRACE (arXiv 2606.11119, section 3) is everything from the root to a turn, observation included.

This module knows nothing of torch, TRL or processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from ctypes import c_float
from dataclasses import dataclass, field
from typing import Any


BACKUPS = ("leaf_mean", "child_mean")


def is_success(reward: float, success_threshold: float) -> bool:
    """`R >= success_threshold`, both in single precision, in which rewards are added up: 0.9 is 0.89999998 there."""
    return c_float(reward).value >= c_float(success_threshold).value


@dataclass(slots=True)
class Leaf:
    """How an episode ended.

    Attributes:
        kind (`str`): `"bare"` (drawn from the root), `"continuation"` (drawn from a prefix), or `"extra"` (a
            continuation that became one more rollout from the root because its prompt had no eligible prefix).
        reason (`str`): why the episode ended: `"final"` (the model or the environment ended it), `"length"` (a turn
            was cut by the token limit), `"turns"` (turn limit), `"overflow"` (an observation did not fit).
        reward (`float`): terminal reward `R`, the weighted sum of all reward sources; `nan` until scored, and for a
            leaf that no reward function scored.
        rewards (`list[float]`): one entry per reward function, `nan` where it returned `None`.
        success (`bool` or `None`): `R >= success_threshold`, written with the reward; `None` for an unscored leaf.
            Nothing else judges a reward.
        rollout (`int`): number of the rollout in its tree, in the order in which rollouts were started.
        info (`dict[str, float]`): the environment's last numbers.
    """

    kind: str = "bare"
    reason: str = "final"
    reward: float = math.nan
    rewards: list[float] = field(default_factory=list)
    success: bool | None = None
    rollout: int = 0
    environment: Any = None  # what TRL passes to reward functions as `environments[i]`
    environment_reward: float | None = None  # `StepResult.reward` of the last step, if any
    extras: dict[str, Any] = field(default_factory=dict)  # columns logged by reward functions with `log_extra`
    info: dict[str, float] = field(default_factory=dict)

    @property
    def truncated(self) -> bool:
        return self.reason != "final"

    @property
    def scored(self) -> bool:
        return not math.isnan(self.reward)


@dataclass(slots=True, frozen=True, eq=False)
class Start:
    """What a rollout was shown first.

    Attributes:
        prompt (`str` or `list[dict]`): the prompt, what the rollout's own `reset` returned included.
        ids (`list[int]`): its token ids.
    """

    prompt: Any
    ids: list[int]


@dataclass(slots=True, eq=False)
class Turn:
    """One turn (node) of a rollout tree. Compared and hashed by identity.

    Attributes:
        token_ids (`list[int]`): ids sampled by the policy in this turn, never decoded and encoded again.
        logprobs (`list[float]` or `None`): log-probs of `token_ids` under the sampler, where the backend gives them.
        observation_ids (`list[int]`): ids of the environment's answer, template tokens included.
        text (`str`): decoded `token_ids`, for environments and logs only.
        messages (`list[dict]`): chat messages this turn added: the assistant's and the environment's.
        parent (`Turn` or `None`): `None` for the root.
        depth (`int`): 0 for the root, `t` for the t-th turn.
        value (`float` or `None`): predictor's `v(H_t)` at the moment it was used for allocation.
        certainty (`float` or `None`): how exactly the predictor knows that value, see `allocation.py`.
        target (`float` or `None`): backed-up success rate, see [`RolloutTree.backup`]; `None` where nothing below is
            scored.
        target_variance (`float` or `None`): estimate of `V(1 - V)`, see [`RolloutTree.backup`]; `None` where there are
            not two outcomes to compare.
        advantage (`float`): the turn's advantage; every sampled token of the turn carries it.
        leaf (`Leaf` or `None`): set when the episode ended with this turn.
        start (`Start` or `None`): of a first turn whose rollout was shown something other than the tree's prompt,
            since an environment's `reset` answered differently: what it was shown, in the place of the root's ids.
    """

    token_ids: list[int]
    observation_ids: list[int]
    parent: Turn | None = field(default=None, repr=False)
    depth: int = 0
    logprobs: list[float] | None = None
    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    children: list[Turn] = field(default_factory=list)
    value: float | None = None
    certainty: float | None = None
    target: float | None = None
    target_variance: float | None = None
    advantage: float = 0.0
    leaf: Leaf | None = None
    history_length: int = 0  # tokens from the root to here, prompt and observation included
    start: Start | None = None

    def path(self) -> list[Turn]:
        """Turns from the first turn down to this one; the root is left out."""
        turns = []
        node: Turn | None = self
        while node is not None and node.parent is not None:
            turns.append(node)
            node = node.parent
        turns.reverse()
        return turns

    def history_ids(self) -> list[int]:
        """Token ids of `H_t`: the prompt, then every turn's sampled and observed tokens. A new list at every call."""
        parts = []
        ids: list[int] = []
        node: Turn | None = self
        while node is not None:
            parts.append(node)
            if node.start is not None:
                ids += node.start.ids
                break
            node = node.parent
        for part in reversed(parts):
            ids += part.token_ids
            ids += part.observation_ids
        return ids

    def leaves(self) -> Iterator[Turn]:
        """Turns at or below this one that ended an episode, in depth-first order."""
        stack = [self]
        while stack:
            node = stack.pop()
            if node.leaf is not None:
                yield node
            stack.extend(reversed(node.children))

    def turns(self) -> Iterator[Turn]:
        """This turn and all turns below it, parents before children, in depth-first order."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))


@dataclass(slots=True, frozen=True)
class RemoteChild:
    """What this process needs to know of a root's child that lives on another process: of the leaves below it the
    rewards (`nan` for unscored ones) and the successes (`None` for those), the factual leaf first; and its backed-up
    value."""

    rewards: tuple[float, ...]
    successes: tuple[bool | None, ...]
    target: float | None


@dataclass(slots=True, eq=False)
class RolloutTree:
    """All rollouts of one prompt, that is, of one dataset row, on this process.

    Attributes:
        prompt (`str` or `list[dict]`): the prompt as shown to the model, an environment's reset observation included.
            A rollout whose own reset answered differently has its own, see [`RolloutTree.start`].
        example (`dict`): the dataset row; never written to.
        root (`Turn`): depth 0, `root.observation_ids` are the prompt's token ids.
        index (`int`): number of the prompt in the candidate pool, the same on every process.
        budget (`int`): bare rollouts allocated to this prompt over all processes (`m_i`).
        remote (`list[RemoteChild]`): children of the root on other processes; empty unless the prompt spans processes.
    """

    prompt: Any
    example: dict[str, Any]
    root: Turn
    index: int = 0
    budget: int = 0
    remote: list[RemoteChild] = field(default_factory=list)

    @classmethod
    def from_prompt(
        cls, prompt: Any, prompt_ids: Sequence[int], example: dict[str, Any] | None = None, **kwargs: Any
    ) -> RolloutTree:
        root = Turn(token_ids=[], observation_ids=list(prompt_ids), history_length=len(prompt_ids))
        return cls(prompt=prompt, example=example or {}, root=root, **kwargs)

    @staticmethod
    def add_turn(
        parent: Turn,
        token_ids: Sequence[int],
        observation_ids: Sequence[int] = (),
        logprobs: Sequence[float] | None = None,
        text: str = "",
        messages: Sequence[dict[str, Any]] = (),
        leaf: Leaf | None = None,
        start: Start | None = None,
    ) -> Turn:
        """Appends a turn below `parent` (the root for a first turn). The arguments are copied, `start` is not.

        Raises:
            ValueError: if `parent` already ended its episode, or if `logprobs` and `token_ids` differ in length.
        """
        if parent.leaf is not None:
            raise ValueError(f"The turn of depth {parent.depth} ended its episode: nothing can follow it.")
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise ValueError(f"{len(logprobs)} log-probs for {len(token_ids)} sampled tokens.")
        turn = Turn(
            token_ids=list(token_ids),
            observation_ids=list(observation_ids),
            parent=parent,
            depth=parent.depth + 1,
            logprobs=None if logprobs is None else list(logprobs),
            text=text,
            messages=copy_messages(messages),
            leaf=leaf,
            history_length=(parent.history_length if start is None else len(start.ids))
            + len(token_ids)
            + len(observation_ids),
            start=start,
        )
        parent.children.append(turn)
        return turn

    @property
    def prompt_ids(self) -> list[int]:
        return self.root.observation_ids

    def start(self, turn: Turn) -> Start:
        """What the rollouts that `turn` belongs to were shown first; at the root, the tree's prompt."""
        while turn.depth > 1:
            turn = turn.parent  # type: ignore[assignment]
        return Start(self.prompt, self.prompt_ids) if turn.start is None else turn.start

    def turns(self) -> Iterator[Turn]:
        """All sampled turns, parents before children; the root is left out."""
        turns = self.root.turns()
        next(turns)
        return turns

    def leaves(self) -> list[Turn]:
        """Leaves in the order in which their rollouts were started."""
        return sorted(self.root.leaves(), key=lambda turn: turn.leaf.rollout)  # type: ignore[union-attr]

    def anchors(self) -> Iterator[Turn]:
        """The root and every visited prefix that did not end an episode (TRACE's anchors)."""
        return (turn for turn in self.root.turns() if turn.leaf is None)

    def rewards_below(self, turn: Turn) -> list[float]:
        """Rewards of the scored leaves at or below `turn`; at the root, those on other processes included."""
        rewards = [leaf.leaf.reward for leaf in turn.leaves() if leaf.leaf.scored]  # type: ignore[union-attr]
        if turn is self.root:
            rewards += [reward for child in self.remote for reward in child.rewards if not math.isnan(reward)]
        return rewards

    def backup(self, mode: str = "leaf_mean") -> None:
        """Writes the backed-up success rate `V^` into `target` of every turn (arXiv 2606.11119; `docs/algorithm.md`).

        `leaf_mean`: `V^(y) = (1/n_y) sum_c n_c V^(c)` over the children `c` of `y`, `n_y` the scored leaves below `y`.
        `child_mean`: every child has the same weight, however many leaves were put below it after the factual outcomes
        were seen. Unscored leaves count for neither. A leaf's own target is its outcome, 0.0 or 1.0.

        Also writes `target_variance`, the share of pairs of rollouts from `y` with different outcomes, halved: an
        unbiased estimate of `V(1 - V)`, where `V^(y) (1 - V^(y))` is too small. The rollouts are the bare ones at the
        root, each with the outcome it had before anything branched off, and the continuations at a prefix, without the
        factual rollout, whose outcome decided how many continuations there are.

        Raises:
            ValueError: if `mode` is not one of `BACKUPS`.
        """
        if mode not in BACKUPS:
            raise ValueError(f"Unknown backup {mode!r}: use one of {', '.join(map(repr, BACKUPS))}.")
        counts: dict[Turn, int] = {}
        drawn: dict[Turn, float | None] = {}  # outcome of the rollout that a turn was sampled in
        for turn in reversed(list(self.root.turns())):
            if turn.leaf is not None:
                success = turn.leaf.success
                counts[turn] = int(success is not None)
                turn.target = drawn[turn] = None if success is None else float(success)
                turn.target_variance = None
                continue
            # Children stand in the order in which they were sampled: what branches off comes later
            drawn[turn] = drawn[turn.children[0]] if turn.children else None
            outcomes = [drawn[child] for child in turn.children]
            children = [(child.target, counts[child]) for child in turn.children if child.target is not None]
            if turn is self.root:
                for child in self.remote:
                    if child.target is not None:
                        children.append((child.target, sum(success is not None for success in child.successes)))
                    success = child.successes[0] if child.successes else None
                    outcomes.append(None if success is None else float(success))
            counts[turn] = sum(count for _, count in children)
            if not children:
                turn.target = None
            elif mode == "leaf_mean":
                turn.target = sum(target * count for target, count in children) / counts[turn]
            else:
                turn.target = sum(target for target, _ in children) / len(children)
            turn.target_variance = _variance_by_pairs(outcomes if turn is self.root else outcomes[1:])


def _variance_by_pairs(outcomes: Sequence[float | None]) -> float | None:
    """Chance that of two outcomes the first is a success and the second is not; `None` for fewer than two."""
    known = [outcome for outcome in outcomes if outcome is not None]
    if len(known) < 2:
        return None
    return sum(known) * (len(known) - sum(known)) / (len(known) * (len(known) - 1))


def copy_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of chat messages, tool calls and content blocks included: changing them changes nothing else."""
    return [_copy(message) for message in messages]


def _copy(value: Any) -> Any:
    # Several times as fast as `copy.deepcopy`, and every message of every live branch goes through it in every round
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
