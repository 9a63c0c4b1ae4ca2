"""
Between token ids and messages: what a turn said, and which ids an environment's answer becomes.

Ids the policy sampled are read here, never written: a turn is decoded for the environment, and its ids stay what they
were. Only an answer is encoded, as the text that the chat template puts after the assistant's turn:

    .. <|im_start|>assistant\\n MARK <|im_end|> \\n<|im_start|>user\\nObservation<|im_end|>\\n<|im_start|>assistant\\n
                                    │          └────────────── after a turn that ended by itself ──────────────────┘
                                    └──────── after a turn that a stop string ended: its end token was never sampled

The answer is rendered behind a made-up assistant turn whose text is the mark. What a template does before the mark
does not matter: it may drop the reasoning of earlier turns, or show the last assistant turn differently from others.
"""

from __future__ import annotations

import copy
import json
import re
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from inspect import isfunction, ismethod
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema
from transformers.utils.chat_parsing.response_templates import load_response_template

from .environments.base import Reply
from .foreign import nests_deeper, sound
from .seams import parse_response


_MARK = "TRACE-MARK-7391"  # plain letters: some templates escape others in JSON
_HEADER_TOKENS = (8, 64)  # the header of an assistant turn is looked for among so many last tokens of a history first
_MOST_KNOWN_TOKENS = 2**20  # of answers encoded before
_MOST_FORMS = 1000  # names of tools are the policy's to invent
# No blanks around it, and nothing that markup or JSON is made of
_PLAIN = re.compile(r"[^\s<>{}\[\]|](?:[^<>{}\[\]|]*[^\s<>{}\[\]|])?")
_TRIALS = ("trial", "\"another\" 'trial',\n\n\tlonger & é日\\" + 99 * "-")
_WAYS = ("__call__", "_encode_plus", "batch_decode", "decode", "_decode")  # from text to ids and back


@dataclass(slots=True, frozen=True)
class Turned:
    """A sampled turn, decoded.

    Attributes:
        text (`str`): without special tokens.
        message (`dict`): the assistant message it makes.
        malformed (`bool`): whether it holds a tool call that could not be parsed, or is nested too deep to be handed
            on; the message is its text then.
    """

    text: str
    message: dict[str, Any]
    malformed: bool = False


@dataclass(slots=True, frozen=True)
class _Seam:
    """How the chat template goes on behind an assistant turn.

    Attributes:
        inside (`str`): what it puts between what was said and the end of the turn.
        end (`str`): the turn's end token; empty if the template has none of its own.
        resumed (`str`): what follows `inside` where the assistant goes on without an answer.
    """

    inside: str
    end: str
    resumed: str


@dataclass(slots=True, frozen=True)
class _Answer:
    """An encoded answer.

    Attributes:
        ids (`array`): from the end token of the turn before it on.
        closes (`bool`): whether the first of these ends the turn before, rather than opening the answer.
    """

    ids: array
    closes: bool

    def after(self, end: int | None) -> list[int]:
        """Ids behind a turn that ended with the token `end`, or by a stop string."""
        ids = self.ids
        # GLM has no end token: its turn ends with the token that opens the answer
        ended = end is not None and bool(ids) and (self.closes or ids[0] == end)
        return (ids[1:] if ended else ids).tolist()


@dataclass(slots=True, frozen=True)
class _Form:
    """What a template puts before, between and behind the contents of answers of one kind."""

    pieces: tuple[str, ...]
    closes: bool

    @classmethod
    def of(cls, text: str, closes: bool, messages: list[dict[str, Any]]) -> _Form | None:
        """Read off one answer; `None` if it does not show every content as it is."""
        pieces = []
        for message in messages:
            before, found, text = text.partition(message["content"])
            if not found:
                return None
            pieces.append(before)
        return cls((*pieces, text), closes)

    def filled(self, messages: list[dict[str, Any]]) -> tuple[str, bool]:
        parts = [part for piece, message in zip(self.pieces, messages) for part in (piece, message["content"])]  # noqa: B905
        return "".join((*parts, self.pieces[-1])), self.closes


class Codec:
    """
    Args:
        tokenizer (`PreTrainedTokenizerBase`): the policy's tokenizer.
        eos_token_ids (`list[int]`): every id that ends a turn.
        conversational (`bool`): whether prompts are lists of messages.
        chat_template (`str`, *optional*): template to use instead of the tokenizer's own.
        chat_template_kwargs (`dict`, *optional*): passed to the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        conversational: bool,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ):
        self.tokenizer = tokenizer
        self.eos_token_ids = set(eos_token_ids)
        self.conversational = conversational
        self.chat_template = chat_template
        self.chat_template_kwargs = chat_template_kwargs or {}
        response_template = getattr(tokenizer, "response_template", None)
        self._response_template = None if response_template is None else load_response_template(response_template)
        self._eos_texts = [tokenizer.convert_ids_to_tokens(token_id) for token_id in eos_token_ids]
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = _any_of(special.union(self._eos_texts))
        self._backend = _backend_of(tokenizer)
        self._appending = _appending(tokenizer, everywhere=not conversational)
        self._text_arguments = False
        self._seams: dict[str | None, _Seam] = {}
        self._forms: dict[Hashable, _Form | None] | None = {} if self._is_shipped() else None
        self._schemas: dict[tuple[int, ...], tuple[list, list]] = {}
        self._known: dict[Hashable, _Answer] = {}
        self._known_tokens = 0

    @property
    def idle_context(self) -> list[int]:
        """A context for a process that has no branch to continue but must take part in a generation call."""
        return [min(self.eos_token_ids)]

    def check(self, role: str) -> None:
        """Renders a trial answer, so that a template that can't is refused before anything is sampled.

        Raises:
            ValueError: with a sentence that says what the template lacks.
        """
        if not self.conversational:
            return
        if role == "tool" and self._response_template is None:
            raise ValueError(
                "The tokenizer has no `response_template`, so tool calls can't be read from what the model says: set "
                "one for its chat template (`tokenizer.response_template`)."
            )
        try:
            text, _ = self._render(Reply(messages=[{"role": role, "name": "trial", "content": _MARK}]))
            reason = None if _MARK in text else "it leaves out what the answer says"
        # Templates raise errors of their own, and of whatever they call
        except Exception as error:
            reason = str(error)
        if reason is not None:
            raise ValueError(
                f"The chat template can't append an answer of role {role!r} to an assistant turn ({reason}): use one "
                "that can (`processing_class.chat_template`)."
            )

    # What the policy said

    def decode_turns(self, turns: Sequence[tuple[list[int], list[int], list[Callable] | None]]) -> list[Turned]:
        """Decodes turns.

        Args:
            turns: triples of sampled ids, the ids of the history they were sampled behind, and the tools that history
                was rendered with.
        """
        ids = [sampled for sampled, _, _ in turns]
        texts = self._decode(ids, skip_special_tokens=True)
        if not self.conversational or self._response_template is None:
            return [Turned(text, {"role": "assistant", "content": text}) for text in texts]
        raws = self._decode(ids)
        decoded = []
        for (sampled, history, tools), text, raw in zip(turns, texts, raws, strict=True):
            if not sampled:
                decoded.append(Turned(text, {"role": "assistant", "content": text}))
                continue
            turn: Any = _DecodedTurn(self.tokenizer, self._response_template, raw, text)
            message = parse_response(turn, sampled, prefix=self._header(history), tools=self._schemas_of(tools))
            decoded.append(Turned(text, message, turn.fell_back))
        return decoded

    def _header(self, history: list[int]) -> str:
        """The end of a history, from the header of the turn that follows it on or from before that: what stands before
        the header is of no account to the parser, and takes long to decode."""
        for count in _HEADER_TOKENS:
            (text,) = self._decode([history[-count:]])
            if self._response_template.start_anchor_re.search(text) is not None:  # type: ignore[union-attr]
                return text
        return self._decode([history])[0]

    def _decode(self, ids: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        if self._backend is None:
            return self.tokenizer.batch_decode(ids, skip_special_tokens=skip_special_tokens) if ids else []
        # `batch_decode` comes to this, but looks at every id first, which takes longer than decoding them
        return self._backend.decode_batch(ids, skip_special_tokens=skip_special_tokens)

    def _schemas_of(self, tools: list[Callable] | None) -> list | None:
        """JSON schemas of tools, which the parser would make again for every turn."""
        if not tools:
            return None
        key = tuple(map(id, tools))
        if key not in self._schemas:
            schemas = [get_json_schema(tool) if isfunction(tool) or ismethod(tool) else tool for tool in tools]
            # With the tools themselves: as long as they live, nothing else has their ids
            self._schemas[key] = (list(tools), schemas)
        return self._schemas[key][1]

    # What the policy reads next

    def encode_replies(self, replies: Sequence[tuple[Reply, int | None]]) -> list[list[int] | Exception]:
        """
        Token ids of answers, each up to where the next turn starts, in one call of the tokenizer.

        Args:
            replies: pairs of an answer, all messages of which are rendered in one go, and the token that the turn
                before it ended with, `None` if a stop string ended it.

        Returns:
            `list[list[int] | Exception]`: ids, or in the place of an answer that the template can't render, its error.
        """
        # Nothing was said and the turn is still open: it goes on
        silent = [end is None and not reply.messages and not reply.text for reply, end in replies]
        answers = iter(self._answers([reply for (reply, _), skip in zip(replies, silent, strict=True) if not skip]))
        encoded: list[list[int] | Exception] = []
        for (_, end), skip in zip(replies, silent, strict=True):
            answer = None if skip else next(answers)
            if answer is None:
                encoded.append([])
            elif isinstance(answer, Exception):
                encoded.append(answer)
            else:
                encoded.append(answer.after(end if self.conversational else None))
        return encoded

    def _answers(self, replies: Sequence[Reply]) -> list[_Answer | Exception]:
        """Encoded answers. What siblings are answered is often the same, so each is rendered and encoded once."""
        # An answer that can't be a key is its own, by its number
        keys = [_key(reply) or number for number, reply in enumerate(replies)]
        rendered: dict[Hashable, tuple[str, bool]] = {}
        failed: dict[Hashable, Exception] = {}
        for key, reply in zip(keys, replies, strict=True):
            if key not in rendered and key not in failed and key not in self._known:
                try:
                    rendered[key] = self._render(reply)
                # An environment may say what the template has no form for
                except Exception as error:
                    failed[key] = error
        # Encoded from the end token on, so that an answer is cut into tokens as it is inside a conversation
        encoded = self._encode([text for text, _ in rendered.values()])
        new = {
            key: _Answer(array("q", ids), closes)
            for (key, (_, closes)), ids in zip(rendered.items(), encoded, strict=True)
        }
        answers = [failed.get(key) or new.get(key) or self._known[key] for key in keys]
        self._remember({key: answer for key, answer in new.items() if not isinstance(key, int)})
        return answers

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self._backend is None:
            return self._appending(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        # The tokenizer comes to this, but for the place of each token in the text, which nobody asks for. It is called
        # once all the same: it sets the backend to neither cut nor pad
        self._appending("", add_special_tokens=False)
        backend = self._appending.backend_tokenizer
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _remember(self, answers: dict[Hashable, _Answer]) -> None:
        self._known_tokens += sum(len(answer.ids) for answer in answers.values())
        if self._known_tokens > _MOST_KNOWN_TOKENS:
            self._known.clear()
            self._known_tokens = sum(len(answer.ids) for answer in answers.values())
        self._known.update(answers)

    def _render(self, reply: Reply) -> tuple[str, bool]:
        """An answer as text, in a conversation from the end token of the turn before it on, and whether it starts with
        such a token."""
        if not self.conversational:
            return reply.text or "", False
        form = self._form(reply.messages)
        return self._render_messages(reply.messages) if form is None else form.filled(reply.messages)

    def _render_messages(self, messages: list[dict[str, Any]]) -> tuple[str, bool]:
        name = None
        if messages and messages[0]["role"] == "tool":
            name = str(messages[0].get("name") or "tool")
        seam = self._seam(name)
        text = self._behind_mark([self._assistant(name), *messages], goes_on=True)
        if not text.startswith(seam.inside):
            raise ValueError("it shows an assistant turn differently where an answer follows")
        text = text[len(seam.inside) :]
        first = self._special.match(text)
        # GPT-OSS ends the last turn with <|return|>, and with <|end|> whatever follows
        closes = first is not None and (first[0] == seam.end or seam.resumed.startswith(first[0]))
        return text, closes

    def _is_shipped(self) -> bool:
        return self.conversational and self.tokenizer.get_chat_template(self.chat_template) in _shipped_templates()

    def _form(self, messages: list[dict[str, Any]]) -> _Form | None:
        """The form of answers of this kind (same roles and names); `None` where contents may shape what is around."""
        if self._forms is None or not messages or not all(map(_is_plain, messages)):
            return None
        kind = tuple(tuple(item for item in message.items() if item[0] != "content") for message in messages)
        if kind not in self._forms:
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            forms = []
            for trial in _TRIALS:
                trials = [{**message, "content": f"{number} {trial}"} for number, message in enumerate(messages)]
                forms.append(_Form.of(*self._render_messages(trials), trials))
            self._forms[kind] = forms[0] if forms[0] == forms[1] else None
        return self._forms[kind]

    def _seam(self, name: str | None) -> _Seam:
        if name not in self._seams:
            try:
                last = self._behind_mark([self._assistant(name)], goes_on=False)
            except TypeError:
                # DeepSeek-V3 takes the arguments of a call as text only
                self._text_arguments = True
                last = self._behind_mark([self._assistant(name)], goes_on=False)
            ends = [last.find(end) for end in self._eos_texts if end in last]
            if ends:
                at = min(ends)
            else:
                # A turn that ends with a token the policy isn't stopped by, or with none at all
                at = 0 if name is None and self._special.match(last) else len(last)
            end = self._special.match(last, at)
            resumed = self._behind_mark([self._assistant(name)], goes_on=True)
            self._seams[name] = _Seam(last[:at], end[0] if end else "", resumed.removeprefix(last[:at]))
        return self._seams[name]

    def _assistant(self, name: str | None) -> dict[str, Any]:
        """An assistant turn that ends with the mark: plain text, or a call of the tool `name`."""
        if name is None:
            return {"role": "assistant", "content": _MARK}
        arguments: Any = f'{{"mark": "{_MARK}"}}' if self._text_arguments else {"mark": _MARK}
        # Some templates (GPT-OSS) name a tool's answer after the call
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def _behind_mark(self, messages: list[dict[str, Any]], goes_on: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": "."}, *messages],
            tokenize=False,
            add_generation_prompt=goes_on,
            chat_template=self.chat_template,
            **self.chat_template_kwargs,
        )
        _, found, behind = text.partition(_MARK)
        if not found:
            raise ValueError("it leaves out what the assistant says")
        return behind


class _DecodedTurn:
    """What TRL's `parse_response` asks of a tokenizer, for one turn that is decoded already."""

    def __init__(self, tokenizer: Any, response_template: Any, raw: str, text: str):
        self.tokenizer = tokenizer
        self.response_template = response_template
        self.eos_token = tokenizer.eos_token
        self.fell_back = False
        self._raw = raw
        self._text = text

    def parse_response(self, ids: list[int], prefix: str, tools: list | None) -> dict[str, Any]:
        try:
            message = self.tokenizer.parse_response(self._raw, self.response_template, prefix=prefix, tools=tools)
        except RecursionError as error:
            raise ValueError("The call is nested too deep.") from error
        if nests_deeper(message):
            raise ValueError("The call is nested too deep.")
        # JSON may hold escapes of lone surrogates
        return sound(message)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        # Asked for where parsing failed; everything but a call is text, which can't fail
        self.fell_back = True
        return self._text


def _backend_of(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` that a tokenizer consists of, `None` where it does something of its own to texts."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.clean_up_tokenization_spaces:
        return None
    ways = [(getattr(type(tokenizer), name), getattr(PreTrainedTokenizerFast, name)) for name in _WAYS]
    return tokenizer.backend_tokenizer if all(way is stock for way, stock in ways) else None


def _appending(tokenizer: Any, everywhere: bool) -> Any:
    """A tokenizer for text that follows other text: a copy that puts no space before the first word, or the same where
    it puts none.

    Args:
        everywhere: also where the space is put behind every special token. Inside a conversation it belongs there.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer
    backend = tokenizer.backend_tokenizer
    try:
        states = [part and json.loads(part.__getstate__()) for part in (backend.normalizer, backend.pre_tokenizer)]
    # A part that is written in Python
    except Exception:
        return tokenizer
    changed = [_without_lead(state, everywhere) for state in states]
    if changed == states:
        return tokenizer
    parts = Tokenizer(BPE())
    loaded = json.loads(parts.to_str())
    loaded["normalizer"], loaded["pre_tokenizer"] = changed
    parts = Tokenizer.from_str(json.dumps(loaded))
    backend = copy.deepcopy(backend)
    backend.normalizer, backend.pre_tokenizer = parts.normalizer, parts.pre_tokenizer
    tokenizer = copy.copy(tokenizer)
    tokenizer._tokenizer = backend
    return tokenizer


def _without_lead(state: dict[str, Any] | None, everywhere: bool) -> dict[str, Any] | None:
    """What a normalizer or a pre-tokenizer consists of, without what puts a space before a text."""
    if state is None:
        return None
    if state["type"] == "Metaspace" and (everywhere or state["prepend_scheme"] == "first"):
        return {**state, "prepend_scheme": "never"}
    if state["type"] == "ByteLevel" and everywhere and "add_prefix_space" in state:
        return {**state, "add_prefix_space": False}
    if state["type"] == "Prepend" and everywhere:
        return {"type": "Sequence", "normalizers": []}
    for key in ("normalizers", "pretokenizers"):
        if key in state:
            return {**state, key: [_without_lead(part, everywhere) for part in state[key]]}
    return state


@cache
def _shipped_templates() -> frozenset[str]:
    """The chat templates that TRL ships. Of these it is known, and tested, that plain text in an answer is shown as it
    is and changes nothing else; a template of one's own may do anything, and is asked about every answer."""
    folder = files("trl").joinpath("chat_templates")
    return frozenset(path.read_text(encoding="utf-8") for path in folder.iterdir() if path.name.endswith(".jinja"))


def _is_plain(message: dict[str, Any]) -> bool:
    return (
        all(isinstance(value, str) for value in message.values()) and _PLAIN.fullmatch(message["content"]) is not None
    )


def _key(reply: Reply) -> Hashable:
    """What an answer is known by; `None` if it holds more than plain text."""
    if not all(isinstance(value, str) for message in reply.messages for value in message.values()):
        return None
    return reply.text, tuple(tuple(message.items()) for message in reply.messages)


def _any_of(tokens: set[str]) -> re.Pattern:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(re.escape(token) for token in longest_first if token) or "(?!)")
