"""
Python sessions: a namespace that belongs to one branch, and that can be forked.

    session ── run ── run ── run        one confined interpreter, kept between programs
                 └─ fork ── run         a fresh interpreter that runs the first programs again when it is first needed

A session is what it has run, so a fork costs nothing until it is used, and an interpreter that lies idle can be ended
for another: at most `max_idle` of them wait at a time, however many branches are live.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from dataclasses import replace

from .client import Interpreter, Result, Sandbox


REPEAT_TIMEOUT = 30.0  # seconds for all earlier programs of a session together
LOST = (
    "The earlier programs had to be run again, and did not do the same as before, or took too long. This one was not "
    "run."
)
# Differ between interpreters, and say nothing of what a program does: addresses, and the name of its folder
_INCIDENTAL = re.compile(r"0x[0-9a-f]+|trace-python-\w+/\w+")


def _comparable(result: Result) -> Result:
    error = None if result.error is None else _INCIDENTAL.sub("", result.error)
    return replace(result, output=_INCIDENTAL.sub("", result.output), error=error)


class Sessions:
    """
    Makes sessions, and keeps the interpreters of those that are between two programs.

    Args:
        sandbox ([`Sandbox`]):
            Starts interpreters.
        timeout (`float`, *optional*, defaults to `5.0`):
            Seconds of CPU time of a program.
        wall_timeout (`float`, *optional*):
            Seconds on the clock; three times `timeout` by default, since programs share the machine.
        max_idle (`int`, *optional*, defaults to `128`):
            Interpreters that are kept between two programs.
    """

    def __init__(self, sandbox: Sandbox, timeout: float = 5.0, wall_timeout: float | None = None, max_idle: int = 128):
        if timeout <= 0 or wall_timeout is not None and wall_timeout <= 0:
            raise ValueError(f"Timeouts must be positive, got {timeout} and {wall_timeout}.")
        if max_idle < 0:
            raise ValueError(f"`max_idle` must not be negative, got {max_idle}.")
        self.sandbox = sandbox
        self.timeout = timeout
        self.wall_timeout = 3 * timeout if wall_timeout is None else wall_timeout
        self.max_idle = max_idle
        self._lock = threading.Lock()
        self._idle: OrderedDict[PythonSession, Interpreter] = OrderedDict()
        self._checked = False

    def check(self) -> None:
        """Starts an interpreter, the first time.

        Raises:
            SandboxError: if programs can't be isolated on this machine.
        """
        with self._lock:
            if not self._checked:
                self.sandbox.start().close()
                self._checked = True

    def new(self) -> PythonSession:
        """A session that has run nothing yet. Its interpreter is started when it runs something."""
        return PythonSession(self)

    def take(self, session: PythonSession) -> Interpreter | None:
        """The session's interpreter, for it alone; `None` if it has none, or no more."""
        with self._lock:
            return self._idle.pop(session, None)

    def keep(self, session: PythonSession, interpreter: Interpreter) -> None:
        """Keeps the session's interpreter for its next program, and ends the one that has waited longest if that makes
        too many."""
        ended = []
        with self._lock:
            if session.closed:
                ended.append(interpreter)
            else:
                self._idle[session] = interpreter
            while len(self._idle) > self.max_idle:
                ended.append(self._idle.popitem(last=False)[1])
        for interpreter in ended:
            interpreter.close()

    def end(self, session: PythonSession) -> Interpreter | None:
        """As `take`; what comes back for this session later is not kept."""
        with self._lock:
            session.closed = True
            return self._idle.pop(session, None)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def close(self) -> None:
        """Ends all interpreters."""
        with self._lock:
            interpreters = list(self._idle.values())
            self._idle.clear()
        for interpreter in interpreters:
            interpreter.close()
        self.sandbox.close()


class PythonSession:
    """One namespace. Not for several threads at once."""

    def __init__(self, sessions: Sessions, history: tuple[tuple[str, Result], ...] = ()):
        self._sessions = sessions
        # What the namespace is made of; begins anew when an interpreter is lost
        self._history = history
        self.closed = False

    def run(self, code: str) -> Result:
        """Runs a program after those that this session has run already.

        Raises:
            SandboxError: if programs can't be isolated on this machine.
        """
        interpreter = self._sessions.take(self)
        if interpreter is not None and not interpreter.is_alive:
            # Killed while it waited, for memory perhaps: no fault of a program
            interpreter.close()
            interpreter = None
        if interpreter is None:
            interpreter = self._repeat()
            if interpreter is None:
                self._history = ()
                return Result("", LOST, lost=True)
        result = self._run(interpreter, code)
        if result.lost:
            self._history = ()
        else:
            self._history += ((code, result),)
            self._sessions.keep(self, interpreter)
        return result

    def _repeat(self) -> Interpreter | None:
        """A fresh interpreter that has run the earlier programs; `None` if they did not do the same as before."""
        interpreter = self._sessions.sandbox.start()
        deadline = time.monotonic() + REPEAT_TIMEOUT
        for code, known in self._history:
            result = self._run(interpreter, code)
            if _comparable(result) != _comparable(known) or time.monotonic() > deadline:
                interpreter.close()
                return None
        return interpreter

    def _run(self, interpreter: Interpreter, code: str) -> Result:
        try:
            return interpreter.run(code, self._sessions.timeout, self._sessions.wall_timeout)
        except BaseException:
            interpreter.close()
            raise

    def fork(self) -> PythonSession:
        """A session in the same state. It shares nothing that changes."""
        return PythonSession(self._sessions, self._history)

    def close(self) -> None:
        """Ends the session's interpreter; one that is at work, when it has done its work."""
        interpreter = self._sessions.end(self)
        if interpreter is not None:
            interpreter.close()
