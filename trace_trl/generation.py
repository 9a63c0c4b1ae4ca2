"""
One round of generation behind one small interface: the contexts of all live branches go in, their next turns come out.

    generate(requests) -> samples       one backend call a round, never one per prompt

Contexts and turns are token ids. A turn ends with an end-of-turn token, with a stop string, or at its token limit.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import StoppingCriteriaList, StopStringCriteria
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import pad


@dataclass(slots=True, frozen=True)
class Request:
    """One live branch.

    Attributes:
        context (`list[int]`): ids of its history, not to be changed, as the branch will go on with them.
        max_new_tokens (`int`): what its next turn may use, above 0.
        branch (`tuple[int, int]`): which one it is: the number of its prompt, and of its rollout among the prompt's.
    """

    context: list[int]
    max_new_tokens: int
    branch: tuple[int, int] = (0, 0)


@dataclass(slots=True, frozen=True)
class Sample:
    """One sampled turn.

    Attributes:
        token_ids (`list[int]`): sampled ids, the end-of-turn token or stop string included.
        finish (`str`): `"eos"`, `"stop"` or `"length"`.
        logprobs (`list[float]` or `None`): log-probs of `token_ids`, where the backend gives them.
        cached_tokens (`int` or `None`): tokens of the context that the backend had in its prefix cache and did not
            compute again, where it has one.
    """

    token_ids: list[int]
    finish: str
    logprobs: list[float] | None = None
    cached_tokens: int | None = None


class Generator(Protocol):
    def __call__(self, requests: Sequence[Request]) -> list[Sample]: ...


class TurnStream(Protocol):
    """A generator that turns can be asked of one by one ([`~trace_trl.continuous.ContinuousRun`])."""

    @property
    def is_busy(self) -> bool:
        """Whether there is something to `step` for."""

    def submit(self, requests: Sequence[tuple[Hashable, Request]]) -> None:
        """Takes requests, each with a key."""

    def step(self) -> list[tuple[Hashable, Sample]]:
        """Works for a moment, and returns the turns that ended, with the keys of their requests."""


class Backend(Protocol):
    """A generator that a trainer is set up for."""

    def __call__(self, requests: Sequence[Request]) -> list[Sample]: ...

    @property
    def context_length(self) -> int | None:
        """Tokens that a history and its next turn may have together, where it has a limit of its own."""

    def session(self) -> AbstractContextManager[Any]:
        """Open while turns are sampled with one set of weights. Entered and left by all processes together."""


def make_backend(trainer: Any, stop_strings: Sequence[str] | None = None) -> Backend:
    """The backend that the options of a [`TRACETrainer`] ask for."""
    if not trainer.use_vllm:
        return TransformersGenerator(trainer, stop_strings)
    # vLLM is an optional package
    from . import vllm_generation

    colocated = trainer.vllm_mode == "colocate"
    generator = vllm_generation.ColocatedGenerator if colocated else vllm_generation.ServerGenerator
    return generator(trainer, stop_strings)


class TransformersGenerator:
    """
    Samples with `model.generate`, or with transformers' continuous batching where the trainer is set up for it.

    Args:
        trainer (`GRPOTrainer`): gives the model, its wrapping, and TRL's generation settings.
        stop_strings (`list[str]`, *optional*): strings that end a turn. Continuous batching has no such notion: there
            a turn is sampled on and cut behind the string afterwards.
    """

    def __init__(self, trainer: Any, stop_strings: Sequence[str] | None = None):
        self.trainer = trainer
        self.stop_strings = list(stop_strings or [])
        self._stop: TurnStopStrings | None = None
        self._model: Any = None  # the unwrapped model while a `session` lasts

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around several rounds: the model is unwrapped once for all of them, and wrapped again whatever happens."""
        # Sharded weights are gathered while the model is unwrapped: only as long as a round takes
        if self.trainer._dist.is_zero3:
            yield
            return
        unwrapped = self._unwrapped()
        self._model = unwrapped.__enter__()
        try:
            yield
        finally:
            self._model = None
            # Without the error: TRL's would then leave gradient checkpointing disabled
            unwrapped.__exit__(None, None, None)

    @property
    def context_length(self) -> int | None:
        return None

    def __call__(self, requests: Sequence[Request]) -> list[Sample]:
        trainer = self.trainer
        config = copy.copy(trainer.generation_config)
        config.max_new_tokens = max(request.max_new_tokens for request in requests)
        contexts = [request.context for request in requests]
        batched = trainer.use_transformers_continuous_batching
        rows = self._generate_batched(contexts, config) if batched else self._generate_padded(contexts, config)
        if len(rows) != len(requests):
            raise RuntimeError(
                f"The generation backend returned {len(rows)} turns for {len(requests)} branches; see the generation "
                "logs above for the underlying error."
            )
        eos_token_ids = set(trainer.eos_token_ids)
        return [
            _finish(ids, stopped, request.max_new_tokens, eos_token_ids)
            for (ids, stopped), request in zip(rows, requests, strict=True)
        ]

    def _unwrapped(self) -> AbstractContextManager[Any]:
        trainer = self.trainer
        if self._model is not None:
            return nullcontext(self._model)
        batched = trainer.use_transformers_continuous_batching
        return unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            # TRL passes its own settings in place of the model's generation config (huggingface/transformers#42762)
            generation_kwargs=None if batched else trainer.generation_kwargs,
        )

    def _generate_padded(self, contexts: list[list[int]], config: Any) -> list[tuple[list[int], bool]]:
        trainer = self.trainer
        tensors = [torch.tensor(context) for context in contexts]
        padding = {"padding_side": "left", "pad_to_multiple_of": trainer.pad_to_multiple_of}
        input_ids = pad(tensors, padding_value=trainer._tokenizer.pad_token_id, **padding)
        attention_mask = pad([torch.ones_like(tensor) for tensor in tensors], padding_value=0, **padding)
        device = trainer.accelerator.device
        start = input_ids.size(1)
        stop = self._stop_strings(start)
        with (
            profiling_context(trainer, "transformers.generate"),
            self._unwrapped() as model,
            torch.no_grad(),
            trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
        ):
            output = model.generate(
                input_ids=input_ids.to(device),
                attention_mask=attention_mask.to(device),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([stop] if stop else []),
            )
        completions = output[:, start:].cpu()
        lengths, stopped = row_lengths(completions, trainer.eos_token_ids, stop.lengths if stop else None)
        return [(row[:length].tolist(), s) for row, length, s in zip(completions, lengths, stopped, strict=True)]

    def _stop_strings(self, start: int) -> TurnStopStrings | None:
        if not self.stop_strings:
            return None
        if self._stop is None:
            # Made once: it looks at every token of the vocabulary
            self._stop = TurnStopStrings(self.trainer._tokenizer, self.stop_strings)
        self._stop.begin(start)
        return self._stop

    def _generate_batched(self, contexts: list[list[int]], config: Any) -> list[tuple[list[int], bool]]:
        trainer = self.trainer
        with (
            profiling_context(trainer, "transformers.generate_batch"),
            self._unwrapped() as model,
            torch.no_grad(),
            trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
        ):
            training = model.training
            if trainer.args.bf16:
                model.to(torch.bfloat16)
            elif trainer.args.fp16:
                model.to(torch.float16)
            if trainer.args.cast_lm_head_to_fp32:
                model.lm_head.to(torch.float32)
            outputs = model.generate_batch(
                contexts,
                generation_config=config,
                continuous_batching_config=trainer.continuous_batching_config,
                progress_bar=False,
            )
            model.train(training)
        errors = [output.error for output in outputs.values() if output.error is not None]
        if errors:
            raise RuntimeError(f"Continuous batching failed for {len(errors)} of {len(outputs)} branches: {errors[0]}")
        return [self._cut(list(output.generated_tokens)) for output in outputs.values()]

    def _decode(self, ids: list[int]) -> str:
        return self.trainer._tokenizer.decode(ids, skip_special_tokens=False)

    def _cut(self, ids: list[int]) -> tuple[list[int], bool]:
        end = stop_string_end(self._decode, ids, self.stop_strings)
        return (ids, False) if end is None else (ids[:end], True)


class TurnStopStrings(StopStringCriteria):
    """
    transformers' stop strings, looked for in the sampled tokens only (never across the end of the prompt), and with
    the exact length at which each row stopped: the padding that follows may be an end-of-turn token itself.

    Attributes:
        lengths (`torch.Tensor` or `None`): shape `(rows,)`, sampled tokens up to and including the stop string; -1 for
            rows that no stop string ended.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str]):
        super().__init__(tokenizer, list(stop_strings))
        self.begin(0)

    def begin(self, start: int) -> None:
        """Readies it for another call of `generate`, whose prompts are padded to `start` tokens."""
        self.start = start
        self.lengths: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        sampled = input_ids[:, self.start :]
        done = super().__call__(sampled, scores, **kwargs)
        if self.lengths is None:
            self.lengths = torch.full((input_ids.size(0),), -1, device=input_ids.device)
        self.lengths[done & (self.lengths < 0)] = sampled.size(1)
        return done


def row_lengths(
    completions: torch.Tensor, eos_token_ids: Sequence[int], stop_lengths: torch.Tensor | None
) -> tuple[list[int], list[bool]]:
    """How many tokens of each row were sampled, and whether a stop string ended it.

    Args:
        completions: shape `(rows, tokens)`, padded behind the end of each row.
        eos_token_ids: a row ends with the first of these.
        stop_lengths: shape `(rows,)` as in [`TurnStopStrings`], or `None`.
    """
    rows, width = completions.shape
    never = width + 1
    is_eos = torch.isin(completions, torch.tensor(list(eos_token_ids)))
    ends = torch.where(is_eos, torch.arange(1, never).expand(rows, -1), never)
    eos_ends = ends.min(dim=1).values if width else torch.full((rows,), never)
    stop_ends = torch.full((rows,), never)
    if stop_lengths is not None:
        stop_ends = torch.where(stop_lengths.cpu() >= 0, stop_lengths.cpu(), never)
    # A row that ended by its end-of-turn token is padded, and padding may complete a stop string later
    stopped = stop_ends < eos_ends
    return torch.minimum(eos_ends, stop_ends).clamp(max=width).tolist(), stopped.tolist()


def stop_string_end(decode: Any, ids: list[int], stop_strings: Sequence[str]) -> int | None:
    """Number of leading `ids` up to and including the first complete stop string, or `None`.

    Args:
        decode: `decode(ids) -> str`.
    """

    def found(count: int) -> bool:
        text = decode(ids[:count])
        return any(stop in text for stop in stop_strings)

    if not stop_strings or not found(len(ids)):
        return None
    low, high = 0, len(ids)  # found(high), not found(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def _finish(ids: list[int], stopped: bool, limit: int, eos_token_ids: set[int]) -> Sample:
    # All rows of a call share the largest limit; what a branch was not allowed is cut here
    if len(ids) > limit:
        return Sample(ids[:limit], "length")
    if ids and ids[-1] in eos_token_ids:
        return Sample(ids, "eos")
    return Sample(ids, "stop" if stopped else "length")
