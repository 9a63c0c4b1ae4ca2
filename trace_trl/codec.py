"""
Between token ids and messages: what a turn said, and which ids an environment's answer becomes.

Ids the policy sampled are read here, never written: a turn is decoded for the environment, and its ids stay what they
were. Only an answer is encoded, as the text that the chat template puts after the assistant's turn:

    .. <|im_start|>assistant\\n MARK <|im_end|> \\n<|im_start|>user\\nObservation<|im_end|>\\n<|im_start|>assistant\\n
                                    │          └────────────── after a turn that ended by itself ──────────────────┘
                                    └──────── after a turn that a stop string ended: its end token was never sampled

The answer is rendered behind a made-up assistant turn whose text is the mark. Everything behind the mark is the
answer, also where a template shows the last assistant turn differently from earlier ones, or drops the reasoning of
earlier ones: what such a template does before the mark does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from trl.chat_template_utils import parse_response

from .environments.base import Reply


_MARK = "TRACE-MARK-7391"  # plain letters: some templates escape others in JSON


class Codec:
    """
    Args:
        tokenizer (`PreTrainedTokenizerBase`): the policy's tokenizer.
        eos_token_ids (`list[int]`): every id that ends a turn.
        conversational (`bool`): whether prompts are lists of messages.
        chat_template (`str`, *optional*): template to use instead of the tokenizer's own.
        chat_template_kwargs (`dict`, *optional*): passed to the template.

    Raises:
        ValueError: if the chat template gives no way to append an answer to a turn.
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
        self._parses = (
            getattr(tokenizer, "response_template", None) is not None
            or getattr(tokenizer, "response_schema", None) is not None
        )
        self._eos_texts = [tokenizer.convert_ids_to_tokens(token_id) for token_id in eos_token_ids]
        self._call_opening = _call_opening(getattr(tokenizer, "response_template", None))

    @property
    def idle_context(self) -> list[int]:
        """A context for a process that has no branch to continue but must take part in a generation call."""
        return [min(self.eos_token_ids)]

    def check(self, role: str) -> None:
        """Renders a trial answer, so that a template that can't is refused before anything is sampled.

        Raises:
            ValueError: with a sentence that says what the template lacks.
        """
        if self.conversational:
            self.encode_reply(Reply(messages=[{"role": role, "name": "trial", "content": "trial"}]), ended=True)

    def looks_like_call(self, text: str) -> bool:
        """Whether a decoded turn holds the opening of a tool call; asked only about turns without a parsable one."""
        return self._call_opening is not None and self._call_opening.search(text) is not None

    def decode_turn(
        self, ids: list[int], history: list[int], tools: list[Callable] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The text of a turn without special tokens, and the assistant message it makes."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        if self.conversational and self._parses and ids:
            return text, parse_response(self.tokenizer, ids, prefix=history, tools=tools)
        return text, {"role": "assistant", "content": text}

    def encode_reply(self, reply: Reply, ended: bool) -> list[int]:
        """Token ids of an environment's answer, up to where the next turn starts. See `encode_replies`."""
        return self.encode_replies([(reply, ended)])[0]

    def encode_replies(self, replies: Sequence[tuple[Reply, bool]]) -> list[list[int]]:
        """Token ids of answers, in one call of the tokenizer.

        Args:
            replies: pairs of an answer, all messages of which are rendered in one go, and whether the turn before it
                ended with its own end token, rather than by a stop string.
        """
        texts = [self._suffix(reply, ended) for reply, ended in replies]
        if not any(texts):
            return [[] for _ in texts]
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        if not self.conversational:
            return [list(ids) for ids in encoded]
        # Encoded together with the end token, so that the answer is cut into tokens as it is inside a conversation
        return [list(ids[1:] if ended else ids) for ids, (_, ended) in zip(encoded, replies, strict=True)]

    def _suffix(self, reply: Reply, ended: bool) -> str:
        """The answer as text; in a conversation, from the end token of the turn before it on."""
        if not self.conversational:
            return reply.text or ""
        messages = reply.messages
        if not messages and not ended:
            return ""  # nothing was said and the turn is still open: it goes on
        assistant: dict[str, Any] = {"role": "assistant", "content": _MARK}
        if messages and messages[0]["role"] == "tool":
            # Some templates (GPT-OSS) name the tool's answer after the call
            call = {"name": messages[0]["name"], "arguments": {"mark": _MARK}}
            assistant["content"] = ""
            assistant["tool_calls"] = [{"type": "function", "function": call}]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": "."}, assistant, *messages],
            tokenize=False,
            add_generation_prompt=True,
            chat_template=self.chat_template,
            **self.chat_template_kwargs,
        )
        _, found, text = text.partition(_MARK)
        ends = [text.find(end) for end in self._eos_texts if end and end in text]
        if not found or not ends:
            raise ValueError(
                "The chat template does not render an assistant turn followed by an end-of-turn token "
                f"({', '.join(map(repr, self._eos_texts))}) and an answer of role "
                f"{messages[0]['role'] if messages else 'assistant'!r}: use a template that does (`processing_class."
                "chat_template`), or add its end-of-turn token to the model's `generation_config.eos_token_id`."
            )
        return text[min(ends) :]


def _call_opening(response_template: dict[str, Any] | None) -> re.Pattern | None:
    field = ((response_template or {}).get("fields") or {}).get("tool_calls") or {}
    if "open" in field:
        return re.compile(re.escape(field["open"]))
    return re.compile(field["open_pattern"]) if "open_pattern" in field else None
