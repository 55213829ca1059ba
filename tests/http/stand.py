"""A whole host in memory behind its public listener, with everything real but the provider, which is scripted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import anyio
import anyio.lowlevel
import httpx
from anyio.abc import TaskGroup

from adapters.clock import SystemClock
from adapters.driver import Driver, DriverLimits
from adapters.http import PublicApp
from adapters.http_ports import HttpPorts
from adapters.intake import EndpointPolicy, Gates, Intake
from adapters.lease import HostLease, LeaseTimes
from adapters.memory_journal import MemoryJournal
from adapters.notices import Notices
from adapters.observer import Observer, ObserverLimits
from adapters.probes import Counters
from adapters.sender import Sender
from adapters.store import JournalStore
from adapters.vault import MemoryKeys, Vault
from adapters.view_tables import MemoryTables
from adapters.views import Views
from domain.approval import TenantPolicy
from domain.events import Target
from domain.history import Recorded
from domain.provider import Exchange, Failure, Outgoing, RawFrame, StreamEnd, StreamItem, StreamOpened
from domain.values import Actor

ENDPOINT = "main"
START = f"cap:hermes_agent:{ENDPOINT}:run_start"
STATUS = f"cap:hermes_agent:{ENDPOINT}:run_status"
EVENTS = f"cap:hermes_agent:{ENDPOINT}:run_events"
APPROVAL = f"cap:hermes_agent:{ENDPOINT}:run_approval"
STOP = f"cap:hermes_agent:{ENDPOINT}:run_stop"
MASTER = bytes(range(32))
CANARY = "canary-7f3a"

OWN = ("action:read", "action:write", "approval:read", "events:read", "audit:read")
PEOPLE: dict[str, Actor] = {
    "ada": Actor(id="ada", tenant="acme", scopes=(*OWN, "data:sensitive:read"), roles=("caller",)),
    "bea": Actor(id="bea", tenant="acme", scopes=OWN),
    "boss": Actor(id="boss", tenant="acme", scopes=("*",), roles=("approver",)),
    "clerk": Actor(id="clerk", tenant="acme", scopes=("action:read:any", "approval:write"), roles=("approver",)),
    "weak": Actor(id="weak", tenant="acme", scopes=()),
    "zoe": Actor(id="zoe", tenant="other", scopes=("*",), roles=("approver",)),
}


def told(status: int, body: Any, *, retry_after: str = "") -> Exchange:
    """A complete answer."""
    return Exchange(
        sent=True,
        status=status,
        content_type="application/json",
        body=json.dumps(body).encode(),
        retry_after=retry_after,
    )


LOST = Exchange(sent=True, failure=Failure.READ_ERROR)


def sse(body: dict[str, Any]) -> RawFrame:
    """A frame as the provider writes it."""
    data = json.dumps(body)
    return RawFrame(raw=f"data: {data}\n\n".encode(), data=data)


def deltas(run_id: str, *texts: str, end: str = "run.completed") -> list[RawFrame]:
    """Frames of a run that says these words and ends."""
    frames = [sse({"event": "message.delta", "run_id": run_id, "delta": text}) for text in texts]
    return frames + ([sse({"event": end, "run_id": run_id, "output": "".join(texts)})] if end else [])


class ScriptedProvider:
    """One endpoint: it answers at once, remembers what it was sent, and tells each run's frames as they are given."""

    def __init__(self) -> None:
        self.target = Target(endpoint_id=ENDPOINT, origin="http://hermes.test")
        self.sent: list[Outgoing] = []
        self.answers: list[Exchange] = []
        self.frames: Callable[[str], list[RawFrame]] = lambda run_id: deltas(run_id, "Hello ", "world")
        self.status: dict[str, Any] = {"status": "running"}
        self.hold = anyio.Event()
        self.hold.set()
        self._numbers = count(1)

    async def send(self, out: Outgoing) -> Exchange:
        """One mutation."""
        self.sent.append(out)
        await self.hold.wait()
        if self.answers:
            return self.answers.pop(0)
        parts = out.path.split("/")
        if out.path == "/v1/runs":
            return told(202, {"run_id": f"run_{next(self._numbers)}", "status": "started"})
        if out.path.endswith("/stop"):
            return told(200, {"run_id": parts[3], "status": "stopping"})
        choice = json.loads(out.body or b"{}").get("choice", "once")
        return told(200, {"run_id": parts[3], "choice": choice, "resolved": 1})

    async def read(self, out: Outgoing) -> Exchange:
        """One status read."""
        await anyio.lowlevel.checkpoint()
        run_id = out.path.split("/")[3]
        return told(200, {"object": "hermes.run", "run_id": run_id} | self.status)

    async def stream(self, out: Outgoing, idle_s: float = 75) -> AsyncIterator[StreamItem]:
        """The run's frames, then the end of the connection."""
        yield StreamOpened()
        for frame in self.frames(out.path.split("/")[3]):
            await anyio.lowlevel.checkpoint()
            yield frame
        yield StreamEnd(reason="closed")


class Callers:
    """Tokens are the names of people."""

    def __init__(self) -> None:
        self.people = dict(PEOPLE)

    def find(self, token: str) -> Actor | None:
        """Who a token names."""
        return self.people.get(token)


class Stand:
    """The host and its client."""

    def __init__(self, tasks: TaskGroup, view_wait_s: float) -> None:
        drawn = count()
        self.clock = SystemClock()
        self.keys, self.notices, self.gates, self.counters = MemoryKeys(), Notices(), Gates(), Counters()
        self.journal = MemoryJournal(clock=self.clock, now=self.clock.now)
        self.vault = Vault(MASTER, self.keys, lambda size: hashlib.shake_128(b"%d" % next(drawn)).digest(size))
        self.store = JournalStore(self.journal, self.vault, self.clock.new_id)
        self.provider = ScriptedProvider()
        self.policy = TenantPolicy(id="acme")
        self.callers = Callers()
        links = {ENDPOINT: self.provider}
        times = LeaseTimes(ttl_ms=300_000, heartbeat_ms=100_000, margin_ms=1_000)
        self.lease = HostLease(self.store, self.clock, "replica-1", "proc_1", "test", times)
        observer = Observer(
            self.store, self.vault, self.clock, self.lease, links, self.notices, ObserverLimits(batch_ms=5)
        )
        sender = Sender(
            self.store,
            self.vault,
            self.clock,
            self.lease,
            links,
            self.notices,
            observer.observe,
            lambda tenant: self.policy,
        )
        self.driver = Driver(
            self.store, self.clock, self.lease, links, self.notices, observer, sender, DriverLimits(max_in_flight=4)
        )
        self.views = Views(MemoryTables(), self.store, self.clock, wait_beyond=self.journal.wait_beyond)
        self.intake = Intake(
            self.store,
            self.vault,
            self.clock,
            self.lease,
            links,
            {ENDPOINT: EndpointPolicy()},
            lambda tenant: self.policy,
            self.driver,
            self.notices,
            self.gates,
        )
        self.driver.attach(tasks)
        observer.attach(tasks)
        self.ports = HttpPorts(
            intake=self.intake,
            callers=self.callers,
            journal=self.journal,
            vault=self.vault,
            views=self.views,
            notices=self.notices,
            clock=self.clock,
            counts=self.counters,
            view_wait_s=view_wait_s,
            endpoints=lambda: [
                (ENDPOINT, "Main", "http://hermes.test", ""),
                ("theirs", "Theirs", "http://x.test", "other"),
            ],
        )
        self.app = PublicApp(self.ports)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=True), base_url="http://host.test"
        )
        self._keys = count(1)

    async def call(self, method: str, path: str, who: str = "ada", **more: Any) -> httpx.Response:
        """One request as somebody."""
        headers = more.pop("headers", {}) | ({"Authorization": f"Bearer {who}"} if who else {})
        return await self.client.request(method, path, headers=headers, **more)

    async def get(self, path: str, who: str = "ada", **params: Any) -> httpx.Response:
        """A read."""
        return await self.call("GET", path, who, params=params or None)

    async def submit(self, capability: str = START, who: str = "ada", **members: Any) -> httpx.Response:
        """A submission with a fresh key unless one is given."""
        body = {"capability_id": capability, "input": {"input": f"say {CANARY}"}}
        if capability in (START, APPROVAL, STOP):
            body["idempotency_key"] = f"key-{next(self._keys)}"
        return await self.call("POST", "/aip/v1/actions", who, json=body | members)

    async def started(self, who: str = "ada", **members: Any) -> tuple[str, str]:
        """(Action id, run id) of a start that was taken, its frames stored and its end known."""
        answer = (await self.submit(START, who, **members)).json()["action_result"]
        run_id = answer["output"]["run_id"]
        await self.until(lambda: self.ended(run_id))
        return answer["action_id"], run_id

    async def ended(self, run_id: str) -> bool:
        """Whether the view knows the run's end and its whole stream."""
        await self.views.catch_up()
        found = await self.get("/views/runs", "boss", run_id=run_id)
        if not found.json()["runs"]:
            found = await self.get("/views/runs", "zoe", run_id=run_id)
        return bool(found.json()["runs"]) and found.json()["runs"][0]["state"] not in ("running", "stopping")

    async def until(self, met: Callable[[], Any], seconds: float = 10) -> None:
        """Look until it is so."""
        with anyio.fail_after(seconds):
            while not await met():  # noqa: ASYNC110 - what is awaited is an answer over HTTP
                await anyio.sleep(0.005)

    async def log(self) -> list[Recorded]:
        """Everything stored."""
        return [item for item in await self.store.read_log(0, 100_000) if isinstance(item, Recorded)]


@asynccontextmanager
async def stand(view_wait_s: float = 10.0) -> AsyncIterator[Stand]:
    """A host that has its sequence; its views are folded when a test asks for it."""
    async with anyio.create_task_group() as tasks:
        host = Stand(tasks, view_wait_s)
        await host.lease.take()
        await host.views.prepare()
        tasks.start_soon(host.views.run)
        try:
            async with host.client:
                yield host
        finally:
            tasks.cancel_scope.cancel()
