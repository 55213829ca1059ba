"""The fixtures that other suites take from `tests.pg`."""

import psycopg

from tests.pg import dsn, fresh_database, postgres_server  # noqa: F401


def test_every_fresh_database_is_empty_and_its_own(postgres_server, dsn):  # noqa: F811
    with psycopg.connect(dsn) as one, psycopg.connect(fresh_database(postgres_server)) as other:
        one.execute("CREATE TABLE t ()")
        count = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
        assert one.execute(count).fetchone() == (1,)
        assert other.execute(count).fetchone() == (0,)
