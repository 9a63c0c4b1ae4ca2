"""
Demonstrations for the BFCL example: the ground truth of training tasks, the calls of a user turn in one list.

    user        Go into document folder and create 'TeamNotes.txt'
    assistant   [cd(folder='documents'), touch(file_name='TeamNotes.txt')]
    user        the results
    assistant   Done.
"""

from __future__ import annotations

import random
from typing import Any

from tasks.bfcl import API_CLASS, SMALL, BFCLTask

from trace_trl.environments.bfcl_calls import format_calls


Messages = list[dict[str, str]]

LONGEST = 1700  # characters of a prompt
LONGEST_TURN = 160
LONGEST_EPISODE = 1200  # behind the prompt


def demonstrate(row: dict[str, Any], task: BFCLTask) -> Messages:
    """An episode in the real environment."""
    environment = task.environment
    messages = [dict(message) for message in row["prompt"]]
    state = environment.reset(row)
    result = None
    for calls in environment.ground_truth(row):
        for turn in filter(None, (format_calls(calls, environment.call_format) if calls else "", "Done.")):
            messages.append({"role": "assistant", "content": turn})
            result = environment.step(state, turn)
            if not result.done:
                messages += _messages(result.observation)
    assert result is not None and result.reward == 1.0, row["id"]
    return messages


def _is_short(messages: Messages) -> bool:
    lengths = [(message["role"], len(message["content"])) for message in messages[2:]]
    turns = [length for role, length in lengths if role == "assistant"]
    return max(turns) <= LONGEST_TURN and sum(length for _, length in lengths) <= LONGEST_EPISODE


def _messages(observation: Any) -> Messages:
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)


def build_demonstrations(seed: int = 0, copies: int = 5) -> list[Messages]:
    """
    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of their order.
        copies (`int`, *optional*, defaults to `5`):
            How often each comes.

    Returns:
        `list[list[dict]]`: conversations, in random order.
    """
    task = BFCLTask(**SMALL)
    rows = task.train_rows(subset="base", api_class=API_CLASS)
    rows = [row for row in rows if len(row["prompt"][0]["content"]) <= LONGEST]
    demonstrations = [messages for row in rows if _is_short(messages := demonstrate(row, task))] * copies
    random.Random(seed).shuffle(demonstrations)
    return demonstrations
