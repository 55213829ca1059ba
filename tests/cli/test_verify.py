"""The verification: what passes, what is told as not proven, and that wrong discovery and silent agents fail it."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from adapters.client import Api
from adapters.practice_hermes import PracticeHermes, PracticeOptions
from adapters.verify import CONNECTOR, Permits, artifact, verify_host
from domain.contracts import manifest
from tests.host_process import HostProcess
from tests.restart_door import RestartDoor

SHORT = PracticeOptions(status_retention=4.0, sweep_every=0.3)
RUNS = ("--start-runs", "--start-prompt", "TEXT ready and done")
GUARDED = ("--approval-prompt", "ASK rm -rf /srv/verify\nTEXT done")


def results(report: dict[str, Any]) -> list[str]:
    return [check["result"] for check in report["endpoints"][0]["checks"]]


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.proves("A161", "A162", "A163", "A164", "A165", "A166", "A167", "A168", "A169")
def test_all_eight_checks_pass_with_every_permit(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    with (
        PracticeHermes(options=SHORT) as hermes,
        RestartDoor(hermes.restart) as door,
        HostProcess(tmp_path, hermes.base_url, hermes.key) as host,
    ):
        words = ("verify", *RUNS, *GUARDED, "--retention", "--restart-command", door.command, "--record", str(record))
        ran = host.command(*words, wait_s=110)
        assert (ran.code, ran.out.splitlines()[-1]) == (0, "All checks passed."), ran.out + ran.err
        assert hermes.ledger().tool_effects == 0, "the guarded commands were denied or stopped"
        kept = record.read_text()
        for private in (hermes.key, "ready and done", "rm -rf"):
            assert private not in kept
    report = json.loads(kept)
    endpoint = report["endpoints"][0]
    assert (results(report), endpoint["not_proven"]) == (["passed"] * 8, [])
    assert report["source_revision"] == {"release": "0.1.0", "build": artifact()["sha256"][:16]}
    assert report["artifacts"] == {"host": artifact(), "connector": artifact(CONNECTOR)}
    assert (endpoint["endpoint_id"], endpoint["origin"]) == ("practice", hermes.base_url)
    assert (endpoint["hermes_revision"], "tenant_binding" in endpoint) == ("0.19.0", True)
    assert len(endpoint["credential_revision"]) == len(endpoint["configuration_revision"]) == 16
    for part in (report, *endpoint["checks"]):
        assert part["began_at"] <= part["ended_at"]
        assert part["began_at"].endswith("Z")
    assert all(item["seen"] for check in endpoint["checks"] for item in check["observations"])


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.proves("A167")
def test_where_any_number_of_readers_is_served_a_restart_cuts_the_stream(tmp_path: Path) -> None:
    with (
        PracticeHermes(flavour="0.22") as hermes,
        RestartDoor(hermes.restart) as door,
        HostProcess(tmp_path, hermes.base_url, hermes.key) as host,
    ):
        report = host.command("verify", *RUNS, *GUARDED, "--json").json
        assert results(report) == ["passed"] * 6 + ["not_tried"] * 2
        assert report["endpoints"][0]["checks"][6]["permit"] == "--restart-command"
        report = host.command("verify", *RUNS, *GUARDED, "--restart-command", door.command, "--json").json
        assert results(report) == ["passed"] * 7 + ["not_tried"], report["endpoints"][0]["checks"]
        assert report["endpoints"][0]["checks"][7]["permit"] == "--retention"
        assert (report["endpoints"][0]["hermes_revision"], door.knocks) == ("0.22.2", 1)


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.proves("A170")
def test_what_is_not_permitted_is_told_as_not_proven_and_touches_nothing(tmp_path: Path) -> None:
    with PracticeHermes() as hermes, HostProcess(tmp_path, hermes.base_url, hermes.key) as host:
        ran = host.command("verify", "--record", str(tmp_path / "record.json"))
        assert ran.code == 1
        assert ran.out.splitlines()[-1] == "NOT verified: 7 checks are not proven."
        for flag in ("--start-runs", "--approval-prompt", "--restart-command", "--retention"):
            assert flag in ran.out
        assert ran.out.count("not proven; permit it with") == 7
        report = host.command("verify", "--json").json
        assert (results(report), report["passed"]) == (["passed"] + ["not_tried"] * 7, False)
        assert report["endpoints"][0]["not_proven"] == [2, 3, 4, 5, 6, 7, 8]
        assert hermes.ledger().starts_received == 0
        silent = host.command("verify", *RUNS, "--approval-prompt", "TEXT never asks", "--json", "--wait", "20").json
        assert results(silent) == ["passed"] * 3 + ["failed"] * 4 + ["not_tried"]
        assert "did not ask" in silent["endpoints"][0]["checks"][3]["problem"]
        assert json.loads((tmp_path / "record.json").read_text())["passed"] is False
        assert host.command("verify", "--endpoint", "elsewhere").code == 2


@contextmanager
def discovering(change: Callable[[dict[str, Any]], None]) -> Iterator[str]:
    """A server that answers a manifest after a change, and the capabilities of it."""
    told = copy.deepcopy(manifest([("one", "One", "http://127.0.0.1:1", "acme")]))
    change(told)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = told if self.path.endswith("manifest") else {"capabilities": told["capabilities"]}
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words: Any) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def first_check(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    with discovering(change) as url:
        report = verify_host(Api(url, None), Api(url, None), Permits(), (), lambda _: None, lambda _: None)
    assert report["endpoints"][0]["tenant_binding"] == "acme"
    check: dict[str, Any] = report["endpoints"][0]["checks"][0]
    return check


def add(capabilities: list[dict[str, Any]], name: str) -> None:
    capabilities.append(capabilities[0] | {"id": f"cap:hermes_agent:one:{name}"})


@pytest.mark.proves("A161")
def test_discovery_as_published_passes_and_other_families_are_listed_apart() -> None:
    assert first_check(lambda told: None)["result"] == "passed"
    other = first_check(lambda told: add(told["capabilities"], "operator"))
    assert (other["result"], list(other["other_capabilities"])) == ("passed", ["cap:hermes_agent:one:operator"])


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a run capability is missing": lambda told: told["capabilities"].pop(2),
    "there is one too many": lambda told: add(told["capabilities"], "run_steer"),
    "the retry safety of a start": lambda told: told["capabilities"][0]["contract"]["execution"].update(
        retry_safety="safe"
    ),
    "the approval of a choice": lambda told: told["capabilities"][3].update(requires_human_approval=False),
    "the time of an approval": lambda told: told["capabilities"][4]["contract"]["approval"].update(ttl_ms=1),
    "the life of a key": lambda told: told["capabilities"][0]["contract"]["idempotency"].update(ttl_ms=1),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.proves("A161")
def test_discovery_that_differs_in_anything_fails(what: str) -> None:
    check = first_check(WRONG[what])
    assert check["result"] == "failed"
    assert any(not item["seen"] for item in check["observations"])
