"""Token F1 of HotpotQA, as an `evaluate` metric."""

# `evaluate` copies this file elsewhere and scans it for imports line by line: it stands alone, with one import a line.
import collections
import re
import string

import datasets
import evaluate


_CITATION = """\
@inproceedings{yang2018hotpotqa,
    title     = {{HotpotQA}: A Dataset for Diverse, Explainable Multi-hop Question Answering},
    author    = {Yang, Zhilin and Qi, Peng and Zhang, Saizheng and Bengio, Yoshua and Cohen, William W. and
                 Salakhutdinov, Ruslan and Manning, Christopher D.},
    booktitle = {Conference on Empirical Methods in Natural Language Processing ({EMNLP})},
    year      = {2018},
}
"""

_DESCRIPTION = "Mean token F1 between answers and references after HotpotQA's normalisation."

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[str]`): answers given; an empty string where there is none.
    references (`list[str]` or `list[list[str]]`): right answers, or all names of each: the best counts.

Returns:
    `hotpotqa_f1` (`float`): mean F1, in [0, 1].

Example:
    >>> metric = evaluate.load("examples/metrics/hotpotqa_f1")
    >>> metric.compute(predictions=["the tower in Paris", "no one"], references=["Paris tower", "no"])
    {'hotpotqa_f1': 0.4}
"""


def normalize_answer(answer):
    text = "".join(char for char in answer.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1_score(prediction, reference):
    prediction, reference = normalize_answer(prediction), normalize_answer(reference)
    closed = ("yes", "no", "noanswer")
    if prediction != reference and (prediction in closed or reference in closed):
        return 0.0
    predicted, expected = prediction.split(), reference.split()
    common = sum((collections.Counter(predicted) & collections.Counter(expected)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class HotpotQAF1(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=[
                datasets.Features({"predictions": datasets.Value("string"), "references": references})
                for references in (datasets.List(datasets.Value("string")), datasets.Value("string"))
            ],
            reference_urls=["https://hotpotqa.github.io"],
        )

    def _compute(self, predictions, references):
        names = [[reference] if isinstance(reference, str) else reference for reference in references]
        scores = [
            max(f1_score(prediction, name) for name in right)
            for prediction, right in zip(predictions, names, strict=True)
        ]
        return {"hotpotqa_f1": sum(scores) / len(scores)}
