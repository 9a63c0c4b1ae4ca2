"""Answer metrics against values worked out by hand from HotpotQA's evaluation script, its definition written a second
time, and the `evaluate` modules."""

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_trl.environments.qa_metrics import best_exact_match, best_f1, exact_match, f1_score, normalize_answer


METRICS = Path(__file__).resolve().parents[1] / "examples" / "metrics"


@pytest.mark.parametrize(
    ("answer", "normalized"),
    [
        ("The Eiffel Tower", "eiffel tower"),
        ("an  Apple,\n a day!", "apple day"),
        ("U.S.A.", "usa"),
        # Articles are words: those inside words stay, and so does one that punctuation glued to its neighbour.
        ("Theatre and Anagram", "theatre and anagram"),
        ("A-ha", "aha"),
        ("a", ""),
        ("...", ""),
        ("", ""),
        # Only ASCII punctuation is dropped.
        ("Alû – “demon”", "alû – “demon”"),
    ],
)
def test_normalize_answer(answer, normalized):
    assert normalize_answer(answer) == normalized


@pytest.mark.parametrize(
    ("prediction", "reference", "em", "f1"),
    [
        ("The Eiffel Tower", "eiffel tower.", 1.0, 1.0),
        # 2 of 3 predicted tokens, all of 2 reference tokens
        ("tower in Paris", "Paris tower", 0.0, 0.8),
        ("12 April 1961", "1961", 0.0, 0.5),
        # A repeated token counts as often as both sides have it.
        ("new new york", "new york city", 0.0, 2 / 3),
        ("1990", "1991", 0.0, 0.0),
        ("", "1991", 0.0, 0.0),
        # Equal, but without a token in common
        ("the", "a", 1.0, 0.0),
        ("Yes.", "yes", 1.0, 1.0),
        ("no", "yes", 0.0, 0.0),
        # Half of the tokens agree, and it is still wrong.
        ("yes they are", "yes", 0.0, 0.0),
        ("no", "no one", 0.0, 0.0),
        ("noanswer", "noanswer", 1.0, 1.0),
        ("noanswer given", "noanswer", 0.0, 0.0),
    ],
)
def test_scores(prediction, reference, em, f1):
    assert exact_match(prediction, reference) == em
    assert f1_score(prediction, reference) == pytest.approx(f1)


def test_evaluate_modules_agree(monkeypatch, tmp_path):
    import datasets
    import evaluate

    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    predictions = ["The Eiffel Tower", "tower in Paris", "no one", "yes", "", "the", "new new york", "Alû"]
    references = ["eiffel tower.", "Paris tower", "no", "Yes", "1991", "a", "new york city", "alû"]
    pairs = list(zip(predictions, references, strict=True))
    for name, score in (("hotpotqa_em", exact_match), ("hotpotqa_f1", f1_score)):
        metric = evaluate.load(str(METRICS / name), cache_dir=str(tmp_path))
        for prediction, reference in pairs:
            result = metric.compute(predictions=[prediction], references=[reference])
            assert result == {name: pytest.approx(score(prediction, reference))}
        result = metric.compute(predictions=predictions, references=references)
        assert result == {name: pytest.approx(sum(score(*pair) for pair in pairs) / len(pairs))}


# The definition a second time: no regular expression, no counter


def is_word(char):
    return char.isalnum() or char == "_"


def plain_normalize(answer):
    kept = ""
    for char in answer.lower():
        if char not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~":
            kept += char
    words, word = [], ""
    for char in kept + " ":
        if is_word(char):
            word += char
            continue
        # An article is one only as a whole word; what stands around it is not joined
        words.append(" " if word in ("a", "an", "the") else word)
        words.append(char)
        word = ""
    return " ".join("".join(words).split())


def plain_f1(prediction, reference):
    predicted, expected = plain_normalize(prediction), plain_normalize(reference)
    for answer in ("yes", "no", "noanswer"):
        if (predicted == answer or expected == answer) and predicted != expected:
            return 0.0
    left, right = predicted.split(), expected.split()
    if not left or not right:
        return 0.0
    remaining, same = list(right), 0
    for token in left:
        if token in remaining:
            remaining.remove(token)
            same += 1
    # 2PR / (P + R) with P = same / left and R = same / right
    return 2 * same / (len(left) + len(right))


PIECES = (
    "a an the The AN yes no noanswer Yes. NO! no-answer New York York's U.S. A-ha 1961 1,000 % $5 -- ... “demon” Alû "
    "ALÛ naïve İstanbul straße 東京 é e\u0301 x_y (film) ' \" / the,an an'the a's _ \u2014 \u00a0 \u0660 theatre"
).split(" ")


def generated_pairs(count):
    rng = random.Random(0)

    def answer():
        return rng.choice((" ", "  ", "\t", "-", ", ")).join(rng.choices(PIECES, k=rng.randrange(5)))

    for number in range(count):
        first = answer()
        second = answer() if number % 3 else " ".join([first, rng.choice(PIECES)])
        yield first, second


def test_scores_are_those_of_the_definition():
    pairs = [
        *generated_pairs(2000),
        *itertools.product(["", "yes", "no", "noanswer", "the", "yes no", "No."], repeat=2),
    ]
    assert len(set(pairs[:200])) > 190
    mixed = 0
    for prediction, reference in pairs:
        assert normalize_answer(prediction) == plain_normalize(prediction)
        assert exact_match(prediction, reference) == float(plain_normalize(prediction) == plain_normalize(reference))
        assert f1_score(prediction, reference) == pytest.approx(plain_f1(prediction, reference), abs=1e-12)
        mixed += 0 < f1_score(prediction, reference) < 1
    assert mixed > 200


answers = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(PIECES), max_size=6).map(" ".join))


@given(answers, answers)
def test_scores_of_any_pair(prediction, reference):
    assert normalize_answer(prediction) == plain_normalize(prediction)
    assert exact_match(prediction, reference) == float(plain_normalize(prediction) == plain_normalize(reference))
    score = f1_score(prediction, reference)
    assert score == pytest.approx(plain_f1(prediction, reference), abs=1e-12)
    assert score == f1_score(reference, prediction) and 0 <= score <= 1
    assert exact_match(prediction, reference) <= score or not plain_normalize(prediction)


@given(answers, st.lists(answers, min_size=1, max_size=4))
def test_the_best_reference_counts(prediction, references):
    assert best_exact_match(prediction, references) == max(exact_match(prediction, other) for other in references)
    assert best_f1(prediction, references) == max(f1_score(prediction, other) for other in references)
    assert best_f1(prediction, references[0]) == f1_score(prediction, references[0])
    assert best_exact_match(prediction, references[0]) == exact_match(prediction, references[0])


def test_aliases():
    aliases = ["United States of America", "USA", "American"]
    assert best_exact_match("the U.S.A.", aliases) == 1.0 and exact_match("the U.S.A.", aliases[0]) == 0.0
    assert best_f1("united states", aliases) == pytest.approx(2 * 2 / 6)
    for score in (best_exact_match, best_f1):
        with pytest.raises(ValueError, match="at least one reference"):
            score("x", [])
