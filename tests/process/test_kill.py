"""Processes that are killed: hosts under load, the database, Hermes; and a host that is asked to end."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from adapters.client import CallFailed, NoAnswer
from adapters.postgres import EmbeddedPostgres
from domain.action import State
from domain.events import AttemptClaimed, AttemptUnknown, SequenceExpired
from tests.pg import until
from tests.process.load import Load
from tests.process.site import HostProcess, Site, end, found
from tests.process.truth import every_state_is_justified, folded, nothing_was_sent_twice, standing

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(240)]
CYCLES = 20
UNKNOWN_CODE = "connector.hermes_agent.outcome_unknown"


def nothing_acknowledged_is_lost(place: Site, load: Load, hosts: list[HostProcess]) -> None:
    """Each key names one Action, on every host, also where no answer ever came; what was settled stays as told."""
    again = [(host, key, *asked) for key, asked in sorted(load.asked.items()) for host in hosts]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda one: load.ask(*one), again))
    until(lambda: standing(place), 60)
    stored = folded(place.events())
    assert {key: ids for key, ids in load.told.items() if len(ids) != 1} == {}
    assert {action_id for ids in load.told.values() for action_id in ids} <= stored.keys()
    assert load.changed == []
    assert load.settled.keys() <= {action_id for action_id, action in stored.items() if action.settled is not None}


@pytest.mark.proves("A132", "A133", "A134", "A142", "B001", "B015", "B094", "B134", "B135")
def test_twenty_killed_hosts_under_load_lose_nothing_acknowledged_and_send_nothing_twice(place: Site) -> None:
    first, second = place.host("one", ttl_ms=3_000), place.host("two", ttl_ms=3_000)
    chance = random.Random(7)
    first.start()
    second.start()
    living = [first, second]
    with Load(lambda: list(living), callers=4, seed=7) as load:
        for cycle in range(CYCLES):
            victim = (first, second)[cycle % 2]
            threading.Event().wait(0.2 + chance.random() * 0.4)
            victim.kill()
            living.remove(victim)
            if cycle == CYCLES // 2:  # long enough for the other host to take over what this one left
                until(lambda: any(isinstance(e.event, SequenceExpired) for e in place.events()), 30)
            victim.spawn()
            until(victim.listening, 60)
            living.append(victim)
    until(lambda: first.ready() and second.ready(), 60)
    nothing_acknowledged_is_lost(place, load, [first, second])
    counts = nothing_was_sent_twice(place)
    every_state_is_justified(place)
    told = folded(place.events())
    unknown = sum(action.state is State.UNKNOWN for action in told.values())
    print(f"{len(told)} Actions, {counts}, {unknown} unknown, {load.lost} answers lost, {load.refused} refused")
    assert load.odd == []
    assert counts["runs"] > CYCLES
    assert load.lost > 0


@pytest.mark.proves("B002", "A133")
def test_a_killed_database_under_load_loses_nothing_acknowledged(place: Site, durable_server: EmbeddedPostgres) -> None:
    host = place.host("one")
    host.start()
    with Load(lambda: [host], callers=4, seed=11) as load:
        for _ in range(3):
            before = len(load.settled)
            until(lambda before=before: len(load.settled) > before + 5, 60)  # type: ignore[misc]
            durable_server.kill()
            durable_server.start()
            until(host.ready, 60)
    nothing_acknowledged_is_lost(place, load, [host])
    nothing_was_sent_twice(place)
    told = every_state_is_justified(place)
    assert host.process is not None
    assert host.process.poll() is None
    assert sum(action.state is State.UNKNOWN for action in told.values()) == 0


@pytest.mark.proves("A002", "A122", "A128", "B122", "B137")
@pytest.mark.parametrize("waits", [False, True], ids=["while a run works", "while a run waits for approval"])
def test_a_killed_hermes_leaves_a_run_whose_end_is_not_known(place: Site, waits: bool) -> None:
    host = place.host("one")
    host.start()
    run_id = host.begin("ASK rm -rf /srv/x" if waits else "SLEEP 60", "work")
    if waits:
        host.asked(run_id)
    else:
        host.run_in(run_id, "running")
    place.hermes.kill()
    place.hermes.start()
    view = host.run_in(run_id, "unknown", "failed", "cancelled", "completed")
    assert (view["state"], view["end"]["known"], view["unknown_reason"]) == ("unknown", False, "evidence_lost")
    assert place.hermes.received("start") == 1
    repeated = host.submit("run_start", {"body": {"input": "ASK rm -rf /srv/x" if waits else "SLEEP 60"}}, "work")
    assert repeated["action_result"]["output"]["run_id"] == run_id
    assert place.hermes.received("start") == 1
    assert place.hermes.ledger()["effects"] == []


@pytest.mark.proves("B029", "B076", "B115")
def test_a_host_that_is_asked_to_end_finishes_the_call_in_hand_and_takes_nothing_new(place: Site) -> None:
    host = place.host("one")
    host.start()
    place.hermes.fault(kind="delay", route="start", seconds=2.0)
    with ThreadPoolExecutor(1) as pool:
        given = {"body": {"input": "TEXT slow"}}
        slow = pool.submit(host.submit, "run_start", given, "slow")
        until(lambda: place.hermes.received("start") == 1)
        assert host.process is not None
        host.process.send_signal(signal.SIGTERM)
        until(lambda: host.readiness()[0] == 503)
        with pytest.raises(CallFailed) as refused:
            host.submit("run_start", {"body": {"input": "TEXT late"}}, "late")
        assert (refused.value.code, refused.value.error["effect"]) == ("connector_host.not_ready", "none")
        told = slow.result()["action_result"]
    assert (told["status"], place.hermes.received("start")) == ("completed", 1)
    assert host.process.wait(30) == 0
    assert isinstance(place.events()[-1].event, SequenceExpired)
    host.start()
    repeated = host.submit("run_start", given, "slow")["action_result"]
    assert repeated["output"]["run_id"] == told["output"]["run_id"]


def hang(place: Site, host: HostProcess, route: str, ask: Callable[[], Any]) -> None:
    """Let one mutation hang at the provider after it was carried out, and kill the host in between."""
    before = place.hermes.received(route)
    place.hermes.fault(kind="hang", route=route, carried_out=True, seconds=30.0)
    lost: list[Exception] = []

    def call() -> None:
        try:
            ask()
        except NoAnswer as error:
            lost.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    until(lambda: place.hermes.received(route) > before)
    host.kill()
    caller.join()


@pytest.mark.proves("A132", "A136", "A142", "B134")
def test_a_host_killed_between_claim_and_receipt_of_a_start_never_sends_it_again(place: Site) -> None:
    host, other = place.host("one", ttl_ms=2_000), place.host("two", ttl_ms=2_000)
    host.start()
    given = {"body": {"input": "TEXT once"}}
    hang(place, host, "start", lambda: host.submit("run_start", given, "once"))
    other.start()

    def unknown() -> dict[str, Any] | None:
        told = other.submit("run_start", given, "once", mode="async")
        result = told.get("action_result")
        return result if result and result["status"] == "requires_human" else None

    result = found(unknown)
    assert result["error"]["code"] == UNKNOWN_CODE
    host.start()
    assert host.submit("run_start", given, "once")["action_result"]["action_id"] == result["action_id"]
    assert (place.hermes.received("start"), place.hermes.ledger()["runs_created"]) == (1, 1)
    kinds = [type(event.event) for event in place.events()]
    assert kinds.index(AttemptClaimed) < kinds.index(AttemptUnknown)
    recovery = host.api().get("/views/recovery").body
    assert recovery["total"] == 1
    assert result["action_id"] in json.dumps(recovery)
    nothing_was_sent_twice(place)
    every_state_is_justified(place)


@pytest.mark.proves("A137", "B135")
def test_a_host_killed_between_claim_and_receipt_of_a_choice_never_sends_it_again(place: Site) -> None:
    host = place.host("one")
    host.start()
    run_id = host.begin("ASK rm -rf /srv/x", "work")
    given = {"run_id": run_id, "choice": "once", "reviewed": host.asked(run_id)}
    waiting = host.submit("run_approval", given, "choice")["action_result"]
    hang(place, host, "approval", lambda: host.decide(waiting["output"]["approval_id"]))
    host.start()
    told = host.answered(waiting["action_id"])
    assert told["status"] in ("requires_human", "completed")
    ledger = place.hermes.ledger()
    assert (place.hermes.received("approval"), len(ledger["choices"]), len(ledger["effects"])) == (1, 1, 1)
    nothing_was_sent_twice(place)


@pytest.mark.proves("A131", "A046")
def test_fifty_equal_starts_on_two_hosts_are_one_action_one_claim_and_one_request(place: Site) -> None:
    hosts = [place.host("one"), place.host("two")]
    for host in hosts:
        host.start()
    place.hermes.fault(kind="delay", route="start", seconds=2.0)
    given = {"body": {"input": "TEXT once"}}
    with ThreadPoolExecutor(50) as pool:
        bodies = list(pool.map(lambda number: hosts[number % 2].submit("run_start", given, "once"), range(50)))
    results = [body["action_result"] for body in bodies]
    assert len({result["action_id"] for result in results}) == 1
    assert {(result["status"], result["output"]["run_id"]) for result in results} == {
        ("completed", place.hermes.ledger()["created"][0])
    }
    assert place.hermes.received("start") == 1
    assert sum(isinstance(event.event, AttemptClaimed) for event in place.events()) == 1


def accepted(place: Site, host: HostProcess, count: int) -> list[str]:
    """Asynchronous starts that were acknowledged; their Actions."""
    place.hermes.fault(kind="delay", route="start", seconds=60.0, times=count, carried_out=True)

    def one(number: int) -> str:
        body = host.submit("run_start", {"body": {"input": f"TEXT {number}"}}, f"queued-{number}", mode="async")
        return str(body["ack"]["action_id"])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, range(count)))


@pytest.mark.proves("A134", "B098", "B100")
def test_accepted_work_is_sent_once_or_told_as_unknown_after_a_kill(place: Site) -> None:
    host = place.host("one")
    host.start()
    ids = accepted(place, host, 60)
    host.kill()
    place.hermes.clear()
    claimed = {e.history.rpartition("/")[2] for e in place.events() if isinstance(e.event, AttemptClaimed)}
    host.start()
    told = {action_id: host.answered(action_id) for action_id in ids}
    assert {told[action_id]["status"] for action_id in claimed} == {"requires_human"}
    rest = set(ids) - claimed
    assert rest
    assert {told[action_id]["status"] for action_id in rest} == {"completed"}
    assert host.api().get("/views/recovery").body["total"] == len(claimed)
    nothing_was_sent_twice(place)
    every_state_is_justified(place)


@pytest.mark.proves("B042", "B098")
def test_a_database_killed_during_recovery_forgets_no_item(place: Site, durable_server: EmbeddedPostgres) -> None:
    host = place.host("one")
    host.start()
    ids = accepted(place, host, 250)
    host.kill()
    place.hermes.clear()
    claimed = {e.history.rpartition("/")[2] for e in place.events() if isinstance(e.event, AttemptClaimed)}
    host.spawn()
    until(lambda: b"recovering" in host.out.read_bytes(), 60)
    threading.Event().wait(0.2)
    durable_server.kill()
    assert host.process is not None
    threading.Event().wait(2)
    durable_server.start()
    until(lambda: host.process.poll() is not None or b'{"ready"' in host.out.read_bytes(), 60)  # type: ignore[union-attr]
    if host.process.poll() is not None:
        assert host.process.returncode != 0
        assert b'{"ready"' not in host.out.read_bytes()
        host.start()
    until(host.listening)
    told = {action_id: host.answered(action_id)["status"] for action_id in ids}
    assert {told[action_id] for action_id in claimed} == {"requires_human"}
    assert {told[action_id] for action_id in set(ids) - claimed} == {"completed"}
    nothing_was_sent_twice(place)
    every_state_is_justified(place)
    end(host.process, signal.SIGTERM)
    host.start()
    assert {action_id: host.result(action_id)["status"] for action_id in ids} == told
