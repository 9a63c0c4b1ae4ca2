"""
From trees to the rows TRL's loss expects: one row per leaf.

    completion   a1 a1 │ o1 o1 │ a2 a2 a2 │ o2 │ a3 a3         a: sampled by the policy, o: observed
    loss mask     1  1 │  0  0 │  0  0  0 │  0 │  1  1         a2 is trained in another leaf's row
    advantage     A1 A1│  0  0 │  0  0  0 │  0 │ A3 A3         one number per turn, times the turn's weight
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .advantages import row_weights
from .tree import RolloutTree, Turn


@dataclass
class Rows:
    """One entry per leaf in every list; the lists of one row are equally long, token by token.

    Attributes:
        leaves: tree and last turn of each row.
        prompt_ids, completion_ids: token ids.
        sampled_mask: 1 for tokens the policy sampled, 0 for observed ones.
        loss_mask: 1 for tokens that are trained in this row.
        advantages: advantage times weight of each token, 0 where the loss mask is 0.
        logprobs: log-probs under the sampler, or `None` if the backend gives none.
    """

    leaves: list[tuple[RolloutTree, Turn]] = field(default_factory=list)
    prompt_ids: list[list[int]] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)
    sampled_mask: list[list[int]] = field(default_factory=list)
    loss_mask: list[list[int]] = field(default_factory=list)
    advantages: list[list[float]] = field(default_factory=list)
    logprobs: list[list[float]] | None = None

    def __len__(self) -> int:
        return len(self.leaves)

    @property
    def prompts(self) -> list[Any]:
        return [tree.start(turn).prompt for tree, turn in self.leaves]

    @property
    def truncated(self) -> list[bool]:
        return [turn.leaf.truncated for _, turn in self.leaves]  # type: ignore[union-attr]

    def advantage_tensor(self, like: torch.Tensor) -> torch.Tensor:
        """Advantages of shape `(rows, tokens)`, padded on the right to the shape of `like`, in float32."""
        padded = torch.zeros(like.shape, dtype=torch.float32)
        for row, advantages in enumerate(self.advantages):
            padded[row, : len(advantages)] = torch.tensor(advantages, dtype=torch.float32)
        return padded.to(like.device)


def build_rows(
    trees: Sequence[RolloutTree], weighting: str = "once", mask_truncated: bool = False, empty_token_id: int = 0
) -> Rows:
    """Rows of all leaves, tree by tree, in the order in which rollouts were started.

    Args:
        trees: trees with advantages.
        weighting: one of `TURN_WEIGHTINGS`.
        mask_truncated: whether rows of truncated leaves are not trained (a turn they share is, in another row).
        empty_token_id: stands, untrained, in the row of an episode that holds no token at all: a row can't be empty.
    """
    rows = Rows()
    for tree in trees:
        for turn, weights in zip(tree.leaves(), row_weights(tree, weighting, mask_truncated), strict=True):
            path = turn.path()
            ids: list[int] = []
            sampled: list[int] = []
            trained: list[int] = []
            advantages: list[float] = []
            logprobs: list[float] = []
            for node, weight in zip(path, weights, strict=True):
                count, observed = len(node.token_ids), len(node.observation_ids)
                ids += node.token_ids
                ids += node.observation_ids
                sampled += [1] * count + [0] * observed
                trained += [int(weight > 0)] * count + [0] * observed
                advantages += [node.advantage * weight] * count + [0.0] * observed
                logprobs += (node.logprobs or [0.0] * count) + [0.0] * observed
            if not ids:
                ids, sampled, trained, advantages, logprobs = [empty_token_id], [0], [0], [0.0], [0.0]
            if any(node.logprobs is not None for node in path):
                rows.logprobs = (
                    rows.logprobs if rows.logprobs is not None else [[0.0] * len(i) for i in rows.completion_ids]
                )
            if rows.logprobs is not None:
                rows.logprobs.append(logprobs)
            rows.leaves.append((tree, turn))
            rows.prompt_ids.append(tree.start(turn).ids)
            rows.completion_ids.append(ids)
            rows.sampled_mask.append(sampled)
            rows.loss_mask.append(trained)
            rows.advantages.append(advantages)
    return rows
