"""Many streams at once through the real observer: every frame is stored in order, a batch of frames as one event."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from adapters.clock import SystemClock
from adapters.journal import Journal
from adapters.lease import HostLease, LeaseTimes
from adapters.notices import Notices
from adapters.observer import Observer, ObserverLimits
from adapters.store import JournalStore
from adapters.vault import PostgresKeys, Vault
from domain import binding, stream
from domain.events import FramesStored, RunBound, Target
from domain.history import Change, Command, run_history, run_token, stream_history
from domain.provider import Exchange, Outgoing, RawFrame, StreamEnd, StreamItem, StreamOpened
from tests.golden.event_samples import MASTER

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]

TENANT, ENDPOINT = "acme", "main"
RUNS, FRAMES = 100, 200
CLOCK = SystemClock()


def frame(**body: Any) -> RawFrame:
    data = json.dumps(body)
    return RawFrame(raw=f"data: {data}\n\n".encode(), data=data)


def frames_of(run_id: str) -> list[RawFrame]:
    said = [frame(event="message.delta", run_id=run_id, delta=f"{number} ") for number in range(FRAMES - 1)]
    return [*said, frame(event="run.completed", run_id=run_id, output=f"the output of {run_id}")]


class Streams:
    """A provider whose every run speaks at full speed and ends; it counts subscriptions."""

    def __init__(self) -> None:
        self.target = Target(endpoint_id=ENDPOINT, origin="http://hermes.test")
        self.subscriptions: dict[str, int] = {}

    async def send(self, out: Outgoing) -> Exchange:
        raise AssertionError(f"observing sends nothing: {out.path}")

    async def read(self, out: Outgoing) -> Exchange:
        await anyio.lowlevel.checkpoint()
        run_id = out.path.split("/")[3]
        body = {"object": "hermes.run", "run_id": run_id, "status": "running", "output": None}
        return Exchange(sent=True, status=200, content_type="application/json", body=json.dumps(body).encode())

    async def stream(self, out: Outgoing, idle_s: float = 75) -> AsyncIterator[StreamItem]:
        run_id = out.path.split("/")[3]
        self.subscriptions[run_id] = self.subscriptions.get(run_id, 0) + 1
        yield StreamOpened()
        for number, item in enumerate(frames_of(run_id)):
            if number % 16 == 0:
                await anyio.lowlevel.checkpoint()
            yield item
        yield StreamEnd(reason="closed")


async def bind(store: JournalStore, lease: HostLease, provider: Streams, run_id: str) -> None:
    at = CLOCK.now()
    bound = RunBound(
        at=at,
        tenant=TENANT,
        endpoint_id=ENDPOINT,
        run_id=run_id,
        action_id=f"act_{run_id}",
        attempt_id=f"att_{run_id}",
        principal="alice",
        target=provider.target,
        owner=lease.fence,
        started_at=at,
    )
    change = Change(history=run_history(TENANT, ENDPOINT, run_token(run_id)), expected=0, events=(bound,))
    await store.append(Command(changes=(change,)))


@pytest.mark.parametrize("batch_frames", [256, 7])
async def test_a_hundred_streams_are_stored_whole_and_in_order_with_one_event_for_each_batch(
    journal: Journal, database: str, batch_frames: int
) -> None:
    keys = PostgresKeys(database)
    vault = Vault(MASTER, keys, CLOCK.entropy)
    store = JournalStore(journal, vault, CLOCK.new_id)
    lease = HostLease(store, CLOCK, "replica-1", "proc_1", "0", LeaseTimes(ttl_ms=300_000))
    await lease.take()
    provider, limits = Streams(), ObserverLimits(batch_frames=batch_frames, batch_ms=20)
    observer = Observer(store, vault, CLOCK, lease, {ENDPOINT: provider}, Notices(), limits)
    runs = [f"run_{number}" for number in range(RUNS if batch_frames > FRAMES else RUNS // 10)]
    for run_id in runs:
        await bind(store, lease, provider, run_id)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            observer.attach(tasks)
            for run_id in runs:
                observer.observe(TENANT, ENDPOINT, run_id)
            for run_id in runs:
                while not (await observer.view(TENANT, ENDPOINT, run_id))[1].closed_reason:
                    await CLOCK.sleep(0.05)
            tasks.cancel_scope.cancel()

    for run_id in runs:
        token = run_token(run_id)
        history = await store.load(stream_history(TENANT, ENDPOINT, token))
        seen, batches = stream.replay(history), [item.event for item in history if isinstance(item.event, FramesStored)]
        opened = [await vault.open(batch.frames) for batch in batches]
        texts = [text for content in opened for _, text in msgspec.json.decode(content, type=list[tuple[int, str]])]
        assert [text.encode() for text in texts] == [item.raw for item in frames_of(run_id)]
        assert [batch.first for batch in batches] == [
            1 + sum(before.count for before in batches[:place]) for place in range(len(batches))
        ]
        assert max(batch.count for batch in batches) <= batch_frames
        assert len(batches) < FRAMES / 2
        assert (seen.last_seq, seen.terminal_seq, seen.gaps, seen.open) == (FRAMES, FRAMES, (), False)
        run = binding.replay(await store.load(run_history(TENANT, ENDPOINT, token)))
        assert run.ended is not None
        assert run.ended.state == "completed"
    assert provider.subscriptions == dict.fromkeys(runs, 1)
    await keys.close()
