"""Questions of HotpotQA, 2WikiMultiHopQA and MuSiQue in the forms their owners publish, in one schema."""

import copy
import gzip
import json
from pathlib import Path

import pytest

from trace_trl.environments.loading import DataError
from trace_trl.environments.qa_data import load_questions, unique_paragraphs
from trace_trl.environments.search import SearchEnvironment


DATA = Path(__file__).resolve().parents[1] / "examples" / "data"
HOTPOTQA = DATA / "hotpotqa_dev_distractor_500.jsonl.gz"
TWO_WIKI = DATA / "2wikimultihopqa_dev_164.jsonl.gz"

CONTEXT = [["Simon &amp; Simon", ["It is a series.", " It ran for years."]], ["Alû", ["A demon."]]]
FACTS = [["Alû", 0], ["Simon &amp; Simon", 1], ["Alû", 0]]
ROW = {
    "_id": "5a8b",
    "question": " Which? ",
    "answer": "yes",
    "type": "comparison",
    "level": "hard",
    "supporting_facts": FACTS,
    "context": CONTEXT,
}
EXPECTED = {
    "id": "5a8b",
    "question": "Which?",
    "answer": "yes",
    "answers": ["yes"],
    "subset": "comparison",
    "context": {
        "title": ["Simon & Simon", "Alû"],
        "sentences": [["It is a series.", " It ran for years."], ["A demon."]],
    },
    "supporting_titles": ["Alû", "Simon & Simon"],
}
MUSIQUE = {
    "id": "3hop1__140786_2053_5289",
    "paragraphs": [
        {"idx": 0, "title": "Green", "paragraph_text": "Green is an album. It sold well!", "is_supporting": True},
        {"idx": 1, "title": "Green", "paragraph_text": "Green is a colour.", "is_supporting": False},
        {"idx": 2, "title": "Miller", "paragraph_text": "Steve Miller sang.", "is_supporting": True},
    ],
    "question": "Who?",
    "question_decomposition": [{"id": 1, "question": "?", "answer": "!", "paragraph_support_idx": 0}],
    "answer": "Steve Miller",
    "answer_aliases": ["Miller", "Steve Miller", ""],
    "answerable": True,
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def refused(path, *parts, **kwargs):
    with pytest.raises(DataError) as caught:
        load_questions(path, **kwargs)
    for part in (str(path), *parts):
        assert part in str(caught.value), caught.value


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # The Hub's form: columns instead of pairs
        {
            "context": {"title": [title for title, _ in CONTEXT], "sentences": [s for _, s in CONTEXT]},
            "supporting_facts": {"title": [title for title, _ in FACTS], "sent_id": [0, 1, 0]},
        },
        # Copies of 2WikiMultiHopQA on the Hub: JSON text
        {"context": json.dumps(CONTEXT), "supporting_facts": json.dumps(FACTS), "evidences": "[]"},
    ],
)
def test_the_forms_of_hotpotqa_and_2wikimultihopqa(tmp_path, changes):
    row = {**ROW, **changes}
    assert load_questions(write(tmp_path / "rows.jsonl", row)) == [EXPECTED]
    row["id"] = row.pop("_id")
    assert load_questions(write(tmp_path / "rows.jsonl", row)) == [EXPECTED]
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    assert load_questions(tmp_path / "rows.json") == [EXPECTED]


def test_forms_that_arrow_keeps(tmp_path):
    import datasets

    columns = {
        "context": {"title": [title for title, _ in CONTEXT], "sentences": [s for _, s in CONTEXT]},
        "supporting_facts": {"title": [title for title, _ in FACTS], "sent_id": [0, 1, 0]},
    }
    data = datasets.Dataset.from_list([{**ROW, **columns}])
    data.save_to_disk(tmp_path / "hotpotqa")
    data.to_parquet(tmp_path / "hotpotqa.parquet")
    assert load_questions(tmp_path / "hotpotqa") == load_questions(tmp_path / "hotpotqa.parquet") == [EXPECTED]
    data = datasets.Dataset.from_list([MUSIQUE])
    data.to_parquet(tmp_path / "musique.parquet")
    assert load_questions(tmp_path / "musique.parquet") == load_questions(write(tmp_path / "rows.jsonl", MUSIQUE))


def test_musique(tmp_path):
    unanswerable = {**copy.deepcopy(MUSIQUE), "answerable": False}
    (row,) = load_questions(write(tmp_path / "rows.jsonl", MUSIQUE, unanswerable))
    assert row == {
        "id": "3hop1__140786_2053_5289",
        "question": "Who?",
        "answer": "Steve Miller",
        "answers": ["Steve Miller", "Miller"],
        "subset": "3hop1",
        "context": {
            "title": ["Green", "Green", "Miller"],
            "sentences": [["Green is an album.", "It sold well!"], ["Green is a colour."], ["Steve Miller sang."]],
        },
        "supporting_titles": ["Green", "Miller"],
    }
    refused(write(tmp_path / "rows.jsonl", unanswerable), "answerable")


def test_aliases_of_2wikimultihopqa(tmp_path):
    # As its owners publish them: lines, in a file named .json
    aliases = write(
        tmp_path / "id_aliases.json",
        {"Q_id": "Q1", "aliases": ["United States", "US"], "demonyms": ["American"]},
        {"Q_id": "Q2", "aliases": [], "demonyms": []},
    )
    rows = [{**ROW, "_id": str(number), "answer": "USA", "answer_id": f"Q{number}"} for number in (1, 2, 3)]
    rows[2]["answer_id"] = None
    questions = load_questions(write(tmp_path / "rows.jsonl", *rows), aliases=aliases)
    assert [row["answers"] for row in questions] == [["USA", "United States", "US", "American"], ["USA"], ["USA"]]
    with pytest.raises(DataError, match=r"bad\.jsonl, line 1, field `aliases`"):
        load_questions(tmp_path / "rows.jsonl", aliases=write(tmp_path / "bad.jsonl", {"Q_id": "Q1", "aliases": "US"}))


@pytest.mark.parametrize("path", [HOTPOTQA, TWO_WIKI])
def test_bundled_rows_are_loaded_and_can_be_searched(path):
    import datasets

    rows = load_questions(path)
    assert len(rows) == (500 if path == HOTPOTQA else 164)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        original = [json.loads(line) for line in lines]
    for row, first in zip(rows, original, strict=True):
        assert row["subset"] == first["type"] and row["answers"] == [first["answer"].strip()]
        assert len(row["context"]["title"]) == len(first["context"])
        assert row["supporting_titles"] and set(row["supporting_titles"]) <= set(row["context"]["title"])
    # One schema, and back
    assert datasets.Dataset.from_list(rows)[0] == rows[0]
    environment = SearchEnvironment(k=1)
    state = environment.reset(rows[0])
    title = rows[0]["supporting_titles"][0]
    assert environment.step(state, f"Action: search[{title}]").observation.startswith(f"Observation: {title}: ")


def test_the_licence_of_the_second_file_lies_beside_it():
    text = (DATA / "README.md").read_text(encoding="utf-8")
    for part in (TWO_WIKI.name, "Apache", "Ho", "Xanh", "COLING 2020", "Sugawara", "Aizawa"):
        assert part in text


def test_rows_without_paragraphs(tmp_path):
    row = {key: value for key, value in ROW.items() if key not in ("context", "supporting_facts")}
    (found,) = load_questions(write(tmp_path / "rows.jsonl", row), need_context=False)
    assert found["context"] == {"title": [], "sentences": []} and found["supporting_titles"] == []
    (found,) = load_questions(write(tmp_path / "rows.jsonl", {**MUSIQUE, "paragraphs": []}), need_context=False)
    assert found["context"] == {"title": [], "sentences": []}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"answer": ...}, ["line 2", "field `answer`", "is missing"]),
        ({"answer": ""}, ["line 2", "field `answer`", "is empty"]),
        ({"answer": None}, ["line 2", "field `answer`"]),
        ({"question": 3}, ["line 2", "field `question`"]),
        ({"_id": ...}, ["line 2", "field `id`", "is missing"]),
        ({"_id": "5a8b"}, ["line 2", "field `_id`", "'5a8b' is also the id of line 1"]),
        ({"type": 3}, ["line 2", "field `type`"]),
        ({"context": ...}, ["line 2", "field `context`", "no paragraphs", "need_context=False"]),
        ({"context": []}, ["line 2", "field `context`", "no paragraphs"]),
        ({"context": None}, ["line 2", "field `context`", "no paragraphs"]),
        ({"context": {"title": [], "sentences": []}}, ["line 2", "field `context`", "no paragraphs"]),
        ({"context": [["A", []], ["B", [" "]]]}, ["line 2", "field `context`", "without any text"]),
        ({"context": [["A"]]}, ["line 2", "field `context`", "must be"]),
        ({"context": 3}, ["line 2", "field `context`", "must be"]),
        ({"context": "[[broken"}, ["line 2", "field `context`", "JSON"]),
        ({"context": [["A", "text"]]}, ["line 2", "field `context`", "paragraph 1", "is not a list"]),
        ({"context": [["A", ["a"]], ["B", [None]]]}, ["line 2", "field `context`", "paragraph 2", "None"]),
        ({"context": [[None, ["a"]]]}, ["line 2", "field `context`", "title"]),
        ({"context": {"title": ["A"], "sentences": []}}, ["line 2", "field `context`", "one length"]),
        ({"supporting_facts": [["A"]]}, ["line 2", "field `supporting_facts`", "must be"]),
        ({"paragraphs": []}, ["line 2", "field `paragraphs`", "no paragraphs"]),
        ({"paragraphs": {"a": 1}}, ["line 2", "field `paragraphs`", "not a list"]),
        ({"paragraphs": [{"title": "A"}]}, ["line 2", "field `paragraphs`", "paragraph 1", "`paragraph_text`"]),
        ({"paragraphs": ["A"]}, ["line 2", "field `paragraphs`", "paragraph 1", "`title`"]),
        ({"answer_aliases": "US"}, ["line 2", "field `answer_aliases`", "not a list"]),
        ({"answer_aliases": [1]}, ["line 2", "field `answer_aliases`", "1"]),
    ],
)
def test_bad_rows(tmp_path, changes, parts):
    bad = {**ROW, "_id": "other", **changes}
    bad = {key: value for key, value in bad.items() if value is not ...}
    refused(write(tmp_path / "rows.jsonl", ROW, bad), *parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["empty"]),
        (b'{"_id": "a", "question": "Al\xfb?"}\n', ["line 1", "field `question`", "UTF-8"]),
        (b'{"_id": "a", "question": \n', ["line 1", "JSON"]),
    ],
)
def test_bad_files(tmp_path, content, parts):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    refused(path, *parts)


def test_unique_paragraphs():
    rows = load_questions(HOTPOTQA)
    paragraphs = list(unique_paragraphs([*rows[:50], *rows[:50]]))
    assert paragraphs == list(unique_paragraphs(rows[:50]))
    assert len({(title, " ".join(sentences)) for title, sentences in paragraphs}) == len(paragraphs) <= 500
