"""The store on the journal in memory and on PostgreSQL: the same promises on both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta

import anyio
import psycopg
import pytest

from adapters.clock import SystemClock
from adapters.command import EVENT_BYTES, Outcome, Stored, Verdict
from adapters.journal import Journal
from adapters.memory_journal import MemoryJournal
from adapters.migrate import migrate
from adapters.settings import Limits
from adapters.store import JournalStore, Rows, Unreadable
from adapters.vault import MemoryKeys, PostgresKeys, Vault
from domain.errors import HostError, IntegrityFault
from domain.events import CancelWished, LeaseRenewed, RunEnded, SequenceExpired, SequenceTaken, StatusSeen
from domain.history import (
    Change,
    Command,
    Recorded,
    action_history,
    fence_history,
    handle_history,
    host_history,
    run_history,
    run_token,
    stream_history,
)
from domain.ports import AppendUnknown, Conflict, Fenced, NeverStored, NotStored, TooLate
from domain.values import Fence, Plain, PrivateScope, Sealed
from tests.golden.event_samples import MASTER

pytestmark = pytest.mark.anyio
AT = datetime(2026, 11, 30, 12, tzinfo=UTC)
HISTORY = "acme/act/act_1"
SCOPE = PrivateScope(tenant="acme", principal="alice")
CANARY = b"canary-51b0e7"
CLOCK = SystemClock()


def wish(reason: str = "changed my mind") -> CancelWished:
    return CancelWished(at=AT, by="alice", reason=reason)


def command(*events: CancelWished | StatusSeen, expected: int = 0, **members: object) -> Command:
    change = Change(history=HISTORY, expected=expected, events=events, scope=SCOPE)
    return Command(changes=(change,), **members)  # type: ignore[arg-type]


def memory_store() -> tuple[JournalStore, MemoryJournal, Vault]:
    journal, vault = MemoryJournal(clock=CLOCK, now=CLOCK.now), Vault(MASTER, MemoryKeys(), CLOCK.entropy)
    return JournalStore(journal, vault, CLOCK.new_id), journal, vault


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
async def built(request: pytest.FixtureRequest) -> AsyncIterator[tuple[JournalStore, Rows, Vault]]:
    if request.param == "memory":
        yield memory_store()
        return
    dsn = request.getfixturevalue("dsn")
    await anyio.to_thread.run_sync(migrate, dsn)
    journal, keys = Journal(dsn, clock=CLOCK), PostgresKeys(dsn)
    await journal.start()
    vault = Vault(MASTER, keys, CLOCK.entropy)
    yield JournalStore(journal, vault, CLOCK.new_id), journal, vault
    await keys.close()
    await journal.stop()


Built = tuple[JournalStore, Rows, Vault]


async def test_what_is_appended_is_what_is_loaded_with_private_content_sealed(built: Built) -> None:
    store, _, vault = built
    seen = StatusSeen(at=AT, state="running", answer_digest="d", answer=Plain(content=CANARY))
    recorded = await store.append(command(wish(), seen, cause="a reason"))
    assert recorded == await store.load(HISTORY)
    assert [entry.version for entry in recorded] == [1, 2]
    assert recorded[0].event == wish()
    assert recorded[0].event_id != recorded[1].event_id
    assert recorded[0].cause == "a reason"
    status = recorded[1].event
    assert isinstance(status, StatusSeen)
    assert isinstance(status.answer, Sealed)
    assert await vault.open(status.answer) == CANARY
    assert list(recorded) == await store.read_log(recorded[0].position - 1, 10)
    assert await store.load_many([HISTORY, "acme/act/none"]) == {HISTORY: recorded, "acme/act/none": ()}
    await store.confirm()


async def test_the_same_decision_made_twice_is_a_conflict_and_never_the_same_bytes(built: Built) -> None:
    store, _, _ = built
    first = await store.append(command(wish()))
    with pytest.raises(Conflict):
        await store.append(command(wish()))
    assert await store.load(HISTORY) == first


async def test_an_older_sequence_and_one_that_was_never_taken_decide_nothing(built: Built) -> None:
    store, _, _ = built
    old = await store.take_sequence("host-1", SequenceTaken(at=AT, instance="a", release="1"))
    with pytest.raises(Fenced):
        await store.append(command(wish(), fence=Fence("host-1", 2)))
    new = await store.take_sequence("host-1", SequenceTaken(at=AT, instance="b", release="1"))
    assert (old, new) == (Fence("host-1", 1), Fence("host-1", 2))
    with pytest.raises(Fenced):
        await store.append(command(wish(), fence=old))
    with pytest.raises(Fenced):
        await store.take_sequence("host-1", SequenceTaken(at=AT, instance="c", release="1"), 2)
    (recorded,) = await store.append(command(wish(), fence=new))
    assert recorded.fence == new
    assert len(await store.load(fence_history("host-1"))) == 2


async def test_a_sequence_is_expired_together_with_other_events_and_only_once(built: Built) -> None:
    store, _, _ = built
    other = await store.take_sequence("host-1", SequenceTaken(at=AT, instance="a", release="1"))
    mine = await store.take_sequence("host-2", SequenceTaken(at=AT, instance="b", release="1"))

    def expire(fence: Fence) -> Command:
        changes = (
            Change(history=host_history("host-2"), expected=0, events=(LeaseRenewed(at=AT, sequence=1),)),
            Change(
                history=fence_history("host-1"),
                expected=1,
                events=(SequenceExpired(at=AT, by=mine, watched_ms=30_000),),
            ),
        )
        return Command(changes=changes, fence=fence)

    recorded = await store.append(expire(mine))
    assert [entry.history for entry in recorded] == [host_history("host-2"), fence_history("host-1")]
    assert recorded[1].position + 1 == recorded[0].position
    assert (await store.load(host_history("host-2")))[0] == recorded[0]
    assert (await store.load(fence_history("host-1")))[1] == recorded[1]
    with pytest.raises(Fenced):
        await store.append(command(wish(), fence=other))
    with pytest.raises(Conflict):
        await store.append(expire(mine))
    await store.take_sequence("host-2", SequenceTaken(at=AT, instance="c", release="1"))
    with pytest.raises(Fenced):
        await store.append(expire(mine))


async def test_after_the_last_moment_nothing_is_stored(built: Built) -> None:
    store, _, _ = built
    with pytest.raises(TooLate):
        await store.append(command(wish(), not_after=CLOCK.now() - timedelta(seconds=5)))
    assert await store.load(HISTORY) == ()
    assert len(await store.append(command(wish(), not_after=CLOCK.now() + timedelta(seconds=60)))) == 1


async def test_what_can_never_be_stored_is_certainly_not_stored(built: Built) -> None:
    store, _, _ = built
    with pytest.raises(NeverStored):
        await store.append(command(wish("x" * (EVENT_BYTES + 1))))
    with pytest.raises(NeverStored):
        await store.append(command(wish("\udfff")))
    assert await store.load(HISTORY) == ()


async def test_the_longest_tenant_endpoint_and_ids_are_names_that_can_be_stored(built: Built) -> None:
    store, _, _ = built
    tenant, endpoint, run = "t" * 128, "e" * 128, run_token("r" * 512)
    histories = (
        action_history(tenant, "a" * 128),
        run_history(tenant, endpoint, "r" * 64),
        stream_history(tenant, endpoint, run),
        handle_history(endpoint, run),
        host_history("h" * 128),
    )
    for history in histories:
        await store.append(Command(changes=(Change(history=history, expected=0, events=(wish(),)),)))
        assert len(await store.load(history)) == 1


async def test_the_largest_answer_fits_into_one_command_with_what_it_means() -> None:
    store, _, _ = memory_store()
    answer = Plain(content=CLOCK.entropy(Limits().answer_bytes))
    seen = StatusSeen(at=AT, state="completed", answer_digest="d", answer=answer)
    ended = RunEnded(at=AT, state="completed", source="status", evidence="run:1", result=answer, has_output=True)
    change = Change(history="acme/run/main/run_1", expected=0, events=(seen, ended), scope=SCOPE)
    assert len(await store.append(Command(changes=(change,)))) == 2


async def test_the_log_goes_on_over_an_event_that_cannot_be_read_and_its_history_does_not(built: Built) -> None:
    store, journal, _ = built
    await store.append(command(wish()))
    rows = [
        Stored(history=HISTORY, version=2, topic="os.system", state=b"{}"),
        Stored(history=HISTORY, version=3, topic="run.deadline_passed", state=b'{"id":"x","v":9,"e":{}}'),
    ]
    await journal.append(rows, fence=None, deadline_s=5)
    (after,) = await store.append(command(wish(), expected=3))
    readable, *faults, last = await store.read_log(0, 10)
    assert isinstance(readable, Recorded)
    assert (readable.version, readable.event, last) == (1, wish(), after)
    assert faults == [
        Unreadable(history=HISTORY, version=2, position=2, topic="os.system", reason="history.newer_version"),
        Unreadable(history=HISTORY, version=3, position=3, topic="run.deadline_passed", reason="history.newer_version"),
    ]
    with pytest.raises(IntegrityFault):
        await store.load(HISTORY)


@pytest.mark.postgres
async def test_private_content_is_in_no_table_of_the_database_and_erasure_reaches_other_hosts(dsn: str) -> None:
    await anyio.to_thread.run_sync(migrate, dsn)
    journal, keys, others = Journal(dsn, clock=CLOCK), PostgresKeys(dsn), PostgresKeys(dsn)
    await journal.start()
    here, there = Vault(MASTER, keys, CLOCK.entropy), Vault(MASTER, others, CLOCK.entropy)
    async with anyio.create_task_group() as both:
        both.start_soon(here.prepare, [SCOPE], AT)
        both.start_soon(there.prepare, [SCOPE], AT)
    assert here.seal(b"", SCOPE, AT, "h", 1).key == there.seal(b"", SCOPE, AT, "h", 1).key
    store = JournalStore(journal, here, CLOCK.new_id)
    seen = StatusSeen(at=AT, state="running", answer_digest="d", answer=Plain(content=CANARY))
    await store.append(command(seen))
    (recorded,) = await store.load(HISTORY)
    assert isinstance(recorded.event, StatusSeen)
    assert await there.open(recorded.event.answer) == CANARY
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        for table in ("stored_events", "data_keys"):
            rows = await (await connection.execute(f"select t::text from {table} t")).fetchall()  # type: ignore[arg-type]
            assert rows
            assert not any(CANARY.decode() in text or CANARY.hex() in text or "alice" in text for (text,) in rows)
        await connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'vault'"
        )
    assert await there.forget("acme", "alice", "2026-11") == 1
    fresh = Vault(MASTER, keys, CLOCK.entropy)
    await fresh.admit()
    with pytest.raises(HostError) as caught:
        await fresh.open(recorded.event.answer)
    assert caught.value.code == "private.erased"
    assert len(await store.load(HISTORY)) == 1
    await keys.close()
    await others.close()
    await journal.stop()


async def test_keys_that_cannot_be_reached_mean_not_stored() -> None:
    _, journal, _ = memory_store()
    away = PostgresKeys("host=127.0.0.1 port=1 dbname=none")
    store = JournalStore(journal, Vault(MASTER, away, CLOCK.entropy), CLOCK.new_id)
    with pytest.raises(NotStored):
        await store.append(command(wish()))


class Answering(MemoryJournal):
    """A journal whose appends end as they are told to."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(clock=CLOCK, now=CLOCK.now)
        self._verdict = verdict

    async def append(
        self, rows: Sequence[Stored], *, fence: Fence | None, deadline_s: float, not_after: datetime | None = None
    ) -> Outcome:
        return Outcome(self._verdict, 0, "as told")


@pytest.mark.parametrize(
    ("verdict", "refusal"),
    [
        (Verdict.CONFLICT, Conflict),
        (Verdict.FENCED, Fenced),
        (Verdict.UNLEASED, Fenced),
        (Verdict.EXPIRED, TooLate),
        (Verdict.REJECTED, NotStored),
        (Verdict.NOT_APPENDED, NotStored),
        (Verdict.UNKNOWN, AppendUnknown),
    ],
)
async def test_each_verdict_is_told_as_what_it_means(verdict: Verdict, refusal: type[Exception]) -> None:
    store = JournalStore(Answering(verdict), Vault(MASTER, MemoryKeys(), CLOCK.entropy), CLOCK.new_id)
    with pytest.raises(refusal, match="as told"):
        await store.append(command(wish()))
