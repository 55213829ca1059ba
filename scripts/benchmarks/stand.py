"""The parts of a host that benchmarks measure, wired as the host wires them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from anyio.from_thread import BlockingPortal, start_blocking_portal

from adapters.clock import SystemClock
from adapters.driver import Driver
from adapters.hermes import BearerKey, HermesEndpoint
from adapters.http_ports import HttpPorts
from adapters.intake import EndpointPolicy, Gates, Intake
from adapters.journal import Journal
from adapters.lease import HostLease, LeaseTimes
from adapters.memory_journal import MemoryJournal
from adapters.migrate import migrate
from adapters.notices import Notices
from adapters.observer import Observer
from adapters.probes import Counters
from adapters.sender import Sender
from adapters.store import JournalStore
from adapters.vault import KeyTable, MemoryKeys, PostgresKeys, Vault
from adapters.view_tables import MemoryTables
from adapters.views import Views
from domain.approval import TenantPolicy
from domain.events import Target
from domain.values import Actor

ENDPOINT = "main"
NOWHERE = "http://127.0.0.1:9"
WHO = Actor(id="bench", kind="service", tenant="default", scopes=("*",))


class Host:
    """The parts of a host in a thread's event loop, on a database or, without one, on a journal in memory.

    Nothing is driven and no view follows unless somebody attaches a task group.
    """

    def __init__(
        self, portal: BlockingPortal, dsn: str | None, origin: str = NOWHERE, notices: Notices | None = None
    ) -> None:
        self.portal = portal
        self.clock = clock = SystemClock()
        self._ends: list[Callable[[], Awaitable[None]]] = []
        keys: KeyTable
        if dsn is None:
            journal: Journal | MemoryJournal = MemoryJournal(clock=clock, now=clock.now)
            keys = MemoryKeys()
        else:
            migrate(dsn)
            journal, keys = Journal(dsn, clock=clock), PostgresKeys(dsn)
            self._ends += [journal.stop, keys.close]
        portal.call(journal.start)
        vault = self.vault = Vault(clock.entropy(32), keys, clock.entropy)
        store = self.store = JournalStore(journal, vault, clock.new_id)
        lease = self.lease = HostLease(store, clock, "bench", clock.new_id("proc_"), "0", LeaseTimes(ttl_ms=300_000))
        provider = self.provider = portal.call(_endpoint, origin)
        self._ends.append(provider.close)
        providers, notices = {ENDPOINT: provider}, notices or Notices()
        observer = self.observer = Observer(store, vault, clock, lease, providers, notices)
        sender = Sender(store, vault, clock, lease, providers, notices, observer.observe, policy_of)
        driver = Driver(store, clock, lease, providers, notices, observer, sender)
        self.intake = Intake(
            store,
            vault,
            clock,
            lease,
            providers,
            {ENDPOINT: EndpointPolicy(approvals_manual=True)},
            policy_of,
            driver,
            notices,
            Gates(),
        )
        self.ports = HttpPorts(
            intake=self.intake,
            callers=Callers(),
            journal=journal,
            vault=vault,
            views=Views(MemoryTables(), store, clock),
            notices=notices,
            clock=clock,
            counts=Counters(),
            endpoints=lambda: [(ENDPOINT, ENDPOINT, origin, "")],
            at_start=dict,
        )
        portal.call(lease.take)

    def close(self) -> None:
        """End it."""
        for end in self._ends:
            self.portal.call(end)


class Callers:
    """One caller with one token."""

    def find(self, token: str) -> Actor | None:
        """Who it is."""
        return WHO if token == "bench" else None


async def _endpoint(origin: str) -> HermesEndpoint:
    return HermesEndpoint(Target(endpoint_id=ENDPOINT, origin=origin), BearerKey("bench"))


def policy_of(tenant: str) -> TenantPolicy:
    """What every tenant grants: nothing beyond the defaults."""
    return TenantPolicy(id=tenant)


@contextmanager
def host(dsn: str | None, origin: str = NOWHERE, notices: Notices | None = None) -> Iterator[Host]:
    """A host on an empty database, or on a journal in memory, whose provider is at ``origin``."""
    with start_blocking_portal() as portal:
        running = Host(portal, dsn, origin, notices)
        try:
            yield running
        finally:
            running.close()
