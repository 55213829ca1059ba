"""The operational listener: exact bodies, four gates, eight metrics, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from itertools import product

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from adapters.operational import OperationalApp
from domain.errors import NotNow
from projections.metrics import HostMetrics
from projections.readiness import Gates, RecoverySummary

pytestmark = pytest.mark.anyio
AT = datetime.fromisoformat("2026-03-01T12:30:15.5+00:00")
COUNTS = RecoverySummary(
    recovered_at=AT,
    pending_approvals=1,
    recoverable_transactions=2,
    queued_results=3,
    delegation_results=4,
    callback_deliveries=5,
)


def gates(lease: bool = True, draining: bool = False, storage: bool = True, connector: bool = True) -> Gates:
    """Gates as a probe found them."""
    return Gates(
        lease_valid=lease,
        draining=draining,
        storage_ready=storage,
        connector_ready=connector,
        durability="durable_shared",
        recovery=COUNTS,
    )


class Listener:
    """The application before a probe that remembers how often it was asked."""

    def __init__(self) -> None:
        self.found = gates()
        self.metrics = HostMetrics(lease_valid=True, storage_ready=True, connector_ready=True)
        self.probes = 0
        self.fault: Exception | None = None
        app = OperationalApp(self.probe, lambda: self.metrics, lambda prefix: prefix + "1")
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://host.test")

    async def probe(self) -> Gates:
        """A probe."""
        self.probes += 1
        if self.fault:
            raise self.fault
        return self.found


@pytest.fixture
async def listener(anyio_backend: str) -> AsyncIterator[Listener]:
    """A listener."""
    ready = Listener()
    async with ready.client:
        yield ready


@pytest.mark.proves("B017", "B027")
async def test_health_is_a_constant_that_asks_nobody(listener: Listener) -> None:
    listener.found = gates(False, True, False, False)
    for _ in range(2):
        answer = await listener.client.get("/health")
        assert answer.status_code == 200
        assert answer.json() == {
            "status": "ok", "protocol": "AIP", "version": "1.0", "service": "aip-connector-host",
        }  # fmt: skip
    assert listener.probes == 0


@pytest.mark.proves("B028", "B029", "B030", "B031", "B032")
@pytest.mark.parametrize("flags", list(product((True, False), repeat=4)))
async def test_ready_needs_all_four_gates(listener: Listener, flags: tuple[bool, bool, bool, bool]) -> None:
    lease, draining, storage, connector = flags
    listener.found = gates(*flags)
    answer = await listener.client.get("/ready")
    ready = lease and not draining and storage and connector
    assert answer.status_code == (200 if ready else 503)
    assert answer.json()["status"] == ("ready" if ready else "not_ready")
    assert listener.probes == 1


@pytest.mark.proves("B033", "B034", "B035", "B036", "B037", "B038", "B039")
async def test_the_body_of_ready_is_exact(listener: Listener) -> None:
    assert (await listener.client.get("/ready")).json() == {
        "status": "ready",
        "lease_valid": True,
        "draining": False,
        "runtime": {
            "durability": "durable_shared",
            "ready": True,
            "detail": "ok",
            "recovery": {
                "recovered_at": [2026, 60, 12, 30, 15, 500_000_000, 0, 0, 0],
                "pending_approvals": 1,
                "recoverable_transactions": 2,
                "queued_results": 3,
                "delegation_results": 4,
                "callback_deliveries": 5,
            },
        },
        "connector": {"ready": True, "detail": "ok"},
    }


@pytest.mark.proves("B108")
async def test_details_are_cut_at_their_bound(listener: Listener) -> None:
    listener.found = msgspec.structs.replace(gates(), connector_detail="x" * 5000)
    assert len((await listener.client.get("/ready")).json()["connector"]["detail"]) == 1024


NAMES = [
    "ready", "storage_ready", "in_flight", "requests_total", "rejected_total", "heartbeat_failures_total",
    "lease_recovery_attempts_total", "lease_recoveries_total",
]  # fmt: skip


@pytest.mark.proves("B019", "B026", "B052", "B061", "B062", "B064")
async def test_a_scrape_has_exactly_eight_unlabelled_samples_and_asks_nobody(listener: Listener) -> None:
    listener.metrics = HostMetrics(
        lease_valid=True,
        draining=True,
        storage_ready=True,
        in_flight=2,
        requests_total=9,
        rejected_total=3,
        heartbeat_failures_total=1,
        lease_recovery_attempts_total=5,
        lease_recoveries_total=4,
    )
    answer = await listener.client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    assert [line.split()[2] for line in lines[::2]] == [f"aip_connector_host_{name}" for name in NAMES]
    assert all(line.startswith("# TYPE ") for line in lines[::2])
    assert answer.text.endswith("\n")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    assert [(s.name.removeprefix("aip_connector_host_"), s.value, s.labels) for s in samples] == [
        (name, value, {}) for name, value in zip(NAMES, (0, 1, 2, 9, 3, 1, 5, 4), strict=True)
    ]
    kinds = [line.split()[3] for line in lines[::2]]
    assert kinds == ["gauge"] * 3 + ["counter"] * 5
    assert listener.probes == 0


@pytest.mark.proves("B053", "B054")
@pytest.mark.parametrize("flags", list(product((True, False), repeat=4)))
async def test_the_ready_metric_combines_the_cached_flags(
    listener: Listener, flags: tuple[bool, bool, bool, bool]
) -> None:
    lease, draining, storage, connector = flags
    listener.metrics = HostMetrics(
        lease_valid=lease, draining=draining, storage_ready=storage, connector_ready=connector
    )
    text = (await listener.client.get("/metrics")).text
    assert f"aip_connector_host_ready {int(lease and not draining and storage and connector)}\n" in text
    assert f"aip_connector_host_storage_ready {int(storage)}\n" in text


@pytest.mark.parametrize("path", ["/", "/aip/v1/manifest", "/views/runs", "/openapi.json", "/healthz"])
async def test_nothing_else_is_served_here(listener: Listener, path: str) -> None:
    answer = await listener.client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request.route_not_found")


async def test_other_methods_are_refused(listener: Listener) -> None:
    answer = await listener.client.post("/ready")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert answer.json()["error"]["code"] == "request.method_not_allowed"


@pytest.mark.parametrize(
    ("fault", "code"), [(NotNow("storage.unavailable"), "storage.unavailable"), (ValueError("x"), "internal.fault")]
)
async def test_a_probe_that_fails_is_told_in_the_one_shape(listener: Listener, fault: Exception, code: str) -> None:
    listener.fault = fault
    answer = await listener.client.get("/ready")
    assert answer.status_code in (500, 503)
    assert answer.json()["error"]["code"] == code
