"""A host behind PgBouncer: refused where it pools by transaction, served where it pools by session."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from adapters.postgres import EmbeddedPostgres
from tests.pg import state_folder, until
from tests.process.site import Site, found

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.tools, pytest.mark.timeout(150)]

POOLER = """\
[databases]
{name} = host={socket} port={server_port} dbname={name} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
auth_type = any
pool_mode = {mode}
max_client_conn = 200
default_pool_size = 40
ignore_startup_parameters = extra_float_digits,options
unix_socket_dir =
"""


@contextmanager
def pooler(place: Site, server: EmbeddedPostgres, mode: str) -> Iterator[str]:
    """A DSN that leads through PgBouncer."""
    parts = conninfo_to_dict(place.dsn)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with state_folder() as folder:
        folder.mkdir(mode=0o755)
        settings = folder / "pgbouncer.ini"
        folder_of_server, name = parts["host"], parts["dbname"]
        settings.write_text(
            POOLER.format(name=name, socket=folder_of_server, server_port=parts["port"], port=port, mode=mode), "utf-8"
        )
        settings.chmod(0o644)
        owner = server.data_dir.stat()
        with (folder / "log").open("wb") as log:
            account = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
            process = subprocess.Popen(["pgbouncer", str(settings)], stderr=log, **account)  # type: ignore[call-overload]
        dsn = make_conninfo(place.dsn, host="127.0.0.1", port=port)
        try:

            def answers() -> bool:
                try:
                    psycopg.connect(dsn).close()
                except psycopg.Error:
                    return False
                return True

            until(answers)
            yield dsn
        finally:
            process.terminate()
            process.wait()


def test_a_pooler_that_changes_sessions_is_refused_at_the_start(place: Site, durable_server: EmbeddedPostgres) -> None:
    with pooler(place, durable_server, "transaction") as dsn:
        host = place.host("one", dsn_file=place.through(dsn, "pooled"))
        host.spawn()
        assert found(lambda: host.process.poll() if host.process else None) == 1
        told = host.out.read_text("utf-8") + host.err.read_text("utf-8")
    assert "storage.unsuitable" in told
    assert "pooled by session" in told


def test_a_pooler_by_session_serves_a_host_once_the_role_carries_its_settings(
    place: Site, durable_server: EmbeddedPostgres
) -> None:
    with pooler(place, durable_server, "session") as dsn:
        host = place.host("one", dsn_file=place.through(dsn, "pooled"))
        host.spawn()
        assert found(lambda: host.process.poll() if host.process else None) == 1
        assert "transaction_timeout" in host.out.read_text("utf-8") + host.err.read_text("utf-8")
        with psycopg.connect(place.dsn, autocommit=True) as connection:
            connection.execute(f"alter database {connection.info.dbname} set transaction_timeout = '5s'".encode())
    with pooler(place, durable_server, "session") as dsn:
        other = place.host("two", dsn_file=place.through(dsn, "pooled-again"))
        other.start()
        other.run_in(other.begin("TEXT pooled", "pooled"), "completed")
        other.terminate()
