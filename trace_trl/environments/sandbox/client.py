"""The trainer's side of the sandbox: starts interpreters, hands them programs, ends those that take too much."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base import describe


SERVER = Path(__file__).with_name("server.py")
FILE_SIZE = 4 << 20
OPEN_FILES = 64
FOLDER_SIZE = 16 << 20
FOLDER_FILES = 256
TICK = 0.05  # seconds between two looks at what a running program has used
START_TIMEOUT = 120.0  # seconds in which the server must have loaded its packages
FORK_TIMEOUT = 20.0
KEPT = ("LD_LIBRARY_PATH",)  # without it some installations of Python don't start
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the order of sets is the same whenever a program is run again
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class SandboxError(RuntimeError):
    """Programs can't be run in isolation on this machine; says what is missing."""


@dataclass(frozen=True, slots=True)
class Result:
    """
    What a program did.

    Attributes:
        output (`str`): what it printed, and the value of its last line if that is an expression; cut at `max_output`.
        error (`str` or `None`): traceback, or why it was ended.
        dropped (`int`): bytes that were printed beyond `max_output`.
        lost (`bool`): the interpreter has ended, and all variables with it.
        timed_out (`bool`): it was ended because the program took too long.
    """

    output: str
    error: str | None = None
    dropped: int = 0
    lost: bool = False
    timed_out: bool = False


class Interpreter:
    """One confined Python process with one namespace. Not for several threads at once."""

    def __init__(self, pid: int, handle: int, channel: socket.socket, folder: str, max_output: int):
        self.pid = pid
        self.folder = folder
        self.max_output = max_output
        self._handle = handle
        self._channel = channel
        self._clock = (~pid << 3) | 2  # of the CPU time of that process, see clock_getcpuclockid(3)
        self._owner = os.getpid()
        self._closed = False
        channel.setblocking(False)
        self.stop()

    def run(self, code: str, timeout: float, wall_timeout: float) -> Result:
        """Runs one program. Whatever it does is a result.

        Args:
            code (`str`): Python source.
            timeout (`float`): seconds of CPU time.
            wall_timeout (`float`): seconds on the clock, which other programs on the machine slow down.
        """
        if self._closed:
            return Result("", "The interpreter has ended.", lost=True)
        request = json.dumps({"code": code, "max_output": self.max_output}).encode()
        try:
            self._signal(signal.SIGCONT)
            result = self._exchange(struct.pack("!I", len(request)) + request, timeout, wall_timeout)
            self.stop()
            return result
        except _Ended as ended:
            self.close()
            return Result("", str(ended), lost=True, timed_out=isinstance(ended, _TimedOut))
        except Exception:
            # It died, or a program wrote to the channel: nothing it says can be read any more
            self.close()
            return Result("", "The interpreter crashed.", lost=True)
        except BaseException:
            self.close()
            raise

    def _exchange(self, request: bytes, timeout: float, wall_timeout: float) -> Result:
        used, now = self._cpu_time(), time.monotonic()
        deadline, next_look = now + wall_timeout, now + TICK
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        if poller.poll(0):
            raise ValueError("it speaks without being asked")
        received, length = bytearray(), None
        # In JSON a byte of the output takes six, and a character of the error twelve
        limit = 18 * self.max_output + 1024
        unsent = memoryview(request)
        while length is None or len(received) < 4 + length:
            now = time.monotonic()
            if now >= deadline:
                raise _TimedOut(f"Timeout: the program took longer than {wall_timeout:g} s.")
            if now >= next_look:
                self._check_use(used, timeout)
                next_look = now + TICK
            poller.modify(self._channel, select.POLLIN | (select.POLLOUT if unsent else 0))
            for _, events in poller.poll(1000 * min(TICK, deadline - now)):
                if unsent and events & select.POLLOUT:
                    unsent = unsent[self._channel.send(unsent) :]
                if events & ~select.POLLOUT:
                    part = self._channel.recv(1 << 16)
                    if not part:
                        raise ConnectionResetError
                    received += part
                    if length is None and len(received) >= 4:
                        (length,) = struct.unpack("!I", received[:4])
                        if length > limit:
                            raise ValueError("not an answer")
        if len(received) > 4 + length:
            raise ValueError("more than an answer")
        self._check_folder()
        return self._read(json.loads(received[4:].decode()))

    def _read(self, answer: dict) -> Result:
        """Takes nothing for granted: a program can write what it likes to its end of the channel."""
        output, error, dropped = answer["output"], answer["error"], answer["dropped"]
        if type(output) is not str or type(error) not in (str, type(None)) or type(dropped) is not int:
            raise ValueError("not an answer")
        if not 0 <= dropped < 1 << 63:
            raise ValueError("not a number of bytes")
        error = None if error is None else _readable(error[-self.max_output :]) or "An error without a text."
        return Result(_readable(output[: self.max_output]), error, dropped)

    def _check_use(self, used: float, timeout: float) -> None:
        if self._cpu_time() - used > timeout:
            raise _TimedOut(f"Timeout: the program took longer than {timeout:g} s of CPU time.")
        self._check_folder()

    def _check_folder(self) -> None:
        size = 0
        with os.scandir(self.folder) as entries:
            for count, entry in enumerate(entries, start=1):
                size += entry.stat(follow_symlinks=False).st_size
                if size > FOLDER_SIZE or count > FOLDER_FILES:
                    raise _Ended(
                        f"The program wrote more than {FOLDER_SIZE >> 20} MB, or more than {FOLDER_FILES} files."
                    )

    def _cpu_time(self) -> float:
        return time.clock_gettime(self._clock)

    def _signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def stop(self) -> None:
        """Halts it between two programs: an alarm that one left behind would burn the CPU."""
        if not self._closed:
            try:
                self._signal(signal.SIGSTOP)
            except OSError:
                pass

    @property
    def is_alive(self) -> bool:
        """Whether the process is there. It may have been killed for memory while it waited."""
        return not self._closed and not _is_ready(self._handle, 0.0)

    def close(self) -> None:
        """Kills the process and removes its folder. In a process forked from the one that started it: forgets it."""
        if self._closed:
            return
        self._closed = True
        try:
            if os.getpid() == self._owner:
                self._signal(signal.SIGKILL)
                # The folder must not change any more when it is removed
                _is_ready(self._handle, 10.0)
                shutil.rmtree(self.folder, ignore_errors=True)
        except ProcessLookupError:
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            os.close(self._handle)
            self._channel.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


class _Ended(Exception):
    """Why a program was ended."""


class _TimedOut(_Ended):
    pass


def _is_ready(descriptor: int, timeout: float) -> bool:
    # `select` takes no descriptor above 1023, of which a trainer may have more
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(1000 * timeout))


def _readable(text: str) -> str:
    # Half of a surrogate pair can't be encoded, and no tokenizer takes it
    return text.encode("utf-8", "replace").decode()


class Sandbox:
    """
    Starts [`Interpreter`]s. Its server process is started at the first one, and ends with the trainer.

    Args:
        memory_mb (`int`, *optional*, defaults to `512`):
            Memory a program may use, beyond that of Python and the preloaded packages.
        max_output (`int`, *optional*, defaults to `16384`):
            Bytes of output that are kept of a program.
        cpu_seconds (`int`, *optional*, defaults to `600`):
            CPU time of an interpreter over all its programs.
        preload (`Sequence[str]`, *optional*, defaults to `("numpy", "sympy")`):
            Packages that are imported once for all interpreters, where they are installed.
        isolation (`str`, *optional*, defaults to `"strict"`):
            `"strict"` runs programs confined, or not at all. `"limits"` sets resource limits only: programs can then
            read and change whatever the trainer can.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        memory_mb: int = 512,
        max_output: int = 16384,
        cpu_seconds: int = 600,
        preload: Sequence[str] = ("numpy", "sympy"),
        isolation: str = "strict",
    ):
        if isolation not in ("strict", "limits"):
            raise ValueError(f"`isolation` must be 'strict' or 'limits', got {isolation!r}.")
        for name, value in (("memory_mb", memory_mb), ("max_output", max_output), ("cpu_seconds", cpu_seconds)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self.memory_mb = memory_mb
        self.max_output = max_output
        self.cpu_seconds = cpu_seconds
        self.preload = tuple(preload)
        self.isolation = isolation
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def start(self) -> Interpreter:
        """A fresh interpreter.

        Raises:
            SandboxError: if it can't be confined here.
        """
        channel, other = socket.socketpair()
        handle = folder = None
        try:
            with self._lock:
                server = self._living_server()
                folder = tempfile.mkdtemp(dir=server.folder)
                request = {
                    "folder": folder,
                    "memory": self.memory_mb << 20,
                    "cpu_seconds": self.cpu_seconds,
                    "file_size": FILE_SIZE,
                    "open_files": OPEN_FILES,
                    "isolation": self.isolation,
                }
                try:
                    pid, handle = server.fork(json.dumps(request).encode(), other)
                except SandboxError:
                    raise  # its answer: the other interpreters are well
                except BaseException:
                    # An answer that comes later would be taken for that of the next request
                    server.close()
                    raise
            other.close()
            channel.settimeout(START_TIMEOUT)
            if channel.recv(1) != b"\x00":
                message = channel.recv(4 + 4096)[4:].decode(errors="replace") or "the process died."
                raise SandboxError(
                    f"Programs can't be isolated on this machine: {message} With isolation='limits' they run with the "
                    "trainer's own rights (PythonEnvironment, and AnswerChecker or MathAccuracy)."
                )
        except BaseException as error:
            channel.close()
            if handle is not None:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                os.close(handle)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise SandboxError(f"No interpreter could be started: {describe(error)}") from error
            raise
        finally:
            other.close()
        return Interpreter(pid, handle, channel, folder, self.max_output)

    def _living_server(self) -> _Server:
        if self._server is None or not self._server.is_alive:
            if self._server is not None:
                self._server.close()
            self._server = _Server(self.preload)
        return self._server

    def close(self) -> None:
        """Ends the server, and with it all interpreters."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


class _Server:
    def __init__(self, preload: Sequence[str]):
        if not sys.platform.startswith("linux"):
            raise SandboxError("The Python tool runs on Linux only: it limits and isolates programs by the kernel.")
        self.folder = tempfile.mkdtemp(prefix="trace-python-")
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as failed, other:
            failed.callback(shutil.rmtree, self.folder, ignore_errors=True)
            descriptor = other.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", str(SERVER), str(descriptor), self.folder, *preload],
                env=ENVIRONMENT | {name: os.environ[name] for name in KEPT if name in os.environ},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C is the trainer's affair
            )
            failed.pop_all()
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._process, self._control, self.folder, self._owner)
        self._control.settimeout(START_TIMEOUT)
        try:
            ready = self._control.recv(64)
        except OSError as error:
            self.close()
            raise SandboxError(f"The process that starts Python programs did not start: {describe(error)}") from error
        if ready != b"ready":
            self.close()
            raise SandboxError("The process that starts Python programs ended at once; its error stands above.")

    @property
    def is_alive(self) -> bool:
        # In a process forked from the one that started it, it is another one's
        return self._finalizer.alive and self._owner == os.getpid() and self._process.poll() is None

    def fork(self, request: bytes, channel: socket.socket) -> tuple[int, int]:
        self._control.settimeout(FORK_TIMEOUT)
        socket.send_fds(self._control, [request], [channel.fileno()])
        answer, handles, _, _ = socket.recv_fds(self._control, 4096, 1)
        for handle in handles:
            os.set_inheritable(handle, False)
        if not handles:
            if answer:
                raise SandboxError(answer.decode(errors="replace"))
            raise ConnectionResetError("the process that starts them has ended")
        return int(answer), handles[0]

    def close(self) -> None:
        self._finalizer()


def _end(process: subprocess.Popen, control: socket.socket, folder: str, owner: int) -> None:
    control.close()
    if os.getpid() != owner:
        return
    try:
        process.wait(2.0)  # it ends when nobody is there any more
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
