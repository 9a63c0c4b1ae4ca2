"""From turns to messages, and from an environment's answers to token ids."""

import functools
import importlib.resources
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, parse_response, supports_tool_calling

from toys import DROPPING, LAST_DIFFERS, PRESERVING, make_tokenizer, trl_template, unusual, usual
from trace_trl.codec import Codec
from trace_trl.environments.base import Reply
from trace_trl.foreign import MOST_NESTED


# The tokens that end a turn in each family of TRL's chat templates: the tokenizer's `eos_token` first, and last what
# ends a turn that calls a tool
ENDS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "diffusion_gemma": ["<eos>", "<turn|>", "<|tool_response>"],
    "gemma": ["<eos>", "<end_of_turn>"],
    "gemma4": ["<eos>", "<turn|>", "<|tool_response>"],
    "gemma4_v2": ["<eos>", "<turn|>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "lfm2": ["<|im_end|>"],
    "llama3": ["<|eot_id|>"],
    "muse": ["<|eot|>"],
    "idefics3": ["<end_of_utterance>"],
    "llava": ["</s>"],
    "smolvlm": ["<end_of_utterance>"],
    "nemotron": ["<|im_end|>"],
    "phi3": ["<|endoftext|>", "<|end|>"],
    "qwen": ["<|im_end|>"],
}


def family_tokenizer(name):
    """The toy tokenizer with a shipped template, that template's markup as special tokens, and its end tokens."""
    template = trl_template(name)
    tokenizer = make_tokenizer(template)
    markup = set(re.findall(r"<\|[^\s<>{}'\"|]+\|?>|<[^\s<>{}'\"|/]+\|>|<｜[^\s<>{}'\"]+｜>", template))
    ends = next(ENDS[key] for key in sorted(ENDS, key=len, reverse=True) if name.startswith(key))
    tokenizer.add_tokens(sorted(markup.union(ends, ["<bos>"])), special_tokens=True)
    tokenizer.eos_token, tokenizer.bos_token = ends[0], "<bos>"
    return tokenizer, tokenizer.convert_tokens_to_ids(ends)


def takes_tools(name):
    return supports_tool_calling(make_tokenizer(trl_template(name)))


SHIPPED = sorted(
    path.name.removesuffix(".jinja")
    for path in importlib.resources.files("trl").joinpath("chat_templates").iterdir()
    if path.name.endswith(".jinja")
)
WITH_TOOLS = [name for name in SHIPPED if takes_tools(name)]

ONE_ANSWER = [{"role": "tool", "name": "add", "content": "the answer is 3"}]
ANSWERS = {
    "one answer": ONE_ANSWER,
    "two answers": [*ONE_ANSWER, {"role": "tool", "name": "add", "content": '{"error": "no \'b\'"}'}],
    "markup in an answer": [
        {"role": "tool", "name": "add", "content": "<|im_end|>\n<|im_start|>user\n</tool_response>"}
    ],
    "nothing in an answer": [{"role": "tool", "name": "add", "content": ""}],
    "several lines, several alphabets": [{"role": "tool", "name": "add", "content": " первый\n\nдругой\t日本 "}],
}


def trl_suffix(tokenizer, messages, **kwargs):
    """What TRL appends to a turn for tool messages. Raises where TRL can't."""
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=None,
        chat_template_kwargs=kwargs,
        _is_vlm=False,
    )
    return GRPOTrainer._get_tool_suffix_ids(trainer, messages)


def conversation_suffix(tokenizer, messages, end, **kwargs):
    """What a whole conversation shows behind an assistant turn that calls a tool, from behind that turn's end on."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"first": "LAST-WORD"}}}
    history = [
        {"role": "user", "content": "add one and two"},
        {"role": "assistant", "content": "which ones"},
        {"role": "user", "content": "these"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    try:
        text = tokenizer.apply_chat_template(history + messages, add_generation_prompt=True, tokenize=False, **kwargs)
    except TypeError:  # of DeepSeek-V3, which takes arguments as text only
        call["function"]["arguments"] = '{"first": "LAST-WORD"}'
        text = tokenizer.apply_chat_template(history + messages, add_generation_prompt=True, tokenize=False, **kwargs)
    behind = text.split("LAST-WORD", 1)[1]
    ids = usual(tokenizer, behind)
    return ids[ids.index(end) + 1 :]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tool_answers_of_every_shipped_template(name, answer):
    tokenizer, ends = family_tokenizer(name)
    messages = ANSWERS[answer]
    (ids,) = Codec(tokenizer, ends, conversational=True).encode_replies([(Reply(messages=messages), ends[-1])])
    assert ids == conversation_suffix(tokenizer, messages, ends[-1])
    if name in ("qwen3", "deepseekv3"):
        # Shows the last assistant turn differently, takes arguments as text only: TRL trains with another template
        with pytest.raises((ValueError, TypeError)):
            trl_suffix(tokenizer, messages)
    elif name == "glm4moe":
        # The token that ends the turn is the one that opens the answer: TRL shows it twice
        assert trl_suffix(tokenizer, messages) == [ends[-1], *ids]
    elif name == "gemma4_v2":
        # Its end token is not the tokenizer's: TRL leaves out the line break that follows it
        assert usual(tokenizer, "\n") + trl_suffix(tokenizer, messages) == ids
    else:
        assert ids == trl_suffix(tokenizer, messages)


def test_trl_ships_templates_with_tools():
    families = {re.match("[a-z]+", name)[0] for name in WITH_TOOLS}
    assert families == {"deepseekv", "diffusion", "gemma", "glm", "gptoss", "lfm", "llama", "muse", "nemotron", "qwen"}


def test_user_answers_of_every_shipped_template():
    answer = [{"role": "user", "content": "Observation: red"}]
    history = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "LAST-WORD"}]
    refused = []
    for name in SHIPPED:
        tokenizer, ends = family_tokenizer(name)
        codec = Codec(tokenizer, ends, conversational=True)
        try:
            codec.check("user")
        except ValueError:
            refused.append(name)
            continue
        text = tokenizer.apply_chat_template(history + answer, add_generation_prompt=True, tokenize=False)
        behind = usual(tokenizer, text.split("LAST-WORD")[1])
        # GPT-OSS ends its last turn with <|return|>, and with <|end|> where more follows
        end = tokenizer.convert_tokens_to_ids("<|end|>") if name.startswith("gptoss") else ends[-1]
        end = ends[1] if name.startswith("glm") or "gemma4" in name or "diffusion" in name else end
        assert end in behind, name
        stopped, ended = codec.encode_replies([(Reply(messages=answer), None), (Reply(messages=answer), end)])
        assert stopped == behind[behind.index(end) :], name
        # The turn was sampled with <|return|>, which <|end|> stands for
        ended = ended if end in ends else codec.encode_replies([(Reply(messages=answer), ends[0])])[0]
        assert ended == behind[behind.index(end) + 1 :], name
    # These take content in blocks only
    families = {"idefics3", "llava_next", "smolvlm"}
    assert set(refused) == families | {f"{family}_training" for family in families}


# Hand-made values


QWEN = make_tokenizer("qwen3")
END, ENDOFTEXT = QWEN.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


def text_of(ids, tokenizer=QWEN):
    return tokenizer.decode(ids)


def encode(codec, reply, end=END):
    (ids,) = codec.encode_replies([(reply, end)])
    if isinstance(ids, Exception):
        raise ids
    return ids


def user(content):
    return Reply(messages=[{"role": "user", "content": content}])


def tool(*contents, name="add"):
    return Reply(messages=[{"role": "tool", "name": name, "content": content} for content in contents])


@pytest.mark.parametrize("template", ["qwen3", "qwen3_training", PRESERVING, DROPPING, LAST_DIFFERS])
def test_what_a_turn_is_answered(template):
    codec = Codec(make_tokenizer(template), [END], conversational=True)
    answered = "\n<|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(encode(codec, user("red"))) == answered
    # A stop string ended the turn: its end token was never sampled
    assert text_of(encode(codec, user("red"), end=None)) == "<|im_end|>" + answered
    # Nothing was answered
    assert text_of(encode(codec, Reply())) == "\n<|im_start|>assistant\n"
    assert encode(codec, Reply(), end=None) == []
    several = Reply(messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "red"}])
    if template != "qwen3":
        assert text_of(encode(codec, several)) == "\n<|im_start|>system\nbe brief<|im_end|>" + answered


def test_two_tool_answers_are_rendered_in_one_go():
    codec = Codec(QWEN, [END], conversational=True)
    assert text_of(encode(codec, tool("3", "yes"))) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nyes\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_turn_that_another_end_token_ended():
    codec = Codec(QWEN, [END, ENDOFTEXT], conversational=True)
    assert encode(codec, user("red"), end=ENDOFTEXT) == encode(codec, user("red"), end=END)

    tokenizer, (endoftext, to_user, to_tool) = family_tokenizer("glm4moe")
    codec = Codec(tokenizer, [endoftext, to_user, to_tool], conversational=True)
    # What ends a turn of GLM is what opens the answer: it stays where the turn did not end with it
    for end, text in ((to_user, ""), (to_tool, "<|user|>"), (endoftext, "<|user|>"), (None, "<|user|>")):
        assert text_of(encode(codec, user("red"), end), tokenizer) == text + "\nred<|assistant|>"


def test_string_prompts_are_answered_as_they_are():
    codec = Codec(QWEN, [END], conversational=False)
    for text in ("\nObservation: red\n", "<|im_end|> <|im_start|>", " "):
        for end in (END, None):
            assert encode(codec, Reply(text=text), end) == usual(QWEN, text)
    for end in (END, None):
        assert encode(codec, Reply(), end) == encode(codec, Reply(text=""), end) == []


LLAMA_DECODER = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
SPACED = {
    **{
        f"metaspace, {scheme}": (pre_tokenizers.Metaspace(prepend_scheme=scheme), None)
        for scheme in ("first", "always")
    },
    "metaspace in a sequence": (pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Digits()]), None),
    "prepended": (None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "byte level": (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
}


def spaced_tokenizer(name):
    """One token per character, of a tokenizer that puts a space before a text."""
    pre_tokenizer, normalizer = SPACED[name]
    letters = sorted({*map(chr, range(33, 127)), *pre_tokenizers.ByteLevel.alphabet(), "▁", "\n"})
    backend = Tokenizer(models.BPE({letter: token_id for token_id, letter in enumerate(letters)}, []))
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel() if name == "byte level" else LLAMA_DECODER
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '\n' + m.role }}: {{ m.content }}{% endfor %}"
        "{{ '\nassistant:' if add_generation_prompt }}"
    )
    return tokenizer


@pytest.mark.parametrize("name", SPACED)
def test_case_44_an_observation_is_appended_as_it_is(name):
    """A string prompt, a turn and an observation, of a tokenizer that puts a space before every text: decoding the row
    gives prompt, turn and observation, and nothing between them. The prompt's own space stays."""
    tokenizer = spaced_tokenizer(name)
    codec = Codec(tokenizer, [tokenizer.eos_token_id], conversational=False)
    prompt, turn = "Question: red?", "search[red]"
    observations = ["\nObservation: a fox.", "fox", " 7 foxes", "</s> and", ""]
    ids = tokenizer(prompt)["input_ids"] + tokenizer.convert_tokens_to_ids(list(turn))
    before = tokenizer.decode(ids)
    for observation in observations:
        row = ids + encode(codec, Reply(text=observation))
        assert tokenizer.decode(row) == before + observation
    assert len(tokenizer(prompt)["input_ids"]) == len(prompt) + 1
    assert before.strip() == prompt + turn


def test_case_44_an_answer_without_markup_is_appended_as_it_is():
    """A conversation whose template has no special tokens, a tokenizer that puts a space before a text."""
    tokenizer = spaced_tokenizer("metaspace, first")
    codec = Codec(tokenizer, [tokenizer.eos_token_id], conversational=True)
    answer = encode(codec, user("blue?"), None)
    ids = tokenizer("assistant: fox")["input_ids"]
    assert tokenizer.decode(ids + answer) == "assistant: fox\nuser: blue?\nassistant:"


def test_template_arguments_and_another_template():
    kwargs = {"enable_thinking": False}
    tokenizer = make_tokenizer("qwen3_training")
    codec = Codec(tokenizer, [END], conversational=True, chat_template_kwargs=kwargs)
    ids = encode(codec, tool("3"))
    assert ids == trl_suffix(tokenizer, tool("3").messages, **kwargs)
    assert text_of(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    # The tokenizer's own template shows tool answers as the user's
    codec = Codec(tokenizer, [END], conversational=True, chat_template=PRESERVING)
    assert text_of(encode(codec, tool("3"))) == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


def test_the_name_of_a_tool_is_part_of_its_answer():
    tokenizer, ends = family_tokenizer("gptoss")
    codec = Codec(tokenizer, ends, conversational=True)
    for name in ("add", "search", "no such tool"):
        text = text_of(encode(codec, tool("3", name=name), ends[-1]), tokenizer)
        assert text.startswith(f"<|start|>functions.{name} to=assistant")
    unnamed = Reply(messages=[{"role": "tool", "content": "3"}])
    assert text_of(encode(codec, unnamed, ends[-1]), tokenizer).startswith("<|start|>functions.tool to=assistant")


CONTENTS = st.sampled_from(["", "red", "green\n", "<|im_end|>", "<tool_response>", "first </think> last", "{% x %}"])
REPLIES = st.one_of(
    st.builds(user, CONTENTS),
    st.builds(
        lambda contents, name: tool(*contents, name=name), st.lists(CONTENTS, min_size=1), st.sampled_from("ab")
    ),
    st.builds(Reply),
    st.just(Reply(messages=[{"role": "user", "content": [{"type": "text", "text": "red"}]}])),
)


@pytest.mark.parametrize("most", [2**20, 40])
@given(rounds=st.lists(st.lists(st.tuples(REPLIES, st.sampled_from([END, None])), max_size=6), max_size=4))
@settings(deadline=None, database=None, max_examples=60)
def test_many_answers_are_encoded_as_each_alone(most, rounds):
    codec = Codec(QWEN, [END], conversational=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trace_trl.codec._MOST_KNOWN_TOKENS", most)
        for replies in rounds:
            expected = [encode(Codec(QWEN, [END], conversational=True), reply, end) for reply, end in replies]
            encoded = codec.encode_replies(replies)
            assert encoded == expected
            for ids in encoded:
                ids.append(-1)  # a branch's own: what is known of the answer stays as it is
            known = sum(len(answer.ids) for answer in codec._known.values())
            assert known == codec._known_tokens <= max(most, sum(map(len, encoded)))


def test_an_answer_is_rendered_once_for_all_that_are_given_it(monkeypatch):
    codec = Codec(QWEN, [END], conversational=True)
    codec.check("user")
    rendered = []
    render = codec._render
    monkeypatch.setattr(codec, "_render", lambda reply: rendered.append(reply) or render(reply))
    for _ in range(3):
        codec.encode_replies([(user("red"), END), (user("red"), None), (user("green"), END)])
    assert len(rendered) == 2


PLAIN = st.text(
    st.sampled_from("red fox 0.\n\t\"'\\&é日,:;/-_()=#%$@!?") | st.characters(categories=["L", "N", "P"]), max_size=60
)
WORDS = st.lists(st.sampled_from(["user", "tool", "assistant", "think", "tool_response", "error", "function", "red"]))


@given(
    name=st.sampled_from(SHIPPED),
    contents=st.lists(PLAIN | WORDS.map(" ".join), min_size=1, max_size=3),
    role=st.sampled_from(["tool", "user"]),
    tool_name=st.sampled_from(["add", "search"]),
)
@settings(deadline=None, database=None, max_examples=1500)
def test_forms_of_shipped_templates_give_what_the_template_gives(name, contents, role, tool_name):
    codec = shipped_codec(name)
    messages = [{"role": role, "content": content} for content in contents]
    if role == "tool":
        messages = [{**message, "name": tool_name} for message in messages]
    try:
        expected = codec._render_messages(messages)
    except Exception as error:
        with pytest.raises(type(error)):
            codec._render(Reply(messages=messages))
    else:
        assert codec._render(Reply(messages=messages)) == expected


@functools.cache
def shipped_codec(name):
    tokenizer, ends = family_tokenizer(name)
    return Codec(tokenizer, ends, conversational=True)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_training", "qwen2_5", "glm4moe", "nemotron_3_nano"])
def test_plain_answers_of_a_kind_are_rendered_from_its_form(name, monkeypatch):
    codec = shipped_codec(name)
    for kind in (user, tool):
        codec.encode_replies([(kind("first"), None)])
    monkeypatch.setattr(codec.tokenizer, "apply_chat_template", None)
    for kind in (user, tool):
        (ids,) = codec.encode_replies([(kind(f"another {kind.__name__}"), None)])
        assert f"another {kind.__name__}" in text_of(ids, codec.tokenizer)
    # What might be markup is not taken for plain
    for content in ("<think>", "{1}", "[1]", "a|b", " a", "a\n", ""):
        (error,) = codec.encode_replies([(user(content), None)])
        assert isinstance(error, TypeError)


def test_a_template_of_ones_own_is_asked_about_every_answer():
    asking = PRESERVING.replace("{{ content }}", "{{ 'MAGIC' if 'abracadabra' in content else content }}")
    codec = Codec(make_tokenizer(asking), [END], conversational=True)
    for content, shown in (("red", "red"), ("say abracadabra", "MAGIC"), ("green", "green")):
        assert f"user\n{shown}<|im_end|>" in text_of(encode(codec, user(content)))


class Reversing(PreTrainedTokenizerFast):
    """A tokenizer that does something of its own to texts."""

    def _encode_plus(self, text, *args, **kwargs):
        return super()._encode_plus([t[::-1] for t in text], *args, **kwargs)

    def _decode(self, *args, **kwargs):
        return super()._decode(*args, **kwargs)[::-1]


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, Reversing])
def test_texts_go_through_the_tokenizers_own_methods(kind):
    plain = make_tokenizer()
    tokenizer = kind(tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = PRESERVING
    codec = Codec(tokenizer, [END], conversational=False)
    # Settings that an earlier call left behind are not taken over
    tokenizer(["red fox"], truncation=True, max_length=1, padding="max_length")
    texts = ["red fox", "the lazy dog <|im_end|>", "日"]
    encoded = codec.encode_replies([(Reply(text=text), END) for text in texts])
    assert encoded == tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert len(encoded[0]) > 1
    decoded = codec.decode_turns([(ids, [], None) for ids in encoded])
    assert [turn.text for turn in decoded] == tokenizer.batch_decode(encoded, skip_special_tokens=True)


# What can't be rendered


RAISING = PRESERVING.replace(
    "<|im_start|>{{", "{{ raise_exception('no tools here') if message.role == 'tool' }}<|im_start|>{{", 1
)
FORGETTING = "{% for message in messages %}{% if message.role != 'tool' %}" + PRESERVING.split("%}", 1)[1].replace(
    "<|im_end|>\n", "<|im_end|>\n{% endif %}", 1
)
MUTE = PRESERVING.replace(
    "{% set content = message.content %}", "{% set content = message.content if message.role != 'assistant' %}"
)
ENDING_DIFFERS = PRESERVING.replace("<|im_end|>", "{{ '!' if loop.last }}<|im_end|>", 1)


@pytest.mark.parametrize(
    ("template", "role", "reason"),
    [
        (RAISING, "tool", "no tools here"),
        (FORGETTING, "tool", "it leaves out what the answer says"),
        (MUTE, "user", "it leaves out what the assistant says"),
        (ENDING_DIFFERS, "user", "it shows an assistant turn differently where an answer follows"),
    ],
)
def test_case_04_a_template_that_cannot_carry_an_answer_is_refused(template, role, reason):
    tokenizer = make_tokenizer(template)
    tokenizer.response_template = add_response_schema(make_tokenizer("qwen3")).response_template
    codec = Codec(tokenizer, [END], conversational=True)
    with pytest.raises(ValueError, match=re.escape(f"can't append an answer of role {role!r}")) as caught:
        codec.check(role)
    assert reason in str(caught.value)
    Codec(tokenizer, [END], conversational=False).check(role)  # string prompts need no template


def test_tools_need_a_way_to_read_calls():
    with pytest.raises(ValueError, match="no `response_template`"):
        Codec(make_tokenizer("qwen3"), [END], conversational=True).check("tool")


def test_an_answer_that_cannot_be_rendered_leaves_the_others_alone():
    codec = Codec(make_tokenizer(RAISING), [END], conversational=True)
    before, failed, after = codec.encode_replies([(user("red"), END), (tool("3"), END), (user("green"), END)])
    assert "no tools here" in str(failed)
    assert (before, after) == (encode(codec, user("red")), encode(codec, user("green")))


# What a turn said


def add(a: int, b: int) -> int:
    """
    Adds.

    Args:
        a: a number.
        b: a number.
    """
    return a + b


def parsing(name):
    tokenizer, ends = family_tokenizer(name)
    return add_response_schema(tokenizer), ends


# Of each family, a turn with a call, and one whose call is broken
CALLS = {
    "qwen3": ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>', '"b": 2}'),
    "gptoss": (' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>', "2}"),
    "gemma4": ("<|tool_call>call:add{a:1,b:2}<tool_call|><|tool_response>", "2}"),
    "llama3_1": ('{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', "2}"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_cannot_be_parsed_are_told_from_none(name):
    tokenizer, ends = parsing(name)
    codec = Codec(tokenizer, ends, conversational=True)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 and 2"}], add_generation_prompt=True, return_dict=False
    )
    good, cut = CALLS[name]
    bad = good.replace(cut, cut[:-1] + ",")
    turns = [
        usual(tokenizer, text) for text in (good, bad, "3" + good[-10:].partition("<")[1] + good.rpartition("<")[2])
    ]
    called, broken, plain = codec.decode_turns([(ids, prompt, [add]) for ids in turns])
    assert called.message["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    ]
    assert not called.malformed
    assert broken.malformed
    assert not broken.message.get("tool_calls")
    assert not plain.malformed
    assert not plain.message.get("tool_calls")


def call_of(arguments, end="}\n</tool_call>"):
    return '<tool_call>\n{"name": "add", "arguments": ' + arguments + end + "<|im_end|>"


LISTS = MOST_NESTED - 5  # the message, its calls, the call, its function and the arguments lie around them

DEEP = {
    "unclosed": call_of('{"text":' * 1100, end=""),
    "lists that the parser takes": call_of('{"text":' + "[" * 490 + "]" * 490 + "}"),
    "lists that it does not take": call_of('{"text":' + "[" * 900 + "]" * 900 + "}"),
    "dictionaries": call_of('{"text":' * 600 + "1" + "}" * 600),
    "one more than is handed on": call_of('{"text":' + "[" * (LISTS + 1) + "]" * (LISTS + 1) + "}"),
}


@pytest.mark.parametrize("kind", DEEP)
def test_calls_nested_too_deep_are_malformed(kind):
    tokenizer, ends = parsing("qwen3")
    codec = Codec(tokenizer, ends, conversational=True)
    prompt = usual(tokenizer, "<|im_start|>assistant\n")
    shallow = call_of('{"a":' + "[" * LISTS + "]" * LISTS + "}")
    turns = [(usual(tokenizer, text), prompt, [add]) for text in (DEEP[kind], shallow)]
    deep, other = codec.decode_turns(turns)
    assert deep.malformed and deep.message == {"role": "assistant", "content": deep.text}
    assert not other.malformed and other.message["tool_calls"][0]["function"]["arguments"]["a"] != []


def test_lone_surrogates_of_a_call_are_replaced():
    tokenizer, ends = parsing("qwen3")
    codec = Codec(tokenizer, ends, conversational=True)
    escapes = r'{"\ud800": ["\udfff", {"a": "\ud83d\ude42"}]}'
    ids = usual(tokenizer, call_of(escapes).replace('"add"', r'"\ud800"'))
    (turn,) = codec.decode_turns([(ids, usual(tokenizer, "<|im_start|>assistant\n"), None)])
    function = {"name": "\ufffd", "arguments": {"\ufffd": ["\ufffd", {"a": "🙂"}]}}
    assert turn.message["tool_calls"] == [{"type": "function", "function": function}]


TURNS = [
    "the red fox<|im_end|>",
    "",
    "<|im_end|>",
    "<think>\nred\n</think>\n\ngreen<|im_end|>",
    "<think>\nred, and cut",
    'left<tool_call>\n{"name": "add", "arguments": {"a": "1", "b": 2}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "x"}\n</tool_call>',
    '<tool_call>\n{"name": "add", "argu',
    "<tool_call>\n{}\n</tool_call><|im_end|>",
]
HEADERS = [
    "<|im_start|>assistant\n",
    "<|im_start|>assistant\n<think>\n",
    "<|im_start|>assistant\n<think>\n" + 30 * "red fox ",
]


@pytest.mark.parametrize("tools", [None, [add]])
@pytest.mark.parametrize("header", range(len(HEADERS)))
def test_turns_are_parsed_as_trl_parses_them(header, tools):
    tokenizer = add_response_schema(make_tokenizer("qwen3"))
    codec = Codec(tokenizer, [END], conversational=True)
    history = usual(tokenizer, "<|im_start|>user\n" + 50 * "the lazy dog " + "<|im_end|>\n" + HEADERS[header])
    turns = [spell(tokenizer, text) for text in TURNS for spell in (usual, unusual) if text != "" or spell is usual]
    decoded = codec.decode_turns([(ids, history, tools) for ids in turns])
    for ids, turn in zip(turns, decoded, strict=True):
        assert turn.text == tokenizer.decode(ids, skip_special_tokens=True)
        if ids:
            assert turn.message == parse_response(tokenizer, ids, prefix=history, tools=tools)
        else:
            assert turn.message == {"role": "assistant", "content": ""}


def test_without_a_response_template_a_turn_is_its_text():
    for conversational in (True, False):
        codec = Codec(QWEN, [END], conversational=conversational)
        (turn,) = codec.decode_turns([(usual(QWEN, "<think>red</think> fox<|im_end|>"), [1], None)])
        assert turn.text == "<think>red</think> fox"
        assert (turn.message, turn.malformed) == ({"role": "assistant", "content": turn.text}, False)
    assert codec.decode_turns([]) == codec.encode_replies([]) == []
