"""Events and status: streams, gaps, terminal evidence. Each test is a problem met in the field."""

from __future__ import annotations

import json

import anyio
import pytest

from adapters.sse import SseLimits, SseSplitter
from domain import action as actions
from domain.action import State
from domain.binding import Phase, marks, told_state
from domain.events import StatusSeen, StatusUnread
from domain.provider import TERMINAL_STATES, Exchange, RawFrame
from domain.values import Effect, Mode, Operation
from projections.runs import run_view
from tests.world.hermes import PROXY_PAGE, UNREACHED, answer, refusal
from tests.world.host import World, play, world
from tests.world.laws import check

TWENTY = tuple(step for number in range(20) for step in (("wait", 3), ("delta", f"{number} ")))


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.proves("A012", "A089", "A090", "A092", "A140", "A157")
def test_after_a_dropped_event_stream_the_provider_answers_404_although_the_run_goes_on(replay: bool) -> None:
    async def story() -> None:
        async with world(replay=replay) as w:
            w.hermes.scripts["plain"] = (*TWENTY, ("complete", "all of it"))
            run_id = await w.bound(await w.begin())
            follow = await w.submit(Operation.RUN_EVENTS, {"run_id": run_id}, key="e1", mode=Mode.ASYNC)

            async def five() -> bool:
                return (await w.stream(run_id)).last_seq >= 5

            await w.until(five, step=0.2)
            w.hermes.bend["events"] = lambda _, told: refusal(404, "run_not_found")
            w.hermes.cut_streams()
            await anyio.sleep(10)
            assert told_state(await w.run(run_id)) == ("running", "")
            (gap,) = (await w.stream(run_id)).gaps
            assert (gap.after, gap.before) == (5, None)
            run = await w.ended(run_id)
            assert (told_state(run), run.ended.source if run.ended else "") == (("completed", ""), "status")
            await anyio.sleep(5)
            (gap,) = (await w.stream(run_id)).gaps
            assert (gap.after, gap.before, gap.closed_by) == (5, 6, "terminal_status")
            told = run_view(await w.run_row(run_id))
            assert "gaps" in json.dumps(told)
            read = await w.answered(follow)
            assert read.settled is not None
            assert read.settled.code == "connector.hermes_agent.stream_incomplete"
            assert (read.settled.details["events"], read.settled.details["terminal"]) == (5, False)
            assert len(w.hermes.subscriptions) < 70
            await check(w)

    play(story)


def test_a_stream_that_is_cut_at_a_replaying_provider_goes_on_without_a_gap_left_open() -> None:
    async def story() -> None:
        async with world(replay=True) as w:
            w.hermes.scripts["plain"] = (*TWENTY, ("complete", "all of it"))
            run_id = await w.bound(await w.begin())
            for _ in range(3):
                await anyio.sleep(12)
                w.hermes.cut_streams()
            await w.ended(run_id)
            await anyio.sleep(5)
            seen = await w.stream(run_id)
            assert (seen.last_seq, seen.kinds) == (21, {"message.delta": 20, "run.completed": 1})
            assert [gap.closed_by for gap in seen.gaps] == ["replay"] * 3
            assert len(w.hermes.subscriptions) == 4
            await check(w)

    play(story)


def test_a_host_that_is_replaced_resumes_the_stream_of_a_replaying_provider() -> None:
    async def story() -> None:
        async with world(replay=True) as w:
            w.hermes.scripts["plain"] = (*TWENTY, ("complete", "all of it"))
            run_id = await w.bound(await w.begin())
            await anyio.sleep(20)
            await w.current().kill()
            w.start()
            await w.ended(run_id)
            await anyio.sleep(5)
            seen = await w.stream(run_id)
            assert (seen.last_seq, [gap.closed_by for gap in seen.gaps]) == (21, ["replay"])
            await check(w)

    play(story)


def test_a_host_that_was_stopped_for_long_does_not_close_the_stream_of_its_successor() -> None:
    async def story() -> None:
        async with world(replay=True) as w:
            w.hermes.scripts["plain"] = (*TWENTY, ("wait", 120), ("complete", "all of it"))
            run_id = await w.bound(await w.begin())
            second = w.start("b")
            await second.ready.wait()
            await anyio.sleep(5)
            first = w.current()
            first.process.freeze()
            await anyio.sleep(60)
            assert (await w.stream(run_id)).owner == second.lease.fence
            first.process.thaw()
            await anyio.sleep(30)
            seen = await w.stream(run_id)
            assert (seen.open, seen.subscriptions, seen.open_gap) == (True, 2, None)
            await w.ended(run_id)
            await check(w)

    play(story)


@pytest.mark.proves("A087")
def test_a_second_listener_steals_part_of_the_events_of_the_first() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (*TWENTY, ("complete", "all of it"))
            run_id = await w.bound(await w.begin())
            followers = [
                await w.submit(Operation.RUN_EVENTS, {"run_id": run_id}, key=f"e{number}", mode=Mode.ASYNC)
                for number in range(3)
            ]
            await w.ended(run_id)
            read = [await w.answered(follower) for follower in followers]
            assert [item.settled.details["events"] for item in read if item.settled] == [21] * 3
            assert len(w.hermes.subscriptions) == 1
            await check(w)

    play(story)


@pytest.mark.proves("A088")
def test_a_second_listener_steals_part_of_the_events_of_the_first_at_the_provider() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (*TWENTY, ("complete", "all of it"))
            run_id = await w.bound(await w.begin())
            await anyio.sleep(20)
            w.hermes.runs[run_id].stolen = True
            run = await w.ended(run_id)
            await anyio.sleep(20)
            seen = await w.stream(run_id)
            assert run.ended is not None
            assert run.ended.source == "status"
            assert seen.last_seq < 20
            assert [(gap.after, gap.before) for gap in seen.gaps] == [(seen.last_seq, seen.last_seq + 1)]
            assert w.current().observer.following == 0
            await check(w)

    play(story)


@pytest.mark.proves("A058", "A074", "A121", "A139", "A168")
def test_the_provider_forgets_a_finished_run_after_an_hour_and_slow_pollers_get_404_for_ever() -> None:
    async def story() -> None:
        async with world() as w:
            w.run_deadline_ms = 86_400_000
            w.hermes.scripts["plain"] = (("wait", 60), ("complete", "done"))
            run_id = await w.bound(await w.begin())
            await anyio.sleep(10)
            w.hermes.bend["status"] = lambda _, told: UNREACHED
            w.hermes.bend["events"] = lambda _, told: PROXY_PAGE
            w.hermes.cut_streams()
            await anyio.sleep(3_660)
            assert told_state(await w.run(run_id)) == ("running", "")
            w.hermes.bend.clear()
            del w.hermes.runs[run_id]
            await anyio.sleep(600)
            run = await w.run(run_id)
            assert (told_state(run), run.ended) == (("unknown", "evidence_lost"), None)
            found = [item.event for item in await w.events() if isinstance(item.event, StatusSeen | StatusUnread)]
            assert isinstance(found[0], StatusSeen)
            assert found[0].state == "running"
            assert isinstance(found[-1], StatusUnread)
            assert found[-1].missing
            assert found[-1].at > found[0].at
            assert len(w.hermes.sent("start")) == 1
            await check(w)

    play(story)


@pytest.mark.proves("A069")
def test_a_failed_turn_is_reported_as_completed_with_empty_output() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("wait", 1), ("complete", ""))
            run_id = await w.bound(await w.begin())
            run = await w.ended(run_id)
            assert told_state(run) == ("completed", "")
            assert marks(run) == ("empty_output", "no_usage")
            assert (await w.run_row(run_id)).reason == "run_ended_in_doubt"
            await anyio.sleep(600)
            assert len(w.hermes.sent("start")) == 1
            await check(w)

    play(story)


@pytest.mark.proves("A127")
def test_a_watchdog_declares_failure_while_the_work_goes_on_and_later_delivers() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("wait", 600), ("complete", "late but good"))
            action = await w.answered(await w.begin(timeout_ms=300_000))
            run_id = actions.started_run(action)
            await anyio.sleep(400)
            run = await w.run(run_id)
            assert (told_state(run), run.ended) == (("unknown", "deadline_passed"), None)
            run = await w.ended(run_id)
            assert (told_state(run), marks(run)) == (("completed", ""), ("ended_after_deadline",))
            assert run.ended is not None
            assert b"late but good" in await w.vault.open(run.ended.result)
            assert (await w.action(action)).effect is Effect.CONFIRMED
            await check(w)

    play(story)


def _with_partial_text(run_id: str, told: Exchange) -> Exchange:
    body = json.loads(told.body)
    return told if body.get("status") in TERMINAL_STATES else answer(200, body | {"output": "the first ha"})


@pytest.mark.proves("A066", "A092")
def test_partial_output_of_a_running_run_is_taken_as_the_final_text() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("wait", 200), ("complete", "the first half and the second"))
            w.hermes.bend["status"] = _with_partial_text
            w.hermes.faults["events"] = ["unreached"]
            run_id = await w.bound(await w.begin())
            await anyio.sleep(190)
            run = await w.run(run_id)
            assert (told_state(run), run.ended) == (("running", ""), None)
            assert run.seen is not None
            assert run.seen.has_output
            assert len(w.hermes.reads) >= 20
            ended = await w.ended(run_id)
            assert ended.ended is not None
            assert b"and the second" in await w.vault.open(ended.ended.result)
            w.hermes.scripts["never"] = (("never",),)
            w.hermes.faults["events"] = ["unreached"]
            endless = await w.bound(await w.begin("k2", "never"))
            began = len(w.hermes.reads)
            await anyio.sleep(3_600)
            assert (await w.run(endless)).phase is Phase.FOLLOWED
            assert told_state(await w.run(endless)) == ("unknown", "deadline_passed")
            assert 300 < len(w.hermes.reads) - began < 400
            await check(w)

    play(story)


def _split(stream: bytes, size: int, limits: SseLimits | None = None) -> tuple[list[str], str, bytes]:
    splitter = SseSplitter(limits)
    items = [item for start in range(0, len(stream), size) for item in splitter.feed(stream[start : start + size])]
    last, rest = splitter.close()
    return [item.data for item in items + last if isinstance(item, RawFrame)], splitter.fault, rest


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.proves("A084")
def test_text_with_unusual_line_separators_tears_stream_frames_apart(ending: str) -> None:
    texts = [f"a{separator}b" for separator in ("\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\u20ac")]
    frames = [f"data:{json.dumps({'delta': text}, ensure_ascii=False)}" for text in texts]
    body = (ending * 2).join(
        [": hello", "id: 1\nretry: 5".replace("\n", ending), *frames, "data: one" + ending + "data:two"]
    )
    stream = (body + ending * 2 + "data: never ended").encode()
    whole, fault, rest = _split(stream, len(stream))
    assert [json.loads(data)["delta"] for data in whole[-1 - len(texts) : -1] if data.startswith("{")] == texts
    assert (whole[-1], fault) == ("one\ntwo", "")
    assert b"never ended" in rest or not any("never" in data for data in whole)
    for size in range(1, 40):
        assert _split(stream, size) == (whole, fault, rest)
    _, too_large, _ = _split(b"data: " + b"x" * 200, 7, SseLimits(line=40, frame=60, stream=200))
    assert too_large == "line_too_large"


async def _two_equal_frames(w: World) -> None:
    w.hermes.scripts["plain"] = (
        ("wait", 1),
        ("frame", "message.delta", {"delta": "a", "timestamp": 1}),
        ("wait", 1),
    ) * 3
    run_id = await w.bound(await w.begin())
    await anyio.sleep(10)
    assert (await w.stream(run_id)).kinds == {"message.delta": 3}


def test_equal_frames_one_after_another_are_as_many_as_arrived() -> None:
    async def story() -> None:
        async with world() as w:
            await _two_equal_frames(w)

    play(story)


def test_frames_that_arrive_while_the_store_is_away_for_a_minute_are_all_kept() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (*TWENTY, ("complete", "all of it"))
            run_id = await w.bound(await w.begin())
            await anyio.sleep(10)
            w.current().process.store_away = True
            await anyio.sleep(25)
            w.current().process.store_away = False
            await w.ended(run_id)
            await anyio.sleep(5)
            seen = await w.stream(run_id)
            assert (seen.kinds, seen.gaps) == ({"message.delta": 20, "run.completed": 1}, ())
            assert (await w.action((await w.begin()).request.action_id)).state is State.SETTLED
            await check(w)

    play(story)


def test_a_follower_does_not_read_the_whole_history_for_each_batch_of_frames() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("wait", 0.1), ("delta", "x")) * 300 + (("complete", "done"),)
            run_id = await w.bound(await w.begin())
            w.current().process.counting = True
            follow = await w.submit(Operation.RUN_EVENTS, {"run_id": run_id}, key="e1", mode=Mode.ASYNC)
            read = await w.answered(follow)
            assert read.settled is not None
            assert read.settled.details["events"] == 301
            trace = w.current().process.trace
            assert trace.count("store.append") > 200
            assert trace.count("store.load_many") < 10
            await w.ended(run_id)
            await check(w)

    play(story)
