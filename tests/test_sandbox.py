"""Programs that mean harm, and what is left of them: an observation."""

import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hostile_programs import ENDLESS, HOSTILE
from trace_trl.environments.python import PythonEnvironment
from trace_trl.environments.sandbox import Sandbox, SandboxError, Sessions, client
from waiting import LIMIT, until


TIMEOUT = 1.0  # of CPU time, which other processes on the machine do not use up
WALL = 60.0  # on the clock, which they do: it ends a program only where the test is about that
ENOUGH = 10.0, WALL  # for a program that takes milliseconds
SECRET = "hunter2-of-the-trainer"


@pytest.fixture(scope="module")
def environment():
    environment = PythonEnvironment(timeout=TIMEOUT, wall_timeout=WALL, memory_mb=256)
    yield environment
    environment.close()


def small_sessions(**kwargs):
    return Sessions(Sandbox(preload=()), *ENOUGH, **kwargs)


def state_of(pid):
    """What /proc says of a process: R, S, T where it is halted, Z where it has ended; `None` where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def has_ended(pid):
    return state_of(pid) in (None, "Z", "X")


def listing(folder):
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[path.name] = (status.st_mode, status.st_uid, status.st_mtime_ns, content)
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_is_an_observation(name, environment, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_SECRET", SECRET)
    (tmp_path / "kept.txt").write_text(SECRET)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "also.txt").write_text("kept")
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "unix"))
    with socket.create_server(("127.0.0.1", 0)) as listener, unix:
        listener.setblocking(False)
        unix.listen()
        unix.setblocking(False)
        program = HOSTILE[name]
        for mark, value in ("folder", tmp_path), ("pid", os.getpid()), ("port", listener.getsockname()[1]):
            program = program.replace(f"{{{mark}}}", str(value))
        before = listing(tmp_path)
        state = environment.reset()
        try:
            with monkeypatch.context() as limits:
                if name == "endless sleep":  # the one that takes neither CPU time nor anything else that is limited
                    limits.setattr(environment.sessions, "wall_timeout", 2.0)
                result = environment.step(state, f"Let me see.\n```python\n{program}\n```")
            following = environment.step(state, "```python\nx = 20\nprint(x + 1)\n```")
        finally:
            state.close()
        for server in (listener, unix):
            with pytest.raises(BlockingIOError):
                server.accept()
    assert not result.done
    assert result.observation.startswith("```output\n") and len(result.observation) < 2200
    if name in ENDLESS:  # nothing but the limit of time has ended it
        assert f"longer than {ENDLESS[name]}." in result.observation
    assert SECRET not in result.observation
    assert listing(tmp_path) == before
    result.observation.encode()  # a tokenizer takes it
    # The trainer goes on, this branch as well: with its interpreter, or with another one that says so
    assert "21" in following.observation or "lost" in following.observation or "Error" in following.observation
    fresh = environment.reset()
    assert "21" in environment.step(fresh, "```python\nprint(21)\n```").observation
    fresh.close()


def run(code, **kwargs):
    sessions = Sessions(Sandbox(**kwargs), timeout=2.0, wall_timeout=WALL)
    try:
        return sessions.new().run(textwrap.dedent(code))
    finally:
        sessions.close()


def test_limits_of_time_and_memory_say_so(environment, monkeypatch):
    state = environment.reset()
    with monkeypatch.context() as limits:
        limits.setattr(environment.sessions, "wall_timeout", 2.0)
        observation = environment.step(state, "```python\nimport time\ntime.sleep(999)\n```").observation
    assert "longer than 2 s." in observation
    assert "MemoryError" in environment.step(state, "```python\nx = [0] * 10**9\n```").observation
    state.close()


def test_a_limit_of_processor_time_says_so():
    # On the clock there is time enough where other processes are at work, too
    environment = PythonEnvironment(timeout=TIMEOUT, wall_timeout=240.0)
    state = environment.reset()
    assert "longer than 1 s of CPU time" in environment.step(state, "```python\nwhile True: pass\n```").observation
    state.close()
    environment.close()


def test_processor_time_is_counted_not_waiting():
    sessions = Sessions(Sandbox(preload=()), timeout=0.3, wall_timeout=WALL)
    assert sessions.new().run("import time\ntime.sleep(1)\nprint('awake')").output == "awake\n"
    sessions.close()


def test_nothing_runs_between_two_programs():
    sessions = small_sessions()
    session = sessions.new()
    # An alarm goes off when the program is over, and its handler never returns
    assert session.run("import signal\ndef f(*_):\n    while True: pass\nsignal.signal(14, f)").error is None
    interpreter = sessions.take(session)
    until(lambda: state_of(interpreter.pid) == "T")
    used = interpreter._cpu_time()
    interpreter._signal(signal.SIGALRM)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{interpreter.pid}/status").read_text().splitlines())
    assert int(status["ShdPnd"], 16) == 1 << signal.SIGALRM - 1  # it waits, and so does what it would run
    assert state_of(interpreter.pid) == "T" and interpreter._cpu_time() == used
    interpreter._signal(signal.SIGCONT)  # it would run on, were it not halted
    until(lambda: interpreter._cpu_time() - used > 0.2)
    interpreter.close()
    sessions.close()


@pytest.mark.parametrize("version", range(1, 8))
def test_every_version_of_landlock_protects_files(version, tmp_path, monkeypatch):
    """Also those before its right to truncate, where `O_RDONLY | O_TRUNC` asks for reading only."""
    folder = Path(client.__file__).parent
    (tmp_path / "server.py").write_text((folder / "server.py").read_text())
    confine = (folder / "confine.py").read_text()
    assert confine.count("    if version < 1:\n") == 1
    (tmp_path / "confine.py").write_text(
        confine.replace("    if version < 1:\n", f"    version = min(version, {version})\n    if version < 1:\n")
    )
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    readable = tmp_path / "readable"
    readable.mkdir()
    (readable / "module.py").write_text("kept")
    with (tmp_path / "confine.py").open("a") as file:
        file.write(f"\n_paths = readable_paths\nreadable_paths = lambda: [*_paths(), {str(readable)!r}]\n")
    monkeypatch.setattr(client, "SERVER", tmp_path / "server.py")
    program = f"""
    import os
    for path in ({str(kept)!r}, {str(readable / "module.py")!r}):
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_TRUNC):
            try: os.close(os.open(path, flags)); print(flags, "opened")
            except PermissionError: print(flags, "refused")
    open("own.txt", "w").write("x")
    print(open("own.txt").read())
    """
    result = run(program)
    readable_flags = [f"{os.O_RDONLY} opened", "1 refused", "2 refused", "512 refused", "513 refused"]
    refused = [line.replace("opened", "refused") for line in readable_flags]
    assert result.output.split("\n")[:11] == [*refused, *readable_flags, "x"], result
    assert (readable / "module.py").read_text() == kept.read_text() == "kept"


def test_no_root_in_it():
    """A program has no capabilities, whoever the trainer is, and gains none."""
    sandbox = Sandbox(preload=())
    interpreter = sandbox.start()
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{interpreter.pid}/status").read_text().splitlines())
    assert {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff")} == dict.fromkeys(
        ("CapInh", "CapPrm", "CapEff"), 0
    )
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    sandbox.close()


def test_a_long_error_of_wide_characters_is_no_crash():
    result = run("print('😀' * 9000)\nraise ValueError('😀' * 9000)", max_output=1000)
    assert not result.lost and result.dropped > 0
    assert result.error == "😀" * 1000 and len(result.output) == 250


def test_more_descriptors_than_select_takes():
    sandbox = Sandbox(preload=())
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        interpreter = sandbox.start()
        assert interpreter._handle > 1023
        assert interpreter.run("1 + 1", *ENOUGH).output == "2\n"
        folder = interpreter.folder
        interpreter.close()
        assert not os.path.exists(folder)
    finally:
        for descriptor in held:
            os.close(descriptor)
        sandbox.close()


def test_a_forked_trainer_leaves_the_sandbox_to_its_parent():
    """A worker of a data loader, for instance, that exits as Python does."""
    script = """
    import os, sys
    from trace_trl.environments.sandbox import Sandbox
    ENOUGH = 10, 60
    sandbox = Sandbox(preload=())
    interpreter = sandbox.start()
    interpreter.run("x = 1", *ENOUGH)
    if not os.fork():
        other = sandbox.start()
        assert other.run("2", *ENOUGH).output == "2\\n"
        assert os.path.dirname(other.folder) != os.path.dirname(interpreter.folder)
        del interpreter
        sys.exit(0)
    assert os.wait()[1] == 0
    assert os.path.isdir(interpreter.folder)
    assert interpreter.run("x", *ENOUGH).output == "1\\n"
    assert sandbox.start().run("3", *ENOUGH).output == "3\\n"
    print("fine")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240)
    assert done.stdout == "fine\n", done.stderr


def test_a_late_answer_of_the_server_is_nobody_elses(monkeypatch):
    sandbox = Sandbox(preload=())
    sandbox.start().close()
    monkeypatch.setattr(client, "FORK_TIMEOUT", 0.3)
    server = sandbox._server._process.pid
    os.kill(server, signal.SIGSTOP)
    until(lambda: state_of(server) == "T")
    with pytest.raises(SandboxError, match="No interpreter could be started"):
        sandbox.start()
    monkeypatch.undo()
    interpreters = [sandbox.start() for _ in range(3)]
    for number, interpreter in enumerate(interpreters):
        interpreter.run(f"x = {number}", *ENOUGH)
        assert interpreter.run("import os\nprint(x, os.getpid())", *ENOUGH).output == f"{number} {interpreter.pid}\n"
    sandbox.close()


def test_an_interpreter_that_was_killed_while_it_waited_is_no_loss():
    sessions = small_sessions()
    session = sessions.new()
    session.run("x = 7")
    waiting = next(iter(sessions._idle.values()))
    os.kill(waiting.pid, signal.SIGKILL)
    assert client._is_ready(waiting._handle, LIMIT)
    assert session.run("x").output == "7\n"
    sessions.sandbox._server._process.kill()
    waiting = next(iter(sessions._idle.values()))
    assert client._is_ready(waiting._handle, LIMIT)
    assert session.run("x + 1").output == "8\n"
    sessions.close()


def test_a_failed_start_costs_one_interpreter():
    sandbox = Sandbox(preload=())
    first = sandbox.start()
    server = sandbox._server._process.pid
    before = resource.prlimit(server, resource.RLIMIT_NOFILE)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (4, before[1]))
    with pytest.raises(SandboxError):
        sandbox.start()
    resource.prlimit(server, resource.RLIMIT_NOFILE, before)
    assert first.run("1", *ENOUGH).output == "1\n"
    assert sandbox._server._process.pid == server
    assert sandbox.start().run("2", *ENOUGH).output == "2\n"
    assert len(os.listdir(sandbox._server.folder)) == 1  # the first's; the last one is forgotten
    sandbox.close()
    first.close()


def test_descriptors_are_not_inherited():
    sandbox = Sandbox(preload=())
    interpreter = sandbox.start()
    assert not os.get_inheritable(interpreter._handle)
    assert not os.get_inheritable(interpreter._channel.fileno())
    sandbox.close()


def test_forgotten_interpreters_are_ended():
    sandbox = Sandbox(preload=())
    interpreter = sandbox.start()
    folder, pid = interpreter.folder, interpreter.pid
    del interpreter
    assert not os.path.exists(folder)
    assert has_ended(pid)
    sandbox.close()


def test_interpreters_end_with_the_trainer():
    script = """
    import sys, time
    from trace_trl.environments.sandbox import Sandbox
    sandbox = Sandbox(preload=())
    a, b = sandbox.start(), sandbox.start()
    print(a.pid, b.pid, sandbox._server._process.pid, sandbox._server.folder, flush=True)
    b.run("while True: pass", 60, 60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            *pids, folder = process.stdout.readline().split()
        finally:
            process.kill()
    assert len(pids) == 3
    until(lambda: all(map(has_ended, pids)))
    assert not os.path.exists(folder)


def test_a_dead_server_is_replaced_and_sessions_go_on(caplog):
    sessions = small_sessions()
    session = sessions.new()
    session.run("x = 7")
    first = sessions.sandbox._server._process
    first.kill()
    first.wait(LIMIT)
    interpreter = sessions.take(session)
    assert interpreter.run("x", *ENOUGH).lost  # its parent died, and it with that
    result = session.run("x")
    assert result.output == "7\n"
    assert sessions.sandbox._server._process.pid != first.pid
    sessions.close()


def test_folders_are_removed():
    sandbox = Sandbox(preload=())
    interpreter = sandbox.start()
    interpreter.run("open('a.txt', 'w').write('x')", *ENOUGH)
    assert os.listdir(interpreter.folder) == ["a.txt"]
    interpreter.close()
    assert not os.path.exists(interpreter.folder)
    folder = sandbox._server.folder
    sandbox.close()
    assert not os.path.exists(folder)


def test_descriptors_and_processes_do_not_accumulate():
    sandbox = Sandbox(preload=())
    sandbox.start().close()
    gc.collect()  # what other tests left closes its descriptors now, or later, which makes them fewer
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        interpreter = sandbox.start()
        interpreter.run("1", *ENOUGH)
        interpreter.close()
    server = sandbox._server._process.pid
    assert len(os.listdir("/proc/self/fd")) <= before
    # The server buries its dead, and closes what it was sent, after it has answered
    sandbox.start().close()
    children = Path(f"/proc/{server}/task/{server}/children")
    until(lambda: len(children.read_text().split()) <= 1)
    until(lambda: len(os.listdir(f"/proc/{server}/fd")) < 12)
    sandbox.close()


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("LANDLOCK_CREATE_RULESET = 9999", "This kernel has no Landlock"),
        ("seccomp, _seccomp_error = None, 'not here'", "pyseccomp can't be loaded .not here.: pip install pyseccomp"),
    ],
)
def test_a_system_without_a_part_of_the_isolation_is_refused(missing, sentence, tmp_path, monkeypatch):
    folder = Path(client.__file__).parent
    (tmp_path / "server.py").write_text((folder / "server.py").read_text())
    (tmp_path / "confine.py").write_text((folder / "confine.py").read_text() + f"\n{missing}\n")
    monkeypatch.setattr(client, "SERVER", tmp_path / "server.py")
    environment = PythonEnvironment()
    # At the first `reset`, which ends a run; not in `step`, where the policy would read it
    with pytest.raises(SandboxError, match=f"can't be isolated on this machine: .*{sentence}.*isolation='limits'"):
        environment.reset()
    assert os.listdir(environment.sessions.sandbox._server.folder) == []
    environment.close()
    weaker = PythonEnvironment(isolation="limits")
    state = weaker.reset()
    assert "3" in weaker.step(state, "```python\n1 + 2\n```").observation
    state.close()
    weaker.close()


def test_limits_only_sees_files_and_still_ends():
    assert run("print(open('/etc/passwd').read()[:4])", isolation="limits").output == "root\n"
    assert run("while True: pass", isolation="limits").timed_out


@pytest.mark.parametrize(
    "arguments", [{"isolation": "none"}, {"memory_mb": 0}, {"max_output": 0}, {"cpu_seconds": 0}], ids=str
)
def test_arguments_out_of_range(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Sandbox(**arguments)


def test_many_threads_at_once():
    sessions = small_sessions(max_idle=4)
    barrier = threading.Barrier(24, timeout=LIMIT)

    def work(number):
        barrier.wait()
        session = sessions.new()
        session.run(f"x = {number}")
        output = session.run("x * x").output
        session.close()
        return output

    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(work, range(24))) == [f"{number * number}\n" for number in range(24)]
    assert sessions.idle == 0
    sessions.close()
