"""Stands in for vLLM where it is not installed: an engine and a client of a server, whose turns name their context."""

from __future__ import annotations

import random
import sys
import threading
import types
import zlib
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import requests


class RequestOutputKind(Enum):
    FINAL_ONLY = 2


class SamplingParams:
    """Takes every parameter that the real one has, and no other."""

    KNOWN = {
        *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "max_tokens"),
        *("min_tokens", "logprobs", "stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
        *("spaces_between_special_tokens", "detokenize", "output_kind", "structured_outputs"),
    }

    def __init__(self, **options: Any):
        assert set(options) <= self.KNOWN, set(options) - self.KNOWN
        self.__dict__.update(options)


@dataclass
class StructuredOutputsParams:
    regex: str | None = None
    json: Any = None


def install(monkeypatch=None) -> None:
    """Makes `from vllm import SamplingParams` give these, for a test or for good."""
    vllm, sampling = types.ModuleType("vllm"), types.ModuleType("vllm.sampling_params")
    vllm.SamplingParams = sampling.SamplingParams = SamplingParams
    sampling.RequestOutputKind = RequestOutputKind
    sampling.StructuredOutputsParams = StructuredOutputsParams
    for module in (vllm, sampling):
        if monkeypatch is None:
            sys.modules[module.__name__] = module
        else:
            monkeypatch.setitem(sys.modules, module.__name__, module)


def name_of(context: list[int], words: list[int], length: int) -> list[int]:
    """`length` of the `words` that tell a context from others."""
    number = zlib.crc32(str(context).encode())
    draw = random.Random(number)
    return [draw.choice(words) for _ in range(length)]


@dataclass
class Echo:
    """A model that says what its context is, then ends its turn."""

    words: list[int]
    end: int
    length: int = 6

    def __call__(self, context: list[int], limit: int) -> tuple[list[int], str]:
        ids = [*name_of(context, self.words, self.length), self.end][:limit]
        return ids, "stop" if ids[-1] == self.end else "length"


@dataclass
class _Sampled:
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, Any]]
    stop_reason: Any = None


@dataclass
class _Output:
    request_id: str
    outputs: list[_Sampled]
    num_cached_tokens: int
    finished: bool = True


@dataclass
class FakeEngine:
    """An `LLMEngine` that works on a few requests at a time, and ends them in an order of its own.

    Attributes:
        waiting: open requests by their names, each with its context and its parameters.
        params: parameters of all requests there were.
        aborted: names of requests that were taken back.
    """

    say: Any
    seed: int = 0
    waiting: dict[str, tuple[list[int], SamplingParams]] = field(default_factory=dict)
    params: list[SamplingParams] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    resets: int = 0
    can_reset: bool = True
    prefix_caching: bool = True

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.model_config = types.SimpleNamespace(max_model_len=4096)
        self.vllm_config = types.SimpleNamespace(
            cache_config=types.SimpleNamespace(enable_prefix_caching=self.prefix_caching)
        )

    def add_request(self, name: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        assert name not in self.waiting
        self.waiting[name] = list(prompt["prompt_token_ids"]), params
        self.params.append(params)

    def step(self) -> list[_Output]:
        names = self.random.sample(sorted(self.waiting), min(len(self.waiting), self.random.randint(0, 4)))
        outputs = []
        for name in names:
            context, params = self.waiting.pop(name)
            ids, reason = self.say(context, params.max_tokens)
            logprobs = [{token: types.SimpleNamespace(logprob=-1.0 - place)} for place, token in enumerate(ids)]
            outputs.append(_Output(name, [_Sampled(ids, reason, logprobs)], len(context) // 2))
        return outputs

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self.waiting.pop(name, None)

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return self.can_reset


class FakeLLM:
    """An `LLM` that notes when it sleeps."""

    def __init__(self, engine: FakeEngine):
        self.llm_engine = engine
        self.log: list[str] = []

    def wake_up(self, tags: list[str]) -> None:
        self.log.append(f"wake {tags[0]}")

    def sleep(self, level: int) -> None:
        self.log.append(f"sleep {level}")


class FakeClient:
    """TRL's client of a server, and the server."""

    base_url = "http://fake"

    def __init__(self, say: Any):
        self.say = say
        self.calls: list[dict[str, Any]] = []
        self.hits = 0
        self._lock = threading.Lock()  # several threads ask it at once
        self.session = requests.Session()
        self.session.get = self.get

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"max_model_len": 4096}}

    def get(self, url: str, timeout: float) -> Any:
        lines = [
            "# HELP vllm:prefix_cache_hits_total Tokens",
            f'vllm:prefix_cache_hits_total{{engine="0"}} {float(self.hits)}',
        ]
        return types.SimpleNamespace(text="\n".join(lines))

    def generate(self, prompts: list[list[int]], **options: Any) -> dict[str, Any]:
        with self._lock:
            self.calls.append({"prompts": prompts, **options})
            self.hits += sum(len(prompt) // 2 for prompt in prompts)
        answers = [self.say(prompt, options["max_tokens"])[0] for prompt in prompts]
        return {
            "prompt_ids": [list(prompt) for prompt in prompts],
            "completion_ids": answers,
            "logprobs": [[[-1.0 - place] for place in range(len(ids))] for ids in answers],
        }


class FakeVLLMGeneration:
    """TRL's `VLLMGeneration`, as a trainer makes it, in front of a [`FakeLLM`] or a [`FakeClient`]."""

    say: Any = None

    def __init__(self, mode: str, **options: Any):
        self.__dict__.update(options)
        self.mode = mode
        self.generation_kwargs = options.get("generation_kwargs") or {}
        self.tensor_parallel_size = options.get("tensor_parallel_size", 1)
        self.enable_sleep_mode = options.get("enable_sleep_mode", False)
        self._llm_weights_sleeping = self.enable_sleep_mode
        self.structured_outputs_regex = options.get("structured_outputs_regex")
        self.llm = FakeLLM(FakeEngine(self.say))
        self.vllm_client = FakeClient(self.say)

    def sync_weights(self) -> None:
        self.llm.log.append("sync")
        self._llm_weights_sleeping = False


def make_trainer(say: Any, eos: int, accelerator: Any, tokenizer: Any = None, mode: str = "colocate", **options: Any):
    """What a generator reads of a trainer."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    vllm = type("Speaking", (FakeVLLMGeneration,), {"say": staticmethod(say)})(mode, **(sampling | options))
    return types.SimpleNamespace(
        use_vllm=True,
        vllm_mode=mode,
        vllm_generation=vllm,
        accelerator=accelerator,
        eos_token_ids=[eos],
        state=types.SimpleNamespace(global_step=0),
        args=types.SimpleNamespace(report_to=[]),
        _last_loaded_step=-1,
        _tokenizer=tokenizer,
    )
