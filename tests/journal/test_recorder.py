"""The library's own test cases on our recorder, and its writers beside ours."""

from __future__ import annotations

import threading
import uuid
from typing import Any, ClassVar

import anyio
import psycopg
import pytest
from eventsourcing.persistence import StoredEvent
from eventsourcing.postgres import PostgresApplicationRecorder

from adapters.journal import Journal, Verdict
from adapters.recorder import JournalRecorder, datastore
from tests.contract.journal import observe, row
from tests.faults.pg_proxy import PgProxy
from tests.journal.library_cases import persistence_cases

pytestmark = pytest.mark.postgres
cases = persistence_cases()


class OnDatabase:
    """Gives a library test case its recorder on a migrated database, with text ids."""

    INITIAL_VERSION: ClassVar[int] = 1

    @pytest.fixture(autouse=True)
    def _database(self, database: str) -> Any:
        self.store = datastore(database, schema="public", connections=12)
        yield
        self.store.close()

    def create_recorder(self) -> Any:
        recorder = JournalRecorder(self.store)
        recorder.create_table()
        return recorder

    def new_originator_id(self) -> str:
        return str(uuid.uuid4())


class TestApplicationRecorder(OnDatabase, cases.ApplicationRecorderTestCase):
    """Insert, select and concurrent writers, as the library tests its own recorder."""

    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


class TestNonInterleavingIds(OnDatabase, cases.NonInterleavingNotificationIDsBaseCase):
    """Ids of two transactions never interleave."""

    insert_num = 200


class TestAggregateRecorder(OnDatabase, cases.AggregateRecorderTestCase):
    """The part of an aggregate recorder, with ids returned."""

    def create_recorder(self) -> Any:
        class WithoutIds(JournalRecorder):
            def insert_events(self, stored_events: Any, **kwargs: Any) -> None:
                super().insert_events(stored_events, **kwargs)

        recorder = WithoutIds(self.store)
        recorder.create_table()
        return recorder


def test_database_functions_of_the_library_are_refused(database: str) -> None:
    store = datastore(database, schema="public")
    store.enable_db_functions = True
    with pytest.raises(ValueError, match="POSTGRES_ENABLE_DB_FUNCTIONS"):
        JournalRecorder(store)
    store.close()


@pytest.mark.anyio
async def test_writers_of_the_library_and_ours_keep_ids_in_commit_order(journal: Journal, database: str) -> None:
    store = datastore(database, schema="public", connections=8)
    plain, ours = PostgresApplicationRecorder(store), JournalRecorder(store)
    seen: list[int] = []
    done = threading.Event()

    def insert(recorder: PostgresApplicationRecorder, name: str) -> None:
        for number in range(40):
            recorder.insert_events(
                [StoredEvent(f"{name}/{number}", version, "test.happened", b"x") for version in (1, 2, 3)]
            )

    def follow() -> None:
        position = 0
        while True:
            last = done.is_set()
            rows = ours.log(position, 50)
            seen.extend(r.position for r in rows)
            position = rows[-1].position if rows else position
            if last and not rows:
                return

    follower = threading.Thread(target=follow)
    follower.start()
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, insert, plain, "plain")
        group.start_soon(anyio.to_thread.run_sync, insert, ours, "ours")
        for number in range(40):
            outcome = await observe(journal, row(f"journal/{number}"), row(f"second/{number}"))
            assert outcome.verdict is Verdict.COMMITTED
    done.set()
    await anyio.to_thread.run_sync(follower.join)
    store.close()
    assert len(seen) == len(set(seen)) == 40 * (3 + 3 + 2)
    assert seen == sorted(seen)


@pytest.mark.anyio
async def test_a_writer_of_the_library_and_ours_exclude_each_other(journal: Journal, database: str) -> None:
    with psycopg.connect(database) as library:
        library.execute("lock table stored_events in exclusive mode")
        outcome = await journal.append([row("a")], fence=None, deadline_s=0.2)
        assert outcome.verdict is Verdict.UNKNOWN
        library.rollback()
    assert (await observe(journal, row("a"))).verdict is Verdict.COMMITTED
    with psycopg.connect(database) as ours, psycopg.connect(database) as library:
        ours.execute("lock table stored_events in row exclusive mode")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            library.execute("lock table stored_events in exclusive mode nowait")


@pytest.mark.anyio
async def test_the_subscription_sees_what_a_silent_connection_hides(journal: Journal, database: str) -> None:
    with PgProxy(database) as proxy:
        store = datastore(proxy.dsn, schema="public", connections=4)
        proxy.add("journal-reader", "notify", "drop", times=-1)
        with JournalRecorder(store).subscribe(gt=0) as subscription:
            for number in range(3):
                await observe(journal, row(f"h/{number}"))
                with anyio.fail_after(10):
                    notification = await anyio.to_thread.run_sync(next, subscription)
                assert notification.originator_id == f"h/{number}"
        store.close()
