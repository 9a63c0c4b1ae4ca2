"""
The rollout engine's own time: everything but the model, the environment and the rewards.

    python benchmarks/engine_overhead.py                            # 1,026 leaves: M = 342 bare rollouts, N = 2
    python benchmarks/engine_overhead.py --kinds tools --rollouts 512 --continuations 1 --max-turns 8

A generator that answers at once, an environment that answers at once and a reward that is drawn stand in for the rest,
so that all time that passes is the engine's: contexts, decoding and parsing of turns, handing them to environments,
rendering and encoding of answers, snapshots, allocation. Prompts, turns and answers are as long as in search QA.

    chat      `env_step`, prompts are messages: Qwen3's chat template
    string    `env_step`, prompts are plain text
    tools     native tool calls, which are parsed, and answered with tool messages

An answer is one of its prompt's ten paragraphs, as where a question brings its own; with `--new-answers` none is given
twice. The engine's own time is to stay under 50 ms a round: 5 % of a generation whose 100 tokens take 10 ms each.
"""

from __future__ import annotations

import argparse
import gc
import importlib.resources
import os
import random
import statistics
import time
from collections.abc import Sequence
from functools import wraps
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import add_response_schema

from trace_trl import StepResult
from trace_trl.codec import Codec
from trace_trl.engine import Limits, RootPlan, Run, Stats, TreeRolloutEngine
from trace_trl.environments.callback import CallbackEnvironment
from trace_trl.environments.runner import ConcurrentRunner
from trace_trl.environments.tools import ToolEnvironment
from trace_trl.generation import Request, Sample
from trace_trl.tree import RolloutTree, Turn


TARGET = 50.0  # milliseconds a round

# What is timed, and what it is listed as
STAGES = [
    (Run, "_requests", "contexts"),
    (Run, "_decode", "decode, parse"),
    (Run, "_messages", "messages"),
    (Codec, "encode_replies", "render, encode"),
    (ConcurrentRunner, "run", "dispatch"),  # to environments, forks and snapshots included
    (Run, "_choose_prefixes", "allocation"),
    (Run, "_start_bare", "bookkeeping"),
    (Run, "_play_turn", "bookkeeping"),
    (Run, "_score_all", "bookkeeping"),
    (Run, "_expand_ready", "bookkeeping"),
    (Run, "abandon", "bookkeeping"),
]


class Clock:
    """Seconds spent in watched functions by stage, what they spend in each other left out."""

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
    """A byte-level BPE with Qwen3's markup, and its chat template as TRL ships it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=6000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
    fast.chat_template = importlib.resources.files("trl").joinpath("chat_templates", "qwen3.jinja").read_text()
    return add_response_schema(fast)


class Garbage:
    """Seconds of Python's garbage collections, which go through all objects of the process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._started


class Workload:
    """Texts of realistic lengths, and everything that answers at once."""

    def __init__(self, kind: str, args: argparse.Namespace):
        self.kind = kind
        self.args = args
        self.random = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self.words = ["".join(self.random.choices(letters, k=self.random.randint(2, 9))) for _ in range(2000)]
        self.tokenizer = make_tokenizer(self.words)
        if kind != "tools":
            self.tokenizer.response_template = None
        sample = self.tokenizer(" ".join(self.words))["input_ids"]
        self.tokens_per_word = len(sample) / len(self.words)
        self.searches = [self._turn("search") for _ in range(64)]
        self.answers = [self._turn("finish") for _ in range(64)]
        self.prompts = [self._prompt() for _ in range(args.rollouts // args.per_prompt)]
        self.marks: list[tuple[float, float]] = []  # when the generator was called, and when it returned

    def text(self, tokens: int) -> str:
        return " ".join(self.random.choices(self.words, k=round(tokens / self.tokens_per_word)))

    def _turn(self, action: str) -> list[int]:
        text = f"{self.text(self.args.turn_tokens - 10)}\nAction: {action}[{self.text(4)}]"
        if self.kind == "tools":
            call = '<tool_call>\n{"name": "search", "arguments": {"query": "red"}}\n</tool_call>'
            thought = f"<think>\n{self.text(self.args.turn_tokens - 30)}\n</think>\n\n"
            text = thought + (call if action == "search" else "red")
        return self.tokenizer(text + "<|im_end|>")["input_ids"]

    def _prompt(self) -> tuple[Any, list[int], list[str]]:
        text = self.text(self.args.prompt_tokens)
        paragraphs = [self.text(self.args.observation_tokens) for _ in range(10)]
        if self.kind == "string":
            return text, self.tokenizer(text)["input_ids"], paragraphs
        messages = [{"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return messages, ids, paragraphs

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        started = time.perf_counter()
        turn_length = self.args.turn_tokens + self.args.observation_tokens
        samples = []
        for request in requests:
            # The length of a history tells its turn; from the third on an episode may end
            turn = 1 + round((len(request.context) - self.args.prompt_tokens) / turn_length)
            ends = turn >= self.args.max_turns or (turn >= 3 and self.random.random() < 0.4)
            samples.append(Sample(self.random.choice(self.answers if ends else self.searches), "eos"))
        self.marks.append((started, time.perf_counter()))
        return samples

    def _observe(self, paragraphs: list[str]) -> str:
        paragraph = self.random.choice(paragraphs)
        return f"{self.random.random()} {paragraph}" if self.args.new_answers else paragraph

    def environment(self) -> CallbackEnvironment | ToolEnvironment:
        if self.kind == "tools":

            class Search:
                paragraphs: list[str] = []

                def reset(search, paragraphs: list[str], **row: Any) -> None:
                    search.paragraphs = paragraphs

                def search(search, query: str) -> str:
                    """
                    Searches.

                    Args:
                        query: What for.
                    """
                    return self._observe(search.paragraphs)

                def fork(search) -> Search:
                    other = Search()
                    other.paragraphs = search.paragraphs
                    return other

            return ToolEnvironment(factories={None: Search})

        def env_step(state: list[str], action: str, messages: list) -> StepResult:
            if "Action: finish[" in action:
                return StepResult(done=True, reward=1.0)
            return StepResult(observation=self._observe(state))

        return CallbackEnvironment(
            env_step, lambda example: tuple(example["paragraphs"]), conversational=self.kind == "chat"
        )

    def score(self, leaves: list[tuple[RolloutTree, Turn]]) -> None:
        for _, turn in leaves:
            assert turn.leaf is not None
            turn.leaf.success = self.random.random() < 0.5
            turn.leaf.reward = float(turn.leaf.success)
            turn.leaf.rewards = [turn.leaf.reward]

    def predict(self, leaves: list[Turn]) -> None:
        for leaf in leaves:
            for turn in leaf.path():
                turn.value = self.random.random()


def measure(kind: str, args: argparse.Namespace, clock: Clock, garbage: Garbage) -> dict[str, Any]:
    """Plays `args.repeats` generation batches after a small one, which starts threads and compiles templates."""
    work = Workload(kind, args)
    environment = work.environment()
    tools = [environment.factories[None]().search] if kind == "tools" else None  # type: ignore[union-attr,index]

    def codec() -> Codec:
        return Codec(work.tokenizer, [work.tokenizer.eos_token_id], conversational=kind != "string")

    engine = TreeRolloutEngine(
        generate=work.generate,
        codec=codec(),
        environment=environment,
        score=work.score,
        limits=Limits(completion=100_000),
        predict=work.predict,
        tools=lambda tree: tools,
    )

    def plans() -> list[RootPlan]:
        rows = [{"prompt": prompt, "paragraphs": paragraphs} for prompt, _, paragraphs in work.prompts]
        episodes = engine.reset([(row, row["prompt"]) for row in rows])
        trees = [
            RolloutTree.from_prompt(row["prompt"], ids, row, index=i)
            for i, (row, (_, ids, _)) in enumerate(zip(rows, work.prompts, strict=True))
        ]
        bare = args.per_prompt
        return [RootPlan(t, e, bare, bare * args.continuations) for t, e in zip(trees, episodes, strict=True)]

    engine.run(plans()[:8], seed=0)
    clock.seconds.clear()
    garbage.seconds = 0.0
    rounds: list[float] = []
    cpu = 0.0
    stats, leaves = Stats(), 0
    for repeat in range(args.repeats):
        # New questions come with new paragraphs
        engine.codec = codec()
        todo = plans()
        work.marks.clear()
        cpu_before, started = time.process_time(), time.perf_counter()
        stats = engine.run(todo, seed=repeat)
        ended, cpu_after = time.perf_counter(), time.process_time()
        edges = [started, *(edge for mark in work.marks for edge in mark), ended]
        gaps = [after - before for before, after in zip(edges[::2], edges[1::2], strict=True)]
        # What passes before the first generation belongs to its round
        rounds += [gaps[0] + gaps[1], *gaps[2:]]
        cpu += cpu_after - cpu_before - sum(after - before for before, after in work.marks)
        leaves = sum(len(plan.tree.leaves()) for plan in todo)
    engine.runner.close()
    return {"leaves": leaves, "stats": stats, "rounds": rounds, "cpu": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["chat", "string"], choices=["chat", "string", "tools"])
    parser.add_argument("--rollouts", type=int, default=342, help="bare rollouts M")
    parser.add_argument("--continuations", type=int, default=2, help="continuations N per bare rollout")
    parser.add_argument("--per-prompt", type=int, default=6, help="bare rollouts of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--turn-tokens", type=int, default=100)
    parser.add_argument("--observation-tokens", type=int, default=150)
    parser.add_argument("--max-turns", type=int, default=5, help="episodes have 3 turns to this many")
    parser.add_argument("--new-answers", action="store_true", help="no environment answer is given twice")
    parser.add_argument("--repeats", type=int, default=3, help="generation batches")
    args = parser.parse_args()

    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, milliseconds a round")
    names = list(dict.fromkeys(stage for _, _, stage in STAGES))
    columns = ["leaves", "rounds", "turns", "mean", "median", "most", "CPU", "garbage", *names]
    print(f"{'':<8}" + "".join(f"{column:>{max(len(column), 6) + 2}}" for column in columns))
    clock, garbage = Clock(), Garbage()
    for owner, name, stage in STAGES:
        clock.watch(owner, name, stage)
    worst = 0.0
    for kind in args.kinds:
        result = measure(kind, args, clock, garbage)
        count = len(result["rounds"])
        mean = 1000 * sum(result["rounds"]) / count
        worst = max(worst, mean)
        numbers = [
            result["leaves"],
            result["stats"].rounds,
            result["stats"].turns,
            mean,
            1000 * statistics.median(result["rounds"]),
            1000 * max(result["rounds"]),
            1000 * result["cpu"] / count,
            1000 * garbage.seconds / count,
            *(1000 * clock.seconds.get(name, 0.0) / count for name in names),
        ]
        cells = [f"{n:.1f}" if isinstance(n, float) else f"{n:,}" for n in numbers]
        print(f"{kind:<8}" + "".join(f"{c:>{max(len(n), 6) + 2}}" for c, n in zip(cells, columns, strict=True)))
    print(f"Largest mean: {worst:.1f} ms a round, {'under' if worst < TARGET else 'OVER'} {TARGET:.0f} ms.")


if __name__ == "__main__":
    main()
