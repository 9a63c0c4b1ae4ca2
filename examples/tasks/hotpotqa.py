"""Question answering with search: HotpotQA, 2WikiMultiHopQA, MuSiQue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import evaluate
from accelerate.utils import gather_object

from trace_trl.environments.qa_data import load_questions
from trace_trl.environments.qa_metrics import best_exact_match, best_f1
from trace_trl.environments.retrieval import CorpusIndex, RetrievalServer, Retriever
from trace_trl.environments.search import search_env

from . import DATA, Row, Task


TRAIN_FILE = DATA / "hotpotqa_train_distractor_99.jsonl.gz"
DEV_FILE = DATA / "hotpotqa_dev_distractor_500.jsonl.gz"
METRICS = DATA.parent / "metrics"

# Short on purpose: the prompt is read again in every round of an episode, and a small model learns the format from
# demonstrations rather than from instructions.
SYSTEM_PROMPT = (
    "Answer the question with the help of a search tool. Each turn is a Thought and one Action: search[query], "
    "lookup[word] or finish[answer]."
)
MAX_OBSERVATION_CHARS = 320
MAX_TURNS = 4


def build_prompt(question: str) -> list[dict[str, str]]:
    """The messages an episode starts with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.strip()}]


def make_retriever(corpus: str | None = None, url: str | None = None) -> Retriever | None:
    """A corpus on disk, a retrieval server, or neither: then each row's own paragraphs are searched."""
    if corpus is not None and url is not None:
        raise ValueError("Give a corpus or a retrieval server, not both.")
    if url is not None:
        return RetrievalServer(url)
    return CorpusIndex.open(corpus) if corpus is not None else None


class AnswerF1:
    """
    Reward function: token F1 of the answer in the final state with the best of the right answers, 0 where the episode
    ended without one. Exact match is logged beside it.

    It notes the answers, so that those of an evaluation can be given to the `evaluate` metrics.
    """

    __name__ = "answer_f1"

    def __init__(self):
        self.answers: list[tuple[str, str, list[str]]] = []

    def __call__(
        self,
        environments: Sequence,
        id: Sequence[str],
        answers: Sequence[Sequence[str]],
        log_extra: Callable[[str, list], None],
        **kwargs: Any,
    ) -> list[float]:
        given = [state.answer or "" for state in environments]
        self.answers += [(row, text, list(right)) for row, text, right in zip(id, given, answers, strict=True)]
        log_extra("exact_match", [best_exact_match(*pair) for pair in zip(given, answers, strict=True)])
        return [best_f1(*pair) for pair in zip(given, answers, strict=True)]


class SearchTask(Task):
    """
    Args:
        k (`int`, *optional*, defaults to `1`):
            Pages shown by one search.
        max_observation_chars (`int`, *optional*, defaults to `320`):
            Largest length of what an action shows.
        retriever ([`Retriever`], *optional*):
            A corpus or a server to search in; the paragraphs of each row by default.
    """

    name = "hotpotqa"
    reward_name = "token F1"
    metrics = {"exact_match": "exact match", "searches": "searches", "invalid_actions": "invalid actions"}

    def __init__(
        self, k: int = 1, max_observation_chars: int = MAX_OBSERVATION_CHARS, retriever: Retriever | None = None
    ):
        self.own_paragraphs = retriever is None
        self.env_reset, self.env_step = search_env(k, max_observation_chars, retriever=retriever)
        self.reward = AnswerF1()
        self.reward_funcs = [self.reward]
        self._evaluate: list[evaluate.EvaluationModule] | None = None

    def train_rows(self, source: str | Path | None = None, **kwargs: Any) -> list[Row]:
        rows = load_questions(source or TRAIN_FILE, need_context=self.own_paragraphs, **kwargs)
        return [{"prompt": build_prompt(row["question"]), **row} for row in rows]

    def test_rows(self, source: str | Path | None = None, **kwargs: Any) -> list[Row]:
        return self.train_rows(source or DEV_FILE, **kwargs)

    def begin_evaluation(self) -> None:
        self.reward.answers.clear()  # those of training

    def evaluation_results(self, logged: dict[str, float]) -> dict[str, float]:
        by_row: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
        for row, *pair in gather_object(list(self.reward.answers)):
            by_row[row].append(pair)
        self.reward.answers.clear()
        # With several processes, a last batch that is not full is filled up with rows of the first
        each = min(map(len, by_row.values()))
        pairs = [pair for found in by_row.values() for pair in found[:each]]
        predictions, references = map(list, zip(*pairs, strict=True))
        if self._evaluate is None:
            self._evaluate = [evaluate.load(str(METRICS / name)) for name in ("hotpotqa_em", "hotpotqa_f1")]
        results = {"answered": sum(map(bool, predictions)) / len(predictions)}
        for name, metric in zip(("exact match", "token F1"), self._evaluate, strict=True):
            (results[name],) = metric.compute(predictions=predictions, references=references).values()
        return results
