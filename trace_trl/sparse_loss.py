"""
The loss's forward pass over the rows that can move the policy, and over no others.

    row 1   p p │ + + o 0 · · ·        +: trained, with an advantage      o: observed
    row 2   p p │ 0 0 o 0 0 0 ·        0: trained, of advantage 0         ·: padding, or trained in another row
    row 3   p p │ · · · + + · ·

Row 2 moves nothing, and nothing behind the last trained token of the others is looked at: rows 1 and 3 are computed,
five tokens wide. What TRL's loss does with the result stays its own: it is handed tensors of full shape, so that
whatever it divides by counts every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


@contextmanager
def needed_rows_only(trainer: Any, batch: dict[str, Any]) -> Iterator[None]:
    """While it is open, the loss of a [`~trl.GRPOTrainer`] over a micro-batch computes what its gradient depends on.

    Args:
        trainer ([`~trl.GRPOTrainer`])
        batch (`dict`): what the trainer hands to its loss.
    """
    if not rows_may_be_skipped(trainer):
        yield
        return
    needed = NeededTokens.of(batch, cut=not length_matters(trainer.model), multiple=trainer.pad_to_multiple_of)
    wrapped = vars(trainer).get("_get_per_token_logps_and_entropies")  # by a profiler, say
    forward = partial(needed.compute, trainer._get_per_token_logps_and_entropies)
    trainer._get_per_token_logps_and_entropies = forward
    try:
        yield
    finally:
        del trainer._get_per_token_logps_and_entropies
        if wrapped is not None:
            trainer._get_per_token_logps_and_entropies = wrapped


def rows_may_be_skipped(trainer: Any) -> bool:
    """Whether a row whose advantages are all 0 has no part in a trainer's loss: no KL term, no entropy bonus, no
    auxiliary loss, and no quantile over all entropies."""
    return (
        trainer.beta == 0.0
        and trainer.top_entropy_quantile >= 1.0
        and not trainer._entropy_bonus_enabled
        and not trainer.aux_loss_enabled
    )


def length_matters(model: Any) -> bool:
    """Whether what the model makes of a token depends on how much padding follows: rotary embeddings whose frequencies
    change with the length of the batch (`longrope`, `dynamic`)."""

    def changes(parameters: Any) -> bool:
        if isinstance(parameters, dict):  # of the model, or of each type of layer
            return any(changes(value) for value in parameters.values())
        return isinstance(parameters, str) and (parameters == "longrope" or "dynamic" in parameters)

    return changes(getattr(model.config.get_text_config(), "rope_parameters", None))


@dataclass(frozen=True)
class NeededTokens:
    """Which part of a micro-batch the gradient depends on.

    Attributes:
        tokens (`torch.Tensor` of shape `(rows, tokens)`, bool): the trained ones, of rows with an advantage other
            than 0. Not only those with the advantage: a ratio of sequences is one of all their trained tokens. Where
            no row has one, those of the first row that is trained.
        width (`int`): how many completion tokens are computed.
        old_logprobs (`torch.Tensor` of shape `(rows, tokens)`, *optional*): those the loss compares with; `None` where
            it compares with what is computed.
    """

    tokens: torch.Tensor
    width: int
    old_logprobs: torch.Tensor | None

    @classmethod
    def of(cls, batch: dict[str, Any], cut: bool = True, multiple: int | None = None) -> NeededTokens:
        """
        Args:
            batch (`dict`): as [`~trl.GRPOTrainer`] hands it to its loss.
            cut (`bool`): whether what lies behind the last needed token may be left out.
            multiple (`int`, *optional*): what the width is a multiple of, unless it is the whole one.
        """
        advantages, mask = batch["advantages"], batch["completion_mask"]
        if "tool_mask" in batch:
            mask = mask * batch["tool_mask"]
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        trained = mask != 0
        rows = (trained & (advantages != 0)).any(1)
        if not rows.any():
            rows = trained.any(1) & (trained.any(1).cumsum(0) == 1)
        tokens = trained & rows.unsqueeze(1)
        width = tokens.size(1)
        if cut:
            columns = tokens.any(0).nonzero()
            last = int(columns[-1]) + 1 if len(columns) else 1
            width = min(width, -(-last // (multiple or 1)) * (multiple or 1))
        return cls(tokens, width, batch.get("old_per_token_logps"))

    def compute(
        self,
        forward: Callable[..., tuple],
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """
        Log-probs and entropies of a micro-batch, those of the needed tokens computed. The other log-probs are
        `old_logprobs`, so that ratios there are 1; the other entropies are the mean of the needed ones.

        Every process computes at least one row: a sharded model gathers its weights in each pass.

        Args:
            forward (`Callable`): `GRPOTrainer._get_per_token_logps_and_entropies`.
            input_ids, attention_mask (`torch.Tensor` of shape `(rows, prompt and completion tokens)`): of all rows.
            logits_to_keep (`int`): completion tokens.
            **kwargs: passed on to `forward`.

        Returns:
            as `forward`: log-probs and entropies of shape `(rows, completion tokens)`, and the auxiliary loss.
        """
        rows = self.tokens.any(1).nonzero().squeeze(1)
        if not len(rows):
            rows = rows.new_zeros(1)
        until = input_ids.size(1) - logits_to_keep + self.width
        logprobs, entropies, aux_loss = forward(
            model, input_ids[rows, :until], attention_mask[rows, :until], logits_to_keep=self.width, **kwargs
        )
        return (
            self._spread(logprobs, rows, self.old_logprobs),
            None if entropies is None else self._spread(entropies, rows, self._mean(entropies, rows)),
            aux_loss,
        )

    def _spread(self, computed: torch.Tensor, rows: torch.Tensor, elsewhere: torch.Tensor | None) -> torch.Tensor:
        full = computed.new_zeros(self.tokens.shape) if elsewhere is None else elsewhere.to(computed.dtype)
        full = full.expand(self.tokens.shape).clone()
        full[rows, : self.width] = computed
        return full

    def _mean(self, entropies: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        needed = self.tokens[rows, : self.width]
        return entropies.detach()[needed].mean() if needed.any() else entropies.new_zeros(())
