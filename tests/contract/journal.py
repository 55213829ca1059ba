"""What any journal does. `JournalContract` runs on each journal that a subclass's `journal` fixture yields."""

from __future__ import annotations

from datetime import UTC, datetime

import anyio
import pytest

from adapters.command import EVENT_BYTES
from adapters.follower import Follower
from adapters.journal import Fence, Journal, NotTaken, Outcome, Stored, Verdict, fence_history
from adapters.memory_journal import MemoryJournal

AnyJournal = Journal | MemoryJournal
PAST = datetime(2001, 1, 1, tzinfo=UTC)
FUTURE = datetime(2999, 1, 1, tzinfo=UTC)


def row(history: str, version: int = 1, state: bytes = b"{}", topic: str = "test.happened") -> Stored:
    """One row, with bytes that differ where the test wants other commands."""
    return Stored(history=history, version=version, topic=topic, state=state)


async def observe(journal: AnyJournal, *rows: Stored) -> Outcome:
    """Append as an observation."""
    return await journal.append(rows, fence=None, deadline_s=20)


async def decide(journal: AnyJournal, sequence: int, *rows: Stored, replica: str = "one") -> Outcome:
    """Append as a decision under a fence."""
    return await journal.append(rows, fence=Fence(replica, sequence), deadline_s=20)


class JournalContract:
    """The promises of the port; nothing here knows which journal it talks to."""

    async def test_what_is_acknowledged_is_read_back_with_its_position(self, journal: AnyJournal) -> None:
        rows = [row("t/action/a", 1, b"\x00\xff"), row("t/action/a", 2, b""), row("t/key/k", 1, b"k", "test.other")]
        outcome = await observe(journal, *rows)
        assert outcome.verdict is Verdict.COMMITTED
        log = await journal.read_log(0, 10)
        assert [(r.history, r.version, r.topic, r.state) for r in log] == [
            (r.history, r.version, r.topic, r.state) for r in rows
        ]
        assert log[-1].position == outcome.position == await journal.last_position()
        assert await journal.read("t/action/a") == log[:2]
        assert await journal.read("t/action/a", after=1) == log[1:2]
        assert await journal.read_many(["t/key/k", "nothing"]) == {"t/key/k": log[2:], "nothing": []}
        assert await journal.read_log(log[0].position, 1) == log[1:2]

    async def test_the_same_bytes_again_are_committed_once_and_answered_with_the_first_position(
        self, journal: AnyJournal
    ) -> None:
        first = await observe(journal, row("a"), row("b"))
        await observe(journal, row("c"))
        again = await observe(journal, row("a"), row("b"))
        assert (again.verdict, again.position) == (Verdict.COMMITTED, first.position)
        assert len(await journal.read_log(0, 10)) == 3

    async def test_other_bytes_or_another_topic_at_a_taken_key_are_a_conflict_and_store_nothing(
        self, journal: AnyJournal
    ) -> None:
        await observe(journal, row("a"))
        assert (await observe(journal, row("a", state=b"other"), row("b"))).verdict is Verdict.CONFLICT
        assert (await observe(journal, row("a", topic="test.else"))).verdict is Verdict.CONFLICT
        assert await journal.read("b") == []

    async def test_a_command_of_which_only_some_rows_are_stored_is_an_integrity_conflict(
        self, journal: AnyJournal
    ) -> None:
        await observe(journal, row("a"))
        outcome = await observe(journal, row("a"), row("b"))
        assert outcome.verdict is Verdict.CONFLICT
        assert "integrity" in outcome.detail
        assert await journal.read("b") == []

    async def test_a_decision_passes_only_under_the_current_sequence(self, journal: AnyJournal) -> None:
        assert (await decide(journal, 1, row("a"))).verdict is Verdict.UNLEASED
        assert await journal.take_sequence("one", b"first", "lease.taken") == 1
        assert (await decide(journal, 1, row("a"))).verdict is Verdict.COMMITTED
        assert await journal.take_sequence("one", b"second", "lease.taken") == 2
        assert (await decide(journal, 1, row("b"))).verdict is Verdict.FENCED
        assert (await decide(journal, 3, row("b"))).verdict is Verdict.UNLEASED
        assert (await decide(journal, 2, row("b"))).verdict is Verdict.COMMITTED

    async def test_an_observation_passes_under_any_fence(self, journal: AnyJournal) -> None:
        await journal.take_sequence("one", b"first", "lease.taken")
        await journal.take_sequence("one", b"second", "lease.taken")
        assert (await observe(journal, row("late/receipt"))).verdict is Verdict.COMMITTED

    async def test_a_decision_that_committed_before_the_takeover_is_not_told_fenced(self, journal: AnyJournal) -> None:
        await journal.take_sequence("one", b"first", "lease.taken")
        claim = row("t/attempt/x", state=b"claim")
        first = await decide(journal, 1, claim)
        await journal.take_sequence("one", b"second", "lease.taken")
        again = await decide(journal, 1, claim)
        assert (again.verdict, again.position) == (Verdict.COMMITTED, first.position)

    async def test_a_sequence_named_by_the_lease_may_leave_a_gap_but_never_goes_back(self, journal: AnyJournal) -> None:
        assert await journal.take_sequence("one", b"a", "lease.taken", sequence=7) == 7
        with pytest.raises(NotTaken) as refused:
            await journal.take_sequence("one", b"b", "lease.taken", sequence=7)
        assert refused.value.outcome.verdict is Verdict.FENCED
        assert await journal.take_sequence("one", b"c", "lease.taken") == 8

    async def test_hosts_that_take_a_sequence_at_the_same_time_get_different_ones(self, journal: AnyJournal) -> None:
        taken: list[int] = []

        async def take(number: int) -> None:
            taken.append(await journal.take_sequence("one", b"%d" % number, "lease.taken"))

        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(take, number)
        assert sorted(taken) == [1, 2, 3, 4, 5]

    async def test_another_replica_expires_exactly_the_sequence_it_watched(self, journal: AnyJournal) -> None:
        await journal.take_sequence("one", b"a", "lease.taken")
        await journal.take_sequence("two", b"b", "lease.taken")
        own = Fence("two", 1)
        takeover = row("t/attempt/x", 1, b"taken over")
        assert (await journal.expire("one", 2, b"c", "lease.expired")).verdict is Verdict.UNLEASED
        done = await journal.expire("one", 1, b"c", "lease.expired", rows=[takeover], fence=own)
        assert done.verdict is Verdict.COMMITTED
        assert (await decide(journal, 1, row("b"))).verdict is Verdict.FENCED
        assert (await journal.expire("one", 1, b"d", "lease.expired", fence=own)).verdict is Verdict.FENCED
        log = await journal.read_log(0, 10)
        assert [r.history for r in log] == [
            fence_history("one"),
            fence_history("two"),
            fence_history("one"),
            "t/attempt/x",
        ]

    async def test_a_superseded_replica_cannot_expire_another(self, journal: AnyJournal) -> None:
        await journal.take_sequence("one", b"a", "lease.taken")
        await journal.take_sequence("two", b"b", "lease.taken")
        await journal.take_sequence("two", b"c", "lease.taken")
        outcome = await journal.expire("one", 1, b"d", "lease.expired", fence=Fence("two", 1))
        assert outcome.verdict is Verdict.FENCED

    async def test_a_command_is_refused_for_ever_once_its_last_moment_has_passed(self, journal: AnyJournal) -> None:
        late = await journal.append([row("a")], fence=None, deadline_s=20, not_after=PAST)
        assert late.verdict is Verdict.EXPIRED
        early = await journal.append([row("a")], fence=None, deadline_s=20, not_after=FUTURE)
        assert early.verdict is Verdict.COMMITTED
        again = await journal.append([row("a")], fence=None, deadline_s=20, not_after=PAST)
        assert again.verdict is Verdict.COMMITTED

    async def test_a_deadline_that_is_over_before_the_first_try_appends_nothing(self, journal: AnyJournal) -> None:
        outcome = await journal.append([row("a")], fence=None, deadline_s=-1)
        assert outcome.verdict in {Verdict.NOT_APPENDED, Verdict.UNKNOWN}
        if outcome.verdict is Verdict.NOT_APPENDED:
            assert await journal.read("a") == []

    @pytest.mark.parametrize(
        "rows",
        [
            [row("a", 0)],
            [row("a", 2**63)],
            [row("a", 1), row("a", 3)],
            [row("a", 1), row("a", 1)],
            [row("a", 2), row("a", 1)],
            [row("nul\0")],
            [row("surrogate\ud800")],
            [row("x" * 401)],
            [row("")],
            [row("a", topic="nul\0")],
            [row(fence_history("one"))],
            [row("a", state=bytes(EVENT_BYTES + 1))],
            [row("a", state="text")],  # type: ignore[arg-type]
        ],
        ids=lambda rows: f"{rows[0].history[:12]!r}-{len(rows)}",
    )
    async def test_what_can_be_wrong_with_one_command_is_found_in_its_caller(
        self, journal: AnyJournal, rows: list[Stored]
    ) -> None:
        with pytest.raises(ValueError):  # noqa: PT011
            await observe(journal, *rows)
        assert await journal.last_position() == 0

    async def test_one_of_many_concurrent_commands_for_one_key_wins(self, journal: AnyJournal) -> None:
        outcomes: list[Outcome] = []

        async def claim(number: int) -> None:
            outcomes.append(await observe(journal, row("key", 1, b"%d" % number), row(f"action/{number}")))

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(claim, number)
        verdicts = [outcome.verdict for outcome in outcomes]
        assert verdicts.count(Verdict.COMMITTED) == 1
        assert verdicts.count(Verdict.CONFLICT) == 19
        assert len(await journal.read_log(0, 100)) == 2

    async def test_a_follower_sees_each_row_once_in_commit_order_and_wakes_for_new_ones(
        self, journal: AnyJournal
    ) -> None:
        follower = Follower(journal, page=2, confirm=True)
        seen: list[Stored] = []

        async def follow() -> None:
            while len(seen) < 5:
                seen.extend(await follower.next_page(2))

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            for number in range(5):
                await observe(journal, row("a", number + 1))
        assert [r.version for r in seen] == [1, 2, 3, 4, 5]
        assert seen == await journal.read_log(0, 10)
        assert await journal.wait_beyond(seen[-1].position, 0) == seen[-1].position

    async def test_confirming_stores_no_row(self, journal: AnyJournal) -> None:
        await observe(journal, row("a"))
        await journal.confirm()
        assert len(await journal.read_log(0, 10)) == 1
