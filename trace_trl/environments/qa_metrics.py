"""
Answer metrics of HotpotQA's evaluation script (Yang et al. 2018): exact match and token F1 after normalisation.

Pure Python, so that reward functions can use them without a metrics package.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)

# An answer of this kind is right or wrong as a whole: "no" in "no one" is not half an answer.
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


def normalize_answer(answer: str) -> str:
    """
    Lower-cases, drops ASCII punctuation and the articles a, an, the, and collapses white space, in this order.

    Args:
        answer (`str`):
            Answer as written.

    Returns:
        `str`: the form in which two answers are compared.
    """
    text = "".join(char for char in answer.lower() if char not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, reference: str) -> float:
    """
    Whether two answers are equal after [`normalize_answer`].

    Args:
        prediction (`str`):
            Answer given.
        reference (`str`):
            Right answer.

    Returns:
        `float`: 1.0 or 0.0.
    """
    return float(normalize_answer(prediction) == normalize_answer(reference))


def f1_score(prediction: str, reference: str) -> float:
    """
    Harmonic mean of token precision and token recall after [`normalize_answer`].

    A yes/no/noanswer on either side scores 0 unless both sides are equal. No token in common scores 0, two empty
    answers included.

    Args:
        prediction (`str`):
            Answer given.
        reference (`str`):
            Right answer.

    Returns:
        `float`: F1 in [0, 1].
    """
    predicted, expected = normalize_answer(prediction), normalize_answer(reference)
    if predicted != expected and (predicted in _CLOSED_ANSWERS or expected in _CLOSED_ANSWERS):
        return 0.0
    predicted_tokens, expected_tokens = predicted.split(), expected.split()
    common = sum((Counter(predicted_tokens) & Counter(expected_tokens)).values())
    if common == 0:
        return 0.0
    precision = common / len(predicted_tokens)
    recall = common / len(expected_tokens)
    return 2 * precision * recall / (precision + recall)


def best_exact_match(prediction: str, references: str | Sequence[str]) -> float:
    """
    The best [`exact_match`] over an answer and its aliases, as SQuAD and MuSiQue score them.

    Args:
        prediction (`str`):
            Answer given.
        references (`str` or `Sequence[str]`):
            Right answers, at least one.

    Returns:
        `float`: 1.0 or 0.0.

    Raises:
        ValueError: if there is no right answer.
    """
    return _best(exact_match, prediction, references)


def best_f1(prediction: str, references: str | Sequence[str]) -> float:
    """
    The best [`f1_score`] over an answer and its aliases. MuSiQue's own F1 differs where an answer is yes or no, which
    it treats like any other, and where two are empty, which it scores 1.

    Args:
        prediction (`str`):
            Answer given.
        references (`str` or `Sequence[str]`):
            Right answers, at least one.

    Returns:
        `float`: F1 in [0, 1].

    Raises:
        ValueError: if there is no right answer.
    """
    return _best(f1_score, prediction, references)


def _best(score: Callable[[str, str], float], prediction: str, references: str | Sequence[str]) -> float:
    if isinstance(references, str):
        references = [references]
    if not references:
        raise ValueError("There is no right answer to compare with: give at least one reference.")
    return max(score(prediction, reference) for reference in references)
