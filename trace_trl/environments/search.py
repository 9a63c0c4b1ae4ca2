"""
Search over one question's own paragraphs, for multi-hop question answering with text actions.

    question ── Thought, Action: search[Dogwoman] ── Observation: Dogwoman: The telemovies were created by ...
             ── Thought, Action: search[Magda Szubanski] ── Observation: ...
             ── Thought, Action: finish[1961]          episode over, `state.answer == "1961"`

The action space is ReAct's (arXiv 2210.03629): `search[query]`, `lookup[term]`, `finish[answer]`, of which the last
`Action:` of a turn counts. A turn that can't be understood is answered with the right syntax; it never raises.

A [`SearchState`] holds only what an episode did so far, in immutable fields, and a [`ParagraphIndex`] that never
changes once built: a fork is a shallow copy, and all branches of a prompt share one index.
"""

from __future__ import annotations

import dataclasses
import html
import re
import threading
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .base import StepResult


SYNTAX = "Action: search[query], Action: lookup[term] or Action: finish[answer]"

# `Action:` as ReAct prompts and chat models write it: numbered, bold, or in any case.
_MARKER = re.compile(r"\baction\s*\d*\W{0,2}:[\s*`]*", re.IGNORECASE)
_CALL = re.compile(r"([a-z_]+)\s*\[", re.IGNORECASE)
_TOKEN = r"(?u)\b\w+\b"
_TITLE_WEIGHT = 2


def _fold(text: str) -> str:
    """Lower case without accents: a policy often spells "Alû" as "Alu"."""
    return "".join(char for char in unicodedata.normalize("NFKD", text.lower()) if not unicodedata.combining(char))


def _clean(text: Any) -> str:
    """Collapses white space and resolves the HTML entities that HotpotQA's titles still hold."""
    return " ".join(html.unescape(str(text)).split())


def parse_action(text: str) -> tuple[str | None, str]:
    """
    Reads the last `Action:` of a turn.

    Args:
        text (`str`):
            One turn, such as `"Thought: I need the creator.\\nAction: search[Dogwoman]"`.

    Returns:
        `tuple[str | None, str]`: the action's name in lower case and its argument with its white space collapsed, or
        `None` and a sentence for the policy that says what is wrong. The argument ends with the bracket that closes
        the first one, on the same line, so that `search[Alien [film]]` asks for `Alien [film]`.
    """
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


class ParagraphIndex:
    """
    BM25 over the paragraphs of one question, built at the first search and read-only from then on.

    Args:
        context (`Sequence` or `Mapping`):
            Paragraphs as the HotpotQA files have them, `[[title, [sentence, ...]], ...]`, or as its Hub data set has
            them, `{"title": [...], "sentences": [[...], ...]}`.

    Raises:
        ValueError: if `context` has neither form.
    """

    def __init__(self, context: Sequence[Any] | Mapping[str, Any]):
        try:
            if isinstance(context, Mapping):
                context = list(zip(context["title"], context["sentences"], strict=True))
            self.paragraphs: list[tuple[str, tuple[str, ...]]] = [
                (_clean(title), tuple(_clean(sentence) for sentence in sentences)) for title, sentences in context
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "`context` must be [[title, [sentence, ...]], ...] or {'title': [...], 'sentences': [[...], ...]}."
            ) from error
        self._titles = [_fold(title) for title, _ in self.paragraphs]
        self._retriever: Any = None
        self._built = False
        self._lock = threading.Lock()

    @staticmethod
    def _tokenize(texts: list[str]) -> list[list[str]]:
        import bm25s

        return bm25s.tokenize(texts, token_pattern=_TOKEN, stopwords="en", return_ids=False, show_progress=False)

    def _scores(self, query: str) -> list[float]:
        nothing = [0.0] * len(self.paragraphs)
        tokens = self._tokenize([query])[0]
        if not tokens:
            return nothing
        with self._lock:
            if not self._built:
                texts = [" ".join([title] * _TITLE_WEIGHT + list(sentences)) for title, sentences in self.paragraphs]
                corpus = self._tokenize([_fold(text) for text in texts])
                # bm25s can't index a corpus without words.
                if any(corpus):
                    import bm25s

                    self._retriever = bm25s.BM25()
                    self._retriever.index(corpus, show_progress=False)
                self._built = True
        return nothing if self._retriever is None else self._retriever.get_scores(tokens).tolist()

    def search(self, query: str, k: int = 1) -> tuple[int, ...]:
        """
        Ranks paragraphs for a query.

        Args:
            query (`str`):
                Words to look for. A query that is a paragraph's title finds that paragraph first.
            k (`int`, *optional*, defaults to `1`):
                Largest number of paragraphs.

        Returns:
            `tuple[int, ...]`: positions of at most `k` paragraphs that share a word with the query, best first; equal
            scores keep the order of the context.
        """
        if not self.paragraphs:
            return ()
        query = _fold(query)
        scores = self._scores(query)
        for position, title in enumerate(self._titles):
            if title == query:
                scores[position] = float("inf")
        ranked = sorted(range(len(scores)), key=lambda position: -scores[position])
        return tuple(position for position in ranked[:k] if scores[position] > 0)


@dataclass(slots=True)
class SearchState:
    """
    What one episode did so far.

    Attributes:
        index ([`ParagraphIndex`]): the question's paragraphs; shared by all forks.
        pages (`tuple[int, ...]`): paragraphs found by the last search that found any.
        term (`str` or `None`): term of the last lookup in `pages`.
        results (`int`): how many sentences with `term` were shown.
        answer (`str` or `None`): argument of `finish`; `None` while the episode runs.
        searches (`int`), lookups (`int`), invalid (`int`): turns of each kind; `invalid` ones had no readable action.
    """

    index: ParagraphIndex
    pages: tuple[int, ...] = ()
    term: str | None = None
    results: int = 0
    answer: str | None = None
    searches: int = 0
    lookups: int = 0
    invalid: int = 0

    def fork(self) -> SearchState:
        """An independent copy that shares the index, the one field that is not immutable and never changes."""
        return dataclasses.replace(self)


class SearchEnvironment:
    """
    Answers search, lookup and finish actions over the paragraphs in the `context` column of a row.

    It never gives a reward: a reward function reads the answer from the final states, `environments[i].answer`.

    Args:
        k (`int`, *optional*, defaults to `1`):
            Paragraphs shown by a search.
        max_observation_chars (`int`, *optional*, defaults to `400`):
            Largest length of the text shown by an action, titles not counted. The paragraphs of one search share it.

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

    def __init__(self, k: int = 1, max_observation_chars: int = 400):
        if k < 1 or max_observation_chars < k:
            raise ValueError(f"Needs 1 <= k <= max_observation_chars, got {k} and {max_observation_chars}.")
        self.k = k
        self.max_observation_chars = max_observation_chars

    def reset(self, example: Mapping[str, Any]) -> SearchState:
        """Starts an episode for a row with a `context` column (see [`ParagraphIndex`])."""
        if "context" not in example:
            raise ValueError(f"The row has no `context` column, only: {', '.join(map(str, example))}.")
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
            observation = self._search(state, argument)
        elif name == "lookup":
            observation = self._lookup(state, argument)
        else:
            state.answer = argument
        state.invalid += name is None
        info = {"searches": state.searches, "lookups": state.lookups, "invalid_actions": state.invalid}
        if name == "finish":
            return StepResult(done=True, info=info)
        return StepResult(f"Observation: {observation}", info=info)

    def _search(self, state: SearchState, query: str) -> str:
        state.searches += 1
        pages = state.index.search(query, self.k)
        if not pages:
            return f"Nothing found for {_truncate(query, self.max_observation_chars)}. Try other words."
        state.pages, state.term, state.results = pages, None, 0
        limit = self.max_observation_chars // len(pages)
        found = (state.index.paragraphs[page] for page in pages)
        return "\n".join(f"{title}: {_truncate(' '.join(sentences), limit)}" for title, sentences in found)

    def _lookup(self, state: SearchState, term: str) -> str:
        state.lookups += 1
        if not state.pages:
            return "There is no page to look in yet. Search first."
        if state.term is None or _fold(state.term) != _fold(term):
            state.term, state.results = term, 0
        hits = [
            sentence
            for page in state.pages
            for sentence in state.index.paragraphs[page][1]
            if _fold(term) in _fold(sentence)
        ]
        if state.results >= len(hits):
            return "No more results."
        state.results += 1
        sentence = _truncate(hits[state.results - 1], self.max_observation_chars)
        return f"(Result {state.results} / {len(hits)}) {sentence}"


def search_env(
    k: int = 1, max_observation_chars: int = 400
) -> tuple[Callable[[Mapping[str, Any]], SearchState], Callable[[SearchState, str, Any], StepResult]]:
    """
    The two callbacks of a [`SearchEnvironment`], as [`TRACETrainer`] takes them.

    Args:
        k (`int`, *optional*, defaults to `1`):
            Paragraphs shown by a search.
        max_observation_chars (`int`, *optional*, defaults to `400`):
            Largest length of the text shown by an action.

    Returns:
        `tuple[Callable, Callable]`: `env_reset(example) -> state` and
        `env_step(state, action, messages) -> StepResult`.

    Example:

    ```python
    env_reset, env_step = search_env(k=1)
    trainer = TRACETrainer(..., env_reset=env_reset, env_step=env_step)
    ```
    """
    environment = SearchEnvironment(k=k, max_observation_chars=max_observation_chars)
    return environment.reset, environment.step
