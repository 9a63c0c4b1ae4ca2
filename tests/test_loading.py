"""Rows from files and from `datasets`, and that whatever is wrong with them is said with file, row and field."""

import builtins
import gzip
import json
import pickle

import pytest

from trace_trl.environments.loading import DataError, load_rows, optional, read_rows, text, text_list


ROWS = [{"id": "a", "question": "Où?", "answer": "there"}, {"id": "b", "question": "When?", "answer": "then"}]
FIELDS = {"question": text, "answer": text}


def lines_of(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(path, content):
    path.write_bytes(content)
    return path


def write_parquet(path, columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


def refused(source, *parts, **kwargs):
    """The error of loading `source`, with all parts in its message."""
    with pytest.raises(DataError) as caught:
        load_rows(source, **{"fields": FIELDS, "id_field": "id", **kwargs})
    message = str(caught.value)
    for part in (str(source), *parts):
        assert part in message, message
    assert message.endswith(".") and "\n" not in message
    return caught.value


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", lines_of(ROWS)),
        ("rows.ndjson", b"\xef\xbb\xbf" + lines_of(ROWS).replace(b"\n", b"\r\n\n")),
        ("rows.jsonl.gz", gzip.compress(lines_of(ROWS))),
        # A browser may unpack a download, and keep its name; the reverse happens, too.
        ("rows.jsonl.gz", lines_of(ROWS)),
        ("rows.JSONL", gzip.compress(lines_of(ROWS))),
        ("rows.json", json.dumps(ROWS).encode()),
        ("rows.json", json.dumps({"version": "1", "data": ROWS}, indent=1).encode()),
        ("rows.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        ("rows.json", lines_of(ROWS)),
        ("rows.json", lines_of([{"data": [], **ROWS[0]}, ROWS[1]])),
    ],
)
def test_text_files(tmp_path, name, content):
    rows = load_rows(write(tmp_path / name, content), fields=FIELDS, id_field="id")
    assert [{**row, "data": []} for row in rows] == [{**row, "data": []} for row in ROWS]
    assert load_rows(str(tmp_path / name), limit=1) == rows[:1]


def test_parquet(tmp_path):
    columns = {key: [row[key] for row in ROWS] for key in ROWS[0]}
    path = write_parquet(tmp_path / "rows.parquet", columns)
    assert load_rows(path, fields=FIELDS, id_field="id") == ROWS
    assert load_rows(path, limit=1) == ROWS[:1]
    many = write_parquet(tmp_path / "many.parquet", {"answer": ["x"] * 2500 + [""]})
    error = refused(many, "row 2501", "field `answer`", "is empty", fields={"answer": text}, id_field=None)
    assert (error.place, error.field) == ("row 2501", "answer")


def test_folders(tmp_path):
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "two")
    assert load_rows(tmp_path / "one", fields=FIELDS, id_field="id") == ROWS
    assert load_rows(tmp_path / "two", split="test") == ROWS[1:]
    refused(tmp_path / "two", "`split`", "train, test")
    refused(tmp_path / "two", "no split 'dev'", split="dev")
    refused(tmp_path / "one", "row 1", "field `level`", fields={"level": text})
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "can't be loaded")


def test_data_sets_of_the_hub(monkeypatch):
    import datasets

    data = datasets.Dataset.from_list([*ROWS, {"id": "a", "question": "?", "answer": "!"}])
    asked = []

    def load_dataset(name, config=None, split=None):
        asked.append((name, config, split))
        if name == "owner/absent":
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'owner/absent' doesn't exist on the Hub")
        return data if split else datasets.DatasetDict(train=data)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows("owner/name", fields=FIELDS, config="main", split="train[:2]", limit=2) == ROWS
    assert len(load_rows("owner/name")) == 3
    assert asked == [("owner/name", "main", "train[:2]"), ("owner/name", None, None)]
    refused("owner/name", "row 3", "field `id`", "'a'", "row 1")
    refused("owner/absent", "doesn't exist")


def test_what_looks_like_a_file_is_not_looked_up_on_the_hub(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("asked the Hub"))
    for source in ("rows.jsonl", "owner/rows.json.gz", "/no/such/folder", tmp_path / "absent", "../rows", "a b"):
        refused(source, "no such file or folder")
    refused(write(tmp_path / "rows.csv", b"a,b\n"), "name it", ".jsonl")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ({"id": "c", "question": "?"}, ["line 3", "field `answer`", "is missing; the row has id, question"]),
        ({"id": "c", "question": "?", "answer": ""}, ["line 3", "field `answer`", "is empty"]),
        ({"id": "c", "question": " \n", "answer": "!"}, ["line 3", "field `question`", "is empty"]),
        ({"id": "c", "question": "?", "answer": None}, ["line 3", "field `answer`", "is not text but None"]),
        ({"id": "c", "question": ["?"], "answer": "!"}, ["line 3", "field `question`", "is not text but ['?']"]),
        ({"id": "a", "question": "?", "answer": "!"}, ["line 3", "field `id`", "'a' is also the id of line 1"]),
        ({"id": None, "question": "?", "answer": "!"}, ["line 3", "field `id`", "None"]),
        ({"id": [1], "question": "?", "answer": "!"}, ["line 3", "field `id`", "[1]"]),
        ({"question": "?", "answer": "!"}, ["line 3", "field `id`", "is missing"]),
        ({}, ["line 3", "field `question`", "no fields"]),
        (["?", "!"], ["line 3", "no object"]),
        ("text", ["line 3", "no object"]),
        (b'{"id": "c", "answer": "Al\xfb"}', ["line 3", "field `answer`", "0xfb", "UTF-8"]),
        (b'{"id": "c", "answer": "there', ["line 3", "no valid JSON"]),
        (b'{"id": "c"} {"id": "d"}', ["line 3", "no valid JSON", "Extra data"]),
        (b'{"id": "c", "score": NaN}', ["line 3", "NaN"]),
        (b'{"id": "c", "score": -Infinity}', ["line 3", "-Infinity"]),
        (b'{"id": "c", "answer": "\\ud83d"}', ["line 3", "surrogate"]),
        (b'{"id": ' + b"[" * 200_000, ["line 3", "no valid JSON"]),
        (b'{"id": ' + b"1" * 10_000 + b"}", ["line 3", "no valid JSON"]),
    ],
)
def test_bad_lines(tmp_path, line, parts):
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    refused(write(tmp_path / "rows.jsonl", lines_of(ROWS) + line + b"\n"), *parts)
    refused(write(tmp_path / "rows.jsonl.gz", gzip.compress(lines_of(ROWS) + line)), *parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (json.dumps([*ROWS, {"id": "c", "question": "?"}]).encode(), ["row 3", "field `answer`", "is missing"]),
        (json.dumps([*ROWS, ROWS[0]]).encode(), ["row 3", "field `id`", "row 1"]),
        (json.dumps([*ROWS, 7]).encode(), ["row 3", "no object"]),
        (json.dumps({"rows": ROWS}).encode(), ['{"data": [...]}']),
        (b'[\n {"id": "a",\n  "answer": "Al\xfb"}]', ["line 3", "field `answer`", "UTF-8"]),
        (b'[\n {"id": "a",\n  "answer" "b"}]', ["line 3", "no valid JSON"]),
        (b"[]", ["no rows"]),
        (b"  \n", ["no rows"]),
    ],
)
def test_bad_json_files(tmp_path, content, parts):
    refused(write(tmp_path / "rows.json", content), *parts)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.parquet"])
def test_empty_and_damaged_files(tmp_path, name):
    path = write(tmp_path / name, b"")
    refused(path, "is empty")
    if name != "rows.parquet":
        refused(write(path, gzip.compress(b"")), "no rows")
        whole = gzip.compress(lines_of(ROWS * 1000))
        refused(write(path, whole[:-20]), "gzip file is cut off", fields={}, id_field=None)
        refused(write(path, whole[:60] + b"\xff" * 40 + whole[100:]), "gzip file is cut off or damaged")
    else:
        refused(write(path, b"PAR1 and so on"), "cut off, damaged or no parquet")
        whole = write_parquet(path, {"id": ["a"]}).read_bytes()
        refused(write(path, whole[:-9]), "cut off, damaged or no parquet")
        refused(write_parquet(path, {"id": []}), "no rows")


def test_broken_utf8_in_parquet(tmp_path):
    import pyarrow

    answers = pyarrow.array([b"fine", b"Al\xfb"]).view(pyarrow.string())
    path = write_parquet(tmp_path / "rows.parquet", {"id": ["a", "b"], "answer": answers})
    refused(path, "row 2", "field `answer`", "UTF-8")


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", lines_of(ROWS))

    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", denied)
    refused(path, "Permission denied")


def test_checks():
    assert optional(text)(None) is None and optional(text)("") == "is empty"
    assert text_list(["a", ""]) is None and text_list([]) is None
    assert "not a list" in text_list("ab") and "7" in text_list(["a", 7])
    assert len(text(["x" * 1000])) < 100


def test_limits_and_optional_fields(tmp_path):
    path = write(tmp_path / "rows.jsonl", lines_of(ROWS) + b"broken\n")
    # Rows behind the limit are not read
    assert load_rows(path, fields={"level": optional(text)}, limit=2) == ROWS
    with pytest.raises(ValueError, match="`limit` is 0"):
        load_rows(path, limit=0)


def test_rows_are_read_as_they_are_asked_for(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", lines_of(ROWS) + b"broken\n")
    rows = read_rows(path)
    monkeypatch.setattr(builtins, "open", None)
    assert [next(rows), next(rows)] == [("line 1", ROWS[0]), ("line 2", ROWS[1])]
    with pytest.raises(DataError, match="line 3"):
        next(rows)


def test_errors_are_pickled():
    error = DataError("is empty", "rows.jsonl", "line 7", "answer")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "rows.jsonl, line 7, field `answer`: is empty."
