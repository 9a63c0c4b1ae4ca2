"""Token ids from prompt to row: nothing that was sampled is ever spelled anew, cut in half or lost."""

import asyncio
import re

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

import toys
from toys import (
    DROPPING,
    LAST_DIFFERS,
    PRESERVING,
    ScriptedGenerator,
    call,
    generation_batch,
    make_engine,
    make_model,
    make_plan,
    make_tokenizer,
    make_trainer,
    unusual,
    usual,
)
from trace_trl import StepResult
from trace_trl.engine import Limits
from trace_trl.environments.callback import CallbackEnvironment
from trace_trl.generation import Sample
from trace_trl.rows import build_rows


TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id
PLAIN = dict(root_allocation="uniform", continuations_per_root=0, max_completion_length=200)


def turn(text, spell=usual):
    return spell(TOKENIZER, text) + [END]


def until(word, observation="the lazy dog"):
    """An environment that answers every turn but the one that says `word`."""

    def env_step(state, action, messages):
        return StepResult(done=True) if word in action else StepResult(observation=observation)

    return env_step


def play(generate, env_step, bare=1, continuations=0, tokenizer=None, seed=0, **kwargs):
    """The tree of one prompt."""
    conversational = kwargs.get("conversational", True)
    engine = make_engine(generate, CallbackEnvironment(env_step, None, conversational), tokenizer, **kwargs)
    plan = make_plan(engine, bare=bare, continuations=continuations, tokenizer=tokenizer)
    engine.run([plan], seed=seed)
    return plan.tree


def answered(text):
    """How Qwen3's template shows the user's answer behind a turn that ended by itself."""
    return usual(TOKENIZER, f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


def told(*results):
    """How it shows what tools answered."""
    shown = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return usual(TOKENIZER, f"\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n")


def same_lengths(rows):
    lists = [rows.completion_ids, rows.sampled_mask, rows.loss_mask, rows.advantages]
    lists += [] if rows.logprobs is None else [rows.logprobs]
    return all(len({len(part) for part in row}) == 1 for row in zip(*lists, strict=True))


# 1


@pytest.mark.parametrize("template", ["qwen3", PRESERVING, DROPPING, LAST_DIFFERS])
def test_case_01_an_unusual_spelling_stands_in_the_row(template):
    turns = [turn("the quick fox", unusual), turn("<think>red</think> lazy dog", unusual), turn("finish", unusual)]
    assert all(ids != turn(TOKENIZER.decode(ids[:-1])) for ids in turns)
    generate = ScriptedGenerator(turns, [END])
    tree = play(generate, until("finish"), tokenizer=make_tokenizer(template))
    expected = [*turns[0], *answered("the lazy dog"), *turns[1], *answered("the lazy dog"), *turns[2]]
    assert build_rows([tree]).completion_ids == [expected]
    # And it is what the policy went on from
    assert [request.context for request in generate.requests] == [
        tree.prompt_ids + expected[:length]
        for length in (0, len(turns[0] + answered("the lazy dog")), len(expected) - len(turns[2]))
    ]


def test_case_01_an_unusual_spelling_stands_in_the_row_of_a_string_prompt():
    turns = [turn("the quick fox", unusual), turn("finish", unusual)]
    tree = play(ScriptedGenerator(turns, [END]), until("finish", "\nlazy dog"), conversational=False)
    assert build_rows([tree]).completion_ids == [[*turns[0], *usual(TOKENIZER, "\nlazy dog"), *turns[1]]]


def test_case_01_an_unusual_spelling_stands_in_the_batch(tmp_path):
    turns = [turn(call("echo", text="red fox"), unusual), turn("the fox", unusual)]
    # Two rollouts in step: each turn is asked for twice
    trainer = make_trainer(
        tmp_path, [ids for ids in turns for _ in range(4)], tools=[toys.echo], num_generations=4, **PLAIN
    )
    batch = generation_batch(trainer)
    expected = turns[0] + told("red fox") + turns[1]
    assert batch["completion_ids"].tolist() == [expected] * 4
    mask = [1] * len(turns[0]) + [0] * len(told("red fox")) + [1] * len(turns[1])
    assert batch["tool_mask"].tolist() == [mask] * 4


# 2


def three_turns(third, observation, prompt_length):
    """A policy of three turns whatever it is answered, the last of them `third`; each with log-probs."""
    turns = [usual(TOKENIZER, "red")[:1] * 4 + [END], usual(TOKENIZER, "fox")[:1] * 6 + [END], third]
    ends = [0, len(turns[0]) + len(observation)]
    ends.append(ends[1] + len(turns[1]) + len(observation))

    def script(request):
        ids = turns[ends.index(len(request.context) - prompt_length)]
        ids = ids[: request.max_new_tokens]
        finish = "eos" if ids and ids[-1] == END else "stop" if not ids else "length"
        return Sample(list(ids), finish, [-0.5] * len(ids))

    return turns, script


def rolled_out(turns, observation, budget):
    """By hand: ids, which of them were sampled, and why the episode ended."""
    ids, sampled = [], []
    for number, sampled_ids in enumerate(turns):
        cut = sampled_ids[: budget - len(ids)]
        ids, sampled = ids + cut, sampled + [1] * len(cut)
        if len(cut) < len(sampled_ids):
            return ids, sampled, "length"
        if number == len(turns) - 1:
            return ids, sampled, "final"
        if len(ids) + len(observation) > budget:
            return ids, sampled, "overflow"
        ids, sampled = ids + observation, sampled + [0] * len(observation)
        if len(ids) == budget:
            return ids, sampled, "length"
    raise AssertionError


@pytest.mark.parametrize("continuations", [0, 2])
@pytest.mark.parametrize("third", [[], [END]], ids=["no token", "end token"])
def test_case_02_ids_masks_logprobs_and_advantages_are_equally_long_at_every_budget(third, continuations):
    observation = answered("red")
    prompt = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "what is red"}], add_generation_prompt=True, return_dict=False
    )
    turns, script = three_turns(third, observation, len(prompt))
    total = sum(map(len, turns)) + 2 * len(observation)

    def env_step(state, action, messages):
        return StepResult(done=len(messages) > 4 or action == "", observation="red")

    for budget in range(1, total + 2):
        generate = ScriptedGenerator(script, [END])
        tree = play(generate, env_step, bare=2, continuations=2 * continuations, completion=budget)
        for node in tree.turns():
            node.advantage = 1.0
        rows = build_rows([tree])
        ids, sampled, reason = rolled_out(turns, observation, budget)
        leaves = 2 * (1 + continuations)
        assert len(rows) == leaves
        assert same_lengths(rows), budget
        assert rows.completion_ids == [ids] * leaves, budget
        assert rows.sampled_mask == [sampled] * leaves, budget
        assert {leaf.leaf.reason for leaf in tree.leaves()} == {reason}, budget
        assert rows.logprobs == [[-0.5 * sign for sign in sampled]] * leaves
        assert max(map(len, rows.completion_ids)) <= budget
        assert min(request.max_new_tokens for request in generate.requests) >= 1


def test_case_02_the_tensors_of_a_batch_are_equally_large_at_every_budget(tmp_path):
    trainer = make_trainer(
        tmp_path, tools=[toys.echo], per_device_train_batch_size=6, generation_batch_size=6, num_generations=6
    )
    turns = [turn(call("echo", text="red")), turn(call("echo", text="a")), turn("")]
    total = sum(map(len, turns)) + len(told("red")) + len(told("a"))

    def script(request):
        text = TOKENIZER.decode(request.context)
        return turns[text.count("</tool_response>")]

    for budget in [1, *range(2, total + 1, 7), total, total + 1]:
        trainer._engine.generate = ScriptedGenerator(script, [END])
        trainer._engine.limits = Limits(budget)
        batch = generation_batch(trainer)
        shapes = {batch[name].shape for name in ("completion_ids", "completion_mask", "advantages", "tool_mask")}
        assert len(shapes) == 1, budget
        assert batch["completion_ids"].shape[0] == 6
        assert batch["completion_mask"].sum(dim=1).max() <= budget


# 4


@pytest.mark.parametrize("template", ["qwen3", LAST_DIFFERS])
def test_case_04_observations_behind_a_template_that_shows_the_last_turn_differently(tmp_path, template):
    tokenizer = make_tokenizer(template)
    said = [{"role": "user", "content": "y"}, {"role": "assistant", "content": "x"}]
    last, earlier = (tokenizer.apply_chat_template(m, tokenize=False) for m in (said, [*said, said[0]]))
    assert "<think>" in last and "<think>" not in earlier
    trainer = make_trainer(
        tmp_path, [turn("red")] * 4 + [turn("finish")] * 4, env_step=until("finish"), tokenizer=tokenizer, **PLAIN
    )
    batch = generation_batch(trainer)
    assert batch["completion_ids"].tolist() == [turn("red") + answered("the lazy dog") + turn("finish")] * 4


def test_case_04_tool_results_behind_a_template_that_shows_the_last_turn_differently(tmp_path):
    trainer = make_trainer(
        tmp_path, [turn(call("echo", text="red"))] * 4 + [turn("red")] * 4, tools=[toys.echo], **PLAIN
    )
    batch = generation_batch(trainer)
    assert batch["completion_ids"].tolist() == [turn(call("echo", text="red")) + told("red") + turn("red")] * 4


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            PRESERVING.replace("{% for", "{{ raise_exception('one turn only') if messages|length > 1 }}{% for", 1),
            "one turn only",
        ),
        ("{{ messages[0].content }}", "leaves out what the assistant says"),
    ],
)
def test_case_04_a_template_that_cannot_carry_an_answer_stops_the_run_at_construction(tmp_path, template, reason):
    tokenizer = make_tokenizer(template)
    with pytest.raises(ValueError, match=f"can't append an answer of role 'user'.*{reason}"):
        make_trainer(tmp_path, env_step=until("finish"), tokenizer=tokenizer, **PLAIN)
    make_trainer(tmp_path, tokenizer=tokenizer, **PLAIN)  # a single turn needs no answer


def test_a_turn_that_a_stop_string_ended_is_closed_by_the_answer():
    # A policy that ends its first turn by the stop string, and its second by itself
    stop = usual(TOKENIZER, "Observation:")
    said = usual(TOKENIZER, "red fox\n") + stop
    generate = ScriptedGenerator([said, turn("left"), turn("finish")], [END], stop_ids=stop)
    tree = play(generate, until("finish"))
    answer = answered("the lazy dog")
    expected = said + [END] + answer + turn("left") + answer + turn("finish")
    rows = build_rows([tree])
    assert rows.completion_ids == [expected]
    # The end token that closes it was not sampled, and is not trained
    first = [1] * len(said) + [0] * len([END] + answer)
    assert rows.loss_mask[0][: len(first)] == first


def test_a_turn_that_nothing_answers_goes_on_where_a_stop_string_ended_it():
    stop = usual(TOKENIZER, "fox")
    generate = ScriptedGenerator([usual(TOKENIZER, "red") + stop, turn("finish")], [END], stop_ids=stop)
    tree = play(generate, until("finish", observation=None))
    assert build_rows([tree]).completion_ids == [usual(TOKENIZER, "red") + stop + turn("finish")]
    (leaf,) = tree.leaves()
    assert [node.observation_ids for node in leaf.path()] == [[], []]


# 5


# Shows boilerplate for an empty list of tools, as Llama's templates do
BOILERPLATE = "{% if tools is not none %}You have tools.{% endif %}" + PRESERVING


def test_case_05_an_empty_list_of_tools_gives_the_ids_of_none(tmp_path):
    seen = []
    for tools in (None, []):
        trainer = make_trainer(
            tmp_path, [turn("red")] * 4, tools=tools, tokenizer=make_tokenizer(BOILERPLATE), **PLAIN
        )
        generation_batch(trainer)
        seen.append([request.context for request in trainer._engine.generate.requests])
    assert seen[0] == seen[1]
    assert not TOKENIZER.decode(seen[0][0]).startswith("You have tools.")


def with_bos(template):
    """The toy tokenizer with a BOS token, which it puts before every text, and its template before every chat."""
    tokenizer = make_tokenizer("{{ bos_token }}" + template)
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    assert tokenizer("a")["input_ids"][0] == bos
    return tokenizer, bos


@pytest.mark.parametrize("dataset", ["string_dataset", "chat_dataset"])
def test_case_05_one_bos_and_none_inside(tmp_path, dataset):
    tokenizer, bos = with_bos(PRESERVING)
    trainer = make_trainer(
        tmp_path,
        [turn("red")] * 4 + [turn("finish")] * 4,
        env_step=until("finish", "\nlazy dog\n"),
        dataset=getattr(toys, dataset)(),
        tokenizer=tokenizer,
        **PLAIN,
    )
    batch = generation_batch(trainer)
    for request in trainer._engine.generate.requests:
        assert request.context[0] == bos
        assert request.context.count(bos) == 1
    assert (batch["completion_ids"] != bos).all()
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    assert all(ids.count(bos) == 1 and ids[0] == bos for ids in prompts)


# 6


def test_case_06_two_calls_in_one_turn_run_in_order_and_are_rendered_in_one_go(tmp_path):
    ran = []

    def first(text: str) -> str:
        """
        Runs.

        Args:
            text: what to say.
        """
        ran.append(text)
        return f"first {text}"

    calls = call("first", text="red") + "\n" + call("first", text="green")
    trainer = make_trainer(tmp_path, [turn(calls)] * 4 + [turn("red")] * 4, tools=[first], **PLAIN)
    batch = generation_batch(trainer)
    expected = turn(calls) + told("first red", "first green") + turn("red")
    assert batch["completion_ids"].tolist() == [expected] * 4
    assert sorted(ran) == ["green"] * 4 + ["red"] * 4
    assert ran.index("red") < ran.index("green")


def test_case_06_sync_and_async_calls_keep_their_order(tmp_path):
    async def slow(text: str) -> str:
        """
        Answers late.

        Args:
            text: what to say.
        """
        await asyncio.sleep(0.05)
        return f"slow {text}"

    calls = [("slow", "1"), ("echo", "2"), ("async_echo", "3"), ("failing", None), ("slow", "4")]
    said = "\n".join(call(name) if text is None else call(name, text=text) for name, text in calls)
    tools = [toys.echo, toys.async_echo, toys.failing, slow]
    trainer = make_trainer(tmp_path, [turn(said)] * 4 + [turn("red")] * 4, tools=tools, **PLAIN)
    trainer._engine.limits = Limits(400)
    batch = generation_batch(trainer)
    error = "{'error': 'this tool always fails'}"
    assert (
        batch["completion_ids"].tolist() == [turn(said) + told("slow 1", "2", "3", error, "slow 4") + turn("red")] * 4
    )


# 7


class Vault:
    """An environment that writes down whatever is called on it."""

    called: list[str] = []

    def reset(self, **kwargs) -> None:
        self.called.append("reset")

    def add(self, a: int, b: int) -> int:
        """
        Adds.

        Args:
            a: a number.
            b: a number.
        """
        self.called.append("add")
        return a + b

    def close(self) -> None:
        self.called.append("close")

    def fork(self):
        self.called.append("fork")
        return Vault()

    def get_reward(self) -> float:
        return 0.0

    def _secret(self) -> str:
        self.called.append("_secret")
        return "secret"


def wrapped(text):
    return f"<tool_call>\n{text}\n</tool_call>"


MALFORMED = {
    "empty object": wrapped("{}"),
    "nothing": wrapped(""),
    "no name": wrapped('{"arguments": {"a": 1, "b": 2}}'),
    "empty name": wrapped('{"name": "", "arguments": {"a": 1, "b": 2}}'),
    "name is a number": wrapped('{"name": 1, "arguments": {"a": 1, "b": 2}}'),
    "arguments as text": wrapped('{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}'),
    "arguments as a list": wrapped('{"name": "add", "arguments": [1, 2]}'),
    "arguments missing": wrapped('{"name": "add"}'),
    "unknown argument": wrapped('{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}'),
    "trailing comma": wrapped('{"name": "add", "arguments": {"a": 1, "b": 2,}}'),
    "single quotes": wrapped("{'name': 'add', 'arguments': {'a': 1, 'b': 2}}"),
    "cut in the middle": '<tool_call>\n{"name": "add", "argu',
    "two objects in a row": wrapped(
        '{"name": "add", "arguments": {"a": 1, "b": 2}}\n{"name": "add", "arguments": {}}'
    ),
    "a list": wrapped('[{"name": "add", "arguments": {"a": 1, "b": 2}}]'),
    "invented name": call("subtract", a=1, b=2),
    "private name": call("_secret"),
    "dunder": call("__init__"),
    "reset": call("reset"),
    "close": call("close"),
    "fork": call("fork"),
    "get_reward": call("get_reward"),
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_case_07_malformed_calls_are_answered_with_an_error_and_not_run(tmp_path, monkeypatch, text):
    monkeypatch.setattr(Vault, "called", [])
    trainer = make_trainer(
        tmp_path, [turn(text)] * 4 + [turn("red")] * 4, reward_funcs=None, environment_factory=Vault, **PLAIN
    )
    Vault.called.clear()
    generation_batch(trainer)
    assert set(Vault.called) == {"reset"}
    (first, second) = trainer._engine.generate.calls
    assert len(second) == 4
    for before, after in zip(first, second, strict=True):
        seen = TOKENIZER.decode(after.context[len(before.context) + len(turn(text)) :])
        assert re.search(r"<tool_response>\n\{'error': .+\}\n</tool_response>", seen), seen


def test_case_07_a_call_beside_a_malformed_one_is_run_and_the_other_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(Vault, "called", [])
    text = call("subtract", a=1, b=2) + "\n" + call("add", a=1, b=2)
    trainer = make_trainer(
        tmp_path, [turn(text)] * 4 + [turn("red")] * 4, reward_funcs=None, environment_factory=Vault, **PLAIN
    )
    batch = generation_batch(trainer)
    expected = turn(text) + told("{'error': 'Tool subtract not found.'}", "3") + turn("red")
    assert batch["completion_ids"].tolist() == [expected] * 4
    assert Vault.called.count("add") == 4


def test_case_07_methods_that_are_no_tools_are_not_offered(tmp_path):
    trainer = make_trainer(tmp_path, [turn("red")] * 4, reward_funcs=None, environment_factory=Vault, **PLAIN)
    generation_batch(trainer)
    offered = TOKENIZER.decode(trainer._engine.generate.requests[0].context)
    names = re.findall(r'"name": "([a-z_]+)"', offered)
    assert names == ["add"]


# 8


def test_case_08_a_turn_cut_by_the_length_limit_runs_no_tool(tmp_path):
    ran = []

    def note(text: str) -> str:
        """
        Notes.

        Args:
            text: what to note.
        """
        ran.append(text)
        return text

    whole = turn(call("note", text="red"))
    # The call is complete, only the end token is missing
    limit = len(whole) - 1
    trainer = make_trainer(tmp_path, [whole] * 4, tools=[note], **PLAIN | {"max_completion_length": limit})
    batch = generation_batch(trainer)
    assert ran == []
    assert batch["completion_ids"].tolist() == [whole[:-1]] * 4
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [1.0]

    trainer = make_trainer(
        tmp_path, [whole] * 4 + [turn("red")] * 4, tools=[note], **PLAIN | {"max_completion_length": limit + 100}
    )
    generation_batch(trainer)
    assert ran == ["red"] * 4


def test_case_08_a_turn_cut_by_the_turn_limit_ends_its_episode(tmp_path):
    trainer = make_trainer(tmp_path, [turn("red fox")] * 4, env_step=until("finish"), max_turn_length=2, **PLAIN)
    batch = generation_batch(trainer)
    assert batch["completion_ids"].tolist() == [turn("red fox")[:2]] * 4
    assert {len(call) for call in trainer._engine.generate.calls} == {4}


# 9


def test_case_09_a_result_that_does_not_fit_is_never_cut(tmp_path):
    seen = []

    def reward(completions, completion_ids, **kwargs):
        seen.extend(zip(completions, completion_ids, strict=True))
        return [0.0, 1.0, 0.0, 1.0]

    said = turn(call("huge"))
    trainer = make_trainer(tmp_path, [said] * 4, tools=[toys.huge], reward_funcs=reward, **PLAIN)
    batch = generation_batch(trainer)
    assert batch["completion_ids"].tolist() == [said] * 4
    assert len(seen) == 4
    for messages, ids in seen:
        assert ids == said
        assert [message["role"] for message in messages] == ["assistant"]
        assert messages[0]["tool_calls"][0]["function"]["name"] == "huge"
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [1.0]


@pytest.mark.parametrize("room", [-1, 0, 1])
def test_case_09_a_result_that_just_fits_and_one_that_just_does_not(room):
    said = turn("red")
    budget = len(said) + len(answered("the lazy dog")) + room
    generate = ScriptedGenerator(lambda request: said, [END])
    tree = play(generate, until("finish"), completion=budget)
    (leaf,) = tree.leaves()
    reasons = {-1: "overflow", 0: "length", 1: "length"}
    rows = {-1: said, 0: said + answered("the lazy dog"), 1: said + answered("the lazy dog") + said[:1]}
    assert leaf.leaf.reason == reasons[room]
    assert build_rows([tree]).completion_ids == [rows[room]]
    roles = [message["role"] for node in leaf.path() for message in node.messages]
    assert roles == {-1: ["assistant"], 0: ["assistant", "user"], 1: ["assistant", "user", "assistant"]}[room]


def test_case_09_a_result_leaves_room_in_the_context():
    said = turn("red")
    prompt = len(
        TOKENIZER.apply_chat_template(
            [{"role": "user", "content": "what is red"}], add_generation_prompt=True, return_dict=False
        )
    )
    whole = prompt + len(said) + len(answered("the lazy dog"))
    for context, reason, requests in ((whole, "overflow", 1), (whole + 1, "length", 2)):
        generate = ScriptedGenerator(lambda request: said, [END])
        tree = play(generate, until("finish"), limits=Limits(10_000, context=context))
        assert [leaf.leaf.reason for leaf in tree.leaves()] == [reason]
        assert len(generate.requests) == requests
        assert max(leaf.history_length for leaf in tree.leaves()) <= context


# 10


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_case_10_exactly_as_many_tool_rounds_as_allowed(tmp_path, limit):
    ran = []

    def note(text: str) -> str:
        """
        Notes.

        Args:
            text: what to note.
        """
        ran.append(text)
        return text

    # A policy that never stops asking
    said = turn(call("note", text="red"))
    trainer = make_trainer(
        tmp_path,
        lambda request: said,
        tools=[note],
        max_tool_calling_iterations=limit,
        **PLAIN | {"max_completion_length": 600},
    )
    batch = generation_batch(trainer)
    assert len(ran) == 4 * limit
    assert len(trainer._engine.generate.calls) == limit + 1
    assert batch["completion_ids"].tolist() == [(said + told("red")) * limit + said] * 4


def test_case_10_without_a_limit_the_budget_ends_it(tmp_path):
    said = turn(call("echo", text="red"))
    trainer = make_trainer(tmp_path, lambda request: said, tools=[toys.echo], **PLAIN)
    generation_batch(trainer)
    rounds = 200 // len(said + told("red"))
    assert rounds > 2
    assert len(trainer._engine.generate.calls) == rounds + 1


# 11


def test_case_11_a_budget_that_ends_exactly_after_a_tool_result(tmp_path):
    said = turn(call("echo", text="red"))
    budget = len(said) + len(told("red"))
    trainer = make_trainer(
        tmp_path, lambda request: said, tools=[toys.echo], **PLAIN | {"max_completion_length": budget}
    )
    batch = generation_batch(trainer)
    assert batch["completion_ids"].tolist() == [said + told("red")] * 4
    assert [len(call) for call in trainer._engine.generate.calls] == [4]
    assert all(request.max_new_tokens >= 1 for request in trainer._engine.generate.requests)


# 12


def test_case_12_a_prompt_longer_than_the_model_takes(tmp_path):
    long = "what is the capital of france " * 20
    dataset = Dataset.from_dict({"prompt": ["red", long, "green", "fox"]})
    trainer = make_trainer(
        tmp_path,
        [turn("red")] * 4,
        model=make_model(max_position_embeddings=64),
        dataset=dataset,
        **PLAIN | {"max_completion_length": 8, "candidate_pool_factor": 2},
    )
    with pytest.raises(ValueError, match=r"has \d+ tokens, but the model takes 64 .*'what is the capital of france"):
        generation_batch(trainer, [dict(row) for row in dataset])
    assert trainer._engine.generate.calls == []


def test_case_12_a_prompt_that_leaves_room_for_one_token(tmp_path):
    prompt = "red " * 63
    length = len(usual(TOKENIZER, prompt))
    trainer = make_trainer(
        tmp_path,
        [turn("fox")] * 4,
        model=make_model(max_position_embeddings=length + 1),
        dataset=Dataset.from_dict({"prompt": [prompt]}),
        **PLAIN,
    )
    batch = generation_batch(trainer, [{"prompt": prompt}])
    assert [request.max_new_tokens for request in trainer._engine.generate.requests] == [1] * 4
    assert batch["completion_ids"].shape == (4, 1)


# 40


@pytest.mark.parametrize("returned", [0, 3, 5, 8])
def test_case_40_a_generation_of_other_than_the_rows_asked_for_is_refused_by_name(tmp_path, returned):
    trainer = make_trainer(tmp_path, **PLAIN)

    class Overfull:
        def __call__(self, requests):
            return [Sample([END], "eos")] * returned

    trainer._engine.generate = Overfull()
    with pytest.raises(RuntimeError, match=rf"Overfull\) returned {returned} turns for 4 branches"):
        generation_batch(trainer)


def test_case_40_a_turn_longer_than_asked_for_is_refused_by_name(tmp_path):
    trainer = make_trainer(tmp_path, **PLAIN | {"max_completion_length": 3})

    def endless(requests):
        return [Sample([END] * (4 if number == 2 else 3), "eos") for number, _ in enumerate(requests)]

    trainer._engine.generate = endless
    with pytest.raises(RuntimeError, match=r"endless\) returned 4 tokens for branch 2, which may use 3"):
        generation_batch(trainer)


def test_case_40_log_probs_of_another_length_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, **PLAIN)
    trainer._engine.generate = lambda requests: [Sample([END], "eos", [-0.5, -0.5]) for _ in requests]
    with pytest.raises(ValueError, match="2 log-probs for 1 sampled tokens"):
        generation_batch(trainer)
