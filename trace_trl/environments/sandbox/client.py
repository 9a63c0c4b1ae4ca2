"""The trainer's side of the sandbox: starts interpreters, hands them programs, ends those that take too much."""

from __future__ import annotations

import json
import logging
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


logger = logging.getLogger(__name__)

SERVER = Path(__file__).with_name("server.py")
FILE_SIZE = 4 << 20
OPEN_FILES = 64
FOLDER_SIZE = 16 << 20
FOLDER_FILES = 256
TICK = 0.05  # seconds between two looks at what a running program has used
START_TIMEOUT = 120.0  # seconds in which the server must have loaded its packages
ENVIRONMENT = {
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
        self._closed = False
        self.stop()

    def run(self, code: str, timeout: float, wall_timeout: float) -> Result:
        """Runs one program.

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
            return self._exchange(struct.pack("!I", len(request)) + request, timeout, wall_timeout)
        except _Ended as ended:
            self.close()
            return Result("", str(ended), lost=True, timed_out=isinstance(ended, _TimedOut))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            # It died, or a program wrote to the channel: nothing it says can be read any more
            self.close()
            return Result("", "The interpreter crashed.", lost=True)
        finally:
            self.stop()

    def _exchange(self, request: bytes, timeout: float, wall_timeout: float) -> Result:
        started, used = time.monotonic(), self._cpu_time()
        deadline = started + wall_timeout
        self._channel.setblocking(False)
        received, length = bytearray(), None
        # A byte takes six in JSON at most
        limit = 6 * self.max_output + (1 << 16)
        unsent = memoryview(request)
        while length is None or len(received) < 4 + length:
            wait = min(TICK, deadline - time.monotonic())
            if wait <= 0:
                raise _TimedOut(f"Timeout: the program took longer than {wall_timeout:g} s.")
            poller = select.poll()
            poller.register(self._channel, select.POLLIN | (select.POLLOUT if unsent else 0))
            events = dict(poller.poll(wait * 1000)).get(self._channel.fileno(), 0)
            if not events:
                self._check_use(used, timeout)
                continue
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
        answer = json.loads(received[4 : 4 + length].decode())
        output, error = str(answer["output"]), answer["error"]
        return Result(_readable(output), error and _readable(str(error)[-self.max_output :]), int(answer["dropped"]))

    def _check_use(self, used: float, timeout: float) -> None:
        if self._cpu_time() - used > timeout:
            raise _TimedOut(f"Timeout: the program took longer than {timeout:g} s of CPU time.")
        try:
            with os.scandir(self.folder) as entries:
                sizes = [entry.stat(follow_symlinks=False).st_size for entry in entries]
        except OSError:
            return  # a file was removed meanwhile
        if sum(sizes) > FOLDER_SIZE or len(sizes) > FOLDER_FILES:
            raise _Ended(f"The program wrote more than {FOLDER_SIZE >> 20} MB, or more than {FOLDER_FILES} files.")

    def _cpu_time(self) -> float:
        return time.clock_gettime(self._clock)

    def _signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def stop(self) -> None:
        """Halts it between two programs: a thread that one left behind would burn the CPU."""
        if not self._closed:
            try:
                self._signal(signal.SIGSTOP)
            except OSError:
                pass

    def close(self) -> None:
        """Kills the process and removes its folder."""
        if self._closed:
            return
        self._closed = True
        try:
            self._signal(signal.SIGKILL)
            # The folder must not change any more when it is removed
            select.select([self._handle], [], [], 10.0)
        except OSError:
            pass
        os.close(self._handle)
        self._channel.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def closed(self) -> bool:
        return self._closed


class _Ended(Exception):
    """Why a program was ended."""


class _TimedOut(_Ended):
    pass


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
                pid, handle = server.fork(json.dumps(request).encode(), other)
            channel.settimeout(START_TIMEOUT)
            status = channel.recv(1)
            if status != b"\x00":
                message = channel.recv(4 + 4096)[4:].decode(errors="replace") or "the process died"
                os.close(handle)
                shutil.rmtree(folder, ignore_errors=True)
                raise SandboxError(
                    f"Programs can't be isolated on this machine: {message} With isolation='limits' they run with the "
                    "trainer's own rights."
                )
        except BaseException as error:
            channel.close()
            if isinstance(error, OSError):
                raise SandboxError(f"No interpreter could be started: {describe(error)}") from error
            raise
        finally:
            other.close()
        return Interpreter(pid, handle, channel, folder, self.max_output)

    def _living_server(self) -> _Server:
        if self._server is None or not self._server.is_alive:
            if self._server is not None:
                logger.warning("The process that starts Python programs had ended; a new one is started.")
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
            raise SandboxError("Programs can be isolated on Linux only.")
        self.folder = tempfile.mkdtemp(prefix="trace-python-")
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            descriptor = other.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(SERVER), str(descriptor), *preload],
                env=ENVIRONMENT,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C is the trainer's affair
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._control, self.folder)
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
        return self._process.poll() is None

    def fork(self, request: bytes, channel: socket.socket) -> tuple[int, int]:
        socket.send_fds(self._control, [request], [channel.fileno()])
        pid, handles, _, _ = socket.recv_fds(self._control, 64, 1)
        if not handles:
            raise ConnectionResetError("the process that starts them has ended")
        return int(pid), handles[0]

    def close(self) -> None:
        self._finalizer()


def _end(process: subprocess.Popen, control: socket.socket, folder: str) -> None:
    control.close()
    try:
        process.wait(2.0)  # it ends when nobody is there any more
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
