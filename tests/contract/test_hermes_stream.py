"""Event streams, malformed answers, bounded memory, and the five operations with the practice provider."""

from __future__ import annotations

import random
import tracemalloc
from contextlib import aclosing

import anyio
import pytest

from adapters.hermes import BearerKey, HermesEndpoint, HermesLimits
from adapters.practice_hermes import PracticeHermes
from domain.events import Target
from domain.provider import (
    Comment,
    Failure,
    RawFrame,
    StreamEnd,
    StreamOpened,
    Verdict,
    judge_approval,
    judge_start,
    judge_stop,
    parse_object,
    read_status,
)
from domain.requests import (
    approval_request,
    check_start_input,
    events_request,
    start_request,
    status_request,
    stop_request,
)
from tests.contract.hermes_calls import (
    ACCEPTED,
    SSE_HEAD,
    START,
    TRUSTED,
    chunk,
    close_after_request,
    endless_body,
    endless_headers,
    endless_provisional,
    endpoint,
    half,
    quick,
    reset_after_request,
    sent_to,
    streamed,
)
from tests.faults.http_peer import Connection, Script, answer, http_peer, replying

pytestmark = pytest.mark.anyio


@pytest.mark.proves("A075", "A084", "A085")
async def test_a_stream_gives_its_opening_its_frames_its_comments_and_one_end() -> None:
    body = [b": keepalive\n\n", b"id: 0\nda", b'ta: {"event": "run.completed"}\n\n', b": stream closed\n\n"]
    items = await streamed(replying(SSE_HEAD + b"".join(chunk(part) for part in body) + b"0\r\n\r\n"))
    assert items == [
        StreamOpened(),
        Comment("keepalive"),
        RawFrame(raw=b'id: 0\ndata: {"event": "run.completed"}\n\n', id="0", data='{"event": "run.completed"}'),
        Comment("stream closed"),
        StreamEnd(reason="closed"),
    ]


async def sse_silent(connection: Connection) -> None:
    await connection.read_request()
    await connection.send(SSE_HEAD + chunk(b"data: 1\n\n"))
    await connection.wait_closed()


async def sse_endless_line(connection: Connection) -> None:
    await connection.read_request()
    await connection.send(SSE_HEAD)
    while True:
        await connection.send(chunk(b"x" * 1_000))


async def sse_endless_frame(connection: Connection) -> None:
    await connection.read_request()
    await connection.send(SSE_HEAD)
    while True:
        await connection.send(chunk(b"data: x\n" * 100))


async def sse_endless_comments(connection: Connection) -> None:
    await connection.read_request()
    await connection.send(SSE_HEAD)
    while True:
        await connection.send(chunk(b": x\n\n" * 100))


@pytest.mark.proves("A090", "A157")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (half(SSE_HEAD + chunk(b"data: 1\n\n")), "cut"),
        (replying(SSE_HEAD + chunk(b"data: 1\n\n")), "cut"),
        (replying(SSE_HEAD + chunk(b"data: 1\n\ndata: 2\n") + b"0\r\n\r\n"), "cut"),
        (replying(SSE_HEAD + chunk(b"data: 1\n\n") + b"0\r\n\r\n"), "closed"),
        (replying(SSE_HEAD + chunk(b"data: 1\n\n") + b"nonsense\r\n"), "cut"),
        (sse_silent, "idle"),
    ],
)
async def test_a_stream_that_ends_early_keeps_its_whole_frames_and_names_its_end(script: Script, reason: str) -> None:
    items = await streamed(script, idle_s=0.3)
    assert [item.data for item in items if isinstance(item, RawFrame)] == ["1"]
    assert items[-1] == StreamEnd(reason=reason)
    assert sum(isinstance(item, StreamEnd) for item in items) == 1


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (sse_endless_line, "line_too_large"),
        (sse_endless_frame, "frame_too_large"),
        (sse_endless_comments, "stream_too_large"),
    ],
)
async def test_an_endless_stream_is_bounded(script: Script, reason: str) -> None:
    assert (await streamed(script))[-1] == StreamEnd(reason=reason)


@pytest.mark.proves("A022")
async def test_a_stream_outlives_the_deadline_of_its_opening_as_long_as_bytes_come() -> None:
    async def script(connection: Connection) -> None:
        await connection.read_request()
        await connection.send(SSE_HEAD)
        for _ in range(6):
            await anyio.sleep(0.1)
            await connection.send(chunk(b": keepalive\n\n"))
        await connection.send(b"0\r\n\r\n")

    async with http_peer(script) as peer:
        hermes = endpoint(peer.origin)
        items = [item async for item in hermes.stream(quick(events_request("run_1", None, TRUSTED), 200), idle_s=5)]
        await hermes.close()
    assert items == [StreamOpened(), *[Comment("keepalive")] * 6, StreamEnd(reason="closed")]


@pytest.mark.parametrize(
    "data",
    [
        answer("404 Not Found", b'{"error": {"message": "Run not found", "code": "run_not_found"}}'),
        answer("200 OK", b"{}"),
        answer("200 OK", b"<html>", content_type="text/html"),
        answer("200 OK", b"data: 1\n\n", "Content-Encoding: gzip", content_type="text/event-stream"),
        answer("302 Found", b"", "Location: http://elsewhere/", content_type="text/event-stream"),
    ],
)
async def test_an_answer_that_is_no_event_stream_is_a_refusal_with_its_exchange(data: bytes) -> None:
    (end,) = await streamed(replying(data))
    assert isinstance(end, StreamEnd)
    assert end.reason == "refused"
    assert end.exchange is not None
    assert end.exchange.status == int(data[9:12])


@pytest.mark.parametrize("script", [close_after_request, reset_after_request, half(b"HTTP/1.1 200")])
async def test_a_stream_that_never_opened_says_so(script: Script) -> None:
    (end,) = await streamed(script)
    assert isinstance(end, StreamEnd)
    assert end.reason == "not_connected"
    assert end.exchange is not None
    assert end.exchange.failure is Failure.READ_ERROR


async def test_a_reader_that_leaves_closes_the_connection_and_frees_its_place() -> None:
    async with http_peer(sse_silent) as peer:
        hermes = endpoint(peer.origin, HermesLimits(mutations=1, reads=1, streams=1))
        for _ in range(3):
            async with aclosing(hermes.stream(events_request("run_1", None, TRUSTED))) as items:
                assert isinstance(await anext(items), StreamOpened)
            with anyio.move_on_after(0.05):
                async with aclosing(hermes.stream(events_request("run_1", None, TRUSTED))) as items:
                    async for _ in items:
                        pass
        await peer.until(lambda: not peer.open)
        await hermes.close()
    assert len(peer.heard) == 6


# -- many hostile answers -----------------------------------------------------------------------------------------


def hostile(chance: random.Random) -> bytes:
    """One answer with something wrong in it, from a plausible one."""
    data = bytearray(
        chance.choice(
            [
                ACCEPTED,
                answer("200 OK", b'{"error": "\\u0000"}'),
                answer("404 Not Found", b"x"),
                SSE_HEAD + chunk(b'data: {"event": "run.completed"}\n\n') + b"0\r\n\r\n",
            ]
        )
    )
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[place] = chance.randrange(256)
            case 1:
                del data[place : place + chance.randint(1, 20)]
            case 2:
                data[place:place] = chance.randbytes(chance.randint(1, 30))
            case _:
                data[place:place] = data[: chance.randint(1, len(data))]
        data = data or bytearray(b"x")
    return bytes(data)


async def test_no_malformed_answer_raises_or_counts_as_something_else() -> None:
    chance = random.Random(20)
    answers = [hostile(chance) for _ in range(300)]
    left = list(answers)

    async def script(connection: Connection) -> None:
        await connection.read_request()
        await connection.send(left.pop())

    events = quick(events_request("run_1", None, TRUSTED), 2_000)
    async with http_peer(script) as peer:
        hermes = endpoint(peer.origin)
        for number in range(len(answers)):
            if number % 2:
                items = [item async for item in hermes.stream(events, idle_s=2)]
                assert isinstance(items[-1], StreamEnd)
            else:
                seen = await hermes.send(quick(START, 2_000))
                assert seen.sent
                assert seen.complete or judge_start(seen).verdict is Verdict.AMBIGUOUS
        await hermes.close()
    assert left == []


async def test_memory_stays_near_the_bound_whatever_is_sent() -> None:
    tracemalloc.start()
    try:
        for script in (endless_body, endless_headers, endless_provisional):
            await sent_to(script, quick(START))
        for script in (sse_endless_line, sse_endless_frame, sse_endless_comments):
            await streamed(script)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 1024 * 1024


# -- a provider that works ----------------------------------------------------------------------------------------


@pytest.mark.proves("A013", "A043", "A097", "A102", "A111", "A162")
async def test_the_five_operations_work_with_the_practice_provider() -> None:
    with PracticeHermes() as practice:
        hermes = HermesEndpoint(Target(endpoint_id="one", origin=practice.base_url), BearerKey(practice.key))
        body = check_start_input({"input": "ASK rm -rf /tmp/x\nTEXT done"}, default_session_id="own-1")
        started = judge_start(await hermes.send(start_request(body.content, session_key=None, trusted=TRUSTED)))
        run_id = started.run_id
        names = []
        async with aclosing(hermes.stream(events_request(run_id, None, TRUSTED))) as items:
            async for item in items:
                event = (parse_object(item.data.encode()) or {}) if isinstance(item, RawFrame) else {}
                names.append(event.get("event", type(item).__name__))
                if names[-1] == "approval.request":
                    approved = await hermes.send(approval_request(run_id, "once", False, None, TRUSTED))
        status = read_status(await hermes.read(status_request(run_id, TRUSTED)), run_id)

        second = check_start_input({"input": "SLEEP 30\nTEXT never"})
        other = judge_start(await hermes.send(start_request(second.content, session_key=None, trusted=TRUSTED)))
        stopped = judge_stop(await hermes.send(stop_request(other.run_id, TRUSTED)), other.run_id)
        await hermes.close()
    judged = judge_approval(approved, run_id)
    assert (started.verdict, started.state) == (Verdict.ACCEPTED, "started")
    assert (judged.verdict, judged.choice, judged.resolved) == (Verdict.ACCEPTED, "once", 1)
    assert (status.state, status.session_id) == ("completed", "own-1")
    assert names[0] == "StreamOpened"
    assert names[-3:] == ["run.completed", "Comment", "StreamEnd"]
    assert (stopped.verdict, stopped.state) == (Verdict.ACCEPTED, "stopping")
