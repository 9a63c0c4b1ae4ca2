"""
The process that interpreters are forked from: `python -s -P server.py FD FOLDER PACKAGE ..`, started by `client.py`.

It holds nothing of the trainer's: a fresh Python with an empty environment, and the packages that programs often
import, loaded once. Every message from the trainer asks for one interpreter and brings one end of a socket; the answer
brings a handle of the new process. The interpreter confines itself before it reads its first program.

    trainer ── one message per interpreter ──▶ server ── fork ──▶ interpreter (confined)
       └───────────── programs and their output, over a socket of its own ─────────┘

The process ends when the trainer does, and its interpreters with it.
"""

from __future__ import annotations

import array
import ast
import gc
import importlib
import io
import json
import linecache
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import traceback
import types
from typing import Any


MAX_FRAMES = 8  # of a traceback
TICK = 1.0  # seconds between two looks at whether the trainer lives


class BoundedOutput(io.RawIOBase):
    """Keeps the first `limit` bytes and counts the others."""

    def __init__(self, limit: int):
        self.limit = limit
        self.kept = bytearray()
        self.dropped = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        room = max(0, self.limit - len(self.kept))
        self.kept += view[:room]
        self.dropped += max(0, len(view) - room)
        return len(view)


class Cells:
    """Runs programs one after the other in one namespace, as a notebook does."""

    def __init__(self):
        self.main = types.ModuleType("__main__")
        self.count = 0

    def run(self, code: str, limit: int) -> dict:
        self.count += 1
        raw = BoundedOutput(limit)
        stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", write_through=True)
        sys.stdout = sys.stderr = stream
        sys.modules["__main__"] = self.main
        error = None
        try:
            self._execute(code)
        except BaseException as raised:  # SystemExit too: it ends the program, not the interpreter
            error = self._describe(raised)[-limit:]
        try:
            stream.flush()
        except BaseException:  # the program closed it
            pass
        return {"output": raw.kept.decode("utf-8", "replace"), "dropped": raw.dropped, "error": error}

    def _execute(self, code: str) -> None:
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self.main.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self.main.__dict__)
            if value is not None:
                print(repr(value))

    @staticmethod
    def _describe(error: BaseException) -> str:
        try:
            # Without the frames of this file, which says nothing to the policy
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            lines = traceback.format_exception(type(error), error, trace, limit=-MAX_FRAMES, chain=False)
            return "".join(lines).strip()
        except BaseException:
            return "An exception that can't be shown."


def read_exactly(channel: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        # Plain reads and writes: the confinement has no calls for sockets
        part = os.read(channel, count - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


def write_all(channel: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(channel, view) :]


def serve_interpreter(channel: int) -> None:
    cells = Cells()
    dumps, loads = json.dumps, json.loads
    while True:
        (length,) = struct.unpack("!I", read_exactly(channel, 4))
        request = loads(read_exactly(channel, length))
        answer = dumps(cells.run(request["code"], request["max_output"])).encode()
        write_all(channel, struct.pack("!I", len(answer)) + answer)


def become_interpreter(channel: int, server: int, confinement: types.ModuleType, request: dict) -> None:
    """In the forked process; never returns."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.dup2(channel, 3)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(HOME=request["folder"], TMPDIR=request["folder"])
        # Every interpreter begins with the same random numbers, so that programs can be run again
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        confinement.die_with_parent(server)
        confinement.confine(**request)
        write_all(3, b"\x00")
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".encode()[:4096]
        write_all(3, b"\x01" + struct.pack("!I", len(message)) + message)
        os._exit(1)
    try:
        serve_interpreter(3)
    finally:
        os._exit(1)  # whatever a program did to this interpreter: nothing of it runs on


def load_confinement():
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("confine")
    finally:
        sys.path.remove(folder)


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> None:
    trainer = os.getppid()
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        confinement = load_confinement()
        for name in sys.argv[3:]:
            try:
                importlib.import_module(name)
            except ImportError:
                pass  # a program that wants it reads the same error
        if "numpy" in sys.modules:
            # It is loaded when it is first used, which would be in every interpreter
            importlib.import_module("numpy.random")
        gc.collect()
        gc.freeze()  # these objects are shared with all interpreters as long as nobody writes to them
        serve(control, trainer, confinement)
    except ConnectionError:
        pass  # the trainer has ended
    finally:
        # A trainer that was killed removes nothing
        shutil.rmtree(sys.argv[2], ignore_errors=True)


def serve(control: socket.socket, trainer: int, confinement: types.ModuleType) -> None:
    """Starts interpreters until the trainer ends."""
    own = os.getpid()
    control.settimeout(TICK)
    control.send(b"ready")
    while os.getppid() == trainer:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        except TimeoutError:
            continue  # a process that the trainer forked may hold the other end longer than the trainer lives
        if not message:
            return
        try:
            answer(control, descriptors, own, confinement, json.loads(message))
        except ConnectionError:
            raise
        except OSError as error:  # no process, no descriptor left: that costs one interpreter
            control.send(f"No process could be started: {error}".encode())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        reap()


def answer(control: socket.socket, descriptors: list, own: int, confinement: types.ModuleType, request: dict) -> None:
    """Starts an interpreter and sends its number, with a handle of it."""
    if not descriptors:
        raise OSError("too many open files")
    pid = os.fork()
    if not pid:
        become_interpreter(descriptors[0], own, confinement, request)
    # Before it can be reaped, so that the handle is of no other process
    handle = os.pidfd_open(pid)
    try:
        rights = array.array("i", [handle])
        control.sendmsg([str(pid).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    finally:
        os.close(handle)


if __name__ == "__main__":
    main()
