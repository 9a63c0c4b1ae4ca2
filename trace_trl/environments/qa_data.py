"""
Questions of HotpotQA, 2WikiMultiHopQA and MuSiQue, as their owners publish them, in one form.

    HotpotQA            `_id` or `id`, `context` and `supporting_facts` as lists or, on the Hub, as columns
    2WikiMultiHopQA     the same; copies on the Hub may hold both as JSON text. Aliases are in a file of their own.
    MuSiQue             `paragraphs` with `title`, `paragraph_text` and `is_supporting`; `answer_aliases`

A row in that form can be kept by Arrow, and is what [`SearchEnvironment`] reads:

    {"id": "5a8b57f25542995d1e6f1371", "question": "...", "answer": "yes", "answers": ["yes"], "subset": "comparison",
     "context": {"title": [...], "sentences": [[...], ...]}, "supporting_titles": ["Ed Wood", "Scott Derrickson"]}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .loading import (
    DataError,
    Source,
    UniqueIds,
    check_fields,
    identifier,
    load_rows,
    optional,
    read_rows,
    text,
    text_list,
)
from .retrieval import clean, split_sentences


logger = logging.getLogger(__name__)


class _Wrong(ValueError):
    """What is wrong with a field; the caller knows the row."""

    def __init__(self, field: str, problem: str):
        super().__init__(problem)
        self.field = field


def load_questions(
    source: Source,
    split: str | None = None,
    config: str | None = None,
    need_context: bool = True,
    limit: int | None = None,
    aliases: Source | None = None,
) -> list[dict[str, Any]]:
    """
    Reads questions in the format of HotpotQA, 2WikiMultiHopQA or MuSiQue; which one is seen from the fields.

    MuSiQue's rows with `answerable: false` are left out: they are made from answerable ones, share their ids, and its
    authors score answers on the answerable rows only (MuSiQue-Ans).

    Args:
        source (`str` or `os.PathLike`):
            File, folder or Hub id, as for [`load_rows`].
        split (`str`, *optional*):
            Split of a folder or of a data set on the Hub.
        config (`str`, *optional*):
            Configuration of a data set on the Hub, such as `"distractor"`.
        need_context (`bool`, *optional*, defaults to `True`):
            Whether a row without paragraphs is refused. With `False`, for a search over a corpus, its `context` is
            empty.
        limit (`int`, *optional*):
            Reads no more than the first `limit` rows of the source.
        aliases (`str` or `os.PathLike`, *optional*):
            2WikiMultiHopQA's `id_aliases.json`: lines with `Q_id`, `aliases` and `demonyms`, found by a row's
            `answer_id`.

    Returns:
        `list[dict]`: rows with

        - `id` (`str`), `question` (`str`);
        - `answer` (`str`), and `answers` (`list[str]`), which are the answer and its aliases;
        - `subset` (`str`): HotpotQA's and 2WikiMultiHopQA's `type`, the beginning of MuSiQue's ids (`"2hop"`,
          `"3hop1"`, ...), or `""`;
        - `context` (`dict`): `title` (`list[str]`) and `sentences` (`list[list[str]]`), equally long;
        - `supporting_titles` (`list[str]`): titles of the paragraphs that the answer is from, each once, in the
          source's order. Titles are as pages show them: white space collapsed, HTML entities resolved.

    Raises:
        DataError: if something is wrong with a row.
    """
    known = _load_aliases(aliases) if aliases is not None else {}
    ids: UniqueIds | None = None
    questions = []
    skipped = 0
    for place, row in read_rows(source, split=split, config=config, limit=limit):
        if row.get("answerable") is False:
            skipped += 1
            continue
        id_field = "id" if "id" in row or "_id" not in row else "_id"
        check_fields(row, {id_field: identifier, "question": text, "answer": text}, source, place)
        check_fields(row, dict.fromkeys(("type", "answer_id"), optional(_maybe_empty)), source, place)
        ids = ids or UniqueIds(source, id_field)
        ids.add(str(row[id_field]), place)
        try:
            context, supporting = _read_context(row, need_context)
            names = [row["answer"], *_aliases_of(row), *known.get(row.get("answer_id"), ())]
        except _Wrong as error:
            raise DataError(str(error), source, place, error.field) from error
        questions.append(
            {
                "id": str(row[id_field]),
                "question": row["question"].strip(),
                "answer": row["answer"].strip(),
                "answers": list(dict.fromkeys(name.strip() for name in names if name.strip())),
                "subset": row.get("type") or _hops_of(row),
                "context": context,
                "supporting_titles": list(dict.fromkeys(supporting)),
            }
        )
    if skipped:
        logger.info("%s: left out %d rows that are marked as not answerable.", source, skipped)
    if not questions:
        raise DataError("all rows are marked as not answerable", source, field="answerable")
    return questions


def unique_paragraphs(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """
    The paragraphs of many questions, each once, as [`CorpusIndex.build`] takes them.

    Args:
        rows (`Iterable[Mapping]`):
            Rows of [`load_questions`].

    Yields:
        `tuple[str, list[str]]`: title and sentences, in the order they are first met.
    """
    seen = set()
    for row in rows:
        for title, sentences in zip(row["context"]["title"], row["context"]["sentences"], strict=True):
            key = (title, " ".join(sentences))
            if key not in seen:
                seen.add(key)
                yield title, sentences


def _maybe_empty(value: Any) -> str | None:
    return None if isinstance(value, str) else f"is not text but {value!r:.60}"


def _hops_of(row: Mapping[str, Any]) -> str:
    head, separator, _ = str(row.get("id", "")).partition("__")
    return head if separator and "paragraphs" in row else ""


def _load_aliases(source: Source) -> dict[Any, list[str]]:
    rows = load_rows(source, fields={"Q_id": text, "aliases": text_list, "demonyms": optional(text_list)})
    return {row["Q_id"]: [*row["aliases"], *(row.get("demonyms") or ())] for row in rows}


def _aliases_of(row: Mapping[str, Any]) -> list[str]:
    names = row.get("answer_aliases") or []
    problem = text_list(names)
    if problem is not None:
        raise _Wrong("answer_aliases", problem)
    return names


def _read_context(row: Mapping[str, Any], needed: bool) -> tuple[dict[str, list], list[str]]:
    """The paragraphs of a row as columns, and the titles of those that support the answer."""
    field = "paragraphs" if "paragraphs" in row else "context"
    if field == "paragraphs":
        titles, sentences, supporting = _read_paragraphs(row[field])
    else:
        titles, sentences = _read_pairs(row, field, "sentences")
        supporting, _ = _read_pairs(row, "supporting_facts", "sent_id")
    if needed and not titles:
        raise _Wrong(field, "has no paragraphs; with need_context=False a corpus is searched instead")
    for number, paragraph in enumerate(sentences, start=1):
        problem = text_list(paragraph)
        if problem is not None:
            raise _Wrong(field, f"the list of sentences of paragraph {number} {problem}")
    if titles and not any(sentence.strip() for paragraph in sentences for sentence in paragraph):
        raise _Wrong(field, "has paragraphs without any text")
    return {"title": titles, "sentences": sentences}, supporting


def _unpack(row: Mapping[str, Any], field: str) -> Any:
    """A list that copies on the Hub may hold as JSON text, since Arrow takes no list of a text and a list."""
    value = row.get(field)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _Wrong(field, "is text but no valid JSON") from error


def _read_pairs(row: Mapping[str, Any], field: str, second: str) -> tuple[list[str], list[Any]]:
    """`[[title, x], ...]` or `{"title": [...], second: [...]}` as columns; two empty ones where there is nothing."""
    value = _unpack(row, field)
    try:
        if isinstance(value, Mapping):
            pairs = list(zip(value["title"], value[second], strict=True))
        else:
            pairs = [(title, other) for title, other in value or ()]
    except (KeyError, TypeError, ValueError) as error:
        raise _Wrong(
            field, f"must be [[title, ..], ...], or {{'title': [...], '{second}': [...]}} with lists of one length"
        ) from error
    for title, _ in pairs:
        if not isinstance(title, str):
            raise _Wrong(field, f"holds {title!r:.60} where a title is needed")
    return [clean(title) for title, _ in pairs], [other for _, other in pairs]


def _read_paragraphs(paragraphs: Any) -> tuple[list[str], list[list[str]], list[str]]:
    """Titles, sentences and supporting titles of MuSiQue's paragraphs."""
    if not isinstance(paragraphs, list | None):
        raise _Wrong("paragraphs", f"is not a list but {paragraphs!r:.60}")
    titles, sentences, supporting = [], [], []
    for number, paragraph in enumerate(paragraphs or (), start=1):
        for key in ("title", "paragraph_text"):
            if not isinstance(paragraph, Mapping) or not isinstance(paragraph.get(key), str):
                raise _Wrong("paragraphs", f"paragraph {number} has no text `{key}`")
        titles.append(clean(paragraph["title"]))
        sentences.append(split_sentences(paragraph["paragraph_text"]))
        if paragraph.get("is_supporting"):
            supporting.append(titles[-1])
    return titles, sentences, supporting
