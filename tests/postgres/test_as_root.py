"""Root's part: PostgreSQL refuses root, so another account runs it and gets nothing but our own folders."""

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from adapters.postgres import EmbeddedPostgres, PostgresError
from tests.pg import state_folder

pytestmark = pytest.mark.postgres

NOBODY = pwd.getpwnam("nobody").pw_uid
DAEMON = pwd.getpwnam("daemon").pw_uid


@pytest.fixture
def state() -> Iterator[Path]:
    with state_folder() as folder:
        yield folder


def runs_as(server: EmbeddedPostgres) -> int:
    return os.stat(f"/proc/{server.pid}").st_uid


def test_the_server_runs_as_nobody_from_programs_that_only_root_writes(state):
    with EmbeddedPostgres(state, fsync=False) as server:
        assert runs_as(server) == NOBODY
        program = Path(os.readlink(f"/proc/{server.pid}/exe"))
        assert program.is_relative_to(state)
        copied = [program, *program.parents[: len(program.relative_to(state).parents)]]
        for path in (*copied, *copied[-2].rglob("*")):
            found = path.stat()
            assert (found.st_uid, found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) == (0, 0), path
        groups = Path(f"/proc/{server.pid}/status").read_text().split("Groups:")[1].splitlines()[0].split()
        assert groups in ([], [str(pwd.getpwnam("nobody").pw_gid)])


def test_our_own_files_beside_the_data_stay_with_root(state):
    with EmbeddedPostgres(state, fsync=False) as server:
        owners = {path.name: path.stat().st_uid for path in (state, *state.iterdir())}
        assert [name for name, uid in owners.items() if uid == NOBODY] == [
            name for name in owners if name in (server.data_dir.name, "socket")
        ]
        assert stat.S_IMODE((state / "owner.lock").stat().st_mode) == 0o600
        assert stat.S_IMODE((state / "postgres.log").stat().st_mode) == 0o600


def test_a_named_account_runs_the_server_and_is_kept_at_the_next_start(state):
    with EmbeddedPostgres(state, account="daemon", fsync=False) as server:
        assert runs_as(server) == DAEMON
    with EmbeddedPostgres(state, fsync=False) as server:
        assert runs_as(server) == DAEMON
    with pytest.raises(PostgresError, match="belongs to uid") as caught:
        EmbeddedPostgres(state, account="nobody").start()
    assert caught.value.code == "postgres.account"


@pytest.mark.parametrize("account", ["root", "no-such-account"])
def test_an_account_that_cannot_run_it_is_refused(state, account):
    with pytest.raises(PostgresError) as caught:
        EmbeddedPostgres(state, account=account).start()
    assert caught.value.code == "postgres.account"
    assert not state.exists()


def test_a_state_folder_the_account_cannot_enter_works_and_stays_closed(state):
    closed = state / "home"
    closed.mkdir(parents=True)
    closed.chmod(0o700)
    for _ in range(2):
        with EmbeddedPostgres(closed / "state") as server:
            assert runs_as(server) == NOBODY
            assert server.data_dir.parent == closed / "state"
            folder = Path(conninfo_to_dict(server.dsn)["host"])
            assert not folder.is_relative_to(state)
            with psycopg.connect(server.dsn) as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS kept ()")
            server.kill()
            with psycopg.connect(server.start()) as connection:
                assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)
        assert not folder.parent.exists()
    assert (stat.S_IMODE(closed.stat().st_mode), closed.stat().st_uid) == (0o700, 0)


def test_a_temporary_folder_of_another_account_is_not_taken(state):
    closed = state / ("x" * 100)
    with EmbeddedPostgres(closed, fsync=False) as server:
        folder = Path(conninfo_to_dict(server.dsn)["host"]).parent
    folder.mkdir(mode=0o700)
    os.chown(folder, DAEMON, -1)
    try:
        with pytest.raises(PostgresError, match=str(folder)) as caught:
            server.start()
        assert caught.value.code == "postgres.account"
        assert folder.stat().st_uid == DAEMON
    finally:
        folder.rmdir()


def test_programs_that_another_account_could_change_are_not_run(state):
    with EmbeddedPostgres(state, fsync=False):
        programs = next(state.glob("programs-*"))
    os.chown(programs, DAEMON, -1)
    with pytest.raises(PostgresError, match="only root writes") as caught:
        EmbeddedPostgres(state).start()
    assert caught.value.code == "postgres.account"


def test_programs_of_another_version_and_half_copies_are_replaced(state):
    state.mkdir()
    state.chmod(0o711)
    (state / "programs-1.0").mkdir()
    (state / "programs-1.0.new").mkdir()
    with EmbeddedPostgres(state, fsync=False):
        assert len(list(state.glob("programs-*"))) == 1
