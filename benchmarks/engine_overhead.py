"""
The rollout engine's own time: everything but the model, the environment and the rewards.

    python benchmarks/engine_overhead.py                        # 1,026 leaves, chat, tool calls and plain strings
    python benchmarks/engine_overhead.py --rollouts 512 --continuations 1 --max-turns 8

A generator that answers at once, an environment that answers at once and a reward that is read off a list stand in for
the rest, so that all the time that passes is the engine's: contexts, decoding, parsing, handing turns to environments,
rendering and encoding their answers, snapshots, allocation. Prompts, turns and answers are as long as in search QA.

The engine's own time is to stay under 50 ms a round.
"""

from __future__ import annotations

import argparse
import importlib.resources
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trace_trl import StepResult
from trace_trl import engine as engine_module
from trace_trl.codec import Codec
from trace_trl.engine import Limits, RootPlan, Stats, TreeRolloutEngine
from trace_trl.environments.callback import CallbackEnvironment
from trace_trl.environments.tools import ToolEnvironment
from trace_trl.generation import Request, Sample
from trace_trl.tree import RolloutTree, Turn


TARGET = 0.050  # seconds a round


class Clock:
    """Seconds spent in each of a set of functions, what they spend in each other left out."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    def watch(self, owner: Any, name: str, stage: str) -> None:
        function = getattr(owner, name)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - started
                self.seconds[stage] = self.seconds.get(stage, 0.0) + elapsed - self._inner.pop()
                self._inner[-1] += elapsed

        setattr(owner, name, timed)


def make_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen3's markup and its chat template as TRL ships it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
    fast.chat_template = importlib.resources.files("trl").joinpath("chat_templates", "qwen3.jinja").read_text()
    return fast


class Workload:
    """
    Texts of realistic lengths, and everything that answers at once.

    Args:
        kind (`str`): `"chat"` (`env_step`, observations are user messages), `"tools"` (native tool calls, parsed and
            answered), `"string"` (`env_step`, plain text).
    """

    def __init__(self, kind: str, args: argparse.Namespace):
        self.kind = kind
        self.args = args
        self.random = random.Random(0)
        alphabet = "abcdefghijklmnopqrstuvwxyz"
        self.words = ["".join(self.random.choices(alphabet, k=self.random.randint(2, 9))) for _ in range(2000)]
        self.tokenizer = make_tokenizer(self.words)
        if kind == "tools":
            from trl.chat_template_utils import add_response_schema

            add_response_schema(self.tokenizer)
        self.observations = [self.text(args.observation_tokens) for _ in range(64)]
        self.calls = self.turns(last=False)
        self.answers = self.turns(last=True)
        self.generated = 0.0  # seconds spent in this stand-in for a model
        self.marks: list[tuple[float, float]] = []

    def text(self, tokens: int) -> str:
        words: list[str] = []
        while len(self.tokenizer(" ".join(words))["input_ids"]) < tokens:
            words += self.random.choices(self.words, k=max(1, tokens // 8))
        ids = self.tokenizer(" ".join(words))["input_ids"][:tokens]
        return self.tokenizer.decode(ids)

    def turns(self, last: bool) -> list[list[int]]:
        result = []
        for _ in range(64):
            thought = self.text(self.args.turn_tokens - 20)
            text = f"{thought} Action: finish[yes]" if last else f"{thought} Action: search[no]"
            if self.kind == "tools":
                call = '\n<tool_call>\n{"name": "search", "arguments": {"query": "red fox"}}\n</tool_call>'
                text = f"<think>\n{thought}\n</think>\n\n" + ("yes" if last else call)
            result.append(self.tokenizer(text + "<|im_end|>")["input_ids"])
        return result

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        started = time.perf_counter()
        samples = []
        for request in requests:
            # Length of the episode so far tells its turn; what is drawn ends some episodes early
            turn = (len(request.context) - self.args.prompt_tokens) // (
                self.args.turn_tokens + self.args.observation_tokens
            )
            ends = turn + 1 >= self.args.max_turns or (turn >= 2 and self.random.random() < 0.4)
            samples.append(Sample(self.random.choice(self.answers if ends else self.calls), "eos"))
        self.marks.append((started, time.perf_counter()))
        return samples

    def env_step(self, state: dict[str, Any], action: str, messages: list) -> StepResult:
        if action.endswith("finish[yes]"):
            return StepResult(done=True, reward=1.0)
        state["step"] += 1
        return StepResult(observation=self.observations[state["step"] % 64])

    def environment(self) -> CallbackEnvironment | ToolEnvironment:
        if self.kind == "tools":

            def search(query: str) -> str:
                """
                Searches.

                Args:
                    query: what for.
                """
                return self.observations[len(query)]

            return ToolEnvironment([search])
        return CallbackEnvironment(self.env_step, lambda example: {"step": 0}, conversational=self.kind == "chat")

    def prompts(self) -> list[tuple[Any, list[int]]]:
        count = self.args.rollouts // self.args.per_prompt
        prompts = []
        for _ in range(count):
            prompt: Any = self.text(self.args.prompt_tokens)
            if self.kind == "string":
                ids = self.tokenizer(prompt)["input_ids"]
            else:
                prompt = [{"role": "user", "content": prompt}]
                ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            prompts.append((prompt, ids))
        return prompts

    def score(self, leaves: list[tuple[RolloutTree, Turn]]) -> None:
        for _, turn in leaves:
            assert turn.leaf is not None
            turn.leaf.reward = float(self.random.random() < 0.5)
            turn.leaf.rewards = [turn.leaf.reward]
            turn.leaf.success = turn.leaf.reward == 1.0

    def predict(self, leaves: list[Turn]) -> None:
        for leaf in leaves:
            for turn in leaf.path():
                turn.value = self.random.random()


STAGES = [
    (engine_module._Run, "_requests", "contexts"),
    (Codec, "decode_turns", "decode, parse"),
    (Codec, "encode_replies", "render, encode"),
    (engine_module._Run, "_messages", "messages"),
    (engine_module.ConcurrentRunner, "run", "dispatch"),
    (engine_module._Run, "_choose_prefixes", "allocation"),
    (engine_module._Run, "_take_turns", "bookkeeping"),
    (engine_module._Run, "_score_ready", "bookkeeping"),
    (engine_module._Run, "_expand_ready", "bookkeeping"),
    (engine_module._Run, "_finish", "bookkeeping"),
    (engine_module._Run, "_start_bare", "bookkeeping"),
]


def measure(kind: str, args: argparse.Namespace, watch: Callable[[Clock], None] | None = None) -> dict[str, Any]:
    workload = Workload(kind, args)
    prompts = workload.prompts()
    tokenizer = workload.tokenizer
    environment = workload.environment()
    engine = TreeRolloutEngine(
        generate=workload.generate,
        codec=Codec(tokenizer, [tokenizer.eos_token_id], conversational=kind != "string"),
        environment=environment,
        score=workload.score,
        limits=Limits(completion=100_000, turns=args.max_turns + 1),
        predict=workload.predict,
        tools=lambda tree: environment.tools if isinstance(environment, ToolEnvironment) else None,
    )

    def plans() -> list[RootPlan]:
        return [
            RootPlan(
                RolloutTree.from_prompt(prompt, ids, {"prompt": prompt}, index=i),
                engine.reset([({"prompt": prompt}, prompt)])[0],
                args.per_prompt,
                args.per_prompt * args.continuations,
            )
            for i, (prompt, ids) in enumerate(prompts)
        ]

    engine.run(plans()[:8], seed=0)  # threads started, templates compiled
    clock = Clock()
    rounds: list[float] = []
    total, stats, leaves = 0.0, Stats(), 0
    for repeat in range(args.repeats):
        todo = plans()
        workload.marks.clear()
        started = time.perf_counter()
        stats = engine.run(todo, seed=repeat)
        ended = time.perf_counter()
        edges = [started, *(edge for mark in workload.marks for edge in mark), ended]
        gaps = [after - before for before, after in zip(edges[::2], edges[1::2], strict=True)]
        # What passes before the first and after the last generation belongs to these rounds
        rounds += [gaps[0] + gaps[1], *gaps[2:-1], gaps[-2] + gaps[-1]] if len(gaps) > 3 else [sum(gaps)]
        total += sum(gaps)
        leaves = sum(len(plan.tree.leaves()) for plan in todo)
    return {"kind": kind, "leaves": leaves, "stats": stats, "total": total, "rounds": rounds, "clock": clock}


def main() -> None:
    pass


if __name__ == "__main__":
    main()
