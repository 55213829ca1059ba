"""Feeds: pages, bound cursors, and followers that see every stored frame once."""

from __future__ import annotations

import json
from typing import Any

import anyio
import msgspec
import pytest

from adapters import http_sse
from adapters.http_cursor import ActionPlace, action_cursor
from adapters.http_route import Call
from tests.http.stand import EVENTS, PEOPLE, STOP, Stand, deltas, sse

pytestmark = pytest.mark.anyio


def parsed(text: str) -> list[tuple[str, str, Any]]:
    """(event, id, data) of each frame."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields.get("event", ""), fields.get("id", ""), json.loads(fields["data"])))
    return found


async def read(host: Stand, words: int = 7, **members: Any) -> tuple[str, str]:
    """(Action id, run id) of a settled ``run_events`` over a run of so many words."""
    host.provider.frames = lambda run_id: deltas(run_id, *(f"w{number} " for number in range(words)))
    _, run_id = await host.started()
    answer = await host.submit(EVENTS, input={"run_id": run_id} | members)
    return answer.json()["action_result"]["action_id"], run_id


@pytest.mark.proves("B144")
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
async def test_pages_of_any_size_tell_every_event_and_chunk_once_and_in_order(host: Stand, limit: int) -> None:
    action_id, _ = await read(host)
    cursor, events, chunks = "", [], []
    for _ in range(40):
        page = (await host.get(f"/aip/v1/actions/{action_id}/events", limit=limit, cursor=cursor)).json()[
            "action_events"
        ]
        assert len(page["events"]) + len(page["chunks"]) <= limit
        events += page["events"]
        chunks += page["chunks"]
        cursor = page["cursor"]
        if page["terminal"]:
            break
    assert [event["kind"] for event in events] == ["aip.action.ack", "aip.action.result"]
    assert [chunk["sequence"] for chunk in chunks] == list(range(8))
    assert [chunk["kind"] for chunk in chunks] == ["data"] * 7 + ["done"]
    assert "".join(chunk["part"]["text"] for chunk in chunks[:7]) == "w0 w1 w2 w3 w4 w5 w6 "
    again = (await host.get(f"/aip/v1/actions/{action_id}/events", cursor=cursor)).json()["action_events"]
    assert (again["events"], again["chunks"], again["cursor"], again["terminal"]) == ([], [], cursor, True)


async def test_chunks_and_kinds_narrow_the_feed(host: Stand) -> None:
    action_id, _ = await read(host, 2)
    only = (await host.get(f"/aip/v1/actions/{action_id}/chunks")).json()["action_events"]
    assert (only["events"], len(only["chunks"])) == ([], 3)
    results = (await host.get(f"/aip/v1/actions/{action_id}/events", kinds="aip.action.result")).json()["action_events"]
    assert [event["kind"] for event in results["events"]] == ["aip.action.result"]
    assert results["chunks"] == []
    bare = (await host.get(f"/aip/v1/actions/{action_id}/events", include_chunks=False)).json()["action_events"]
    assert (len(bare["events"]), bare["chunks"]) == (2, [])


@pytest.mark.proves("B149", "A090")
async def test_a_stream_that_closed_early_has_one_closing_error_chunk(host: Stand) -> None:
    host.provider.frames = lambda run_id: deltas(run_id, "a", "b", end="")
    run_id = (await host.submit()).json()["action_result"]["output"]["run_id"]
    action_id = (await host.submit(EVENTS, input={"run_id": run_id})).json()["action_result"]["action_id"]
    page = (await host.get(f"/aip/v1/actions/{action_id}/chunks")).json()["action_events"]
    assert [(chunk["sequence"], chunk["kind"]) for chunk in page["chunks"]] == [(0, "data"), (1, "data"), (2, "error")]
    assert page["chunks"][-1]["data"]["reason"] == "upstream_stream_closed_without_terminal_event"


async def test_a_truncated_read_has_no_further_chunk(host: Stand) -> None:
    action_id, _ = await read(host, 7, max_events=3)
    page = (await host.get(f"/aip/v1/actions/{action_id}/chunks")).json()["action_events"]
    assert [chunk["sequence"] for chunk in page["chunks"]] == [0, 1, 2]
    assert page["terminal"] is True


@pytest.mark.proves("B146")
async def test_other_positions_and_ids_are_never_taken_for_a_cursor(host: Stand) -> None:
    action_id, run_id = await read(host)
    other_id, _ = await read(host)
    path = f"/aip/v1/actions/{action_id}/events"
    page = (await host.get(path)).json()["action_events"]
    theirs = (await host.get(f"/aip/v1/actions/{other_id}/events")).json()["action_events"]["cursor"]
    run_place = (await host.get(f"/views/runs/{run_id}/events")).json()["cursor"]
    forged = page["cursor"].replace("aev_cursor_2", "aev_cursor_1")
    for wrong in (run_id, action_id, "chunk:1", page["events"][0]["id"], theirs, run_place, forged, "7", "offset:1"):
        for query in ({"cursor": wrong}, {"cursor": wrong, "follow": "true"}):
            refused = await host.get(path, **query)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "query.invalid_cursor"), wrong
    for wrong in (run_id, page["cursor"], "chunk:1"):
        refused = await host.get(f"/views/runs/{run_id}/events", after=wrong)
        assert refused.json()["error"]["code"] == "query.invalid_cursor"
    header = await host.call("GET", path + "?follow=true", headers={"Last-Event-ID": "chunk:2"})
    assert header.json()["error"]["code"] == "query.invalid_cursor"


async def test_a_follower_sees_the_frames_of_the_protocol(host: Stand) -> None:
    action_id, _ = await read(host, 2)
    answer = await host.get(f"/aip/v1/actions/{action_id}/events", follow="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "no-cache" in answer.headers["cache-control"]
    assert answer.headers["x-accel-buffering"] == "no"
    frames = parsed(answer.text)
    assert [event for event, _, _ in frames] == [
        "aip.action.ack",
        "aip.action.result",
        *["aip.stream.chunk"] * 3,
        "aip.stream.cursor",
        "aip.stream.terminal",
    ]
    assert frames[0][1] == frames[0][2]["event"]["id"]
    assert frames[2][1] == "chunk:0"
    assert frames[-2][1] == frames[-2][2]["next_cursor"]
    assert frames[-1] == ("aip.stream.terminal", "", {"terminal": True, "action_id": action_id})


@pytest.mark.parametrize("limit", [1, 2, 4])
async def test_a_follower_that_goes_on_from_any_position_frame_misses_and_repeats_nothing(
    host: Stand, limit: int
) -> None:
    action_id, _ = await read(host)
    path = f"/aip/v1/actions/{action_id}/events?follow=true&limit={limit}"
    whole = parsed((await host.call("GET", path)).text)
    told = [(name, place) for name, place, _ in whole if name not in ("aip.stream.cursor", "aip.stream.terminal")]
    assert len(told) == len(set(told)) == 10
    for place, (name, cursor, _) in enumerate(whole):
        if name == "aip.stream.cursor":
            rest = parsed((await host.call("GET", path, headers={"Last-Event-ID": cursor})).text)
            left = [(n, i) for n, i, _ in whole[place + 1 :] if n not in ("aip.stream.cursor", "aip.stream.terminal")]
            assert [(n, i) for n, i, _ in rest if n not in ("aip.stream.cursor", "aip.stream.terminal")] == left


async def frames_until(host: Stand, path: str, last: str, seen: list[tuple[str, str, Any]], who: str = "ada") -> None:
    """Follow as a caller does, frame by frame, until one of this name."""
    reader = Follower(host, path, who)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.run)
        with anyio.fail_after(10):
            while not any(name == last for name, _, _ in seen):
                seen += await reader.next()
        tasks.cancel_scope.cancel()


class Follower:
    """A reader of an event stream over ASGI, with a disconnect in its hands."""

    def __init__(self, host: Stand, path: str, who: str = "ada") -> None:
        self._host, self._who = host, who
        self._path, _, self._query = path.partition("?")
        self._parts: list[bytes] = []
        self._came = anyio.Event()
        self.gone = anyio.Event()

    async def run(self) -> None:
        """The request, until it ends or the reader goes."""
        first = True

        async def receive() -> dict[str, Any]:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": b"", "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                self._parts.append(message["body"])
                self._came.set()

        scope = {
            "type": "http", "method": "GET", "path": self._path, "raw_path": self._path.encode(),
            "query_string": self._query.encode(), "headers": [(b"authorization", f"Bearer {self._who}".encode())],
            "asgi": {"spec_version": "2.3"},
        }  # fmt: skip
        await self._host.app(scope, receive, send)

    async def next(self) -> list[tuple[str, str, Any]]:
        """The frames of the next part."""
        await self._came.wait()
        part = self._parts.pop(0)
        if not self._parts:
            self._came = anyio.Event()
        return parsed(part.decode())


@pytest.mark.proves("B147", "A087")
async def test_losing_a_follower_cancels_nothing(host: Stand) -> None:
    host.provider.hold = anyio.Event()
    action_id = (await host.submit(mode="async")).json()["ack"]["action_id"]
    reader = Follower(host, f"/aip/v1/actions/{action_id}/events?follow=true")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.run)
        assert (await reader.next())[0][0] == "aip.action.ack"
        reader.gone.set()
    status = (await host.get(f"/aip/v1/actions/{action_id}")).json()["action_status"]
    assert status["state"] in ("running", "queued")
    host.provider.hold.set()

    async def settled() -> bool:
        found = await host.get(f"/aip/v1/actions/{action_id}")
        return bool(found.json()["action_status"]["state"] == "completed")

    await host.until(settled)
    assert [out.path for out in host.provider.sent] == ["/v1/runs"]


async def test_a_follower_is_told_what_is_stored_while_it_follows(host: Stand) -> None:
    host.provider.hold = anyio.Event()
    action_id = (await host.submit(mode="async")).json()["ack"]["action_id"]
    seen: list[tuple[str, str, Any]] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            frames_until, host, f"/aip/v1/actions/{action_id}/events?follow=true", "aip.stream.terminal", seen
        )
        await host.until(lambda: _has(seen, "aip.action.ack"))
        host.provider.hold.set()
    names = [name for name, _, _ in seen if name != "aip.stream.cursor"]
    assert names[0] == "aip.action.ack"
    assert names[-2:] == ["aip.action.result", "aip.stream.terminal"]


async def _has(seen: list[tuple[str, str, Any]], wanted: str) -> bool:
    return any(name == wanted for name, _, _ in seen)


async def test_a_silent_feed_is_kept_alive_by_comments(host: Stand) -> None:
    class Impatient:
        """The host's clock, measuring three hundred times as fast."""

        def __getattr__(self, name: str) -> Any:
            return getattr(host.clock, name)

        def monotonic(self) -> float:
            return host.clock.monotonic() * 300

    ports = msgspec.structs.replace(host.ports, clock=Impatient())
    call = Call(actor=PEOPLE["ada"], params={}, query=None, body=None, headers={}, still_admitted=lambda: True)

    async def look(cursor: str) -> http_sse.Step:
        return http_sse.Step(frames=(), cursor=cursor)

    async def wait(seconds: float) -> None:
        assert seconds <= http_sse.KEEP_ALIVE_S
        await anyio.sleep(0.01)

    parts = http_sse.follow(ports, call, "x", look, wait, "")
    with anyio.fail_after(5):
        assert await anext(parts) == b": keep-alive\n\n"
        assert await anext(parts) == b": keep-alive\n\n"
    await parts.aclose()  # type: ignore[attr-defined]


async def test_a_token_that_is_withdrawn_ends_its_feeds(host: Stand) -> None:
    host.provider.hold = anyio.Event()
    action_id = (await host.submit(mode="async")).json()["ack"]["action_id"]
    reader = Follower(host, f"/aip/v1/actions/{action_id}/events?follow=true")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.run)
        await reader.next()
        del host.callers.people["ada"]
        host.provider.hold.set()
        with anyio.fail_after(5):
            while (frames := await reader.next())[-1][0] != "aip.error":
                pass
    assert frames[-1][2]["error"]["code"] == "auth.unverified_actor"


@pytest.mark.parametrize("version", [1, 2])
async def test_a_history_that_cannot_be_read_is_told_to_its_owner_alone(host: Stand, version: int) -> None:
    action_id, _ = await read(host)
    name = f"acme/act/{action_id}"
    rows = host.journal._histories[name]
    rows[version] = msgspec.structs.replace(rows[version], state=b"{")
    for more in ("", "/result", "/events", "/events?follow=true"):
        answer = await host.call("GET", f"/aip/v1/actions/{action_id}{more}", "boss")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "history.unreadable")
        own = await host.call("GET", f"/aip/v1/actions/{action_id}{more}")
        assert own.status_code == (404 if version == 1 else 500)
        for who in ("bea", "zoe"):
            answer = await host.call("GET", f"/aip/v1/actions/{action_id}{more}", who)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "action.not_found")


async def test_a_fault_in_the_middle_of_a_feed_is_its_last_frame(host: Stand) -> None:
    host.provider.hold = anyio.Event()
    action_id = (await host.submit(mode="async")).json()["ack"]["action_id"]
    reader = Follower(host, f"/aip/v1/actions/{action_id}/events?follow=true")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.run)
        await reader.next()
        rows = host.journal._histories[f"acme/act/{action_id}"]
        rows[1] = msgspec.structs.replace(rows[1], state=b"{")
        with anyio.fail_after(5):
            while (frames := await reader.next())[-1][0] != "aip.error":
                pass
        assert frames[-1][2]["error"]["code"] == "history.unreadable"
        host.provider.hold.set()


# ---- runs and people -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_a_runs_feed_tells_everything_stored_of_it_in_the_order_of_the_journal(host: Stand, limit: int) -> None:
    _, run_id = await read(host, 5)
    after, entries = "", []
    for _ in range(60):
        page = (await host.get(f"/views/runs/{run_id}/events", limit=limit, after=after)).json()
        entries += page["events"]
        after = page["cursor"]
        if not page["events"]:
            break
    kinds = [entry["kind"] for entry in entries]
    assert kinds.count("provider.event") == 6
    assert {"run.bound", "run.ended", "stream.closed", "stream.subscription_opened"} <= set(kinds)
    assert [entry["sequence"] for entry in entries if "sequence" in entry] == [1, 2, 3, 4, 5, 6]
    assert [entry["position"] for entry in entries] == sorted(entry["position"] for entry in entries)
    assert len({entry["id"] for entry in entries}) == len(entries)


async def test_a_runs_feed_can_be_followed_and_resumed(host: Stand) -> None:
    host.provider.status = {"status": "completed", "output": "done", "usage": {"total_tokens": 3}}
    _, run_id = await read(host, 3)

    async def over() -> bool:
        await host.views.catch_up()
        return bool((await host.get(f"/views/runs/{run_id}/events")).json()["terminal"])

    await host.until(over)
    path = f"/views/runs/{run_id}/events?follow=true&limit=2"
    whole = parsed((await host.call("GET", path)).text)
    assert whole[-1] == ("aip.stream.terminal", "", {"terminal": True, "run_id": run_id})
    cursors = [place for name, place, _ in whole if name == "aip.stream.cursor"]
    rest = parsed((await host.call("GET", path, headers={"Last-Event-ID": cursors[1]})).text)
    assert [place for name, place, _ in whole if name != "aip.stream.cursor"][4:] == [
        place for name, place, _ in rest if name != "aip.stream.cursor"
    ]


async def test_what_begins_to_wait_for_a_person_is_told_once(host: Stand) -> None:
    host.provider.frames = lambda run_id: [sse({"event": "approval.request", "command": "x", "choices": ["once"]})]
    seen: list[tuple[str, str, Any]] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(frames_until, host, "/views/needs-person?follow=true", "never", seen)
        run_id = (await host.submit()).json()["action_result"]["output"]["run_id"]
        await host.submit(STOP, input={"run_id": run_id})

        async def both() -> bool:
            reasons = {data["event"]["reason"] for name, _, data in seen if name == "needs-human"}
            return reasons >= {"pending_approval", "provider_approval_pending"}

        await host.until(both)
        tasks.cancel_scope.cancel()
    ids = [place for name, place, _ in seen if name == "needs-human"]
    assert len(ids) == len(set(ids)) == 2
    listed = (await host.get("/views/needs-person", limit=1)).json()
    assert listed["total_size"] == 2
    more = (await host.get("/views/needs-person", limit=1, cursor=listed["cursor"])).json()
    assert {listed["needs_person"][0]["id"], more["needs_person"][0]["id"]} == set(ids)


def test_a_cursor_is_short_and_plain() -> None:
    cursor = action_cursor(lambda content: "0" * 64, "acme/act/a", ActionPlace(3, -1, 0))
    assert cursor == "aev_cursor_3_none_0_" + "0" * 24
