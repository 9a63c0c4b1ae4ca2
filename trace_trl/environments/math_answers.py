"""
Whether an answer to a mathematical problem is right, by `math-verify`, and the reward function that says so.

Comparing two expressions may take for ever (`9^{9^{9^9}}`), and both come from outside: it is done in the sandbox that
programs of a policy run in, with its limits on time and memory.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from .base import without_thoughts
from .python import PythonState, find_code
from .sandbox import Interpreter, Sandbox, SandboxError


_BOLD = re.compile(r"\*\*(.+?)\*\*")

MAX_USES = 500  # comparisons of a process: sympy keeps what it has seen
START_TIMEOUT = 60.0

# Run once by every interpreter. Without the timeouts of math-verify itself: they need the main thread, and signals
_PREPARE = r"""
import logging
import re
from decimal import Decimal
from string import ascii_uppercase
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
from latex2sympy2_extended.math_normalization import extract_boxed_content
from math_verify import ExprExtractionConfig, LatexExtractionConfig, StringExtractionConfig, parse, verify
from sympy import And, Equality, Mul, Pow, UnevaluatedExpr, preorder_traversal

# Naming what is to be computed is no answer, unless the right answer does so
TASK = re.compile(r"\\(?:sum|prod|i*int|oint|lim|[dt]?binom|choose|gcd|lcm|det|[pb]?mod)(?![a-z])|\\frac\s*\{\s*d\b|!")
SCIENTIFIC = re.compile(r"(?<![\w.\\])\d+(?:\.\d+)?[eE][+-]?\d{1,3}\b(?!\.\d)")
# E, (E), E: text, \text{(E) text}
CHOICE = re.compile(r"(?:\\(?:text|math|mbox)\w*\s*\{)*\s*\(?([A-Z])(?:[.:)]|[}\s]*$)")
# Without I, which the policy calls itself
CHOICES = StringExtractionConfig(tuple(ascii_uppercase.replace("I", "")), False, lowercase=False)

def tasks_of(parsed):
    return {task for one in parsed if isinstance(one, str) for task in TASK.findall(one)}

def is_written_out(number):
    # 3, -3/7, 50 %, 3 * 10^8
    parts = [part for part in Mul.make_args(number) if part not in (1, -1)]
    powers = [part.args for part in parts if isinstance(part, Pow)]
    plain = sum(part.is_Number for part in parts)
    percent = sum(isinstance(part, UnevaluatedExpr) for part in parts)
    usual = all(base.is_Number and (to == -1 or base == 10 and to.is_Integer) for base, to in powers)
    return usual and len(powers) < 2 and plain < 2 and len(parts) == len(powers) + plain + percent

def is_to_compute(parsed):
    for one in parsed:
        if isinstance(one, str):
            continue
        # x = 17 * 23 = 391 gives it after all
        if isinstance(one, (And, Equality)) and any(is_written_out(s) for e in one.atoms(Equality) for s in e.args):
            continue
        for part in preorder_traversal(one):
            if getattr(part, "is_number", False) and not is_written_out(part) and part.doit().is_Rational:
                return True
    return False

def last_box(text):
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    box = extract_boxed_content(text[start:])
    return box if box.count("{") == box.count("}") else ""

def chosen(box, text):
    if box is None:
        found = parse(re.sub(r"\(([A-Z])\)", r" \1 ", text), [CHOICES], parsing_timeout=None)
        if found:
            return found[0]
        # No more than the letter
        box = text if len(text.strip()) < 5 else ""
    found = CHOICE.match(box)
    return found and found[1]

def is_right(answer, text, boxed):
    box = last_box(text)
    choice = CHOICE.match(answer)
    if choice and re.sub(r"\\\w+|\W", "", answer) == choice[1] and not (boxed and box is None):
        if chosen(box, text) == choice[1]:
            return True
    if box is not None:
        text = "\\boxed{" + box + "}"
    # 2e-3 may be meant with the number e
    meant = [(one, SCIENTIFIC.sub(lambda found: format(Decimal(found[0]), "f"), one)) for one in (answer, text)]
    return any(says(gold, given, boxed) for gold in set(meant[0]) for given in set(meant[1]))

def says(answer, text, boxed):
    gold = parse("\\boxed{" + answer + "}", parsing_timeout=None)
    latex = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=not boxed)
    configs = [latex] if boxed else [latex, ExprExtractionConfig()]
    given = parse(text, extraction_config=configs, extraction_mode="first_match", parsing_timeout=None)
    if not gold or not tasks_of(given) <= tasks_of(gold) or not verify(gold, given, timeout_seconds=None):
        return False
    return not is_to_compute(given) or is_to_compute(gold)
"""


class AnswerChecker:
    """
    Compares answers.

    Args:
        require_box (`bool`, *optional*, defaults to `False`):
            Whether an answer counts only if it stands in `\\boxed{}` or in a formula. Otherwise the last expression of
            the text is the answer where there is neither.
        timeout (`float`, *optional*, defaults to `5.0`):
            Seconds for a comparison. An answer that takes longer is wrong.
        isolation (`str`, *optional*, defaults to `"strict"`):
            See [`Sandbox`].

    Raises:
        ValueError: if `timeout` is not positive.
    """

    def __init__(self, require_box: bool = False, timeout: float = 5.0, isolation: str = "strict"):
        if timeout <= 0:
            raise ValueError(f"`timeout` must be positive, got {timeout}.")
        self.require_box = require_box
        self.timeout = timeout
        self._sandbox = Sandbox(memory_mb=1024, preload=("math_verify",), isolation=isolation)
        self._free: list[tuple[Interpreter, int]] = []  # with the number of comparisons they have made
        self._lock = threading.Lock()

    def __call__(self, answer: str, text: str) -> bool:
        """
        Args:
            answer (`str`):
                Right answer, LaTeX or plain.
            text (`str`):
                What the policy said last. What stands in `<think>` is left out. The answer stands in the last
                `\\boxed{}` or `\\fbox{}`, in the last formula where there is no box, or is the last expression where
                there is neither. Where the right answer is the letter of a choice, "The answer is (A)" gives one, and
                text may follow the letter in a box. 1e5 is a number.

        Returns:
            `bool`: whether they say the same. What is only to be computed (17 * 23, a sum, an integral) is wrong,
            unless the right answer is of that kind.

        Raises:
            ImportError: if `math-verify` is not installed.
            SandboxError: if programs can't be isolated on this machine, or the process does not start.
        """
        text = _BOLD.sub(r"\1", without_thoughts(text))
        program = f"is_right({answer!r}, {text!r}, {self.require_box})"
        interpreter, uses = self._take()
        result = interpreter.run(program, self.timeout, 3 * self.timeout)
        if uses and result.error is not None and not result.timed_out:
            # Out of memory, for instance, which may be the fault of earlier answers
            interpreter.close()
            interpreter, uses = self._start(), 0
            result = interpreter.run(program, self.timeout, 3 * self.timeout)
        if result.error is None and uses + 1 < MAX_USES:
            with self._lock:
                self._free.append((interpreter, uses + 1))
        else:
            interpreter.close()
        return result.output.strip() == "True"

    def _take(self) -> tuple[Interpreter, int]:
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._start(), 0

    def _start(self) -> Interpreter:
        interpreter = self._sandbox.start()
        prepared = interpreter.run(_PREPARE, START_TIMEOUT, START_TIMEOUT)
        if prepared.error is not None:
            interpreter.close()
            if "ModuleNotFoundError" in prepared.error:
                raise ImportError(f"Answers can't be checked: pip install math-verify.\n{prepared.error}")
            raise SandboxError(f"The process that checks answers could not be prepared: {prepared.error}")
        return interpreter

    def close(self) -> None:
        """Ends the processes."""
        with self._lock:
            free, self._free = self._free, []
        for interpreter, _ in free:
            interpreter.close()
        self._sandbox.close()


class MathAccuracy:
    """
    Reward function: whether the last turn gives the right answer.

    [`math_accuracy`] is one with the defaults.

    Args:
        **kwargs:
            Arguments of [`AnswerChecker`].
    """

    __name__ = "math_accuracy"

    def __init__(self, **kwargs: Any):
        # Starts nothing before it is asked
        self.checker = AnswerChecker(**kwargs)

    def __call__(
        self,
        completions: Sequence[Any],
        answer: Sequence[str],
        environments: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """
        Args:
            completions (`list[list[dict]]` or `list[str]`):
                Completions, as conversations or as text.
            answer (`list[str]`):
                Right answers, the data set's column `answer`.
            environments (`list`, *optional*):
                Final states of the episodes, given by the trainer. A [`PythonState`] knows whether there is an answer:
                there is none where a limit cut the last turn.

        Returns:
            `list[float]`: 1.0 or 0.0 each. A last turn that still runs a program or calls a tool is no answer.
        """
        states = [None] * len(completions) if environments is None else environments
        # Together: each answer that is hard to compare takes as long as the checker lets it
        with ThreadPoolExecutor(max_workers=_workers()) as pool:
            right = pool.map(partial(is_right_answer, self.checker), completions, answer, states)
            return [float(value) for value in right]


def _workers() -> int:
    """Comparisons at a time, where the processes of a machine share its CPUs."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(16, (os.cpu_count() or 1) // processes))


math_accuracy = MathAccuracy()


def is_right_answer(checker: AnswerChecker, completion: Any, answer: str, state: Any = None) -> bool:
    """Whether a completion ends with the right answer."""
    if isinstance(state, PythonState):
        text = state.answer or ""
    else:
        text = completion if isinstance(completion, str) else last_words(completion)
    return find_code(text) is None and checker(answer, text)


def last_words(messages: Sequence[dict[str, Any]]) -> str:
    """The text of the assistant's last message; empty if it calls a tool, or if a tool's or a user's came last."""
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        return ""
    content = messages[-1].get("content") or ""
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)
