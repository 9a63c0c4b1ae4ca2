"""The Python tool: programs in text and as native calls, state per branch, and what the policy reads."""

import pytest

from trace_trl.environments.python import (
    PythonEnvironment,
    PythonTool,
    find_code,
    python_env,
    render_result,
)
from trace_trl.environments.sandbox import Result


@pytest.fixture(scope="module")
def environment():
    environment = PythonEnvironment(timeout=10.0, wall_timeout=60.0)
    yield environment
    environment.close()


def block(code):
    return f"Let me compute.\n```python\n{code}\n```"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("```py\nx = 1\n```\nand then\n```python3\nx\n```", "x = 1\nx"),
        ("```Python \nif x:\n    y\n```", "if x:\n    y"),
        ("```python\nprint(1)", "print(1)"),
        ("```python\nprint('```')\n```", "print('```')"),
        ("```\nprint(1)\n```", None),
        ("```output\n1\n```", None),
        ("<think>```python\nx\n```</think>The answer is 3.", None),
        ("<think>```python\nx\n```", None),
        # Templates of some models open the thought in the prompt
        ("Let me try ```python\nx\n``` first.</think>It is 3.", None),
        ("first</think>\n```python\ny\n```", "y"),
        ("```python\n\n```", None),
        ("The answer is \\boxed{3}.", None),
        ("", None),
    ],
)
def test_find_code(text, code):
    assert find_code(text) == code


def test_variables_stay_and_the_last_expression_is_shown(environment):
    state = environment.reset({"problem": "?"})
    assert environment.step(state, block("x = 6")).observation == "```output\n[no output]\n```"
    result = environment.step(state, block("print(x)\nx * 7"))
    assert result.observation == "```output\n6\n42\n```"
    assert not result.done and result.reward is None
    assert result.info == {"programs": 2, "program_errors": 0}
    last = environment.step(state, "So it is \\boxed{42}.")
    assert last.done and state.answer == "So it is \\boxed{42}."
    state.close()


def test_errors_are_read_and_counted(environment):
    state = environment.reset()
    observation = environment.step(state, block("def f():\n    return 1 / 0\nf()")).observation
    assert observation.count("<cell 1>") == 2 and "ZeroDivisionError: division by zero" in observation
    assert "server.py" not in observation
    assert environment.step(state, block("x ===")).info == {"programs": 2, "program_errors": 2}
    state.close()


def test_forks_share_nothing(environment):
    state = environment.reset()
    environment.step(state, block("items = [1]"))
    fork, another = state.fork(), state.fork()
    environment.step(state, block("items.append(2)"))
    environment.step(fork, block("items.append(3)"))
    later = fork.fork()
    environment.step(fork, block("items.append(4)"))
    assert "[1, 2]" in environment.step(state, block("items")).observation
    assert "[1, 3, 4]" in environment.step(fork, block("items")).observation
    assert "[1]" in environment.step(another, block("items")).observation
    assert "[1, 3]" in environment.step(later, block("items")).observation
    assert (state.programs, later.programs) == (3, 3)
    for each in (state, fork, another, later):
        each.close()


def test_a_fork_outlives_what_it_was_forked_from(environment):
    state = environment.reset()
    environment.step(state, block("x = 5"))
    fork = state.fork()
    state.close()
    assert "5" in environment.step(fork, block("x")).observation
    fork.close()


def test_random_numbers_are_the_same_in_a_fork(environment):
    state = environment.reset()
    code = "import random\nimport numpy as np\nprint(random.random(), np.random.rand(), hash('text'), {'a', 'b', 'c'})"
    first = environment.step(state, block(code)).observation
    fork = state.fork()
    again = environment.step(fork, block("import random\nrandom.random()")).observation
    assert again == environment.step(state, block("import random\nrandom.random()")).observation
    fresh = environment.reset()
    assert environment.step(fresh, block(code)).observation == first
    for each in (state, fork, fresh):
        each.close()


def test_a_past_that_can_not_be_repeated_is_said(environment):
    state = environment.reset()
    environment.step(state, block("import os\nx = os.urandom(8)\nprint(x)"))
    fork = state.fork()
    observation = environment.step(fork, block("x")).observation
    assert "did not do the same as before" in observation and "was not run" in observation
    assert "NameError" in environment.step(fork, block("x")).observation
    assert fork.errors == 2
    fork.close()
    state.close()


def test_what_was_lost_is_not_repeated(environment):
    state = environment.reset()
    environment.step(state, block("x = 1"))
    assert "variables are lost" in environment.step(state, block("import os\nos._exit(0)")).observation
    environment.step(state, block("y = 2"))
    fork = state.fork()
    assert "NameError" in environment.step(fork, block("x")).observation
    assert "2" in environment.step(fork, block("y")).observation
    state.close()
    fork.close()


def test_more_branches_than_interpreters():
    environment = PythonEnvironment(max_idle=2)
    states = [environment.reset() for _ in range(6)]
    for turn in range(3):
        for number, state in enumerate(states):
            environment.step(state, block(f"x = {number} if {turn} == 0 else x + 10"))
    assert environment.sessions.idle == 2
    for number, state in enumerate(states):
        assert f"\n{number + 20}\n" in environment.step(state, block("x")).observation
        state.close()
    assert environment.sessions.idle == 0
    environment.close()


def test_long_observations_keep_their_ends():
    text = render_result(Result("a" * 500 + "b" * 500, "Traceback\nValueError: at the end"), 100)
    whole = "a" * 500 + "b" * 500 + "\nTraceback\nValueError: at the end"
    assert text == f"{whole[:50]}\n[{len(whole) - 100} characters left out]\n{whole[-50:]}"
    assert "[7 more bytes]" in render_result(Result("x", dropped=7), 100)
    assert render_result(Result(""), 100) == "[no output]"


def test_native_tool():
    tool = PythonTool(PythonEnvironment())
    tool.reset(problem="?", answer="42")
    assert tool.python("x = 40\nx + 2") == "42"
    fork = tool.fork()
    assert fork.python("x += 1\nx") == "41"
    assert tool.python("x") == "40"
    tool.reset()
    assert "NameError" in tool.python("x")
    fork.close()
    tool.close()
    tool._environment.close()


def test_callbacks_and_arguments():
    env_reset, env_step = python_env(timeout=10.0, max_observation_chars=30)
    state = env_reset({"problem": "?"})
    assert len(env_step(state, block("'x' * 100"), []).observation) < 90
    state.close()
    env_reset.__self__.close()
    with pytest.raises(ValueError, match="max_observation_chars"):
        PythonEnvironment(max_observation_chars=0)
    with pytest.raises(ValueError, match="Timeouts"):
        PythonEnvironment(timeout=0)
    with pytest.raises(ValueError, match="max_idle"):
        PythonEnvironment(max_idle=-1)
