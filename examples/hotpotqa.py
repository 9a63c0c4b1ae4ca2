"""Rows, prompts and messages of the HotpotQA examples, shared by the training script and the warm start."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


EXAMPLES = Path(__file__).resolve().parent
TRAIN_FILE = EXAMPLES / "data" / "hotpotqa_train_distractor_99.jsonl.gz"
DEV_FILE = EXAMPLES / "data" / "hotpotqa_dev_distractor_500.jsonl.gz"
WARM_START = EXAMPLES / "warm_start"

# Short on purpose: the prompt is read again in every round of an episode, and a small model learns the format from
# demonstrations rather than from instructions.
SYSTEM_PROMPT = (
    "Answer the question with the help of a search tool. Each turn is a Thought and one Action: search[query], "
    "lookup[word] or finish[answer]."
)
MAX_OBSERVATION_CHARS = 320
MAX_TURNS = 4


def load_rows(path: str | Path) -> list[dict[str, Any]]:
    """Reads JSON lines, gzipped or not."""
    path = Path(path)
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def build_prompt(question: str) -> list[dict[str, str]]:
    """The messages an episode starts with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.strip()}]


def columns_of(context: Any) -> dict[str, list]:
    """`[[title, [sentence, ...]], ...]`, which Arrow can't hold, in the form of the data set on the Hub."""
    if isinstance(context, dict):
        return context
    return {"title": [title for title, _ in context], "sentences": [sentences for _, sentences in context]}
