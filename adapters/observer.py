"""Observing runs: the one subscription, the status polls, and what they add to the histories. Reads only.

Per run: load, ask ``next_run_step``, store the intent or perform the read, store what was seen. Frames are stored in
batches, one event per batch, together with the end that a terminal frame proves. Nothing here depends on a caller.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from datetime import datetime
from typing import cast

import anyio
import msgspec
from anyio.abc import TaskGroup

from adapters.notices import Bell, Notices
from domain import binding, stream
from domain.binding import Run
from domain.errors import IntegrityFault
from domain.events import Event, OwnerChanged, SubscriptionOpened
from domain.history import Change, Command, run_history, run_token, stream_history
from domain.ports import AppendUnknown, Clock, Conflict, Fenced, Lease, NeverStored, NotStored, Provider, Store, Vault
from domain.provider import TERMINAL_EVENTS, Exchange, RawFrame, StreamEnd, StreamItem, StreamOpened, read_status
from domain.reconciler import Finished, Hold, PollRun, RecordRun, RunFacts, Subscribe, WaitUntil, next_run_step
from domain.requests import Trusted, events_request, status_request
from domain.stream import Received, RunStream
from domain.values import Plain, PrivateScope

log = logging.getLogger(__name__)

ISSUER = "hermes-reconciler"
STORE_PAUSE_S = 0.5
LOOK_AGAIN_S = 30.0
AFTER_END_S = 5.0
LAST_STORE_S = 10.0
GATHERED_BYTES = 1024 * 1024

Made = tuple[tuple[Event, ...], tuple[Event, ...]]


class ObserverLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How far storing may lag behind receiving, and how long a stream may be silent.

    A stream is not read on while ``buffered_frames`` of it wait. ``storing`` streams are stored at once: while these
    are many, the frames of the others gather into fewer and larger events.
    """

    batch_ms: int = 50
    batch_frames: int = 256
    idle_s: float = 75.0
    buffered_frames: int = 64
    storing: int = 16


class Inbox:
    """Frames of one stream between receiving and storing. Leaving its block says that no more will come."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: list[Received] = []
        self._bytes = 0
        self._closed = False
        self._filled, self._full, self._room = anyio.Event(), anyio.Event(), anyio.Event()

    def __enter__(self) -> None:
        """Frames may come."""

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._filled.set()
        self._full.set()

    async def put(self, frame: Received) -> None:
        """Add a frame as soon as there is room."""
        while self._is_full():
            self._room = anyio.Event()
            await self._room.wait()
        self._frames.append(frame)
        self._bytes += len(frame.frame.raw)
        self._filled.set()
        if self._is_full():
            self._full.set()

    def _is_full(self) -> bool:
        """One event keeps what waits, so its bytes are bounded too; one frame always fits."""
        return len(self._frames) >= self._limit or self._bytes >= GATHERED_BYTES

    async def gather(self, seconds: float) -> bool:
        """Wait for a frame, then so long for more of them, or until none fits in; False if no more will come."""
        await self._filled.wait()
        if not self._full.is_set():
            with anyio.move_on_after(seconds):
                await self._full.wait()
        return bool(self._frames)

    def take(self) -> list[Received]:
        """All frames that wait."""
        taken, self._frames, self._bytes = self._frames, [], 0
        if not self._closed:
            self._filled, self._full = anyio.Event(), anyio.Event()
        self._room.set()
        return taken


class Watched:
    """One run as this process observes it."""

    def __init__(self, tenant: str, endpoint_id: str, run_id: str) -> None:
        token = run_token(run_id)
        self.endpoint_id = endpoint_id
        self.run_id = run_id
        self.run_history = run_history(tenant, endpoint_id, token)
        self.stream_history = stream_history(tenant, endpoint_id, token)
        self.run = Run()
        self.stream = RunStream()
        self.live: anyio.CancelScope | None = None
        self.lock = anyio.Lock()
        self.polled_at: datetime | None = None
        self.polls = 0
        self.spread = 0.0
        self.loaded_at = float("-inf")
        self.bell = Bell()

    def is_behind(self) -> bool:
        """True if more was stored than is known here."""
        known = ((self.run_history, self.run.version), (self.stream_history, self.stream.version))
        return any(self.bell.heard(history) > version for history, version in known)

    @property
    def scope(self) -> PrivateScope:
        """Whose key seals what this run says: the tenant and principal of the Action that started it."""
        return PrivateScope(tenant=self.run.tie.tenant, principal=self.run.tie.principal)


class Observer:
    """Observes every run that this host owns; ``run_forever`` holds the tasks."""

    def __init__(
        self,
        store: Store,
        vault: Vault,
        clock: Clock,
        lease: Lease,
        endpoints: Mapping[str, Provider],
        notices: Notices,
        limits: ObserverLimits | None = None,
    ) -> None:
        self._store, self._vault, self._clock, self._lease = store, vault, clock, lease
        self._endpoints, self._notices = endpoints, notices
        self._limits = limits or ObserverLimits()
        self._watched: dict[str, Watched] = {}
        self._storing = anyio.Semaphore(self._limits.storing)
        self._tasks: TaskGroup | None = None

    @property
    def following(self) -> int:
        """How many event streams this process reads now."""
        return sum(1 for watched in self._watched.values() if watched.live is not None)

    def attach(self, tasks: TaskGroup) -> None:
        """Use this task group for all observation."""
        self._tasks = tasks

    def observe(self, tenant: str, endpoint_id: str, run_id: str) -> None:
        """Observe a run from now on, unless this process does so already."""
        watched = Watched(tenant, endpoint_id, run_id)
        if self._tasks is not None and endpoint_id in self._endpoints and watched.run_history not in self._watched:
            self._watched[watched.run_history] = watched
            self._tasks.start_soon(self._observe, watched)

    async def view(self, tenant: str, endpoint_id: str, run_id: str, *, fresh: bool = True) -> tuple[Run, RunStream]:
        """The run and its stream as stored now; unless ``fresh``, as the observation here knows them, if there is one.

        A follower that is woken by each batch of frames must not read the whole history for each of them.
        """
        watched = Watched(tenant, endpoint_id, run_id)
        observed = self._watched.get(watched.run_history)
        if not fresh and observed is not None and observed.run.bound is not None and not observed.is_behind():
            return observed.run, observed.stream
        await self._load(watched)
        return watched.run, watched.stream

    async def record_status(self, tenant: str, endpoint_id: str, run_id: str, exchange: Exchange) -> None:
        """Keep one status read of a run that somebody asked for."""
        watched = Watched(tenant, endpoint_id, run_id)
        await self._load(watched)
        await self._keep_status(watched, exchange)

    async def _load(self, watched: Watched) -> None:
        found = await self._store.load_many([watched.run_history, watched.stream_history])
        watched.run = binding.replay(found[watched.run_history])
        watched.stream = stream.replay(found[watched.stream_history])
        watched.loaded_at = self._clock.monotonic()

    # ---- one run -----------------------------------------------------------------------------------------------------

    async def _observe(self, watched: Watched) -> None:
        try:
            with self._notices.watch(watched.run_history, watched.stream_history) as watched.bell:
                await self._load_until(watched)
                while await self._turn(watched):
                    pass
        except IntegrityFault as fault:
            log.error("run.stopped", extra={"code": fault.code, "run": watched.run_history})
        except Fenced:
            log.warning("run.fenced", extra={"run": watched.run_history})
        except Exception:  # this run alone is not observed until the next round of takeover takes it up again
            log.exception("run.failed", extra={"run": watched.run_history})
        finally:
            if watched.live is not None:
                watched.live.cancel()
            self._watched.pop(watched.run_history, None)

    async def _load_until(self, watched: Watched) -> None:
        while True:
            try:
                return await self._load(watched)
            except IntegrityFault:
                raise
            except Exception:
                log.warning("run.load_failed", extra={"run": watched.run_history}, exc_info=True)
                await self._clock.sleep(STORE_PAUSE_S)

    async def _turn(self, watched: Watched) -> bool:
        """One turn; False when nothing is left to be observed here."""
        now = self._clock.now()
        step = next_run_step(
            RunFacts(
                run=watched.run,
                stream=watched.stream,
                owner=self._lease.fence,
                live=watched.live is not None,
                polled_at=watched.polled_at,
                polls=watched.polls,
                spread=watched.spread,
            ),
            at=now,
        )
        match step:
            case Finished():
                return False
            case RecordRun():
                await self._keep(watched, lambda run, seen: self._again(watched, run, seen, now), decision=True)
            case Subscribe():
                await self._subscribe(watched)
            case PollRun():
                await self._poll(watched)
            case WaitUntil():
                await self._pause(watched, (step.at - now).total_seconds())
            case Hold(why="stream_open"):
                await self._close_ghost(watched)
            case Hold():
                return False
        return True

    def _again(self, watched: Watched, run: Run, seen: RunStream, at: datetime) -> Made:
        """The events of a recording step, decided anew on what is stored now."""
        facts = RunFacts(run=run, stream=seen, owner=self._lease.fence, live=watched.live is not None)
        step = next_run_step(facts, at=at)
        return (step.run, step.stream) if isinstance(step, RecordRun) else ((), ())

    async def _pause(self, watched: Watched, seconds: float) -> None:
        """Sleep until the time or until news; read the histories if another writer added to them, or after long."""
        await watched.bell.wait(min(seconds, LOOK_AGAIN_S))
        watched.bell.clear()
        if watched.is_behind() or self._clock.monotonic() - watched.loaded_at >= LOOK_AGAIN_S:
            async with watched.lock:
                await self._load_until(watched)

    async def _close_ghost(self, watched: Watched) -> None:
        """The end is known by status: a stream that gives nothing for a grace time after that will not give an end."""
        give_up = self._clock.monotonic() + AFTER_END_S
        before = watched.stream.last_seq
        while watched.live is not None and watched.stream.last_seq == before:
            left = give_up - self._clock.monotonic()
            if left <= 0:
                watched.live.cancel()
                return await self._clock.sleep(0)
            await self._pause(watched, left)
        return None

    # ---- storing -----------------------------------------------------------------------------------------------------

    async def _keep(self, watched: Watched, make: Callable[[Run, RunStream], Made], *, decision: bool = False) -> None:
        """Store what ``make`` derives from the histories as they stand; decided anew after each conflict or doubt."""
        async with watched.lock:
            await self._keep_locked(watched, make, decision=decision)

    async def _keep_locked(self, watched: Watched, make: Callable[[Run, RunStream], Made], *, decision: bool) -> None:
        while True:
            run_events, stream_events = make(watched.run, watched.stream)
            if not run_events and not stream_events:
                return
            changes = [
                Change(history=history, expected=version, events=events, scope=watched.scope)
                for history, version, events in (
                    (watched.run_history, watched.run.version, run_events),
                    (watched.stream_history, watched.stream.version, stream_events),
                )
                if events
            ]
            fence = self._lease.fence if decision else None
            try:
                stored = await self._store.append(Command(changes=tuple(changes), fence=fence, cause="observer"))
            except Conflict:
                await self._load_until(watched)
                continue
            except NeverStored:
                raise
            except (NotStored, AppendUnknown):
                await self._clock.sleep(STORE_PAUSE_S)
                await self._load_until(watched)
                continue
            for recorded in stored:
                if recorded.history == watched.run_history:
                    watched.run = binding.evolve(watched.run, recorded.event, recorded.version)
                else:
                    watched.stream = stream.evolve(watched.stream, recorded.event, recorded.version)
            self._notices.tell(*stored)
            return

    async def adopt(self, tenant: str, endpoint_id: str, run_id: str) -> bool:
        """Become this run's owner if nobody else did; True if it is ours now."""
        watched = Watched(tenant, endpoint_id, run_id)
        await self._load(watched)
        previous = watched.run.owner
        mine = self._lease.fence

        def take(run: Run, _: RunStream) -> Made:
            if run.owner is None or run.owner != previous or run.owner == mine:
                return (), ()
            return (OwnerChanged(at=self._clock.now(), owner=mine, previous=run.owner),), ()

        await self._keep(watched, take, decision=True)
        return watched.run.owner == mine

    # ---- status ------------------------------------------------------------------------------------------------------

    def trusted(self, run: Run) -> Trusted:
        """The trusted facts of our own reads of this run."""
        return Trusted(principal=run.tie.principal, tenant=run.tie.tenant, issuer=ISSUER)

    async def _poll(self, watched: Watched) -> None:
        provider = self._endpoints[watched.endpoint_id]
        exchange = await provider.read(status_request(watched.run_id, self.trusted(watched.run)))
        watched.polled_at, watched.spread = self._clock.now(), self._clock.jitter()
        watched.polls = 0 if await self._keep_status(watched, exchange) else watched.polls + 1

    async def _keep_status(self, watched: Watched, exchange: Exchange) -> bool:
        """Store a status read if it says something new; True if it did."""
        reading = read_status(exchange, watched.run_id)
        digest, at = self._vault.digest(exchange.body), self._clock.now()
        before = watched.run.version
        await self._keep(watched, lambda run, _: (binding.observe_status(run, reading, exchange, digest, at=at), ()))
        return watched.run.version != before

    # ---- the stream --------------------------------------------------------------------------------------------------

    async def _subscribe(self, watched: Watched) -> None:
        """Store the intent, then read the stream in a task of its own. If the intent is not stored, nothing opens."""
        number = watched.stream.subscriptions + 1

        def intend(run: Run, seen: RunStream) -> Made:
            at = self._clock.now()
            step = next_run_step(RunFacts(run=run, stream=seen, owner=self._lease.fence), at=at)
            return ((), stream.intend(seen, self._lease.fence, at=at)) if isinstance(step, Subscribe) else ((), ())

        await self._keep(watched, intend, decision=True)
        if watched.stream.subscriptions != number or watched.stream.owner != self._lease.fence or not self._tasks:
            return
        watched.live = anyio.CancelScope()
        self._tasks.start_soon(self._follow, watched, watched.live, number)

    async def _follow(self, watched: Watched, scope: anyio.CancelScope, number: int) -> None:
        reason = "ended_without_frame"
        inbox = Inbox(min(self._limits.buffered_frames, self._limits.batch_frames))
        try:
            with scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._flush, watched, inbox)
                    with inbox:
                        reason = await self._receive(watched, inbox, number)
        except Exception:
            reason = "reader_failed"
            log.exception("stream.reader_failed", extra={"run": watched.run_history})
        try:
            await self._keep(watched, lambda _, seen: ((), self._closing(seen, number, reason)))
        finally:
            watched.live = None  # not before its end is stored: until then nobody else may call it lost
            watched.bell.wake()

    def _closing(self, seen: RunStream, number: int, reason: str) -> tuple[Event, ...]:
        """The end of this subscription; a later one is another reader's, and goes on."""
        mine = seen.open and seen.subscriptions == number
        return stream.close(seen, reason, at=self._clock.now()) if mine else ()

    async def _receive(self, watched: Watched, inbox: Inbox, number: int) -> str:
        """Read the stream to its end; returns why it ended."""
        provider = self._endpoints[watched.endpoint_id]
        place = 0
        resume = watched.stream.last_id if number > 1 else None
        out = events_request(watched.run_id, resume, self.trusted(watched.run))
        reason = "cut"
        # A stream is an async generator, which has to be closed by whoever stops reading it early.
        items = cast("AsyncGenerator[StreamItem, None]", provider.stream(out, self._limits.idle_s))
        async with aclosing(items) as opened:
            async for item in opened:
                match item:
                    case StreamOpened():
                        await self._keep(watched, lambda *_: ((), self._opened(number)))
                    case RawFrame():
                        if watched.stream.crowded:
                            return "crowded"
                        place += 1
                        digest = ""
                        if b"approval.request" in item.raw:  # the same text asked twice is two requests to be reviewed
                            digest = self._vault.digest(b"%d.%d " % (number, place) + item.raw)
                        await inbox.put(Received(at=self._clock.now(), frame=item, digest=digest))
                    case StreamEnd():
                        status = item.exchange.status if item.exchange else None
                        reason = item.reason if status is None else f"{item.reason}_{status}"
                    case _:
                        pass
        return reason

    async def _flush(self, watched: Watched, inbox: Inbox) -> None:
        """Store what was received, at most ``batch_ms`` or ``batch_frames`` behind while few streams are stored."""
        batch: list[Received] = []
        try:
            while await inbox.gather(self._limits.batch_ms / 1000):
                async with self._storing:
                    batch = inbox.take()
                    await self._keep_frames(watched, batch)
                    batch = []
        except anyio.get_cancelled_exc_class():  # what was received is worth storing
            with anyio.move_on_after(LAST_STORE_S, shield=True):
                for rest in (batch, inbox.take()):
                    if rest:
                        await self._keep_frames(watched, rest)
            raise

    def _opened(self, number: int) -> tuple[Event, ...]:
        return (SubscriptionOpened(at=self._clock.now(), number=number),)

    async def _keep_frames(self, watched: Watched, batch: list[Received]) -> None:
        digest = self._vault.digest(b"".join(received.frame.raw for received in batch))

        def make(run: Run, seen: RunStream) -> Made:
            if (seen.last_digest, seen.last_frame_at) == (digest, batch[-1].at):
                return (), ()  # an append in doubt was stored after all
            bridged = stream.bridge(seen, stream.view_frame(batch[0].frame).provider_seq, at=batch[0].at)
            frames = stream.store_frames(seen, batch, digest)
            if frames is None:
                return (), ()
            ended: tuple[Event, ...] = ()
            ends = any(kind in TERMINAL_EVENTS for kind, _ in frames.kinds)
            if ends and (end := stream.terminal_claim(batch)) is not None:
                state, body, marks = end
                ended = binding.observe_end_frame(
                    run,
                    state,
                    Plain(content=json.dumps(body, ensure_ascii=False).encode("utf-8", "backslashreplace")),
                    f"stream:{frames.terminal_seq}",
                    isinstance(body.get("output"), str),
                    marks,
                    at=batch[-1].at,
                )
            return ended, (*bridged, frames, *stream.missing_frames(seen, batch))

        await self._keep(watched, make)
