"""Rows, prompts and metrics of question answering with search, shared by training, evaluation and the warm start."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trace_trl.environments.qa_data import load_questions
from trace_trl.environments.qa_metrics import best_exact_match, best_f1
from trace_trl.environments.retrieval import Retriever
from trace_trl.environments.search import search_env


DATA = Path(__file__).resolve().parent / "data"
TRAIN_FILE = DATA / "hotpotqa_train_distractor_99.jsonl.gz"
DEV_FILE = DATA / "hotpotqa_dev_distractor_500.jsonl.gz"

# Short on purpose: the prompt is read again in every round of an episode, and a small model learns the format from
# demonstrations rather than from instructions.
SYSTEM_PROMPT = (
    "Answer the question with the help of a search tool. Each turn is a Thought and one Action: search[query], "
    "lookup[word] or finish[answer]."
)
MAX_OBSERVATION_CHARS = 320
MAX_TURNS = 4


def load_rows(path: str | Path) -> list[dict[str, Any]]:
    """Reads JSON lines as their owners publish them, gzipped or not."""
    path = Path(path)
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def build_prompt(question: str) -> list[dict[str, str]]:
    """The messages an episode starts with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.strip()}]


class AnswerF1:
    """
    Reward function: token F1 of the answer in the final state with the best of the right answers, 0 where the episode
    ended without one. Exact match is logged beside it.

    It keeps the last answer to each question, so that those of an evaluation can be given to the `evaluate` metrics
    afterwards.
    """

    __name__ = "answer_f1"

    def __init__(self):
        self.answers: dict[str, tuple[str, str]] = {}

    def __call__(
        self,
        environments: Sequence,
        question: Sequence[str],
        answers: Sequence[Sequence[str]],
        log_extra: Callable[[str, list], None],
        **kwargs: Any,
    ) -> list[float]:
        given = [state.answer or "" for state in environments]
        self.answers.update(
            {text: (answer, right[0]) for text, answer, right in zip(question, given, answers, strict=True)}
        )
        log_extra("exact_match", [best_exact_match(*pair) for pair in zip(given, answers, strict=True)])
        return [best_f1(*pair) for pair in zip(given, answers, strict=True)]


class SearchTask:
    """
    Question answering with a search tool: HotpotQA, 2WikiMultiHopQA, MuSiQue.

    Args:
        k (`int`, *optional*, defaults to `1`):
            Pages shown by one search.
        max_observation_chars (`int`, *optional*, defaults to `320`):
            Largest length of what an action shows.
        retriever ([`Retriever`], *optional*):
            A corpus or a server to search in; the paragraphs of each row by default.
    """

    name = "hotpotqa"
    metrics = {"exact_match": "exact match", "searches": "searches", "invalid_actions": "invalid actions"}

    def __init__(
        self, k: int = 1, max_observation_chars: int = MAX_OBSERVATION_CHARS, retriever: Retriever | None = None
    ):
        self.own_paragraphs = retriever is None
        self.env_reset, self.env_step = search_env(k, max_observation_chars, retriever=retriever)
        self.reward = AnswerF1()
        self.reward_funcs: list[Callable] = [self.reward]

    def train_rows(self, source: str | Path | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        rows = load_questions(source or TRAIN_FILE, need_context=self.own_paragraphs, **kwargs)
        return [{"prompt": build_prompt(row["question"]), **row} for row in rows]

    def test_rows(self, source: str | Path | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        return self.train_rows(source or DEV_FILE, **kwargs)
