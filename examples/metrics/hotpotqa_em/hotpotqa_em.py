"""Exact match of HotpotQA, as an `evaluate` metric."""

# `evaluate` copies this file elsewhere and scans it for imports line by line: it stands alone, with one import a line.
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

_DESCRIPTION = "Share of answers that equal the reference after HotpotQA's normalisation."

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[str]`): answers given; an empty string where there is none.
    references (`list[str]` or `list[list[str]]`): right answers, or all names of each: the best counts.

Returns:
    `hotpotqa_em` (`float`): mean exact match, in [0, 1].

Example:
    >>> metric = evaluate.load("examples/metrics/hotpotqa_em")
    >>> metric.compute(predictions=["The Eiffel Tower", "1990"], references=["eiffel tower.", "1991"])
    {'hotpotqa_em': 0.5}
"""


def normalize_answer(answer):
    text = "".join(char for char in answer.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class HotpotQAExactMatch(evaluate.Metric):
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
        matches = [
            any(normalize_answer(prediction) == normalize_answer(name) for name in right)
            for prediction, right in zip(predictions, names, strict=True)
        ]
        return {"hotpotqa_em": sum(matches) / len(matches)}
