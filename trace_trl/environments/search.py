"""
Search for multi-hop question answering with text actions: over a question's own paragraphs, or with a [`Retriever`].

    question ── Thought, Action: search[Dogwoman] ── Observation: Dogwoman: The telemovies were created by ...
             ── Thought, Action: search[Magda Szubanski] ── Observation: ...
             ── Thought, Action: finish[1961]          episode over, `state.answer == "1961"`

The action space is ReAct's (arXiv 2210.03629): `search[query]`, `lookup[term]`, `finish[answer]`, of which the last
`Action:` of a turn counts. A turn that can't be understood is answered with the right syntax; it never raises.

A [`SearchState`] holds only what an episode did so far, in immutable fields, and a [`ParagraphIndex`] that never
changes once built: a fork is a shallow copy, and all branches of a prompt share one index.

[`SearchTools`] is the same for models that call tools: `search` and `lookup`, and a last message with the answer.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .base import StepResult, describe, without_thoughts
from .retrieval import Page, ParagraphIndex, RetrievalError, Retriever, fold


__all__ = ["ParagraphIndex", "SearchEnvironment", "SearchState", "SearchTools", "parse_action", "search_env"]

logger = logging.getLogger(__name__)
_warning = threading.Lock()


SYNTAX = "Action: search[query], Action: lookup[term] or Action: finish[answer]"

# `Action:` as ReAct prompts and chat models write it: numbered, bold, or in any case.
_MARKER = re.compile(r"\baction\s*\d*\W{0,2}:[\s*`]*", re.IGNORECASE)
_CALL = re.compile(r"([a-z_]+)\s*\[", re.IGNORECASE)


def parse_action(text: str) -> tuple[str | None, str]:
    """
    Reads the last `Action:` of a turn.

    Args:
        text (`str`):
            One turn, such as `"Thought: I need the creator.\\nAction: search[Dogwoman]"`. What stands in `<think>` is
            not looked at.

    Returns:
        `tuple[str | None, str]`: the action's name in lower case and its argument with its white space collapsed, or
        `None` and a sentence for the policy that says what is wrong. The argument ends with the bracket that closes
        the first one, on the same line, so that `search[Alien [film]]` asks for `Alien [film]`.
    """
    text = without_thoughts(text)
    markers = list(_MARKER.finditer(text))
    if not markers:
        return None, f"No action found. End your turn with {SYNTAX}."
    rest = text[markers[-1].end() :]
    call = _CALL.match(rest)
    if call is None:
        return None, f"The action could not be read. Write {SYNTAX}."
    name = call.group(1).lower()
    depth = 1
    for end, char in enumerate(rest[call.end() :], start=call.end()):
        if char == "\n":
            break
        depth += (char == "[") - (char == "]")
        if depth == 0:
            return name, " ".join(rest[call.end() : end].split())
    return None, f"The closing bracket is missing. Write Action: {name}[...]."


def _truncate(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    # One char more than the limit: a word that ends exactly there is whole.
    head, space, _ = text[: limit + 1].rpartition(" ")
    return (head if space else text[:limit]) + " ..."


@dataclass(slots=True)
class SearchState:
    """
    What one episode did so far.

    Attributes:
        index ([`ParagraphIndex`] or `None`): the question's paragraphs, shared by all forks; `None` with a retriever.
        pages (`tuple[Page, ...]`): paragraphs found by the last search that found any.
        term (`str` or `None`): term of the last lookup in `pages`.
        results (`int`): how many sentences with `term` were shown.
        answer (`str` or `None`): argument of `finish`; `None` while the episode runs.
        searches (`int`), lookups (`int`), invalid (`int`): turns of each kind; `invalid` ones had no readable action.
        failed (`int`): searches that the retriever could not make.
    """

    index: ParagraphIndex | None = None
    pages: tuple[Page, ...] = ()
    term: str | None = None
    results: int = 0
    answer: str | None = None
    searches: int = 0
    lookups: int = 0
    invalid: int = 0
    failed: int = 0

    def fork(self) -> SearchState:
        """An independent copy that shares the index, the one field that is not immutable and never changes."""
        return dataclasses.replace(self)


class SearchEnvironment:
    """
    Answers search, lookup and finish actions.

    It never gives a reward: a reward function reads the answer from the final states, `environments[i].answer`. Nor
    does a search that fails end anything: the policy reads why, and `info` counts it under `failed_searches`.

    Args:
        k (`int`, *optional*, defaults to `1`):
            Paragraphs shown by a search.
        max_observation_chars (`int`, *optional*, defaults to `400`):
            Largest length of the text shown by an action, titles not counted. The paragraphs of one search share it.
        retriever ([`Retriever`], *optional*):
            Searches for all rows, such as a [`CorpusIndex`] or a [`RetrievalServer`]. By default, each row's own
            paragraphs are searched, which are in its `context` column.

    Example:

    ```python
    >>> environment = SearchEnvironment()
    >>> state = environment.reset({"context": [["Dogwoman", ["It was created by Magda Szubanski."]]]})
    >>> environment.step(state, "Thought: Who made it?\\nAction: search[Dogwoman]", []).observation
    'Observation: Dogwoman: It was created by Magda Szubanski.'
    >>> environment.step(state, "Action: finish[Magda Szubanski]", []).done, state.answer
    (True, 'Magda Szubanski')
    ```
    """

    def __init__(self, k: int = 1, max_observation_chars: int = 400, retriever: Retriever | None = None):
        if k < 1 or max_observation_chars < k:
            raise ValueError(f"Needs 1 <= k <= max_observation_chars, got {k} and {max_observation_chars}.")
        self.k = k
        self.max_observation_chars = max_observation_chars
        if retriever is not None and not isinstance(retriever, Retriever):
            raise TypeError(f"`retriever` needs a method search(query, k), {type(retriever).__name__} has none.")
        self.retriever = retriever
        self._warned = False

    def reset(self, example: Mapping[str, Any]) -> SearchState:
        """Starts an episode. Without a retriever, the row needs a `context` column (see [`ParagraphIndex`])."""
        if self.retriever is not None:
            return SearchState()
        if "context" not in example:
            columns = ", ".join(map(str, example))
            raise ValueError(f"The row has no `context` column, only: {columns}. Add one, or pass a `retriever`.")
        return SearchState(ParagraphIndex(example["context"]))

    def step(self, state: SearchState, action: str, messages: Any = None) -> StepResult:
        """
        Answers one turn and changes `state` in place.

        Args:
            state ([`SearchState`]):
                State of this branch.
            action (`str`):
                The decoded turn.
            messages (`list[dict]`, *optional*):
                Conversation so far; not used.

        Returns:
            [`StepResult`]: an observation that starts with `"Observation: "`, or `done=True` after `finish`.
        """
        name, argument = parse_action(action)
        if name is None:
            observation = argument
        elif name not in ("search", "lookup", "finish"):
            name, observation = None, f"There is no action {name}. Write {SYNTAX}."
        elif not argument:
            observation, name = f"The brackets are empty. Write Action: {name}[...].", None
        elif name == "search":
            observation = self.search(state, argument)
        elif name == "lookup":
            observation = self.lookup(state, argument)
        else:
            state.answer = argument
        state.invalid += name is None
        info = {"searches": state.searches, "lookups": state.lookups, "invalid_actions": state.invalid}
        if self.retriever is not None:
            info["failed_searches"] = state.failed
        if name == "finish":
            return StepResult(done=True, info=info)
        return StepResult(f"Observation: {observation}", info=info)

    def search(self, state: SearchState, query: str) -> str:
        """What a search shows, without the word "Observation"; changes `state` in place."""
        state.searches += 1
        try:
            pages = self._find(state, query)
        except RetrievalError as error:
            problem = describe(error)
            self._warn(problem, error)
            state.failed += 1
            return f"The search failed: {_truncate(problem, self.max_observation_chars)}"
        if not pages:
            return f"Nothing found for {_truncate(query, self.max_observation_chars)}. Try other words."
        state.pages, state.term, state.results = pages, None, 0
        limit = self.max_observation_chars // len(pages)
        return "\n".join(f"{page.title}: {_truncate(' '.join(page.sentences), limit)}" for page in pages)

    def _find(self, state: SearchState, query: str) -> tuple[Page, ...]:
        if self.retriever is None:
            return tuple(state.index.pages(query, self.k))  # type: ignore[union-attr]
        try:
            found = self.retriever.search(query, self.k)
            return tuple(Page(str(title), tuple(map(str, sentences))) for title, sentences in found)[: self.k]
        except RetrievalError:
            raise
        except Exception as error:  # of a retriever that is not ours
            raise RetrievalError(f"{type(error).__name__}: {describe(error)}") from error

    def _warn(self, problem: str, error: RetrievalError) -> None:
        # Searches of many threads may fail at once
        with _warning:
            is_first, self._warned = not self._warned, True
        if is_first:
            url = getattr(self.retriever, "url", None)
            at = type(self.retriever).__name__ + (f" at {url}" if url else "")
            logger.warning(
                "A search by %s failed: %s Later ones are only counted.", at, problem, exc_info=error.__cause__
            )

    def lookup(self, state: SearchState, term: str) -> str:
        """What a lookup shows, without the word "Observation"; changes `state` in place."""
        state.lookups += 1
        if not state.pages:
            return "There is no page to look in yet. Search first."
        if state.term is None or fold(state.term) != fold(term):
            state.term, state.results = term, 0
        hits = [sentence for page in state.pages for sentence in page.sentences if fold(term) in fold(sentence)]
        if state.results >= len(hits):
            return "No more results."
        state.results += 1
        sentence = _truncate(hits[state.results - 1], self.max_observation_chars)
        return f"(Result {state.results} / {len(hits)}) {sentence}"


def search_env(
    k: int = 1, max_observation_chars: int = 400, retriever: Retriever | None = None
) -> tuple[Callable[[Mapping[str, Any]], SearchState], Callable[[SearchState, str, Any], StepResult]]:
    """
    The two callbacks of a [`SearchEnvironment`], as [`TRACETrainer`] takes them.

    Args:
        k (`int`, *optional*, defaults to `1`):
            Paragraphs shown by a search.
        max_observation_chars (`int`, *optional*, defaults to `400`):
            Largest length of the text shown by an action.
        retriever ([`Retriever`], *optional*):
            Searches for all rows; by default, each row's own paragraphs are searched.

    Returns:
        `tuple[Callable, Callable]`: `env_reset(example) -> state` and
        `env_step(state, action, messages) -> StepResult`.

    Example:

    ```python
    env_reset, env_step = search_env(k=1)
    trainer = TRACETrainer(..., env_reset=env_reset, env_step=env_step)
    ```
    """
    environment = SearchEnvironment(k=k, max_observation_chars=max_observation_chars, retriever=retriever)
    return environment.reset, environment.step


class SearchTools:
    """
    The search as an environment of native tool calls. The answer is the last message without a call; a reward function
    reads it from the completion.

    Args:
        environment ([`SearchEnvironment`], *optional*):
            Makes the searches; may be shared. By default, one with default settings.

    Example:

    ```python
    environment = SearchEnvironment(k=3, retriever=CorpusIndex.open("corpus"))
    trainer = TRACETrainer(..., environment_factory=lambda: SearchTools(environment))
    ```
    """

    def __init__(self, environment: SearchEnvironment | None = None):
        self.environment = environment or SearchEnvironment()
        self.state = SearchState()

    def reset(self, **row: Any) -> None:
        self.state = self.environment.reset(row)

    def fork(self) -> SearchTools:
        copy = SearchTools(self.environment)
        copy.state = self.state.fork()
        return copy

    def search(self, query: str) -> str:
        """
        Searches for paragraphs. The title of a page finds that page first.

        Args:
            query: Words to look for.

        Returns:
            The beginning of each paragraph that was found.
        """
        return self._use(self.environment.search, query)

    def lookup(self, term: str) -> str:
        """
        Shows the next sentence with a term on the pages that the last search found.

        Args:
            term: Text to look for.

        Returns:
            The sentence.
        """
        return self._use(self.environment.lookup, term)

    def _use(self, action: Callable[[SearchState, str], str], argument: Any) -> str:
        words = " ".join(str(argument).split())
        if words:
            return action(self.state, words)
        self.state.invalid += 1
        return "The argument is empty. Write what to look for."
