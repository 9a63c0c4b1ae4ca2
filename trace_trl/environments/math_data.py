"""Problems of GSM8K, MATH-500, DeepScaleR, and of any data set with a problem and an answer, as rows of one form."""

from __future__ import annotations

import logging
import re
from typing import Any

from .loading import DataError, Source, UniqueIds, check_fields, identifier, optional, read_rows, text


logger = logging.getLogger(__name__)

_IDS = ("id", "unique_id")
_FINAL = re.compile(r"####\s*(.*?)\s*\Z", re.DOTALL)  # what stands before it in GSM8K's answers is the way to it
_CALCULATION = re.compile(r"<<[^<>]*>>")


def load_problems(
    source: Source,
    split: str | None = None,
    config: str | None = None,
    limit: int | None = None,
    skip_faulty: bool = False,
) -> list[dict[str, Any]]:
    """
    Reads problems; the fields tell which data set they are of.

    Args:
        source (`str` or `os.PathLike`):
            File, folder or Hub id, as for [`load_rows`].
        split (`str`, *optional*):
            Split of a folder or of a data set on the Hub.
        config (`str`, *optional*):
            Configuration of a data set on the Hub, `"main"` for GSM8K.
        limit (`int`, *optional*):
            Reads no more than the first `limit` rows of the source.
        skip_faulty (`bool`, *optional*, defaults to `False`):
            Leaves rows out that lack a problem, an answer or an id of their own, with a warning, where they end the
            reading otherwise. DeepScaleR has rows with an empty answer.

    Returns:
        `list[dict]`: rows with

        - `id` (`str`): the field `id` or `unique_id`, and otherwise the row's number, from 0;
        - `problem` (`str`): the field `problem` or `question`;
        - `answer` (`str`): the final answer, LaTeX or plain; of GSM8K what follows `####`;
        - `subset` (`str`): MATH's `subject`, the number of calculations of GSM8K (`"2 steps"`), or `""`.

    Raises:
        DataError: if something is wrong with a row.
    """
    ids: UniqueIds | None = None
    problems = []
    faulty = []
    for number, (place, row) in enumerate(read_rows(source, split=split, config=config, limit=limit)):
        try:
            problem = "problem" if "problem" in row else "question"
            check_fields(row, {problem: text, "answer": _answer, "subject": optional(text)}, source, place)
            id_field = next((name for name in _IDS if name in row), None)
            if id_field is not None:
                check_fields(row, {id_field: identifier}, source, place)
                if ids is None or ids.field != id_field:
                    ids = UniqueIds(source, id_field)
                ids.add(row[id_field], place)
        except DataError as error:
            if not skip_faulty:
                raise
            faulty.append(str(error))
            continue
        answer = str(row["answer"])
        final = _FINAL.search(answer)
        steps = len(_CALCULATION.findall(answer)) if final else 0
        problems.append(
            {
                "id": str(number if id_field is None else row[id_field]),
                "problem": row[problem].strip(),
                "answer": final.group(1) if final else answer.strip(),
                "subset": row.get("subject") or (f"{steps} step{'s' * (steps != 1)}" if final else ""),
            }
        )
    if faulty:
        logger.warning(f"{len(faulty)} rows are left out, the first of them for this: {faulty[0]}")
    if not problems:
        raise DataError("no row of it can be used", source)
    return problems


def _answer(value: Any) -> str | None:
    """Text, or a number as some copies of AIME have it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return None
    problem = text(value)
    if problem is None and (final := _FINAL.search(value)) and not final.group(1):
        return "has nothing behind ####"
    return problem
