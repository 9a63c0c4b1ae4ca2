"""Problems as their owners publish them, and rows that can't be used."""

import gzip
import json
from pathlib import Path

import pytest

from trace_trl.environments.loading import DataError
from trace_trl.environments.math_data import load_problems


DATA = Path(__file__).resolve().parents[1] / "examples" / "data"


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_gsm8k(tmp_path):
    answer = "She sold 48/2 = <<48/2=24>>24.\nIn all 48+24 = <<48+24=72>>72.\n#### 1,072"
    path = write(
        tmp_path / "gsm8k.jsonl", {"question": " How many? ", "answer": answer}, {"question": "?", "answer": "#### 5"}
    )
    assert load_problems(path) == [
        {"id": "0", "problem": "How many?", "answer": "1,072", "subset": "2 steps"},
        {"id": "1", "problem": "?", "answer": "5", "subset": "0 steps"},
    ]


def test_math_500_and_others(tmp_path):
    path = write(
        tmp_path / "math.jsonl",
        {
            "unique_id": "a/1",
            "problem": "p",
            "answer": r"\frac{1}{2}",
            "subject": "Algebra",
            "level": 2,
            "solution": "s",
        },
        {"id": 7, "problem": "q", "answer": 204},
    )
    assert load_problems(path) == [
        {"id": "a/1", "problem": "p", "answer": r"\frac{1}{2}", "subset": "Algebra"},
        {"id": "7", "problem": "q", "answer": "204", "subset": ""},
    ]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"problem": "p", "answer": "1"}, {"problem": "p"}], "line 2, field `answer`: is missing"),
        ([{"problem": "p", "answer": " "}], "line 1, field `answer`: is empty"),
        ([{"question": "p", "answer": "so ####"}], "line 1, field `answer`: has nothing behind ####"),
        ([{"problem": "p", "answer": None}], "line 1, field `answer`: is not text but None"),
        ([{"problem": "p", "answer": True}], "line 1, field `answer`: is not text but True"),
        ([{"problem": "", "answer": "1"}], "line 1, field `problem`: is empty"),
        ([{"answer": "1"}], "line 1, field `question`: is missing"),
        ([{"id": 1, "problem": "p", "answer": "1"}] * 2, "line 2, field `id`: 1 is also the id of line 1"),
        ([], "the file is empty"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, sentence):
    path = write(tmp_path / "bad.jsonl", *rows)
    with pytest.raises(DataError) as error:
        load_problems(path)
    assert str(path) in str(error.value) and sentence in str(error.value)


def test_faulty_rows_can_be_left_out(tmp_path, caplog):
    path = write(tmp_path / "some.jsonl", {"problem": "p", "answer": ""}, {"problem": "q", "answer": "2"})
    assert [row["problem"] for row in load_problems(path, skip_faulty=True)] == ["q"]
    assert "1 rows are left out" in caplog.text and "line 1, field `answer`: is empty" in caplog.text
    with pytest.raises(DataError, match="no row of it can be used"):
        load_problems(write(tmp_path / "none.jsonl", {"problem": "p", "answer": ""}), skip_faulty=True)


@pytest.mark.parametrize(
    ("name", "rows", "faulty"),
    [("gsm8k_train_2000", 2000, 0), ("gsm8k_test", 1319, 0), ("math500", 500, 0), ("deepscaler_subset_1209", 1208, 1)],
)
def test_bundled_files(name, rows, faulty):
    path = DATA / f"{name}.jsonl.gz"
    problems = load_problems(path, skip_faulty=bool(faulty))
    assert len(problems) == rows == len({row["id"] for row in problems})
    assert all(row["answer"] and "####" not in row["answer"] for row in problems)
    if faulty:
        with pytest.raises(DataError, match="answer"):
            load_problems(path)


def test_no_bundled_training_problem_is_a_test_problem():
    def questions(name):
        with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            return {json.loads(line)["question"] for line in lines}

    assert not questions("gsm8k_train_2000") & questions("gsm8k_test")
