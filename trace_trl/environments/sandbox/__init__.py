"""
Runs programs that a policy wrote: in processes of their own, confined by the kernel, with limits on all they use.

    session.py   a namespace per branch that can be forked        what an environment uses
    client.py    starts interpreters, hands them programs         the trainer's side
    server.py    the process that interpreters are forked from
    confine.py   what they lose
"""

from .client import Interpreter, Result, Sandbox, SandboxError
from .session import PythonSession, Sessions


__all__ = ["Interpreter", "PythonSession", "Result", "Sandbox", "SandboxError", "Sessions"]
