"""Recordings of Hermes Agent 0.19.0, replayed in their own time order through the code that the host runs.

Mutations are judged, status bodies read, stream bytes split in random cuts and stored in random batches. A mutation
that the host would not send is judged all the same, and stands in the run's history as nobody's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from adapters.sse import SseSplitter
from domain import attempt as attempts
from domain import binding, reconciler, stream
from domain.action import Action
from domain.attempt import Attempt
from domain.binding import Run
from domain.errors import CallerError
from domain.events import AttemptClaimed, ChoiceAnswered, ChoiceClaimed, Event, StopClaimed, SubscriptionOpened
from domain.provider import (
    TERMINAL_STATES,
    Comment,
    Exchange,
    RawFrame,
    StatusReading,
    StreamEnd,
    StreamItem,
    StreamOpened,
    Verdict,
    judge,
    read_status,
)
from domain.reconciler import Hold, PollRun, RecordRun, RunFacts, Subscribe, next_run_step
from domain.requests import check_run_input, check_start_input
from domain.stream import Received, RunStream
from domain.values import Operation, Plain, canonical, sha256
from tests.builders import OWNER, TARGET, accepted, bound, moment

GOLDEN = Path(__file__).parents[1] / "golden" / "transcripts"
SCENARIOS = sorted(path.stem for path in GOLDEN.glob("*.json"))
ENDS = {
    "server closed after its close comment": "closed",
    "connection lost without close comment": "cut",
    "closed by client": "ended_without_frame",
}
Step = dict[str, Any]


def recording(scenario: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GOLDEN / f"{scenario}.json").read_text())
    return loaded


def body_of(step: Step) -> bytes:
    return step["text"].encode() if "text" in step else json.dumps(step["body"]).encode()


def exchange_of(step: Step) -> Exchange:
    """A recorded answer as the endpoint adapter tells it."""
    headers = {name.lower(): value for name, value in step["response_headers"].items()}
    return Exchange(
        sent=True,
        status=step["status"],
        content_type=headers.get("content-type", ""),
        retry_after=headers.get("retry-after", ""),
        body=body_of(step),
    )


def items_of(step: Step, random: Random) -> list[StreamItem]:
    """A recorded stream as the endpoint adapter tells it, its bytes cut at random."""
    if step["status"] != 200:
        return [StreamEnd(reason="refused", exchange=exchange_of(step))]
    raw, splitter, items = (GOLDEN / step["file"]).read_bytes(), SseSplitter(), list[StreamItem]([StreamOpened()])
    while raw:
        cut = random.randint(1, 200)
        items += splitter.feed(raw[:cut])
        raw = raw[cut:]
    last, rest = splitter.close()
    assert (last, rest, splitter.fault) == ([], b"", "")
    return [*items, StreamEnd(reason=ENDS[step["end"]])] if step["end"] in ENDS else items


class Told(msgspec.Struct, frozen=True):
    """What is concluded of one run. ``path`` holds each state that was told, ``end`` the evidence of the end."""

    path: str
    end: str = ""
    marks: str = ""
    gaps: str = ""
    asks: str = ""
    pending: tuple[int, ...] = ()
    frames: int = 0


class Observed:
    """One run and its stream, as their histories grow."""

    def __init__(self, run_id: str, at: datetime) -> None:
        self.run_id, self.run, self.stream = run_id, Run(), RunStream()
        self.live, self.number, self.place = False, 0, 0
        self.path: list[str] = []
        self.keep(bound(run_id=run_id, at=at, started_at=at), ())

    def keep(self, run_events: Sequence[Event], stream_events: Sequence[Event]) -> None:
        for event in run_events:
            self.run = binding.evolve(self.run, event, self.run.version + 1)
        for event in stream_events:
            self.stream = stream.evolve(self.stream, event, self.stream.version + 1)
        state, why = binding.told_state(self.run)
        told = f"{state}({why})" if why else state
        if self.path[-1:] != [told]:
            self.path.append(told)

    def step(self, at: datetime) -> reconciler.RunStep:
        """The host's next step, after all that it has to record."""
        while isinstance(
            step := next_run_step(RunFacts(run=self.run, stream=self.stream, owner=OWNER, live=self.live), at=at),
            RecordRun,
        ):
            self.keep(step.run, step.stream)
        return step

    def read(self, reading: StatusReading, exchange: Exchange, at: datetime) -> None:
        self.keep(binding.observe_status(self.run, reading, exchange, sha256(exchange.body), at=at), ())

    def receive(self, batch: Sequence[Received]) -> None:
        frames = stream.store_frames(self.stream, batch, sha256(b"".join(one.frame.raw for one in batch)))
        assert frames is not None
        assert stream.missing_frames(self.stream, batch) == ()
        assert stream.bridge(self.stream, stream.view_frame(batch[0].frame).provider_seq, at=batch[0].at) == ()
        ended: tuple[Event, ...] = ()
        if (claim := stream.terminal_claim(batch)) is not None:
            state, body, marks = claim
            ended = binding.observe_end_frame(
                self.run,
                state,
                Plain(content=canonical(body)),
                f"stream:{frames.terminal_seq}",
                "output" in body,
                marks,
                at=batch[-1].at,
            )
        self.keep(ended, (frames,))

    def close(self, reason: str, at: datetime) -> None:
        self.live = False
        self.keep((), stream.close(self.stream, reason, at=at))

    def told(self) -> Told:
        run, seen = self.run, self.stream
        confirmed = " confirmed" if run.ended and run.ended.source == "frame" and run.confirmed else ""
        gaps = (
            f"{gap.after}..{'' if gap.before is None else gap.before} {gap.reason} {gap.closed_by}" for gap in seen.gaps
        )
        return Told(
            path=" > ".join(self.path),
            end=f"{run.ended.source} {run.ended.evidence}{confirmed}" if run.ended else "",
            marks=" ".join(binding.marks(run)),
            gaps=", ".join(gap.strip() for gap in gaps),
            asks=", ".join(f"{item.generation} {item.how} @{item.seq}" for item in seen.answered),
            pending=tuple(item.ask.generation for item in seen.pending),
            frames=seen.last_seq,
        )


class Replay:
    """One recording through our code. ``reader`` labels the stream that is ours where several read the same run."""

    def __init__(
        self,
        scenario: str,
        seed: int = 0,
        *,
        reader: str | None = None,
        exchanges: Mapping[int, Exchange] | None = None,
        streams: Mapping[int, Sequence[StreamItem]] | None = None,
    ) -> None:
        loaded = recording(scenario)
        self.steps: list[Step] = loaded["steps"]
        self.timeout_ms: int = loaded["config"]["approvals.timeout"] * 1000
        self.random, self.reader = Random(seed), reader
        self.exchanges = exchanges or {}
        self.streams = streams or {}
        self.runs: dict[str, Observed] = {}
        self.mutations: list[str] = []
        self.second_readers: list[str] = []
        self.actions: dict[int, tuple[Attempt, str]] = {}

    def timeline(self) -> Iterator[tuple[float, int, int, Any]]:
        """(seconds, index of the step, place in it, what happens): what was sent, and what came back, apart."""
        for index, step in enumerate(self.steps):
            yield step["at"], index, 0, None
            if step["kind"] == "request":
                # One client asks one thing after the other; the recorded times are rounded.
                following = (one["at"] for one in self.steps[index + 1 :] if one["kind"] in ("request", "stream"))
                came = min(step["at"] + step["seconds"], next(following, 1e9))
                yield came, index, 1, self.exchanges.get(index) or exchange_of(step)
            elif step["kind"] == "stream":
                items = self.streams.get(index) or items_of(step, self.random)
                times = iter([*([0.0] if step["status"] == 200 else []), *step.get("frame_times", ())])
                for place, item in enumerate(items, 1):
                    late = step["ended_after"] if isinstance(item, StreamEnd) else next(times)
                    yield step["at"] + late, index, place, item
                assert next(times, None) is None

    def play(self) -> Replay:
        line = sorted(self.timeline(), key=lambda one: (round(one[0], 6), *one[1:3]))
        while line:
            seconds, index, _, what = line.pop(0)
            step, at = self.steps[index], moment(seconds)
            match what:
                case None:
                    self.begin(step, index, at)
                case Exchange():
                    self.answered(step, index, what, at)
                case RawFrame():
                    frames = [(what, at)]
                    while (
                        line and line[0][1] == index and isinstance(line[0][3], RawFrame) and self.random.random() < 0.6
                    ):
                        frames.append((line[0][3], moment(line.pop(0)[0])))
                    self.frames(step, index, frames)
                case _:
                    self.stream_item(step, index, what, at)
            for observed in self.runs.values():
                observed.step(at)
        for observed in self.runs.values():
            if observed.live:
                assert observed.step(moment(10_000)) == Hold(why="stream_open")
                observed.close("ended_without_frame", moment(10_000))
                observed.step(moment(10_000))
        return self

    def known(self, step: Step, at: datetime) -> Observed | None:
        """The run that a step is about; one that the recording did not start was started before it."""
        run_id = step.get("run_id") or next((part for part in step["path"].split("/") if part.startswith("run_")), "")
        if run_id not in self.runs and step["kind"] != "status_change" and step["status"] == 200 and run_id:
            assert not any(one.get("path") == "/v1/runs" and one["method"] == "POST" for one in self.steps)
            self.runs[run_id] = Observed(run_id, at)
            self.stop_before(self.runs[run_id], at)
        return self.runs.get(run_id)

    def stop_before(self, observed: Observed, at: datetime) -> None:
        """A stop that only a note of the recording tells about."""
        assert "stop answered 200" in self.steps[0]["text"]
        observed.keep((StopClaimed(at=at, action_id="act_s", attempt_id="att_s"),), ())

    def begin(self, step: Step, index: int, at: datetime) -> None:
        if step["kind"] == "status_change":
            observed = self.known(step, at)
            assert observed is not None
            self.status_change(observed, step, at)
        elif step["kind"] == "stream" and (observed := self.known(step, at)) is not None:
            if self.reader not in (None, step["label"]):
                return
            if isinstance(observed.step(at), Subscribe):
                observed.keep((), stream.intend(observed.stream, OWNER, at=at))
                observed.live, observed.number = True, index
            else:
                self.second_readers.append(step["label"])
        elif (operation := mutation(step)) is not None:
            self.claim(operation, step, index, at)

    def status_change(self, observed: Observed, step: Step, at: datetime) -> None:
        """A poll whose answer is recorded by its state and last event, and whole where the state is an end."""
        whole = [
            exchange_of(one)
            for one in self.steps
            if (one.get("method"), one.get("path"), one["status"] if one["kind"] == "request" else 0)
            == ("GET", f"/v1/runs/{observed.run_id}", 200)
            and one["body"]["status"] == step["status"]
        ]
        if whole and step["status"] in TERMINAL_STATES:
            return observed.read(read_status(whole[0], observed.run_id), whole[0], at)
        reading = StatusReading(state=step["status"], http_status=200, last_event=step["last_event"] or "")
        return observed.read(reading, Exchange(sent=True, status=200, body=canonical(step)), at)

    def claim(self, operation: Operation, step: Step, index: int, at: datetime) -> None:
        """What the host says before it sends such a mutation; only what it lets go is claimed for the run."""
        claim = AttemptClaimed(
            at=at, attempt_id=f"att_{index}", number=1, operation=operation, target=TARGET, owner=OWNER
        )
        given, refusal = step.get("request_body"), ""
        observed = None if operation is Operation.RUN_START else self.known(step, at)
        try:
            if operation is Operation.RUN_START:
                if not isinstance(given, dict):
                    raise CallerError("action.input_schema_invalid")  # our bodies are objects, whatever is given
                check_start_input(given)
            elif observed is None:
                raise CallerError("action.not_found")
            elif operation is Operation.RUN_STOP:
                binding.check_stop(observed.run)
                observed.keep((StopClaimed(at=at, action_id=f"act_{index}", attempt_id=claim.attempt_id),), ())
            else:
                observed.keep((self.choice(observed, given, claim, at),), ())
        except CallerError as error:
            refusal = error.code
        self.actions[index] = (Attempt(claim=claim), refusal)

    def choice(self, observed: Observed, given: Any, claim: AttemptClaimed, at: datetime) -> ChoiceClaimed:
        """A choice by a person who reviewed the first request of the run; a repeat is made for the same one."""
        wanted = check_run_input(Operation.RUN_APPROVAL, {"run_id": observed.run_id, "body": given})
        chosen = binding.check_choice(
            observed.run,
            observed.stream,
            choice=wanted.choice,
            resolve_all=wanted.resolve_all,
            reviewed=(f"{observed.run_id}#1",) if observed.stream.asked else (),
            approval_timeout_ms=self.timeout_ms,
            at=at,
        )
        return ChoiceClaimed(
            at=at,
            action_id="act_c",
            attempt_id=claim.attempt_id,
            choice=wanted.choice,
            generations=tuple(item.ask.generation for item in chosen),
        )

    def answered(self, step: Step, index: int, exchange: Exchange, at: datetime) -> None:
        operation = mutation(step)
        if operation is None:
            if step["method"] == "GET" and step["path"].startswith("/v1/runs/"):
                reading = read_status(exchange, step["path"].split("/")[3])
                if (observed := self.known(step, at)) is not None:
                    observed.read(reading, exchange, at)
                else:
                    assert (reading.state, reading.missing) == ("", True)
            return
        attempt, refusal = self.actions[index]
        run_id = "" if operation is Operation.RUN_START else step["path"].split("/")[3]
        judgement = judge(operation, exchange, run_id)
        attempt = attempts.evolve(attempt, attempts.record(attempt, judgement, exchange, sha256(exchange.body), at=at))
        seen = judgement.provider_code or judgement.state or judgement.choice or judgement.cause
        told = f"{operation.value.removeprefix('run_')} {judgement.verdict} {seen}"
        self.mutations.append(f"{told} | {refusal}" if refusal else told)
        if operation is Operation.RUN_START:
            assert (judgement.run_id != "") == (judgement.verdict is Verdict.ACCEPTED)
            if judgement.run_id:
                self.runs[judgement.run_id] = Observed(judgement.run_id, at)
        elif not refusal:
            self.answers_run(operation, self.runs[run_id], attempt, at)

    def answers_run(self, operation: Operation, observed: Observed, attempt: Attempt, at: datetime) -> None:
        (request,) = accepted(operation, run_id=observed.run_id)
        answers = reconciler.answers_run(Action(accepted=request, attempts=(attempt,)), at=at)  # type: ignore[arg-type]
        observed.keep(answers, ())
        for answer in answers:
            if isinstance(answer, ChoiceAnswered):
                (claim,) = (one.claim for one in observed.run.choices if one.claim.attempt_id == answer.attempt_id)
                assert binding.check_resolved(answer, claim, at=at) == ()

    def frames(self, step: Step, index: int, frames: Sequence[tuple[RawFrame, datetime]]) -> None:
        observed = self.runs[step["path"].split("/")[3]]
        if observed.live and observed.number == index:
            batch = []
            for frame, at in frames:
                observed.place += b"approval.request" in frame.raw
                batch.append(Received(at=at, frame=frame, digest=f"{observed.run_id}#{observed.place}"))
            observed.receive(batch)

    def stream_item(self, step: Step, index: int, item: StreamItem, at: datetime) -> None:
        observed = self.runs.get(step["path"].split("/")[3])
        if observed is None or not observed.live or observed.number != index:
            return
        before = (observed.run, observed.stream.last_seq, observed.stream.gaps)
        match item:
            case StreamOpened():
                observed.keep((), (SubscriptionOpened(at=at, number=observed.stream.subscriptions),))
            case StreamEnd():
                observed.close(f"{item.reason}_{item.exchange.status}" if item.exchange else item.reason, at)
                assert observed.run == before[0]  # the end of a stream ends no run, it leads to a status read
                if observed.run.ended is None:
                    assert isinstance(observed.step(at), PollRun)
                return
            case Comment():
                pass
        assert (observed.run, observed.stream.last_seq, observed.stream.gaps) == before


def mutation(step: Step) -> Operation | None:
    if step.get("method") != "POST" or not step["path"].startswith("/v1/runs"):
        return None
    endings = {"approval": Operation.RUN_APPROVAL, "stop": Operation.RUN_STOP, "runs": Operation.RUN_START}
    return endings[step["path"].rsplit("/", 1)[1]]
