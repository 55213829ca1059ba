"""Migrations: each file once, in order, whole or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from adapters.migrate import FOLDER, MigrationRefused, applied, available, migrate

pytestmark = pytest.mark.postgres


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two migrations of a test's own."""
    (tmp_path / "001_first.sql").write_text("create table first (n integer);")
    (tmp_path / "002_second.sql").write_text("alter table first add m integer;")
    return tmp_path


def test_each_file_is_applied_once_and_remembered(dsn: str, folder: Path) -> None:
    assert applied(dsn) == []
    assert [m.number for m in migrate(dsn, folder=folder)] == [1, 2]
    assert migrate(dsn, folder=folder) == []
    assert [(m.number, m.name, m.checksum) for m in applied(dsn)] == [
        (m.number, m.name, m.checksum) for m in available(folder)
    ]


def test_a_changed_file_is_refused_and_nothing_after_it_runs(dsn: str, folder: Path) -> None:
    migrate(dsn, folder=folder)
    (folder / "001_first.sql").write_text("create table first (n bigint);")
    (folder / "003_third.sql").write_text("create table third (n integer);")
    with pytest.raises(MigrationRefused, match="001_first"):
        migrate(dsn, folder=folder)
    assert [m.number for m in applied(dsn)] == [1, 2]


def test_a_file_that_fails_leaves_no_trace_and_keeps_what_came_before(dsn: str, folder: Path) -> None:
    (folder / "002_second.sql").write_text("create table second (n integer); select 1 / 0;")
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(dsn, folder=folder)
    assert [m.number for m in applied(dsn)] == [1]
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select to_regclass('second')").fetchone() == (None,)
    (folder / "002_second.sql").write_text("create table second (n integer);")
    assert [m.number for m in migrate(dsn, folder=folder)] == [2]


def test_hosts_that_start_together_apply_each_file_once(dsn: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: [m.number for m in migrate(dsn)], range(4)))
    assert sorted(number for numbers in done for number in numbers) == [m.number for m in available()]


def test_a_release_runs_beside_a_newer_schema(dsn: str, folder: Path) -> None:
    migrate(dsn, folder=folder)
    (folder / "002_second.sql").unlink()
    assert migrate(dsn, folder=folder) == []
    assert [m.number for m in applied(dsn)] == [1, 2]


@pytest.mark.parametrize("name", ["003_gap.sql", "second.sql", "001_again.sql"])
def test_misnumbered_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "001_first.sql").write_text("select 1;")
    (tmp_path / name).write_text("select 1;")
    with pytest.raises(MigrationRefused):
        available(tmp_path)


def test_the_product_has_its_migrations_in_order() -> None:
    assert available(FOLDER)[0].name == "001_journal.sql"


def test_a_schema_of_its_own_is_made(dsn: str) -> None:
    assert migrate(dsn, schema="apart")
    assert applied(dsn) == []
    assert [m.number for m in applied(dsn, schema="apart")] == [m.number for m in available()]


def test_a_role_that_owns_nothing_finds_nothing_missing(dsn: str) -> None:
    migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create role starter login in role hermes_application")
    try:
        assert migrate(make_conninfo(dsn, user="starter")) == []
    finally:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("drop role starter")
