"""
Rows of a data set from files or from the Hub, checked field by field while they are read.

    load_rows("train.jsonl.gz", fields={"question": text, "level": optional(text)}, id_field="id")

    .jsonl .ndjson      one object per line
    .json               a list of objects, {"data": [...]}, or one object per line
    .parquet            read in batches
    folder              as `datasets.save_to_disk` leaves it, or with data files for `datasets.load_dataset`
    owner/name          a data set on the Hub

Text files may be gzipped, whatever their name. Whatever is wrong with the data is a [`DataError`]: it is found before
training starts, and says where, as in "train.jsonl, line 7, field `answer`: is empty."
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any


logger = logging.getLogger(__name__)

Check = Callable[[Any], "str | None"]
Source = str | os.PathLike

_LINES = (".jsonl", ".ndjson")
_SUFFIXES = (*_LINES, ".json", ".parquet")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_BATCH = 1024  # rows of a parquet file held in memory at a time


class DataError(ValueError):
    """
    Something is wrong with a data set.

    Args:
        problem (`str`):
            What is wrong and what to change, such as `"is empty"`.
        source (`str` or `os.PathLike`):
            File, folder or Hub id.
        place (`str`, *optional*):
            `"line 7"` of a file of JSON lines, `"row 7"` of any other; both count from 1.
        field (`str`, *optional*):
            Field of the row.
    """

    def __init__(self, problem: str, source: Source = "", place: str | None = None, field: str | None = None):
        where = [os.fspath(source), place, field and f"field `{field}`"]
        super().__init__(problem, source, place, field)
        self.source, self.place, self.field = source, place, field
        # What other libraries say may have several lines
        self.message = f"{', '.join(part for part in where if part)}: {' '.join(problem.split()).rstrip('.')}."

    def __str__(self) -> str:
        return self.message


# Checks of a field: `None`, or what is wrong with the value


def text(value: Any) -> str | None:
    """Text that is not blank."""
    if not isinstance(value, str):
        return f"is not text but {_show(value)}"
    return None if value.strip() else "is empty"


def identifier(value: Any) -> str | None:
    """Text that is not blank, or a whole number."""
    return None if type(value) is int else text(value)


def text_list(value: Any) -> str | None:
    """A list of texts; it may be empty, and so may they."""
    if not isinstance(value, list):
        return f"is not a list but {_show(value)}"
    return next((f"holds {_show(item)} where text is needed" for item in value if not isinstance(item, str)), None)


class optional:
    """
    A check of a field that may be missing or `None`.

    Args:
        check (`Callable`):
            Check of a value that is there.
    """

    def __init__(self, check: Check):
        self.check = check

    def __call__(self, value: Any) -> str | None:
        return None if value is None else self.check(value)


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


def check_fields(row: Mapping[str, Any], fields: Mapping[str, Check], source: Source, place: str) -> None:
    """
    Checks the fields of a row.

    Args:
        row (`Mapping`):
            The row.
        fields (`Mapping[str, Callable]`):
            Check of each field; it returns `None` or what is wrong with the value. A field that is missing is refused
            unless its check is [`optional`].
        source (`str` or `os.PathLike`), place (`str`):
            Where the row is from, for the error.

    Raises:
        DataError: for the first field that is missing or wrong.
    """
    for name, check in fields.items():
        if name not in row and not isinstance(check, optional):
            raise DataError(f"is missing; the row has {', '.join(map(str, row)) or 'no fields'}", source, place, name)
        problem = check(row.get(name))
        if problem is not None:
            raise DataError(problem, source, place, name)


class UniqueIds:
    """
    Refuses an id that came before.

    Args:
        source (`str` or `os.PathLike`):
            Where the rows are from.
        field (`str`):
            The field that holds the ids.
    """

    def __init__(self, source: Source, field: str):
        self.source = source
        self.field = field
        self._places: dict[Any, str] = {}

    def add(self, value: Any, place: str) -> None:
        problem = identifier(value)
        if problem is None and value in self._places:
            problem = f"{_show(value)} is also the id of {self._places[value]}: give each row an id of its own"
        if problem is not None:
            raise DataError(problem, self.source, place, self.field)
        self._places[value] = place


def load_rows(
    source: Source,
    fields: Mapping[str, Check] | None = None,
    id_field: str | None = None,
    split: str | None = None,
    config: str | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """
    Reads and checks the rows of a data set.

    Args:
        source (`str` or `os.PathLike`):
            File, folder or Hub id (see the module's documentation).
        fields (`Mapping[str, Callable]`, *optional*):
            Checks as in [`check_fields`].
        id_field (`str`, *optional*):
            Field with ids, each of which must be there once.
        split (`str`, *optional*):
            Split of a folder or of a data set on the Hub; can be left out if there is only one.
        config (`str`, *optional*):
            Configuration of a data set on the Hub.
        limit (`int`, *optional*):
            Reads no more than the first `limit` rows.

    Returns:
        `list[dict]`: the rows.

    Raises:
        DataError: if there is nothing to read, or something is wrong with a row.
    """
    ids = UniqueIds(source, id_field) if id_field is not None else None
    rows = []
    for place, row in read_rows(source, split=split, config=config, limit=limit):
        check_fields(row, fields or {}, source, place)
        if ids is not None:
            check_fields(row, {ids.field: identifier}, source, place)
            ids.add(row[ids.field], place)
        rows.append(row)
    return rows


def read_rows(
    source: Source, split: str | None = None, config: str | None = None, limit: int | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """
    Reads the rows of a data set one by one.

    Args:
        source (`str` or `os.PathLike`), split (`str`), config (`str`), limit (`int`):
            As for [`load_rows`].

    Yields:
        `tuple[str, dict]`: the place of a row, such as `"line 7"`, and the row.

    Raises:
        DataError: if there is nothing to read, or a row can't be read or is no object.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` is {limit}: give the number of rows to read, or None for all.")
    path = Path(source)
    kind = _kind_of(path)
    if path.is_file():
        if kind is None:
            raise DataError(
                f"is of no kind that can be read: name it {', '.join(_SUFFIXES)} after what it holds", path
            )
        rows = _read_file(path, kind)
    elif path.is_dir():
        rows = _read_dataset(source, split, config)
    elif kind is not None or not isinstance(source, str) or not _HUB_ID.fullmatch(source):
        raise DataError("there is no such file or folder: check the path", source)
    else:
        rows = _read_dataset(source, split, config)
    count = 0
    for place, row in islice(rows, limit):
        if not isinstance(row, dict):
            raise DataError(f"is no object with named fields but {_show(row)}", source, place)
        count += 1
        yield place, row
    if not count:
        raise DataError("there are no rows in it", source)


def _kind_of(path: Path) -> str | None:
    name = path.name.lower().removesuffix(".gz")
    return next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)


def _read_file(path: Path, kind: str) -> Iterator[tuple[str, Any]]:
    try:
        if path.stat().st_size == 0:
            raise DataError("the file is empty", path)
        if kind == ".parquet":
            yield from _read_parquet(path)
            return
        with _open(path) as file:
            yield from _read_lines(path, file) if kind in _LINES else _read_json(path, file)
    except OSError as error:  # of the file itself: no right to read it, a broken disk
        raise DataError(f"the file can't be read: {error}", path) from error


@contextmanager
def _open(path: Path) -> Iterator[io.BufferedIOBase]:
    """The file's bytes, unpacked if it is gzipped. The name does not tell: downloads lose or gain a `.gz`."""
    with path.open("rb") as file:
        if file.peek(2)[:2] != b"\x1f\x8b":
            yield file
            return
        with gzip.open(file) as unpacked:
            try:
                yield unpacked  # type: ignore[misc]
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(f"the gzip file is cut off or damaged: get it anew ({error})", path) from error


def _read_lines(path: Path, file: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # written by some editors
        if line.strip():
            yield f"line {number}", _parse(line, path, f"line {number}")


def _read_json(path: Path, file: io.BufferedIOBase) -> Iterator[tuple[str, Any]]:
    data = file.read().removeprefix(b"\xef\xbb\xbf")
    if _are_lines(data):
        yield from _read_lines(path, io.BytesIO(data))
        return
    if not data.strip():
        return
    content = _parse(data, path, None)
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list):
        raise DataError('must hold a list of rows, or {"data": [...]}', path)
    for number, row in enumerate(content, start=1):
        yield f"row {number}", row


def _are_lines(data: bytes) -> bool:
    """Whether a `.json` file holds JSON lines, as some do."""
    first, _, rest = data.lstrip().partition(b"\n")
    if not first.startswith(b"{") or not rest.strip():
        return False
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _parse(data: bytes, path: Path, place: str | None) -> Any:
    try:
        decoded = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        place = place or f"line {before.count(10) + 1}"
        problem = f"byte {data[error.start]:#04x} is not UTF-8: save the file as UTF-8"
        raise DataError(problem, path, place, _field_at(before)) from error

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON value, write null or leave the field out")

    try:
        value = json.loads(decoded, parse_constant=refuse)
    except json.JSONDecodeError as error:
        place = place or f"line {error.lineno}"
        raise DataError(f"is no valid JSON: {error.msg} at character {error.colno}", path, place) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"is no valid JSON: {error}", path, place) from error
    if "\\ud" in decoded or "\\uD" in decoded:
        try:  # half of a surrogate pair: legal JSON, but no text that Arrow or a tokenizer takes
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            problem = "holds half of a character (a lone surrogate, \\ud800 to \\udfff): remove it"
            raise DataError(problem, path, place) from error
    return value


def _field_at(data: bytes) -> str | None:
    """The name before the last colon in the beginning of a JSON object: the field that a broken byte is in."""
    names = re.findall(rb'[{,]\s*"((?:[^"\\]|\\.)*)"\s*:', data)
    return names[-1].decode("utf-8", "replace") if names else None


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH):
                try:
                    rows = batch.to_pylist()
                except UnicodeDecodeError as error:
                    raise _broken_text(path, batch, number) from error
                for row in rows:
                    number += 1
                    yield f"row {number}", row
    except pyarrow.ArrowException as error:
        raise DataError(f"is cut off, damaged or no parquet file: get it anew ({error})", path) from error


def _broken_text(path: Path, batch: Any, before: int) -> DataError:
    for position in range(batch.num_rows):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column[position].as_py()
            except UnicodeDecodeError:
                return DataError("is not UTF-8: write the file anew", path, f"row {before + position + 1}", name)
    return DataError("is not UTF-8: write the file anew", path, f"after row {before}")


def _read_dataset(source: Source, split: str | None, config: str | None) -> Iterator[tuple[str, Any]]:
    import datasets

    name = os.fspath(source)
    folder = Path(source)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
            dataset, saved = datasets.load_from_disk(name), True
        else:
            # A slice, such as `train[:100]`, is a split here
            dataset, saved = datasets.load_dataset(name, config, split=split), False
    except Exception as error:  # of many kinds: network, gated, misspelt, a builder's own
        kind = "folder" if folder.is_dir() else "data set of the Hub"
        raise DataError(f"the {kind} can't be loaded: {error}", name) from error
    if isinstance(dataset, Mapping):
        if split is None and len(dataset) == 1:
            (split,) = dataset
        if split not in dataset:
            had = "give `split`" if split is None else f"there is no split {split!r}"
            raise DataError(f"{had}, one of {', '.join(map(str, dataset))}", name)
        dataset = dataset[split]
    elif saved and split is not None and dataset.split is not None and str(dataset.split) != split:
        raise DataError(f"holds the split {str(dataset.split)!r}, not {split!r}", name)
    number = 0
    try:
        for row in dataset:
            number += 1
            yield f"row {number}", row
    except UnicodeDecodeError as error:
        raise DataError("is not UTF-8: write the data set anew", name, f"row {number + 1}") from error
