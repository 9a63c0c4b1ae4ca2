"""
One round of generation behind one small interface: the contexts of all live branches go in, their next turns come out.

    generate(requests) -> samples       one backend call a round, never one per prompt

Contexts and turns are token ids. A turn ends with an end-of-turn token, with a stop string, or at its token limit.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from transformers import StoppingCriteriaList, StopStringCriteria

from .predictor import decoder_of
from .seams import pad, profiling_context, unwrap_model_for_generation


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
        state (`torch.Tensor` or `None`): the policy's last hidden state at the context's last token, float32 on the
            CPU, where the backend was asked for it and has it.
    """

    token_ids: list[int]
    finish: str
    logprobs: list[float] | None = None
    cached_tokens: int | None = None
    state: torch.Tensor | None = field(default=None, compare=False, repr=False)


class Generator(Protocol):
    def __call__(self, requests: Sequence[Request]) -> list[Sample]: ...


class TurnStream(Protocol):
    """A generator that turns can be asked of one by one ([`~trace_trl.continuous.ContinuousRun`])."""

    @property
    def is_busy(self) -> bool:
        """Whether there is something to `step` for."""

    @property
    def is_shared(self) -> bool:
        """Whether several processes hold it between them, and must `submit` and `step` together, equally often."""

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


def make_backend(trainer: Any, stop_strings: Sequence[str] | None = None, with_states: bool = False) -> Backend:
    """The backend that the options of a [`TRACETrainer`] ask for.

    Args:
        with_states: whether hidden states are wanted in training, from a backend that computes them anyway.
    """
    if not trainer.use_vllm:
        return TransformersGenerator(trainer, stop_strings, with_states)
    # vLLM is an optional package
    from . import vllm_generation

    colocated = trainer.vllm_mode == "colocate"
    generator = vllm_generation.ColocatedGenerator if colocated else vllm_generation.ServerGenerator
    return generator(trainer, stop_strings)


class _Row(NamedTuple):
    """What was sampled for a context: ids, whether a stop string ended them, and the state at the context's end."""

    ids: list[int]
    stopped: bool
    state: torch.Tensor | None = None


class TransformersGenerator:
    """
    Samples with `model.generate`, or with transformers' continuous batching where the trainer is set up for it.

    Args:
        trainer (`GRPOTrainer`): gives the model, its wrapping, and TRL's generation settings.
        stop_strings (`list[str]`, *optional*): strings that end a turn. Continuous batching has no such notion: there
            a turn is sampled on and cut behind the string afterwards.
        with_states (`bool`): whether samples hold hidden states: in training, of a model that nothing random blurs.
            Continuous batching has none.
    """

    def __init__(self, trainer: Any, stop_strings: Sequence[str] | None = None, with_states: bool = False):
        self.trainer = trainer
        self.with_states = with_states and not is_random_in_training(trainer.model, trainer.args)
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
            _finish(row, request.max_new_tokens, eos_token_ids) for row, request in zip(rows, requests, strict=True)
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

    def _generate_padded(self, contexts: list[list[int]], config: Any) -> list[_Row]:
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
            _first_states(model, input_ids.shape, wanted=self.with_states and model.training) as states,
        ):
            output = model.generate(
                input_ids=input_ids.to(device),
                attention_mask=attention_mask.to(device),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([stop] if stop else []),
            )
        completions = output[:, start:].cpu()
        lengths, stopped = row_lengths(completions, trainer.eos_token_ids, stop.lengths if stop else None)
        return [
            _Row(row[:length].tolist(), s, state)
            for row, length, s, state in zip(
                completions, lengths, stopped, states or [None] * len(lengths), strict=True
            )
        ]

    def _stop_strings(self, start: int) -> TurnStopStrings | None:
        if not self.stop_strings:
            return None
        if self._stop is None:
            # Made once: it looks at every token of the vocabulary
            self._stop = TurnStopStrings(self.trainer._tokenizer, self.stop_strings)
        self._stop.begin(start)
        return self._stop

    def _generate_batched(self, contexts: list[list[int]], config: Any) -> list[_Row]:
        trainer = self.trainer
        with (
            profiling_context(trainer, "transformers.generate_batch"),
            self._unwrapped() as model,
            torch.no_grad(),
            trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
        ):
            training = model.training
            with _in_half_precision(model, trainer.args):
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
        return [_Row(*self._cut(list(output.generated_tokens))) for output in outputs.values()]

    def _decode(self, ids: list[int]) -> str:
        return self.trainer._tokenizer.decode(ids, skip_special_tokens=False)

    def _cut(self, ids: list[int]) -> tuple[list[int], bool]:
        end = stop_string_end(self._decode, ids, self.stop_strings)
        return (ids, False) if end is None else (ids[:end], True)


RANDOM = ("drop", "jitter", "noise")  # parts of the names of a configuration's rates


def is_random_in_training(model: Any, args: Any) -> bool:
    """Whether a model's states differ from pass to pass while it is in training mode: by dropout, by noise on
    embeddings, by jitter of routers."""
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.modules.dropout._DropoutNd)]
    # Attention and routers take theirs from the configuration, without a module of their own
    return any(rates) or bool(args.neftune_noise_alpha) or _has_rate(model.config.get_text_config().to_dict())


def _has_rate(config: dict[Any, Any]) -> bool:
    for name, value in config.items():
        if isinstance(value, dict):
            if _has_rate(value):
                return True
        elif isinstance(value, int | float) and value and any(part in str(name) for part in RANDOM):
            return True
    return False


@contextmanager
def _first_states(model: Any, shape: torch.Size, wanted: bool) -> Iterator[list[torch.Tensor]]:
    """A list that the first forward pass fills with the hidden states at the contexts' last tokens, if they are wanted
    and its input has this shape, that of the contexts: beams, prefill in chunks and virtual tokens change it."""
    states: list[torch.Tensor] = []
    if not wanted:
        yield states
        return

    def keep(module: Any, args: Any, output: Any) -> None:
        handle.remove()
        if output[0].shape[:2] == shape:
            # Copied: on a CPU, a view would keep the states of all positions
            states.extend(output[0][:, -1].to("cpu", torch.float32, copy=True))

    handle = decoder_of(model).register_forward_hook(keep)
    try:
        yield states
    finally:
        handle.remove()


@contextmanager
def _in_half_precision(model: Any, args: Any) -> Iterator[None]:
    """While open, a model that is trained with `bf16` or `fp16` computes with weights of that precision, but for an
    output layer that is kept in float32.

    TRL casts the model for good. But its weights are the optimizer's, and half precision loses a step of 1e-6; other
    data in a parameter's place takes the hooks off by which DDP averages gradients; and buffers, such as the
    frequencies of rotary positions, have to stay exact. So copies stand in for the parameters.
    """
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    exact = set(map(id, model.lm_head.parameters())) if args.cast_lm_head_to_fp32 else set()
    copies: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied weights have one
    replaced = []
    try:
        for module in model.modules() if dtype is not None else ():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.is_floating_point() or id(parameter) in exact:
                    continue
                if parameter.dtype != dtype:
                    if parameter not in copies:
                        copies[parameter] = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                    replaced.append((module, name, parameter))
        for module, name, parameter in replaced:
            module._parameters[name] = copies[parameter]
        yield
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter


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


def _finish(row: _Row, limit: int, eos_token_ids: set[int]) -> Sample:
    # All rows of a call share the largest limit; what a branch was not allowed is cut here
    if len(row.ids) > limit:
        return Sample(row.ids[:limit], "length", state=row.state)
    if row.ids and row.ids[-1] in eos_token_ids:
        return Sample(row.ids, "eos", state=row.state)
    return Sample(row.ids, "stop" if row.stopped else "length", state=row.state)
