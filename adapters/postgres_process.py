"""PostgreSQL's programs as processes: started under a guard, and told apart from strangers with the same pid."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

from adapters import postgres_guard
from adapters.postgres_folders import Account, PostgresError

_STOP_S = 90.0
"""Longer than the guard's own patience with fast, immediate and forced shutdown together."""
_LOG_LIMIT = 8 * 1024 * 1024


class Guarded:
    """A program under its guard process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._pipe = process.stdin
        self._report = process.stdout
        self.guard_pid = process.pid
        line = self._report.readline()
        if not line.strip().isdigit():
            raise PostgresError("postgres.start_failed", f"no program was started ({self.end()}), see postgres.log")
        self.pid = int(line)

    def ended(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for guard and program to end; True when they have."""
        if self._process.returncode is None and not self._report.closed:
            poll = select.poll()
            poll.register(self._report, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                return False
            self._process.wait()
        return True

    def wait(self) -> None:
        """Wait, bounded, for a program that is already ending."""
        self.ended(_STOP_S)

    def end(self) -> int:
        """Close the pipe, which asks for a fast shutdown; wait, bounded, and return the exit status."""
        self._pipe.close()
        if not self.ended(_STOP_S):
            self._process.kill()
        self._report.close()
        return self._process.wait()


class Runner:
    """Starts PostgreSQL's programs: which, as whom, under which lock, printing where."""

    def __init__(self, bin_dir: Path, account: Account | None, inside: bool, lock_fd: int, log: Path) -> None:
        self.account = account
        self._bin_dir = bin_dir
        self._inside = inside
        self._lock_fd = lock_fd
        self._log = log

    def start(self, program: str, data_dir: Path, arguments: list[str]) -> Guarded:
        """Start `program` on `data_dir` under a new guard.

        An account that cannot enter the folders above is already put inside by the guard, and reaches the data folder
        as its own working folder.
        """
        reached = str(data_dir) if self._inside else "/proc/self/cwd"
        task = postgres_guard.Task(
            argv=[str(self._bin_dir / program), "-D", reached, *arguments],
            cwd=str(data_dir),
            account=None if self.account is None else (self.account.uid, self.account.gid),
            lock_fd=self._lock_fd,
            log=str(self._log),
            log_limit=_LOG_LIMIT,
        )
        # A closed list: no PG*, LC_*, LANG*, and none of the host's secrets.
        environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        return Guarded(
            subprocess.Popen(
                [sys.executable, "-I", "-S", str(postgres_guard.__file__), json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=environment | {"TZ": "UTC"},
                pass_fds=[self._lock_fd],
                start_new_session=True,
            )
        )


def postmaster_pid(data_dir: Path) -> int | None:
    """The pid that a server of this folder, living or not, left there."""
    try:
        line = (data_dir / "postmaster.pid").read_text(errors="replace").partition("\n")[0].strip()
    except OSError:
        return None
    return int(line) if line.isdigit() and int(line) > 1 else None


def is_alive(pid: int) -> bool:
    """Whether `pid` is a process that still runs; a zombie does not."""
    if sys.platform == "linux":
        try:
            state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            return False
    else:
        state = _ps(pid, "stat=")
    return state[:1] not in ("", "Z", "X")


def is_this_postgres(pid: int, data_dir: Path) -> bool:
    """Whether `pid` is a living server of this data folder, in which a server always has its working folder."""
    if not is_alive(pid):
        return False
    if sys.platform == "linux":
        try:
            program = Path(os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")).name
            return program == "postgres" and os.path.samestat(os.stat(f"/proc/{pid}/cwd"), data_dir.stat())
        except OSError:
            return False
    else:
        command = _ps(pid, "command=")
        return "postgres" in command and str(data_dir) in command


def _ps(pid: int, column: str) -> str:
    return subprocess.run(
        ["ps", "-ww", "-o", column, "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
