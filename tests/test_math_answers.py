"""Answers to mathematical problems, checked by math-verify in a process of their own."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from trace_trl.environments.math_answers import AnswerChecker, last_words, math_accuracy
from trace_trl.environments.python import PythonState
from trace_trl.environments.sandbox.client import Interpreter


@pytest.fixture(scope="module")
def checker():
    checker = AnswerChecker(timeout=30.0)  # the hardest of these takes 0.6
    yield checker
    checker.close()


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("72", "So she sold \\boxed{72} clips.", True),
        ("72", "So she sold 72 clips.", True),
        ("72", "She sold 48, then 24: 72.", True),
        ("72", "\\boxed{71}", False),
        ("72", "72, no, \\boxed{71}", False),
        ("72", "<think>\\boxed{72}</think>\\boxed{71}", False),
        ("72", "<think>is it 71?</think>\\boxed{72}", True),
        ("72", "<think>so first 70 + 2 = 72", False),
        ("72", "<think>\\boxed{72}? wait", False),
        ("72", "The answer is **72**.", True),
        ("72", "", False),
        # Naming the task is no answer, unless the right answer does so
        ("5050", r"\boxed{\sum_{k=1}^{100} k}", False),
        (r"\frac{1}{3}", r"\boxed{\int_0^1 x^2 dx}", False),
        ("45", r"\boxed{\binom{10}{2}}", False),
        ("120", r"\boxed{5!}", False),
        (r"\binom{10}{2}", r"\boxed{\binom{10}{2}}", True),
        ("5!", r"\boxed{5!}", True),
        ("1,200", "\\boxed{1200}", True),
        (r"\frac{3}{7}", "$3/7$", True),
        (r"\frac{1}{2}", r"\boxed{0.5}", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(\pi/2, 3)}", False),
        ("p - q", r"\boxed{-q + p}", True),
        (r"x^2+2x+1", r"\boxed{(x+1)^2}", True),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", True),
        ("5", "\\boxed{'; import os; os._exit(0) #}", False),
        ("5", "\ud800\x00\\boxed{5", False),
    ],
)
def test_answers(checker, answer, text, right):
    assert checker(answer, text) is right


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("7", r"First \boxed{5}. So on, the answer is \boxed{7}.", True),
        ("5", r"First \boxed{5}. So on, the answer is \boxed{7}.", False),
        ("5, 7", r"First \boxed{5}. So on, the answer is \boxed{7}.", False),
        ("7", r"$\boxed{5}$, $\boxed{7}$", True),
        ("7", r"$\boxed{5}$ and $\boxed{7}$", True),
        ("5", r"$\boxed{5}$ and $\boxed{7}$", False),
        ("7", r"$\boxed{5}$ so \boxed{7}", True),
        ("5", r"$\boxed{5}$ so \boxed{7}", False),
        ("7", r"\[\boxed{5}\] or \fbox{7}", True),
        ("7", r"$$\boxed{7}$$ where $x = \frac{1}{2}$", True),
        ("5", r"\boxed{5}, or rather \boxed{7", False),
        ("1, 2", r"\boxed{1, 2}", True),
        (r"50\%", r"$\boxed{50}\%$", True),
        (r"\frac{1}{2}", r"$\boxed{\frac{1}{2}}$, not $\frac{1}{3}$", True),
    ],
)
def test_case_45_the_last_box_decides(checker, answer, text, right):
    """Text with several boxes, in one formula or in several: what stands in the last one is the answer."""
    assert checker(answer, text) is right


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("2", r"\fbox{2}", True),
        ("3", r"\fbox{2}", False),
        ("A", "The answer is (A)", True),
        ("A", "The answer is **(A)**.", True),
        ("(A)", "The answer is A", True),
        ("B", "The answer is (A)", False),
        ("B", "I think, (A) is no answer. The answer, I think, is (B) because C is odd.", True),
        ("B", "Answer: B. A is wrong", True),
        ("A", "Answer: B. A is wrong", False),
        ("A", "(A)", True),
        ("A", "A man goes", False),
        ("E", r"\boxed{E: text}", True),
        ("E", r"\boxed{E. text}", True),
        ("E", r"\boxed{\text{(E) text}}", True),
        ("E", r"\boxed{D: text}", False),
        ("E", r"\boxed{E + 1}", False),
        (r"\text{C}", r"\boxed{C}", True),
        ("100000", "1e5", True),
        ("100000", r"\boxed{1e5}", True),
        ("1e5", r"\boxed{100000}", True),
        ("1e5", r"\boxed{10^5}", True),
        ("0.0015", "So it is 1.5e-3.", True),
        ("2e - 3", r"\boxed{2e-3}", True),
        ("15", "1e5", False),
    ],
)
def test_case_60_answers_are_read_as_they_are_meant(checker, answer, text, right):
    """`\\fbox`, letters of a choice, with or without its text, and 1e5: read as a box, a letter, a number."""
    assert checker(answer, text) is right


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("391", r"\boxed{17 \times 23}", False),
        ("391", r"\boxed{17 * 23}", False),
        ("391", r"The answer is $17 \cdot 23$.", False),
        ("391", r"\boxed{x = 17 \cdot 23}", False),
        ("391", r"\boxed{17 \times 23 = 391}", True),
        ("391", r"$x = 17 \times 23 = 391$", True),
        (r"17 \cdot 23", r"\boxed{23 \cdot 17}", True),
        ("72", "48 + 24", False),
        ("72", "48 + 24 = 72", True),
        ("1024", r"\boxed{2^{10}}", False),
        (r"2^{10}", r"\boxed{1024}", True),
        ("12", r"\boxed{\sqrt{144}}", False),
        ("(3, 2)", r"\boxed{(3, 1 + 1)}", False),
        ("-5", r"\boxed{-5}", True),
        (r"-\frac{3}{7}", "-3/7", True),
        (r"\frac{3}{2}", r"\boxed{1\frac{1}{2}}", True),
        (r"50\%", r"\boxed{50\%}", True),
        ("300000000", r"\boxed{3 \times 10^8}", True),
        (r"\sqrt{12}", r"\boxed{2\sqrt{3}}", True),
        (r"\frac{3\pi}{4}", r"\boxed{\frac{3\pi}{4}}", True),
        ("1, 5", r"\boxed{1, 5}", True),
    ],
)
def test_case_60_what_is_only_to_be_computed_is_wrong(checker, answer, text, right):
    """`\\boxed{17 \\times 23}` for 391 is wrong. A number that is written out is right, also behind a computation."""
    assert checker(answer, text) is right


def test_an_answer_that_takes_for_ever_is_wrong_and_holds_nothing_up(checker, monkeypatch):
    timed_out, run = [], Interpreter.run

    def running(interpreter, code, timeout, wall_timeout):
        result = run(interpreter, code, timeout, wall_timeout)
        timed_out.append(result.timed_out)
        return result

    assert checker("5", r"\boxed{5}")
    with monkeypatch.context() as changed:
        changed.setattr(Interpreter, "run", running)
        changed.setattr(checker, "timeout", 1.0)
        assert not checker("5", r"\boxed{9^{9^{9^{9}}}}")
    assert timed_out == [True]  # ended by its limit, and not tried again
    assert checker("5", r"\boxed{5}")


def test_a_box_can_be_required():
    checker = AnswerChecker(require_box=True)
    assert checker("72", "\\boxed{72}") and not checker("72", "So she sold 72 clips.")
    checker.close()


def test_a_checker_that_ran_out_of_memory_is_started_again(checker):
    assert checker("5", "\\boxed{5}")
    interpreter, uses = checker._free.pop()
    interpreter.run("def is_right(*_): raise MemoryError", 10, 60)
    checker._free.append((interpreter, uses))
    assert checker("5", "\\boxed{5}")


def test_processes_are_renewed(checker, monkeypatch):
    monkeypatch.setattr("trace_trl.environments.math_answers.MAX_USES", 2)
    checker.close()
    assert all(checker("5", "\\boxed{5}") for _ in range(5))
    assert len(checker._free) == 1 and checker._free[0][1] < 2


def test_from_many_threads(checker):
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: checker(str(n), f"\\boxed{{{n}}}"), range(8))) == [True] * 8


def test_reward_reads_the_last_turn():
    def conversation(*turns):
        return [{"role": role, "content": text} for role, text in turns]

    completions = [
        conversation(
            ("assistant", "```python\nprint(5)\n```"), ("user", "```output\n5\n```"), ("assistant", "\\boxed{5}")
        ),
        conversation(("assistant", "\\boxed{5}"), ("user", "no"), ("assistant", "\\boxed{6}")),
        conversation(("assistant", "It is 5.\n```python\nprint(5)\n```")),
        conversation(("assistant", "```python\n5\n```"), ("user", "```output\n5\n```")),
        [],
        "\\boxed{5}",
    ]
    assert math_accuracy(completions, answer=["5"] * 6, problem=["?"] * 6) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    # A turn that a limit cut never reached the environment
    states = [PythonState(None, answer) for answer in ("\\boxed{5}", None, None, None, None, "5")]
    cut = [conversation(("assistant", "\\boxed{5} and so"))] * 6
    assert math_accuracy(cut, answer=["5"] * 6, environments=states) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    # Other environments, such as native tools, don't say
    assert math_accuracy(cut[:1], answer=["5"], environments=[object()]) == [1.0]
    calling = {"role": "assistant", "content": "\\boxed{5}", "tool_calls": [{"function": {"name": "python"}}]}
    assert math_accuracy([[calling]], answer=["5"]) == [0.0]
    assert (
        last_words([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
        == "ab"
    )
    assert last_words([{"role": "assistant", "content": None, "tool_calls": []}]) == ""


def test_timeout_must_be_positive():
    with pytest.raises(ValueError, match="timeout"):
        AnswerChecker(timeout=0)
