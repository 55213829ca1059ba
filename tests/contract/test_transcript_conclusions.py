"""What this system concludes from each recorded transcript of Hermes Agent 0.19.0, and what it leaves open."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import pytest

from adapters.hermes import HermesLimits
from domain.action import State
from domain.errors import CallerError
from domain.events import RunEnded
from domain.provider import (
    Exchange,
    Failure,
    Features,
    Outgoing,
    StreamItem,
    Verdict,
    judge,
    judge_start,
    provider_error,
    read_features,
    read_status,
)
from domain.requests import events_request, status_request
from domain.values import Effect, Operation, Plain
from tests import builders
from tests.contract.hermes_calls import TRUSTED, chunk, endpoint
from tests.contract.transcript_replay import (
    GOLDEN,
    SCENARIOS,
    Replay,
    Step,
    Told,
    body_of,
    exchange_of,
    mutation,
    recording,
)
from tests.faults.http_peer import Connection, http_peer

STARTED = "start accepted started"
STOPPED = "stop accepted stopping"
GONE = "refused run_not_found"
INVALID = "| action.input_schema_invalid"
OVER = "| run.already_terminal"
UNREVIEWED = "| approval.review_required"

POLLED = Told("running > completed", "status run:3")
STREAMED = "running > completed"
ASKED = "running > waiting_for_approval > running > completed"
STOPPED_RUN = "running > stopping > cancelled"
LOST = "unknown(evidence_lost)"
BY_NOBODY = "cancelled_without_stop"

# Of each transcript: what its mutations prove, with what the host says of sending such a one ("| code": not sent), and
# what is told of its runs, in the order of their starts.
CONCLUSIONS: dict[str, tuple[tuple[str, ...], tuple[Told, ...]]] = {
    "01-discovery": ((f"stop {GONE} | action.not_found",), ()),
    "02-start-variants": (
        (
            *[STARTED] * 8,
            f"{STARTED} {INVALID}",  # a session id that is a number: the provider's run fails
            *[f"start refused http_400 {INVALID}"] * 7,
            f"start ambiguous http_500 {INVALID}",
            *[f"start refused http_400 {INVALID}"] * 4,
            *[f"start ambiguous http_500 {INVALID}"] * 3,
            f"start refused http_400 {INVALID}",
            f"start refused body_too_large {INVALID}",
            STARTED,
            "start refused invalid_api_key",
            STARTED,
            "start refused http_400",  # its session key was too long
            *[STARTED] * 2,
        ),
        (
            *[POLLED] * 6,
            Told("running > completed", "status run:4"),
            POLLED,
            Told("running > failed", "status run:2"),
            *[Told("running")] * 4,
        ),
    ),
    "03-plain-run": ((STARTED,), (Told(STREAMED, "frame stream:5 confirmed", frames=5),)),
    "04-tool-run": ((STARTED,), (Told(STREAMED, "frame stream:7 confirmed", frames=7),)),
    "05-parallel-tool-calls": ((STARTED,), (Told(STREAMED, "frame stream:9 confirmed", frames=9),)),
    "06-approval-once": (
        (STARTED, "approval accepted once", f"approval refused approval_not_active {OVER}"),
        (Told(ASKED, "frame stream:7 confirmed", asks="1 responded:once @3", frames=7),),
    ),
    "07-approval-deny": (
        (STARTED, "approval accepted deny", f"approval refused approval_not_active {OVER}"),
        (Told(ASKED, "frame stream:7 confirmed", asks="1 responded:deny @3", frames=7),),
    ),
    "08-approval-session": (  # nobody read the second run's stream, so nobody reviewed its request
        (STARTED, "approval accepted session", STARTED, f"approval accepted deny {UNREVIEWED}"),
        (
            Told(STREAMED, "frame stream:9", asks="1 responded:session @3", frames=9),
            Told(ASKED, "status run:5"),
        ),
    ),
    "09-approval-retry-hits-next": (  # the repeat would release the second command
        (STARTED, "approval accepted once", "approval accepted once | approval.not_pending"),
        (
            Told(
                STREAMED,
                "frame stream:11 confirmed",
                asks="1 responded:once @3, 2 responded:once @7",
                frames=11,
            ),
        ),
    ),
    "10-approval-timeout": (  # the provider says waiting while nothing is pending
        (
            STARTED,
            "approval refused approval_not_pending | approval.not_pending",
            f"approval refused approval_not_active {OVER}",
        ),
        (
            Told(
                "running > waiting_for_approval > completed",
                "frame stream:8 confirmed",
                asks="1 tool.completed @3",
                frames=8,
            ),
        ),
    ),
    "11-approval-errors": (
        (
            STARTED,
            *[f"approval refused invalid_approval_choice {INVALID}"] * 4,
            f"approval refused http_400 {INVALID}",
            *[f"approval ambiguous http_500 {INVALID}"] * 2,
            f"approval refused http_400 {INVALID}",
            f"approval {GONE} | action.not_found",
            f"approval accepted deny {UNREVIEWED}",
            f"approval refused approval_not_pending {UNREVIEWED}",
            f"approval refused approval_not_active {OVER}",
        ),
        (Told(ASKED, "status run:5"),),
    ),
    "12-failed-401": ((STARTED,), (Told("running > failed", "frame stream:1 confirmed", frames=1),)),
    "13-failed-500": ((STARTED,), (Told("running > failed", "frame stream:1 confirmed", frames=1),)),
    "14-stop-model-wait": (
        (STARTED, STOPPED, STOPPED, f"stop {GONE} {OVER}"),
        (Told(STOPPED_RUN, "frame stream:1 confirmed", frames=1),),
    ),
    "15-stop-tool": ((STARTED, STOPPED), (Told(STOPPED_RUN, "frame stream:3 confirmed", frames=3),)),
    "16-stop-approval": (
        (STARTED, STOPPED, f"approval refused approval_not_active {OVER}"),
        (Told(STOPPED_RUN, "frame stream:4 confirmed", asks="1 tool.completed @3", frames=4),),
    ),
    "17-stop-then-approve": (  # the status falls back to running; a stop that was taken stays told
        (STARTED, STOPPED, "approval accepted once | approval.after_stop"),
        (Told(STOPPED_RUN, "frame stream:5 confirmed", asks="1 responded:once @3", frames=5),),
    ),
    "18-stop-after-end": ((STARTED, f"stop {GONE} {OVER}"), (POLLED,)),
    "19-two-subscribers": (
        (STARTED,),
        (Told(STREAMED, "status run:2", gaps="7..8 closed terminal_status", frames=7),),
    ),
    "20-disconnect-while-streaming": (
        (STARTED,),
        (Told(STREAMED, "status run:5", gaps="10..11 ended_without_frame terminal_status", frames=10),),
    ),
    "21-reconnect-in-silence": (
        (STARTED,),
        (Told(STREAMED, "status run:3", gaps="0..1 ended_without_frame terminal_status"),),
    ),
    "22-late-subscribe": ((STARTED,), (Told(STREAMED, "status run:3", frames=5),)),
    "23-keepalive": ((STARTED,), (Told(STREAMED, "frame stream:3", frames=3),)),
    "24-process-kill": (
        (
            *[STARTED] * 4,
            *[f"stop {GONE} {OVER}", f"approval {GONE} {OVER}"],
            *[f"stop {GONE}", f"approval {GONE} {UNREVIEWED}"] * 2,
            *[f"stop {GONE}", f"approval {GONE} | approval.not_pending"],
        ),
        (
            Told(STREAMED, "status run:4", gaps="0..1 refused_404 terminal_status"),
            Told(f"running > {LOST}", gaps="0.. cut"),
            Told(f"running > {LOST}", gaps="1.. cut", frames=1),
            Told(f"running > waiting_for_approval > {LOST}", gaps="2.. cut", pending=(1,), frames=2),
        ),
    ),
    "25-process-term": (  # cancelled on the wire, finished in fact
        (*[STARTED] * 4, *[f"stop {GONE} {OVER}", f"approval {GONE} {OVER}"] * 4),
        (
            Told(STREAMED, "status run:4", gaps="0..1 refused_404 terminal_status"),
            Told("running > cancelled", "frame stream:1", BY_NOBODY, frames=1),
            Told("running > cancelled", "frame stream:2", BY_NOBODY, frames=2),
            Told("running > waiting_for_approval > cancelled", "frame stream:3", BY_NOBODY, pending=(1,), frames=3),
        ),
    ),
    "26-concurrency-429": (
        (
            *[STARTED] * 2,
            "start refused rate_limit_exceeded",
            f"start refused rate_limit_exceeded {INVALID}",
            STOPPED,
            *[STARTED] * 2,
        ),
        (Told(STOPPED_RUN, "status run:5"), POLLED, POLLED, POLLED),
    ),
    "27-lost-start-receipt": ((), ()),
    "28-responses-read": ((STARTED,), (POLLED,)),
    "29-jobs": ((), ()),
    "30-stop-races-completion": ((), (Told(STOPPED_RUN, "status run:3", frames=5),)),
    "31-draining-503": (
        (*[STARTED] * 2, "start refused gateway_draining"),
        (
            Told(STREAMED, "frame stream:6", frames=6),
            Told("running > cancelled", "frame stream:1", BY_NOBODY, frames=1),
        ),
    ),
    "32-older-than-300s": (
        (*[STARTED] * 2, f"approval accepted once {UNREVIEWED}"),
        (
            Told(ASKED, "status run:8", gaps="0..1 refused_404 terminal_status"),
            Told(STREAMED, "status run:2", gaps="0..1 refused_404 terminal_status"),
        ),
    ),
}
# Streams that the recording opened for a run that had been subscribed already: the host opens none of them.
SECOND_READERS = {
    "19-two-subscribers": ["B"],
    "20-disconnect-while-streaming": ["second"],
    "21-reconnect-in-silence": ["second", "third"],
    "22-late-subscribe": ["second"],
    "24-process-kill": ["after restart"] * 3,
    "25-process-term": ["after restart"] * 3,
}


def concluded(replay: Replay) -> tuple[tuple[str, ...], tuple[Told, ...]]:
    return tuple(replay.mutations), tuple(observed.told() for observed in replay.runs.values())


@pytest.mark.proves("A043", "A044", "A058", "A075", "A082", "A084", "A085", "A086", "A089", "A094", "A103", "A104")
@pytest.mark.proves("A111", "A112", "A115", "A118", "A119", "A120", "A122", "A135", "A140")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_transcript_leads_to_its_conclusions_however_it_is_cut(scenario: str) -> None:
    for seed in range(3):
        replay = Replay(scenario, seed).play()
        assert concluded(replay) == CONCLUSIONS[scenario]
        assert replay.second_readers == SECOND_READERS.get(scenario, [])


@pytest.mark.proves("A078", "A079", "A080", "A081")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_frame_of_the_stream_that_was_read_is_stored_with_its_kind(scenario: str) -> None:
    replay = Replay(scenario).play()
    read = {observed.number: observed for observed in replay.runs.values() if observed.stream.subscriptions}
    for index, observed in read.items():
        sequence = replay.steps[index].get("sequence", ())
        assert observed.stream.kinds == Counter(name for name in sequence if not name.startswith(":"))
        assert observed.stream.last_provider_seq is None  # nothing in it tells which frames are missing


@pytest.mark.proves("A088", "A140")
def test_of_two_readers_the_one_that_gets_the_end_cannot_tell_what_it_missed() -> None:
    (told,) = concluded(Replay("19-two-subscribers", reader="B").play())[1]
    assert told == Told(STREAMED, "frame stream:5 confirmed", frames=5)
    (told,) = concluded(Replay("21-reconnect-in-silence", reader="second").play())[1]
    assert told == Told(STREAMED, "status run:3", gaps="2..3 ended_without_frame terminal_status", frames=2)


@pytest.mark.proves("A060", "A062", "A063", "A064")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_status_body_is_read_member_by_member_and_kept_whole_with_the_end(scenario: str) -> None:
    replay = Replay(scenario).play()
    answers = [
        step
        for step in replay.steps
        if step["kind"] == "request" and step["status"] == 200 and step["body"].get("object") == "hermes.run"
    ]
    for step in answers:
        body, reading = step["body"], read_status(exchange_of(step), step["body"]["run_id"])
        assert (reading.state, reading.updated_at) == (body["status"], body["updated_at"])
        assert reading.last_event == body.get("last_event", "")
        assert reading.session_id == (body["session_id"] if isinstance(body["session_id"], str) else "")
        assert (reading.has_output, reading.problem, reading.missing) == ("output" in body, "", False)
        assert read_status(exchange_of(step), "run_another").cause == "other_run_id"
        ended = replay.runs[body["run_id"]].run.ended
        if ended is not None and body["status"] == ended.state:
            kept = result_of(ended)
            assert {name: kept.get(name) for name in ("output", "usage", "error")} == {
                name: body.get(name) for name in ("output", "usage", "error")
            }


def result_of(ended: RunEnded) -> dict[str, Any]:
    assert isinstance(ended.result, Plain)
    loaded: dict[str, Any] = json.loads(ended.result.content)
    return loaded


@pytest.mark.proves("A073", "A132")
def test_the_recorded_provider_advertises_no_replay_no_durable_keys_and_no_list_of_runs() -> None:
    steps = recording("01-discovery")["steps"]
    health, capabilities, listed = (
        exchange_of(next(one for one in steps if (one["path"], one["status"]) == wanted))
        for wanted in (("/health", 200), ("/v1/capabilities", 200), ("/v1/runs", 405))
    )
    denied = exchange_of(next(one for one in steps if one["status"] == 401))
    features = read_features(capabilities, health)
    assert (features.version, features.replay, features.durable_keys, features.request_ids) == (
        "0.19.0",
        False,
        False,
        False,
    )
    assert {"run_submission", "run_status", "run_events_sse", "run_stop", "run_approval_response"} <= {*features.flags}
    assert read_features(denied, health) == Features(version="0.19.0")
    assert (read_status(listed, "run_x").state, read_status(listed, "run_x").missing) == ("", False)

    for step in steps:
        if "text" in step:  # not the provider's own error shape: who answered is not known
            assert judge_start(exchange_of(step)).verdict is Verdict.AMBIGUOUS

    same_key = [
        step
        for step in recording("02-start-variants")["steps"]
        if step.get("request_headers", {}).get("Idempotency-Key") == "same-key"
    ]
    first, second = (judge_start(exchange_of(step)) for step in same_key)
    assert first.run_id != second.run_id
    assert not second.replayed


@pytest.mark.proves("A145")
def test_a_full_or_a_draining_gateway_refuses_for_a_second_and_without_effect() -> None:
    for scenario, status in (("26-concurrency-429", 429), ("31-draining-503", 503)):
        refused = [step for step in recording(scenario)["steps"] if step.get("status") == status and mutation(step)]
        assert refused
        for step in refused:
            judgement = judge_start(exchange_of(step))
            assert (judgement.verdict, judgement.effect, judgement.retry_after_ms) == (
                Verdict.REFUSED,
                Effect.NONE,
                1000,
            )
            assert judgement.code == "connector.hermes_agent.remote_refused_temporarily"


@pytest.mark.proves("A141", "A142")
def test_a_lost_receipt_stays_unknown_whatever_the_stored_session_shows() -> None:
    lost = Exchange(sent=True, failure=Failure.READ_ERROR)
    history = builders.result(builders.claimed(), lost)
    action = builders.action(history)
    assert (action.state, action.effect) == (State.UNKNOWN, Effect.POSSIBLE)
    with pytest.raises(CallerError, match="unknown"):
        builders.claim_again(history, at=22)
    sessions = [step for step in recording("27-lost-start-receipt")["steps"] if step["kind"] == "request"]
    assert {step["status"] for step in sessions} == {200, 404}
    for step in sessions:
        assert judge_start(exchange_of(step)).run_id == ""
        reading = read_status(exchange_of(step), "run_x")
        assert (reading.state, reading.missing) == ("", False)


@pytest.mark.parametrize("scenario", ["28-responses-read", "29-jobs"])
def test_answers_about_responses_and_jobs_prove_nothing_about_a_run(scenario: str) -> None:
    others = [
        step
        for step in recording(scenario)["steps"]
        if step["kind"] == "request" and not step["path"].startswith("/v1/runs")
    ]
    assert others
    for step in others:
        exchange = exchange_of(step)
        for operation in (Operation.RUN_START, Operation.RUN_APPROVAL, Operation.RUN_STOP):
            expected = Verdict.AMBIGUOUS if step["status"] == 200 else Verdict.REFUSED
            assert judge(operation, exchange, "run_x").verdict is expected
        reading = read_status(exchange, "run_x")
        assert (reading.state, reading.missing) == ("", False)
        has_status = "status" in step["body"]  # a stored response says completed, and is no run
        assert reading.cause == (
            f"http_{step['status']}" if step["status"] != 200 else "other_object" if has_status else "not_a_status"
        )
        error = step["body"].get("error")
        message = error["message"] if isinstance(error, dict) else error
        assert provider_error(exchange.body) == (None if error is None else ("", message))


@pytest.mark.parametrize(
    ("scenario", "reply"), [("25-process-term", "slow answer"), ("30-stop-races-completion", "w0 w1 w2")]
)
def test_a_cancelled_run_whose_session_holds_its_whole_reply_stays_cancelled(scenario: str, reply: str) -> None:
    replay = Replay(scenario).play()
    stored = [
        (step["body"]["session_id"], message["content"])
        for step in replay.steps
        if step.get("path", "").endswith("/messages")
        for message in step["body"]["data"]
        if message["finish_reason"] == "stop"
    ]
    assert reply in [content for _, content in stored]
    cancelled = [one.run for one in replay.runs.values() if one.run.ended and one.run.ended.state == "cancelled"]
    assert cancelled
    for run in cancelled:
        assert run.disputes == ()
        assert run.ended is not None
        assert not run.ended.has_output


# ---- over a socket ---------------------------------------------------------------------------------------------------

PHRASES = {200: "OK", 202: "Accepted", 404: "Not Found", 409: "Conflict", 429: "Too Many Requests", 503: "Unavailable"}


def wire(step: Step, random: Random) -> list[bytes]:
    """The recorded answer as pieces of bytes; a stream is chunked and cut at random, and lost as it was lost."""
    head = [f"HTTP/1.1 {step['status']} {PHRASES[step['status']]}"]
    names = {name: value for name, value in step["response_headers"].items() if name != "Transfer-Encoding"}
    head += [f"{name}: {value}" for name, value in names.items()]
    if step["kind"] == "request" or step["status"] != 200:
        content = body_of(step)
        return ["\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content]
    pieces = ["\r\n".join([*head, "Transfer-Encoding: chunked", "", ""]).encode()]
    raw = (GOLDEN / step["file"]).read_bytes()
    while raw:
        cut = random.randint(1, 150)
        pieces.append(chunk(raw[:cut]))
        raw = raw[cut:]
    return pieces if step["end"].startswith("connection lost") else [*pieces, b"0\r\n\r\n"]


def outgoing(step: Step) -> Outgoing | None:
    """The recorded request as the host would write it; ``None`` for one that it has no need of."""
    if not step["path"].startswith("/v1/runs"):
        return None
    if step["method"] == "GET":
        run_id = step["path"].split("/")[3]
        return events_request(run_id, None, TRUSTED) if step["kind"] == "stream" else status_request(run_id, TRUSTED)
    given = step.get("request_body")
    body = None if given is None else given.encode() if isinstance(given, str) else json.dumps(given).encode()
    return Outgoing(method="POST", path=step["path"], headers=(("Content-Type", "application/json"),), body=body)


@pytest.mark.anyio
@pytest.mark.proves("A043", "A075", "A085", "A111", "A140", "A145")
@pytest.mark.parametrize(
    "scenario",
    [
        "03-plain-run",
        "06-approval-once",
        "09-approval-retry-hits-next",
        "14-stop-model-wait",
        "17-stop-then-approve",
        "22-late-subscribe",
        "24-process-kill",
        "26-concurrency-429",
        "31-draining-503",
    ],
)
async def test_the_same_answers_over_a_socket_lead_to_the_same_conclusions(scenario: str) -> None:
    random, pieces = Random(scenario), list[bytes]()
    exchanges: dict[int, Exchange] = {}
    streams: dict[int, list[StreamItem]] = {}

    async def script(connection: Connection) -> None:
        await connection.read_request()
        for piece in pieces:
            await connection.send(piece)

    async with http_peer(script) as peer:
        hermes = endpoint(peer.origin, HermesLimits())
        for index, step in enumerate(recording(scenario)["steps"]):
            out = outgoing(step) if step["kind"] in ("request", "stream") else None
            if out is None:
                continue
            pieces[:] = wire(step, random)
            if step["kind"] == "stream":
                streams[index] = [item async for item in hermes.stream(out)]
            else:
                exchanges[index] = await (hermes.read if step["method"] == "GET" else hermes.send)(out)
            assert peer.heard[-1].startswith(f"{step['method']} {step['path']} HTTP/1.1\r\n".encode())
        await hermes.close()
    assert exchanges
    assert concluded(Replay(scenario, exchanges=exchanges, streams=streams).play()) == CONCLUSIONS[scenario]
