"""
Takes from the calling process what a program of the policy must not have. Linux only; needs no root, no container.

    rlimits     memory, CPU time, size of a file, open files
    Landlock    files: reads what Python is installed in, adds to its own folder, opens nothing else; no TCP
    seccomp     system calls: those a computation needs. None that starts a process, a thread or a program, opens a
                socket, signals another process, removes a file, changes an owner, a mode or a limit
    others      no new privileges, no capabilities; dies with its parent

Runs in a process without the rest of this package (see `server.py`), so it imports nothing of it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
import sysconfig


try:
    # Here, and not where it is used: it looks for the library with a program of the system
    import pyseccomp as seccomp
except (ImportError, RuntimeError) as error:
    seccomp, _seccomp_error = None, str(error)


PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITY_VERSION = 0x20080522
# The same numbers on all architectures
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_VERSION, LANDLOCK_PATH_BENEATH = 1, 1

# Rights of Landlock (linux/landlock.h)
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, MAKE_REGULAR, TRUNCATE = (1 << bit for bit in (0, 1, 2, 3, 8, 14))
READ = EXECUTE | READ_FILE | READ_DIR  # `dlopen` maps libraries as executable
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
# Its size is looked at often: there are no folders in it, and no file leaves it whose content something still holds
OWN_FOLDER = READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | MAKE_REGULAR

SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

SYSTEM_CALLS = """
    read write readv writev pread64 pwrite64 close lseek stat fstat lstat newfstatat fstatat64 statx access
    faccessat faccessat2 readlink readlinkat getcwd getdents getdents64 ftruncate fsync fdatasync flock
    dup dup2 dup3 pipe pipe2 select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
    mmap mprotect munmap mremap brk mincore membarrier
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait sigaltstack pause alarm setitimer getitimer
    nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times getrusage sched_yield
    sched_getaffinity getpid gettid getppid getuid geteuid getgid getegid getpgrp getgroups uname sysinfo getrandom
    getrlimit getcpu
    futex set_robust_list get_robust_list rseq set_tid_address arch_prctl restart_syscall exit exit_group
""".split()

O_WRITE, O_READ_WRITE, O_TRUNC, O_TMPFILE = 1, 2, 0x200, 0x400000  # the last without O_DIRECTORY, which it includes
MADVICE = (0, 1, 2, 3, 4, 8, 14, 15)  # none that takes pages from the machine (MADV_HWPOISON)
# A program may send these to itself. None that halts or continues a process: a SIGCONT undoes a SIGSTOP on its way
SIGNALS = (1, 2, 6, 8, 10, 11, 12, 14, 15)
FCNTL_COMMANDS = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    36,
    37,
    38,
    1030,
)  # none that has signals sent elsewhere (F_SETOWN, F_SETSIG)
IOCTL_COMMANDS = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # is it a terminal, how wide, how much is there, flags


class ConfinementError(RuntimeError):
    """The kernel or the system lacks a part of the confinement."""


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise ConfinementError(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")


def limit_resources(memory: int, cpu_seconds: int, file_size: int, open_files: int) -> None:
    """Sets hard limits; `memory` is counted from what the process has mapped already."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_AS, mapped + memory),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def die_with_parent(parent: int) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that was said
        os._exit(1)


def drop_capabilities() -> None:
    """Root without the powers of root, which system calls that are allowed would ask for."""
    header = struct.pack("=II", CAPABILITY_VERSION, 0)
    if _libc.capset(ctypes.create_string_buffer(header), ctypes.create_string_buffer(24)):
        raise ConfinementError(f"capset failed: {os.strerror(ctypes.get_errno())}")


def readable_paths() -> list[str]:
    """Where this Python and its packages are installed."""
    paths = sysconfig.get_paths()
    wanted = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    wanted += [os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)]
    wanted += [*SYSTEM_LIBRARIES, *DEVICES]
    return list(dict.fromkeys(os.path.realpath(path) for path in wanted if os.path.exists(path)))


def restrict_files(folder: str) -> None:
    """Landlock: `folder` may be changed, the installation of Python read, all else neither."""
    version = _libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_VERSION)
    if version < 1:
        raise ConfinementError(
            "This kernel has no Landlock (Linux 5.13 or newer has, unless it is switched off at boot, or a "
            f"container's seccomp profile withholds it): {os.strerror(ctypes.get_errno())}"
        )
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1  # every right this version knows is asked for
    network = 3 if version >= 4 else 0  # bind and connect TCP
    scoped = 3 if version >= 6 else 0  # abstract sockets and signals
    attributes = struct.pack("=QQQ", files, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise ConfinementError(f"landlock_create_ruleset failed: {os.strerror(ctypes.get_errno())}")
    for path, rights in [(folder, OWN_FOLDER), *((path, READ) for path in readable_paths())]:
        if path in ("/dev/null", "/dev/zero"):
            rights |= WRITE_FILE
        if not os.path.isdir(path):
            rights &= OF_FILES
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights & files, descriptor))
        if _libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_PATH_BENEATH, rule, 0):
            raise ConfinementError(f"Landlock refuses a rule for {path}: {os.strerror(ctypes.get_errno())}")
        os.close(descriptor)
    if _libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0):
        raise ConfinementError(f"landlock_restrict_self failed: {os.strerror(ctypes.get_errno())}")
    os.close(ruleset)


def restrict_system_calls() -> None:
    """seccomp: all that is not in `SYSTEM_CALLS` fails with `EPERM`."""
    if seccomp is None:
        raise ConfinementError(
            f"pyseccomp can't be loaded ({_seccomp_error}): pip install pyseccomp, and the system's libseccomp2."
        )
    allowed = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    # Of another architecture's numbers (32-bit calls on x86-64) not one is allowed
    allowed.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.KILL_PROCESS)

    def allow(name: str, *arguments: seccomp.Arg) -> None:
        if seccomp.resolve_syscall(seccomp.system_arch(), name) >= 0:  # else not a call of this architecture
            allowed.add_rule(seccomp.ALLOW, name, *arguments)

    for name in SYSTEM_CALLS:
        allow(name)
    for command in FCNTL_COMMANDS:
        allow("fcntl", seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, command))
    for command in IOCTL_COMMANDS:
        allow("ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, command))
    for advice in MADVICE:
        allow("madvise", seccomp.Arg(2, seccomp.MASKED_EQ, 0xFFFFFFFF, advice))
    # O_RDONLY | O_TRUNC empties a file that may only be read, where Landlock is older than its right to truncate
    # (Linux 6.2). A file without a name (O_TMPFILE) counts in no folder
    for name, flags in (("open", 1), ("openat", 2)):
        allow(name, seccomp.Arg(flags, seccomp.MASKED_EQ, O_TMPFILE | O_TRUNC, 0))
        for access in (O_WRITE, O_READ_WRITE):
            allow(name, seccomp.Arg(flags, seccomp.MASKED_EQ, O_TMPFILE | O_WRITE | O_READ_WRITE, access))
    # Its flags lie in memory, where no filter looks; the C library then tries clone, which is refused as well
    allowed.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    # All 64 bits of an argument are compared, of which the kernel takes 32
    own = seccomp.Arg(0, seccomp.MASKED_EQ, 0xFFFFFFFF, os.getpid())
    for name, position in (("kill", 1), ("tgkill", 2)):
        for number in SIGNALS:
            allow(name, own, seccomp.Arg(position, seccomp.MASKED_EQ, 0xFFFFFFFF, number))
    allow("prlimit64", seccomp.Arg(2, seccomp.EQ, 0))  # reads a limit
    allowed.load()


def confine(folder: str, memory: int, cpu_seconds: int, file_size: int, open_files: int, isolation: str) -> None:
    """All of it, for good.

    Args:
        folder: the one folder that may be changed; becomes the working directory.
        memory: bytes that may be mapped beyond what is mapped now.
        cpu_seconds: after that much CPU time the kernel kills the process.
        file_size: bytes of a file.
        open_files: number of open files.
        isolation: `"strict"`, or `"limits"` for resource limits only.

    Raises:
        ConfinementError: if a part of it is not to be had here.
    """
    os.chdir(folder)
    try:
        # Should memory run out, the kernel looks here first
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError:
        pass
    limit_resources(memory, cpu_seconds, file_size, open_files)
    if isolation == "strict":
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        drop_capabilities()
        restrict_files(folder)
        restrict_system_calls()
