"""Answer metrics against values worked out by hand from HotpotQA's evaluation script, and the `evaluate` modules."""

from pathlib import Path

import pytest

from trace_trl.environments.qa_metrics import exact_match, f1_score, normalize_answer


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
