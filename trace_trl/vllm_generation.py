"""
Generation with vLLM, in the trainer's own processes or on a server. docs/vllm.md says which options work.

    session ─▶ weights pushed, engine awake ─▶ requests of all rounds ─▶ nothing left in the engine, asleep again

A request has its own sampling parameters, and is told apart by its own key: no answer is found by its position. What
siblings share is sampled once, and its keys and values stay in the engine's prefix cache.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import resource
import signal
import threading
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from .generation import Request, Sample, stop_string_end
from .processes import on_main
from .seams import profiling_context


logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 1024  # to a server, which runs as many turns at once as it can hold
FILES_LEFT = 4  # connections take no more than one in so many of the files that a process may have open


class VLLMGenerator:
    """
    What both ways to run vLLM have in common.

    Args:
        trainer (`GRPOTrainer`): holds TRL's `VLLMGeneration`, which starts vLLM and pushes weights to it.
        stop_strings (`list[str]`, *optional*): strings that end a turn.
    """

    def __init__(self, trainer: Any, stop_strings: Sequence[str] | None = None):
        self.trainer = trainer
        self.vllm = trainer.vllm_generation
        self.stop_strings = list(stop_strings or [])
        self.eos_token_ids = set(trainer.eos_token_ids)

    @property
    def context_length(self) -> int | None:
        """Tokens that a history and its next turn may have together."""
        raise NotImplementedError

    @contextmanager
    def session(self) -> Iterator[None]:
        """Open while turns are sampled with one set of weights. Entered and left by all processes together."""
        self._load_weights()
        yield

    def _load_weights(self) -> None:
        """Pushes the policy's weights to vLLM, once per optimizer step. Gathers them where they are sharded."""
        trainer = self.trainer
        if trainer.state.global_step != trainer._last_loaded_step:
            with profiling_context(trainer, "sync_weights"):
                self.vllm.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step

    def _options(self, request: Request) -> dict[str, Any]:
        """Sampling parameters of one request: TRL's, and those of a turn."""
        vllm = self.vllm
        options = {
            "n": 1,
            "temperature": vllm.temperature,
            "top_p": vllm.top_p,
            "top_k": vllm.top_k,
            "min_p": vllm.min_p or 0.0,
            "repetition_penalty": vllm.repetition_penalty,
            **vllm.generation_kwargs,
            "max_tokens": request.max_new_tokens,
            "logprobs": 0,
            # Besides those that vLLM finds in the model's folder, which may be other ones
            "stop_token_ids": sorted(self.eos_token_ids),
        }
        if options.get("min_tokens"):
            options["min_tokens"] = min(options["min_tokens"], request.max_new_tokens)
        if self.stop_strings:
            # A stop string may hold special tokens, and is looked for in what was sampled as it is
            options |= {
                "stop": self.stop_strings,
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            }
        return options


class ColocatedGenerator(VLLMGenerator):
    """
    vLLM inside the trainer's processes.

    With tensor parallelism, the ranks of a group hold one engine between them, which stays in step because all of them
    hand it the same requests in the same order and step it equally often. Each keeps the answers to its own.
    """

    def __init__(self, trainer: Any, stop_strings: Sequence[str] | None = None):
        super().__init__(trainer, stop_strings)
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        self._make_params = SamplingParams
        self._make_structure = StructuredOutputsParams
        self._final_only = RequestOutputKind.FINAL_ONLY
        self._numbers = itertools.count()
        self._waiting: dict[str, tuple[int, Hashable]] = {}  # by request: its rank in the group, its key there
        if not self.engine.vllm_config.cache_config.enable_prefix_caching:
            logger.warning(
                "vLLM caches no prefixes for this model: every turn prefills its whole history again, and branches "
                "share nothing."
            )

    @property
    def engine(self) -> Any:
        return self.vllm.llm.llm_engine

    @property
    def context_length(self) -> int | None:
        return self.engine.model_config.max_model_len

    @property
    def _group_rank(self) -> int:
        return torch.distributed.get_rank(group=self.vllm.tp_group) if self.vllm.tensor_parallel_size > 1 else 0

    @contextmanager
    def session(self) -> Iterator[None]:
        vllm = self.vllm
        if vllm.enable_sleep_mode and vllm._llm_weights_sleeping:
            # Asleep, vLLM forgets them
            self.trainer._last_loaded_step = -1
        self._load_weights()
        if vllm.enable_sleep_mode:
            vllm.llm.wake_up(tags=["kv_cache"])
        try:
            yield
        finally:
            self.abort()
            if vllm.enable_sleep_mode:
                vllm.llm.sleep(level=2)
                vllm._llm_weights_sleeping = True

    def _load_weights(self) -> None:
        stale = self.trainer.state.global_step != self.trainer._last_loaded_step
        super()._load_weights()
        # TRL empties the cache as well, but does not look whether it could be emptied
        if stale and self.engine.reset_prefix_cache() is False:
            raise RuntimeError("vLLM could not empty its prefix cache, which holds what earlier weights computed.")

    def __call__(self, requests: Sequence[Request]) -> list[Sample]:
        found: dict[Hashable, Sample] = {}
        try:
            self.submit(list(enumerate(requests)))
            while self.is_busy:
                found.update(self.step())
        except BaseException:
            self.abort()
            raise
        return [found[number] for number in range(len(requests))]

    # One by one

    def submit(self, requests: Sequence[tuple[Hashable, Request]]) -> None:
        """Hands requests over, each with a key that its answer is known by. Called by all ranks of a tensor parallel
        group together."""
        parts: list[Any] = [list(requests)]
        if self.vllm.tensor_parallel_size > 1:
            parts = [None] * self.vllm.tensor_parallel_size
            torch.distributed.all_gather_object(parts, list(requests), group=self.vllm.tp_group)
        for rank, part in enumerate(parts):
            for key, request in part:
                name = f"trace-{next(self._numbers)}"
                # Noted first: what is handed over only half is taken back too
                self._waiting[name] = rank, key
                with _uninterrupted():
                    self.engine.add_request(name, {"prompt_token_ids": request.context}, self._params(request))

    @property
    def is_busy(self) -> bool:
        """Whether the engine is at work on a request, of this rank or of another of its group."""
        return bool(self._waiting)

    @property
    def is_shared(self) -> bool:
        return self.vllm.tensor_parallel_size > 1

    def step(self) -> list[tuple[Hashable, Sample]]:
        """Lets the engine sample a token of every running request, and returns the turns that ended, by their keys.
        Called by all ranks of a tensor parallel group together."""
        with _uninterrupted():
            outputs = self.engine.step()
        ended = []
        for output in outputs:
            if output.finished:
                rank, key = self._waiting.pop(output.request_id)
                if rank == self._group_rank:
                    ended.append((key, self._sample(output)))
        return ended

    def abort(self) -> None:
        """Takes back every request that is not answered."""
        if self._waiting:
            with _uninterrupted():
                self.engine.abort_request(list(self._waiting))
            self._waiting.clear()

    def _params(self, request: Request) -> Any:
        options = self._options(request) | {"output_kind": self._final_only, "detokenize": bool(self.stop_strings)}
        structure = options.get("structured_outputs")
        if self.vllm.structured_outputs_regex is not None:
            options["structured_outputs"] = self._make_structure(regex=self.vllm.structured_outputs_regex)
        elif isinstance(structure, dict):
            options["structured_outputs"] = self._make_structure(**structure)
        return self._make_params(**options)

    def _sample(self, output: Any) -> Sample:
        (sampled,) = output.outputs
        if sampled.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"vLLM ended a turn with finish reason {sampled.finish_reason!r}; see its log above for the error."
            )
        ids = list(sampled.token_ids)
        finish = "length"
        if sampled.finish_reason == "stop":
            finish = "stop" if isinstance(sampled.stop_reason, str) else "eos"
        logprobs = [entry[token].logprob for token, entry in zip(ids, sampled.logprobs, strict=True)]
        return Sample(ids, finish, logprobs, output.num_cached_tokens)


def most_connections() -> int:
    """Each takes a file, and keeps it; environments, checkpoints and data loaders need some too."""
    return max(1, min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES_LEFT))


def keep_connections(session: Any, number: int) -> None:
    """Lets a `requests.Session` keep that many connections open; the others are made anew for each request."""
    from requests.adapters import HTTPAdapter

    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=session.get_adapter(scheme).max_retries, pool_maxsize=number))


class ServerGenerator(VLLMGenerator):
    """
    vLLM on a server of its own. The main process asks it, for the branches of all processes, and hands each process
    the turns of its own: a turn is found by who asked for it, however many branches each process has.
    """

    def __init__(self, trainer: Any, stop_strings: Sequence[str] | None = None):
        super().__init__(trainer, stop_strings)
        (self._context_length,) = on_main(
            trainer.accelerator, [None], lambda asking: [self._length_of_server()] * len(asking)
        )
        if trainer.accelerator.is_main_process:
            keep_connections(self.vllm.vllm_client.session, most_connections())

    def _length_of_server(self) -> int | None:
        return self.vllm.vllm_client.get_server_info()["model_config"].get("max_model_len")

    @property
    def context_length(self) -> int | None:
        return self._context_length

    def __call__(self, requests: Sequence[Request]) -> list[Sample]:
        with profiling_context(self.trainer, "vLLM.generate"):
            return on_main(self.trainer.accelerator, list(requests), self._ask)

    def _ask(self, requests: list[Request]) -> list[Sample]:
        """One HTTP request for all branches that may use equally many tokens, all of them at once. Without a
        `max_turn_length`, these are hardly ever two: what is left to a branch is its own."""
        by_limit: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            by_limit.setdefault(request.max_new_tokens, []).append(number)
        groups = list(by_limit.values())
        before = self._cache_hits()
        executor = ThreadPoolExecutor(max(1, min(len(groups), most_connections())))
        try:
            answers = list(executor.map(lambda group: self._generate([requests[number] for number in group]), groups))
        finally:
            # After Ctrl-C nobody waits for what the server is still at
            executor.shutdown(wait=False, cancel_futures=True)
        after = self._cache_hits()
        samples: list[Any] = [None] * len(requests)
        for group, answer in zip(groups, answers, strict=True):
            for number, sample in zip(group, answer, strict=True):
                samples[number] = sample
        if before is not None and after is not None:
            # The server tells the sum only
            samples = [replace(s, cached_tokens=0 if i else after - before) for i, s in enumerate(samples)]
        return samples

    def _generate(self, requests: list[Request]) -> list[Sample]:
        options = self._options(requests[0])
        known = ("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "logprobs")
        named = {name: options.pop(name) for name in known}
        answer = self.vllm.vllm_client.generate(
            prompts=[request.context for request in requests],
            structured_outputs_regex=self.vllm.structured_outputs_regex,
            generation_kwargs=options,
            **named,
        )
        if answer["prompt_ids"] != [request.context for request in requests]:
            raise RuntimeError(
                "The vLLM server answered other prompts than it was asked: a proxy may have mixed them up."
            )
        return [
            Sample(ids, self._finish(ids), [math.nan if top[0] is None else top[0] for top in logprobs])
            for ids, logprobs in zip(answer["completion_ids"], answer["logprobs"], strict=True)
        ]

    def _finish(self, ids: list[int]) -> str:
        if ids and ids[-1] in self.eos_token_ids:
            return "eos"
        end = stop_string_end(self.trainer._tokenizer.decode, ids, self.stop_strings)
        return "length" if end is None else "stop"

    def _cache_hits(self) -> int | None:
        """Tokens that the server's prefix cache has answered since it was started, `None` if it does not tell."""
        client = self.vllm.vllm_client
        try:
            text = client.session.get(f"{client.base_url}/metrics", timeout=10).text
        except OSError:
            return None
        hits = re.findall(r"^vllm:prefix_cache_hits_total\{[^}]*\} (\S+)", text, flags=re.MULTILINE)
        return sum(int(float(count)) for count in hits) if hits else None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back until the engine has done what it is at: in the middle of a step it can't be left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, Any]] = []
    before = signal.signal(signal.SIGINT, lambda *received: caught.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught and callable(before):
            before(*caught[0])
