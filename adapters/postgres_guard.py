"""The process between the host and one PostgreSQL program: the program never outlives the host.

Run as a script of its own, by path, with one JSON argument (`Task`). It is single-threaded on purpose: the
parent-death signal that Linux sends belongs to a *thread*, and here thread and process end together.

Standard input is the host's pipe: end of file, or another parent, means the host is gone or wants the program to stop.
The program then gets SIGINT (fast shutdown), SIGQUIT and SIGKILL, each after the patience for the one before.
Standard output carries one line, the program's pid, and closes when the guard ends. The guard exits with the program's
exit status, or 128 plus the signal that ended it. Everything the program prints goes to a log of bounded size.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
from types import FrameType
from typing import TypedDict

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0
_ESCALATION = ((signal.SIGINT, 60), (signal.SIGQUIT, 10), (signal.SIGKILL, 10))
"""Signals in order, each with the seconds it is given before the next."""


class Task(TypedDict):
    """What the guard is told. `account` is (uid, gid), or None to stay who we are; `log_limit` is in bytes."""

    argv: list[str]
    cwd: str
    account: tuple[int, int] | None
    lock_fd: int
    log: str
    log_limit: int


class BoundedLog:
    """An append-only file that moves to `<name>.1` when it is full, so that two files are the most there is."""

    def __init__(self, path: str, limit: int) -> None:
        self._path = path
        self.limit = limit
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._size = os.fstat(self._fd).st_size

    def write(self, chunk: bytes) -> None:
        """Append `chunk`; what a full disk does not take is dropped, for the database must not stall on its log."""
        try:
            if self._size and self._size + len(chunk) > self.limit:
                full = self._fd
                os.replace(self._path, f"{self._path}.1")
                self._open()
                os.close(full)
            self._size += os.write(self._fd, chunk)
        except OSError:
            return


def supervise(task: Task) -> int:
    """Run the program of `task` until it ends or the host does; return its exit status (shell convention)."""
    host = os.getppid()
    log = BoundedLog(task["log"], task["log_limit"])
    wake, waker = os.pipe()
    for fd in (wake, waker):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _only_wake)

    uid, gid = task["account"] or (None, None)
    try:
        program = subprocess.Popen(
            task["argv"],
            cwd=task["cwd"],
            # Python itself sets LC_CTYPE where no locale is set.
            env={name: value for name, value in os.environ.items() if not name.startswith("LC_")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[task["lock_fd"]],
            user=uid,
            group=gid,
            extra_groups=None if uid is None else [],
            umask=0o077,
            preexec_fn=_ParentDeathSignal(),  # noqa: PLW1509  (no threads here)
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.write(f"cannot start {task['argv'][0]}: {error}\n".encode(errors="replace"))
        return 127
    assert program.stdout is not None
    output = program.stdout.fileno()
    os.set_blocking(output, False)
    os.write(sys.stdout.fileno(), b"%d\n" % program.pid)

    remaining = iter(_ESCALATION)
    stopping = False
    with selectors.DefaultSelector() as selector:
        for fd in (0, wake, output):
            selector.register(fd, selectors.EVENT_READ)
        while program.poll() is None:
            ready = {key.fd for key, _ in selector.select(None if stopping else _PARENT_CHECK_S)}
            if output in ready and not _pump(output, log):
                selector.unregister(output)
            overdue = wake in ready and signal.SIGALRM in os.read(wake, 512)
            if not stopping and (0 in ready or os.getppid() != host):
                stopping = overdue = True
                selector.unregister(0)
            if overdue:
                number, patience = next(remaining, (signal.SIGKILL, 10))
                program.send_signal(number)
                signal.alarm(patience)
    _pump(output, log)
    return program.returncode if program.returncode >= 0 else 128 - program.returncode


def _only_wake(_number: int, _frame: FrameType | None) -> None:
    """Signals to the guard only wake its loop: how long the program lives is the host's decision."""


class _ParentDeathSignal:
    """Runs in the child just before exec, after the change of account (which would clear the setting again)."""

    def __init__(self) -> None:
        self._guard = os.getpid()
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def __call__(self) -> None:
        if self._libc is not None and self._libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
        if os.getppid() != self._guard:
            raise OSError("the guard ended before its program began")


def _pump(output: int, log: BoundedLog) -> bool:
    """Copy what the program has printed; False at its end of file."""
    while True:
        try:
            chunk = os.read(output, min(log.limit, 65536))
        except BlockingIOError:
            return True
        if not chunk:
            return False
        log.write(chunk)


if __name__ == "__main__":
    sys.exit(supervise(json.loads(sys.argv[1])))
