"""
What pushing to the Hub needs beside what transformers does: `Trainer` copies the files it knows from a checkpoint to
the folder it uploads, and uploads everything there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_utils import HubStrategy

from .predictor import HEAD_CONFIG, HEAD_WEIGHTS


NOT_UPLOADED = """\
# Rollout trees: they change while a push reads them. Without the next line they are uploaded.
trees/
"""


def will_push(trainer: Any) -> bool:
    """Whether `Trainer._push_from_checkpoint` would push now. What a running upload reads must stay as it is."""
    if not trainer.is_world_process_zero() or trainer.args.hub_strategy == HubStrategy.END:
        return False
    running = trainer.push_in_progress is not None and not trainer.push_in_progress.is_done()
    return trainer.args.hub_always_push or not running


def bring_head(checkpoint: str, output_dir: str) -> None:
    """Copies the value head of a checkpoint, if it has one, to the folder that becomes the root of the repo."""
    for name in (HEAD_WEIGHTS, HEAD_CONFIG):
        if os.path.isfile(os.path.join(checkpoint, name)):
            shutil.copy(os.path.join(checkpoint, name), os.path.join(output_dir, name))


def keep_trees_local(output_dir: str) -> None:
    """Writes a `.gitignore`, which the Hub applies to uploads, unless there is one."""
    try:
        with open(Path(output_dir) / ".gitignore", "x", encoding="utf-8") as file:
            file.write(NOT_UPLOADED)
    except FileExistsError:
        pass
