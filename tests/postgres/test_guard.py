"""The guard on its own, with programs that are not PostgreSQL."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adapters import postgres_guard
from adapters.postgres_guard import BoundedLog, Task
from tests.pg import until


def guard(tmp_path: Path, *argv: str) -> subprocess.Popen[bytes]:
    with (tmp_path / "lock").open("w") as lock:
        task = Task(
            argv=list(argv),
            cwd=str(tmp_path),
            account=None,
            lock_fd=lock.fileno(),
            log=str(tmp_path / "log"),
            log_limit=4096,
        )
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(postgres_guard.__file__), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[lock.fileno()],
        )


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + 9)]
)
def test_it_ends_with_the_status_of_its_program(tmp_path, code, status):
    with guard(tmp_path, sys.executable, "-c", code) as process:
        assert process.wait() == status


def test_a_program_that_cannot_start_is_told_in_the_log(tmp_path):
    with guard(tmp_path, str(tmp_path / "absent")) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b""
    assert process.returncode == 127
    assert "absent" in (tmp_path / "log").read_text()


def test_the_end_of_the_pipe_interrupts_the_program(tmp_path):
    code = "import signal, sys; signal.signal(2, lambda *_: sys.exit(7)); print('ready', flush=True); signal.pause()"
    with guard(tmp_path, sys.executable, "-c", code) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdigit()
        until(lambda: (tmp_path / "log").read_bytes() == b"ready\n")
        process.stdin.close()
        assert process.wait() == 7


def test_signals_to_the_guard_do_not_end_the_program(tmp_path):
    with guard(tmp_path, sys.executable, "-c", "print(input())") as process:
        assert process.stdout is not None
        process.stdout.readline()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(process.pid, number)
        assert process.wait() == 1  # EOFError: the program's own input is empty
    assert b"EOFError" in (tmp_path / "log").read_bytes()


def test_what_a_program_prints_fills_at_most_two_files_of_the_limit(tmp_path):
    with guard(tmp_path, sys.executable, "-c", "for n in range(20000): print('line', n)") as process:
        assert process.wait() == 0
    files = sorted(tmp_path.glob("log*"))
    assert [file.name for file in files] == ["log", "log.1"]
    assert files[0].read_text().endswith("line 19999\n")
    assert all(file.stat().st_size <= 4096 for file in files)


def test_the_log_is_never_written_through_a_link(tmp_path):
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="log"):
        BoundedLog(str(tmp_path / "log"), 4096)
    assert not (tmp_path / "elsewhere").exists()
