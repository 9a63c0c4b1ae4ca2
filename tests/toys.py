"""Small things tests are made of: a tokenizer, models, data sets and environments. Nothing is downloaded."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.resources
import itertools
import json
import math
import socket
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.chat_template_utils import add_response_schema

from trace_trl import TRACEConfig, TRACETrainer
from trace_trl.codec import Codec
from trace_trl.engine import Limits, RootPlan, TreeRolloutEngine
from trace_trl.environments import runner as runner_module
from trace_trl.environments.runner import ConcurrentRunner
from trace_trl.generation import Sample
from trace_trl.tree import RolloutTree
from waiting import LIMIT, until


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "system user assistant tool Thought Action Observation search lookup finish answer",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "0 1 2 3 4 5 6 7 8 9 10 yes no red green blue left right what is the capital of france",
]


def trl_template(name: str) -> str:
    """A chat template as TRL ships it."""
    return importlib.resources.files("trl").joinpath("chat_templates", f"{name}.jinja").read_text()


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def make_tokenizer(template: str | None = "qwen3", pad_token: str = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE of some 400 tokens: every text has at least two spellings, its merges and its bytes."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()), eos_token="<|im_end|>", pad_token=pad_token
    )
    tokenizer.add_tokens(MARKUP)
    tokenizer.padding_side = "left"
    if template is not None:
        tokenizer.chat_template = trl_template(template) if "{" not in template else template
    return tokenizer


def make_model(seed: int = 0, hidden_size: int = 32, layers: int = 2, **kwargs) -> Qwen3ForCausalLM:
    """A random Qwen3 of a few ten thousand parameters, in float32."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer) + (-len(tokenizer)) % 8,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=kwargs.pop("max_position_embeddings", 1024),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **kwargs,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def make_config(output_dir, cls=TRACEConfig, **kwargs):
    """A configuration for quick runs on a CPU; `cls` may be TRL's own."""
    defaults = dict(
        output_dir=str(output_dir),
        use_cpu=True,
        bf16=False,
        report_to="none",
        learning_rate=1e-3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        max_steps=2,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    if cls is TRACEConfig:
        defaults["show_rollout_progress"] = False
    return cls(**(defaults | kwargs))


QUESTIONS = [
    "what is red",
    "what is green",
    "the quick fox",
    "left or right",
    "the lazy dog",
    "yes or no",
    "1 2 3",
    "0 1",
]


def string_dataset(rows: int = 8) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [QUESTIONS[i % len(QUESTIONS)] for i in range(rows)], "number": list(range(rows))}
    )


def chat_dataset(rows: int = 8) -> Dataset:
    prompts = [[{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "number": list(range(rows))})


def few_words(words: str = "red green blue yes no") -> dict:
    """`generation_kwargs` under which a random model samples nothing but these words and the end of its turn."""
    tokenizer = make_tokenizer()
    kept = {tokenizer.eos_token_id, *tokenizer(words)["input_ids"]}
    return {"suppress_tokens": [token_id for token_id in range(make_model().vocab_size) if token_id not in kept]}


def length_reward(completions, **kwargs):
    """A reward that differs between random completions."""
    texts = [c if isinstance(c, str) else "".join(str(m.get("content", "")) for m in c) for c in completions]
    return [len(set(text)) / 20 for text in texts]


def speak(model, tokenizer, say) -> None:
    """Makes a model say `say(context)`, whatever its weights are, and end its turn: for every caller of `generate`."""

    def generate(input_ids, attention_mask, **kwargs):
        turns = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            text = say(tokenizer.decode(ids[mask.bool()]))
            turns.append(torch.tensor(tokenizer(text + tokenizer.eos_token, add_special_tokens=False)["input_ids"]))
        sampled = torch.nn.utils.rnn.pad_sequence(turns, batch_first=True, padding_value=tokenizer.pad_token_id)
        return torch.cat([input_ids, sampled], dim=1)

    model.generate = generate


# A policy that says what the test wants


def usual(tokenizer, text: str) -> list[int]:
    """`text` as the tokenizer spells it; special tokens in it are theirs."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def unusual(tokenizer, text: str) -> list[int]:
    """`text` spelled byte by byte: the same text, other ids than `usual` gives wherever a merge applies."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [tokenizer.convert_tokens_to_ids(letter) for word, _ in alphabet.pre_tokenize_str(text) for letter in word]


class ScriptedGenerator:
    """
    Stands in for a generation backend, and remembers what it was asked.

    Args:
        script: the ids of all turns in the order they are asked for, or `script(request) -> ids`. A turn that is not
            within its limit is cut. It ends with `"eos"` where its last id is one of `eos_token_ids`, with `"stop"`
            where its last ids are `stop_ids`, else with `"length"`. A [`Sample`] stands as it is.
        eos_token_ids: ids that end a turn.
        stop_ids: ids of a stop string.

    Attributes:
        calls (`list[list[Request]]`): the requests of every call.
    """

    def __init__(self, script, eos_token_ids, stop_ids=None):
        self.script = script if callable(script) else iter(script)
        self.eos_token_ids = set(eos_token_ids)
        self.stop_ids = stop_ids
        self.calls = []

    @property
    def requests(self):
        """The requests of all calls, in their order."""
        return [request for call in self.calls for request in call]

    def __call__(self, requests):
        self.calls.append([replace(request, context=list(request.context)) for request in requests])
        return [self._sample(request) for request in requests]

    def _sample(self, request):
        ids = self.script(request) if callable(self.script) else next(self.script)
        if isinstance(ids, Sample):
            return ids
        cut = list(ids[: request.max_new_tokens])
        if cut and cut[-1] in self.eos_token_ids:
            return Sample(cut, "eos")
        ends_with_stop = self.stop_ids and len(cut) == len(ids) and cut[-len(self.stop_ids) :] == self.stop_ids
        return Sample(cut, "stop" if ends_with_stop else "length")


# Chat templates: one that keeps what it showed, one that drops the reasoning of all turns but the last, one that shows
# the last assistant message with an empty think block, as Qwen3 does

_BODY = (
    "{{ content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HEAD = "{% for message in messages %}{% set content = message.content %}<|im_start|>{{ message.role }}\n"
_EARLIER = "{% if message.role == 'assistant' and not loop.last %}"
_LAST = "{% if message.role == 'assistant' and loop.last %}"

PRESERVING = _HEAD + _BODY
DROPPING = _HEAD + _EARLIER + "{% set content = content.split('</think>')[-1] %}{% endif %}" + _BODY
LAST_DIFFERS = _HEAD + _LAST + "<think>\n\n</think>\n\n{% endif %}" + _BODY


# Engines without a model


def call(name: str, **arguments) -> str:
    """A turn that calls a tool, in Qwen3's format."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def roll_out(environment, say, rows=None, bare=2, continuations=0, conversational=True, **kwargs):
    """
    Plays an engine whose policy says `say(history)`, a turn without its end token.

    Args:
        rows: dataset rows; those of `kwargs["reserves"]` are reserves.
        bare, continuations: per row.
        kwargs: further arguments of the engine. By default a leaf's reward is what its environment gave, else 0.

    Returns:
        trees, stats and engine; the histories that were asked for stand in `engine.histories`.
    """
    tokenizer = make_tokenizer()
    add_response_schema(tokenizer)
    codec = Codec(tokenizer, [tokenizer.eos_token_id], conversational)
    histories = []

    def script(request):
        histories.append(tokenizer.decode(request.context))
        said = say(histories[-1])
        return said if isinstance(said, Sample) else usual(tokenizer, said) + [tokenizer.eos_token_id]

    def score(leaves):
        for _, turn in leaves:
            turn.leaf.reward = turn.leaf.environment_reward or 0.0
            turn.leaf.rewards, turn.leaf.success = [turn.leaf.reward], turn.leaf.reward >= 0.5

    def predict(leaves):
        for turn in {turn for leaf in leaves for turn in leaf.path()}:
            turn.value = 0.5

    def encode(rows, prompts):
        return [encode_prompt(tokenizer, prompt) for prompt in prompts]

    defaults = dict(score=score, limits=Limits(completion=10_000), predict=predict, timeout=LIMIT, encode=encode)
    engine = TreeRolloutEngine(
        ScriptedGenerator(script, [tokenizer.eos_token_id]), codec, environment, **(defaults | kwargs)
    )
    engine.histories = histories
    if rows is None:
        rows = [{"prompt": [{"role": "user", "content": "go"}] if conversational else "go"}]
    plans = []
    for episode, row in zip(engine.reset([(row, row.get("prompt")) for row in rows]), rows, strict=True):
        (ids,) = encode([row], [episode.prompt])
        tree = RolloutTree.from_prompt(episode.prompt, ids, row, index=len(plans), budget=bare)
        plans.append(RootPlan(tree, episode, bare, continuations))
    stats = engine.run(plans, seed=0)
    return [plan.tree for plan in plans], stats, engine


def texts(turn) -> list[str]:
    """What each message on the path to a turn says, assistant and environment alternating."""
    return [str(message["content"]) for t in turn.path() for message in t.messages]


# A kit of tools, well-behaved and not; the names of the environments' methods are those of their faults


def echo(text: str) -> str:
    """
    Repeats.

    Args:
        text: what to repeat.
    """
    return text


async def async_echo(text: str) -> str:
    """
    Repeats, later.

    Args:
        text: what to repeat.
    """
    await asyncio.sleep(0.001)
    return text


def huge() -> str:
    """Says too much."""
    return "word " * 5000


def as_dict() -> dict:
    """Gives a dictionary."""
    return {"a": [1, 2], "b": None}


def as_none() -> None:
    """Gives nothing."""


def as_bytes() -> bytes:
    """Gives bytes."""
    return b"\xffraw"


def as_int() -> int:
    """Gives a number."""
    return 7


def failing() -> str:
    """Fails."""
    raise ValueError("this tool always fails")


def exiting() -> str:
    """Ends the thread it runs in."""
    raise SystemExit(1)


_at: ContextVar = ContextVar("at", default=None)  # under a `Clock`: the runner's call in which this code runs


class Hanging:
    """Calls that do not come back until `release` is set, which leaving the block does. If nobody does they come back
    after what any test waits for, so that a fault which waits for them fails a test, and does not hang it.

    Attributes:
        at_work (`int`): how many wait.
        cancelled (`int`): how often coroutines among them were cancelled.
    """

    def __init__(self):
        self.release = threading.Event()
        self.at_work = self.cancelled = 0
        self.asleep = {}  # under a `Clock`: until when each call sleeps
        self._lock = threading.Lock()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.release.set()

    def tool(self):
        """The call as a tool."""

        def hang() -> str:
            """Takes too long."""
            return self()

        return hang

    def __call__(self) -> str:
        with self._sleeping():
            self.release.wait(2 * LIMIT)
        return "late"

    async def on_loop(self, takes_no_notice=True) -> str:
        """The call as a coroutine, which does not end when it is cancelled, unless it is told to."""
        with self._sleeping():
            while not self.release.is_set():
                try:
                    await asyncio.sleep(0.002)
                except asyncio.CancelledError:
                    self.cancelled += 1
                    if not takes_no_notice:
                        raise
        return "late"

    @contextmanager
    def _sleeping(self):
        call = _at.get()
        with self._lock:
            self.at_work += 1
            self.asleep[call] = math.inf
        try:
            yield
        finally:
            with self._lock:
                self.at_work -= 1
                self.asleep.pop(call, None)


class Clock:
    """
    The time of every [`ConcurrentRunner`]: it passes only while a round waits and nothing else can happen, because
    each of its calls has ended, sleeps, or waits for a worker where all workers sleep. So a time limit ends what hangs
    and nothing else, however slow the machine is, and how long a round lasts can be told. Not for streams.

    Args:
        hanging ([`Hanging`]): what hangs.
    """

    def __init__(self, monkeypatch, hanging):
        self.now = self._began = 1.0
        self._asleep = hanging.asleep
        self._passed = threading.Condition()
        wait, work, play = ConcurrentRunner._wait, runner_module._Call.work, runner_module._Call.play

        def _wait(runner, batch, calls, timeout):
            batch.over = _Over(self, batch.over, runner, calls)
            wait(runner, batch, calls, timeout)

        def _work(call):
            _at.set(call)
            work(call)

        async def _play(call):
            _at.set(call)
            await play(call)

        monkeypatch.setattr(ConcurrentRunner, "_wait", _wait)
        monkeypatch.setattr(runner_module._Call, "work", _work)
        monkeypatch.setattr(runner_module._Call, "play", _play)
        monkeypatch.setattr(runner_module, "time", self)

    @property
    def passed(self) -> float:
        """Seconds since the clock was made."""
        return self.now - self._began

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 0.0  # nobody computes

    thread_time = process_time

    def sleep(self, seconds: float) -> None:
        """In a plain call: as `time.sleep`."""
        call = _at.get()
        with self._passed:
            wakes = self._asleep[call] = self.now + seconds
            self._passed.wait_for(lambda: self.now >= wakes, LIMIT)
            del self._asleep[call]

    def is_still(self, runner, calls) -> bool:
        asleep = {call for call, wakes in self._asleep.copy().items() if wakes > self.now}
        left = [call for call in calls if not (call.ended or call.lost)]
        begun = [call for call in left if call.started is not None]
        if not begun or not asleep.issuperset(begun):
            return False
        return len(begun) == len(left) or {call.thread for call in asleep if call}.issuperset(runner._workers)

    def pass_time(self, seconds: float) -> None:
        """At most `seconds`: until the next call wakes up."""
        with self._passed:
            wakes = [wakes for wakes in self._asleep.copy().values() if wakes > self.now]
            seconds = min([seconds] + [wake - self.now for wake in wakes])
            assert seconds < math.inf, "everything hangs, without a time limit"
            # A little longer, as any wait: else rounding might leave a limit just ahead for ever
            self.now += seconds + 1e-6
            self._passed.notify_all()


class _Over:
    """Stands in for the event that ends a round, under a [`Clock`]."""

    def __init__(self, clock, event, runner, calls):
        self._clock, self._event = clock, event
        self._is_still = lambda: clock.is_still(runner, calls)
        self.set = event.set

    def wait(self, seconds=None):
        until(lambda: self._event.is_set() or self._is_still())
        if not self._event.is_set():
            self._clock.pass_time(math.inf if seconds is None else seconds)
        return self._event.is_set()


class CounterEnvironment:
    """An environment to be derived from: each class derived by `fresh` has records of its own.

    Attributes:
        instances (`list`): all instances that were made by calling the class, copies left out.
        resets (`list[dict]`): what `reset` was given.
        closed (`list`): instances in the order they were closed, copies included.
    """

    instances: list
    resets: list
    closed: list

    @classmethod
    def fresh(cls):
        return type(cls.__name__, (cls,), {"instances": [], "resets": [], "closed": []})

    def __init__(self):
        self.count = 0
        type(self).instances.append(self)

    def reset(self, number: int = 0, **row) -> str:
        type(self).resets.append({"number": number, **row})
        self.count = 0
        return f" Task {number}."

    def add(self, amount: int) -> str:
        """
        Adds.

        Args:
            amount: how much to add.
        """
        self.count += amount
        return f"count {self.count}"

    def get_reward(self) -> float:
        return self.count / 10

    def close(self) -> None:
        type(self).closed.append(self)


class AsyncCounterEnvironment(CounterEnvironment):
    """The same, but all of it async."""

    async def reset(self, number: int = 0, **row) -> str:  # type: ignore[override]
        return CounterEnvironment.reset(self, number, **row)

    async def add(self, amount: int) -> str:  # type: ignore[override]
        """
        Adds.

        Args:
            amount: how much to add.
        """
        await asyncio.sleep(0)
        return CounterEnvironment.add(self, amount)

    async def get_reward(self) -> float:  # type: ignore[override]
        return CounterEnvironment.get_reward(self)

    async def close(self) -> None:  # type: ignore[override]
        CounterEnvironment.close(self)


class LockHolder(CounterEnvironment):
    """Can't be copied; replay restores it."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class SocketOwner(CounterEnvironment):
    """Can't be copied, and must be closed."""

    def __init__(self):
        super().__init__()
        self.socket, self.other = socket.socketpair()

    def close(self) -> None:
        super().close()
        self.socket.close()
        self.other.close()


class Irreproducible(LockHolder):
    """Neither copied nor replayed: no answer is like another."""

    answers = itertools.count()

    def add(self, amount: int) -> str:
        """
        Adds.

        Args:
            amount: how much to add.
        """
        return f"{super().add(amount)}, answer {next(self.answers)}"


class ResetFails(CounterEnvironment):
    def reset(self, **row) -> str:  # type: ignore[override]
        raise RuntimeError("there is no task")


class WithoutTools:
    """Gives the task and the reward, and nothing to call."""

    def reset(self, **row) -> str:
        return " Say yes."

    def get_reward(self) -> float:
        return 1.0


# An engine, or a trainer, for such a policy


def coin(leaves):
    """Scores every other leaf as a success."""
    for _, turn in leaves:
        turn.leaf.reward = float(turn.leaf.rollout % 2)
        turn.leaf.rewards = [turn.leaf.reward]
        turn.leaf.success = turn.leaf.reward == 1.0


def encode_prompt(tokenizer, prompt):
    if isinstance(prompt, str):
        return usual(tokenizer, prompt)
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)


def make_engine(generate, environment, tokenizer=None, conversational=True, completion=200, **kwargs):
    """An engine whose policy is `generate`. Its limits are `Limits(completion)` unless `limits` are given."""
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    return TreeRolloutEngine(
        generate=generate,
        codec=Codec(tokenizer, [tokenizer.eos_token_id], conversational),
        environment=environment,
        score=kwargs.pop("score", coin),
        limits=kwargs.pop("limits", Limits(completion)),
        prefix_allocation=kwargs.pop("prefix_allocation", "uniform"),
        encode=lambda rows, prompts: [encode_prompt(tokenizer, prompt) for prompt in prompts],
        **kwargs,
    )


def make_plan(engine, prompt="what is red", bare=1, continuations=0, index=0, tokenizer=None, **columns):
    """A plan for a prompt: text for a conversation's only message, or for a plain string prompt."""
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    if engine.codec.conversational:
        prompt = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer(prompt)["input_ids"]
    row = {"prompt": prompt, **columns}
    (episode,) = engine.reset([(row, prompt)])
    return RootPlan(RolloutTree.from_prompt(prompt, ids, row, index=index), episode, bare, continuations)


def make_trainer(output_dir, script=None, cls=TRACETrainer, model=None, dataset=None, tokenizer=None, **kwargs):
    """
    A trainer on a tiny model. With a `script` its policy is that [`ScriptedGenerator`], found as
    `trainer._engine.generate`.

    Args:
        kwargs: fields of the configuration, and arguments of the trainer.
    """
    fields = {field.name for field in dataclasses.fields(TRACEConfig)}
    config = {name: kwargs.pop(name) for name in list(kwargs) if name in fields}
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    trainer = cls(
        model=make_model() if model is None else model,
        args=make_config(output_dir, **config),
        processing_class=tokenizer,
        train_dataset=chat_dataset() if dataset is None else dataset,
        **{"reward_funcs": length_reward, **kwargs},
    )
    if script is not None:
        trainer._engine.generate = ScriptedGenerator(script, [tokenizer.eos_token_id])
    return trainer


def generation_batch(trainer, rows=None):
    """One generation batch of a trainer, as its loss gets it; by default from the first rows of its data set."""
    if rows is None:
        rows = [dict(trainer.train_dataset[i]) for i in range(trainer._pool_size)]
    trainer.model.train()
    return trainer._generate_and_score_completions(rows)
