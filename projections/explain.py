"""The explained Action: what is known and by which event, what is not known, one next step, and what must not be done.

One decision table says it for every operation, state, effect and what is known of the run (runs page, Apply idempotency
and retry rules, Handle failures; runbook, Recover by provider state owner). The first row that matches is the answer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from domain.action import State
from domain.binding import Phase
from domain.values import Effect, Operation, rfc3339
from projections.actions import ActionRow, action_status
from projections.runs import RunRow, missing_causes, pending_approvals

START, STATUS, EVENTS = Operation.RUN_START, Operation.RUN_STATUS, Operation.RUN_EVENTS
CHOICE, STOP = Operation.RUN_APPROVAL, Operation.RUN_STOP
SENT_TO_RUN = frozenset({CHOICE, STOP})
READS = frozenset({STATUS, EVENTS})
LIVE = frozenset({Phase.NEW, Phase.FOLLOWED})

NO_SECOND_START = "Do not start it again, under this or any other key: a second run may do the work twice."
NO_SECOND_CHOICE = "Do not send the choice again: it can release another request of the run."
NO_SECOND_STOP = "Do not send the stop again while the first one may have reached the provider."
NO_END_BY_SILENCE = "Do not take silence, a closed stream or a missing status for an end."
NO_GUESS = "Do not record that nothing happened without proof of it."


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What an Action's place in the table means. ``who`` acts next: host, approver, operator, caller or nobody."""

    step: str
    who: str
    why: str
    unknown: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table; an empty set matches everything. ``phases`` holds ``None`` for: no run is known."""

    advice: Advice
    operations: frozenset[Operation] = frozenset()
    states: frozenset[State] = frozenset()
    effects: frozenset[Effect] = frozenset()
    phases: frozenset[Phase | None] = frozenset()

    def matches(self, operation: Operation, state: State, effect: Effect, phase: Phase | None) -> bool:
        """True if each set is empty or holds its value."""
        return (
            (not self.operations or operation in self.operations)
            and (not self.states or state in self.states)
            and (not self.effects or effect in self.effects)
            and (not self.phases or phase in self.phases)
        )


def _only(*states: State) -> frozenset[State]:
    return frozenset(states)


TABLE: tuple[Rule, ...] = (
    # accepted, nothing on its way
    Rule(
        states=_only(State.NEW),
        advice=Advice(step="Nothing.", who="nobody", why="No accepted request is stored here."),
    ),
    Rule(
        states=_only(State.AWAITING),
        advice=Advice(
            step="Decide the approval before it expires.",
            who="approver",
            why="The tenant's policy wants a person's decision; nothing was sent.",
            never=("Do not answer the provider past this gate.",),
        ),
    ),
    Rule(
        operations=READS,
        states=_only(State.READY),
        advice=Advice(
            step="Wait for the read to answer or for its deadline.",
            who="host",
            why="A read changes nothing and may be repeated.",
            unknown=("What the provider says now.",),
            never=(NO_END_BY_SILENCE,),
        ),
    ),
    Rule(
        states=_only(State.READY),
        advice=Advice(
            step="Wait until the host claims and sends it.",
            who="host",
            why="It is accepted, and proven that nothing was sent.",
            never=("Do not submit it again under another key.",),
        ),
    ),
    Rule(
        states=_only(State.CLOSED),
        advice=Advice(
            step="Wait for the next attempt or the settlement.",
            who="host",
            why="The last attempt was refused or never left; it had no effect.",
        ),
    ),
    # sent
    Rule(
        operations=frozenset({START}),
        states=_only(State.CLAIMED),
        advice=Advice(
            step="Wait for the receipt.",
            who="host",
            why="The claim is stored; only the turn that stored it sends.",
            unknown=("Whether the provider has the start.", "Which run it became."),
            never=(NO_SECOND_START,),
        ),
    ),
    Rule(
        operations=frozenset({CHOICE}),
        states=_only(State.CLAIMED),
        advice=Advice(
            step="Wait for the provider's answer.",
            who="host",
            why="The claim is stored; only the turn that stored it sends.",
            unknown=("Whether the choice was applied.",),
            never=(NO_SECOND_CHOICE,),
        ),
    ),
    Rule(
        operations=frozenset({STOP}),
        states=_only(State.CLAIMED),
        advice=Advice(
            step="Wait for the provider's answer.",
            who="host",
            why="The claim is stored; only the turn that stored it sends.",
            unknown=("Whether the stop was taken.",),
            never=(NO_SECOND_STOP,),
        ),
    ),
    Rule(
        operations=frozenset({START}),
        states=_only(State.UNKNOWN),
        advice=Advice(
            step="Look for this start at the endpoint by its session and time; note what is found under this id.",
            who="operator",
            why="It was sent without a provable receipt, and the provider cannot list its runs.",
            unknown=("Whether a run was created.", "The run's handle.", "What the run did, if it exists."),
            never=(NO_SECOND_START, NO_GUESS),
        ),
    ),
    Rule(
        operations=SENT_TO_RUN,
        states=_only(State.UNKNOWN),
        phases=frozenset({Phase.ENDED, Phase.CONTRADICTED}),
        advice=Advice(
            step="Compare the run's stored events and its end with what was sent; note what is found under this id.",
            who="operator",
            why="The run is over; nothing further can be sent to it, and the end may show what was applied.",
            unknown=("Whether this mutation was applied before the end.",),
            never=("Do not send anything more to a run that is over.", NO_GUESS),
        ),
    ),
    Rule(
        operations=frozenset({CHOICE}),
        states=_only(State.UNKNOWN),
        advice=Advice(
            step="Read the run's status and its further events.",
            who="host",
            why="A later event or status can show whether the request was answered.",
            unknown=("Whether the choice was applied.", "Which request it released, if any."),
            never=(NO_SECOND_CHOICE, NO_GUESS),
        ),
    ),
    Rule(
        operations=frozenset({STOP}),
        states=_only(State.UNKNOWN),
        advice=Advice(
            step="Read the run's status until it shows an end.",
            who="host",
            why="Only a terminal status or event proves what the stop did.",
            unknown=("Whether the stop was taken.", "Whether tools of the run still work."),
            never=(NO_SECOND_STOP, NO_END_BY_SILENCE),
        ),
    ),
    Rule(
        states=_only(State.UNKNOWN),
        advice=Advice(
            step="Ask again with a new read.",
            who="caller",
            why="A read changes nothing.",
            unknown=("What the provider says now.",),
            never=(NO_END_BY_SILENCE,),
        ),
    ),
    Rule(
        states=_only(State.CLAIMED),
        advice=Advice(
            step="Wait for the read to answer.",
            who="host",
            why="A read changes nothing and may be repeated.",
            unknown=("What the provider says now.",),
            never=(NO_END_BY_SILENCE,),
        ),
    ),
    Rule(
        states=_only(State.RECEIVED),
        advice=Advice(
            step="Wait for the settlement.",
            who="host",
            why="The provider's receipt is stored and decides it.",
            never=("Do not send it again: it was taken.",),
        ),
    ),
    # settled without having been taken
    Rule(
        states=_only(State.SETTLED),
        effects=frozenset({Effect.NONE}),
        operations=READS,
        advice=Advice(
            step="Use the result; ask again for something newer.",
            who="caller",
            why="The read has its final answer; the run is told by its own view.",
            never=(NO_END_BY_SILENCE,),
        ),
    ),
    Rule(
        states=_only(State.SETTLED),
        effects=frozenset({Effect.NONE}),
        advice=Advice(
            step="Correct the cause and submit a new Action if it is still wanted.",
            who="caller",
            why="It is settled, and proven to have had no effect by itself.",
        ),
    ),
    Rule(
        states=_only(State.SETTLED),
        effects=frozenset({Effect.POSSIBLE}),
        operations=READS,
        advice=Advice(
            step="Read the run's view.",
            who="caller",
            why="The events ended without a proven end; the run is told by its own view.",
            unknown=("The events that were missed.",),
            never=(NO_END_BY_SILENCE,),
        ),
    ),
    Rule(
        states=_only(State.SETTLED),
        effects=frozenset({Effect.POSSIBLE}),
        advice=Advice(
            step="Treat its effects as possibly present in whatever follows.",
            who="operator",
            why="It was settled by a finding, without provider evidence.",
            unknown=("Whether the provider ever took it.",),
            never=(NO_GUESS,),
        ),
    ),
    # settled and taken: the run goes on by itself
    Rule(
        operations=READS,
        states=_only(State.SETTLED),
        advice=Advice(
            step="Use the result; ask again for something newer.",
            who="caller",
            why="The read has its final answer; the run is told by its own view.",
            never=(NO_END_BY_SILENCE,),
        ),
    ),
    Rule(
        states=_only(State.SETTLED),
        phases=frozenset({Phase.CONTRADICTED}),
        advice=Advice(
            step="Have a person compare the two ends that are stored.",
            who="operator",
            why="The provider told two different ends of this run.",
            unknown=("Which of the two ends is true.",),
            never=(NO_SECOND_START, "Do not pick one end without evidence."),
        ),
    ),
    Rule(
        states=_only(State.SETTLED),
        phases=frozenset({Phase.ENDED}),
        advice=Advice(
            step="Use the run's result, with its marks.",
            who="caller",
            why="Terminal evidence of the run is stored.",
            never=("Do not take back what tools did by stopping a run that is over.",),
        ),
    ),
    Rule(
        states=_only(State.SETTLED),
        phases=frozenset({Phase.LOST}),
        advice=Advice(
            step="Check what the run may have done where it would show, and record what is found.",
            who="operator",
            why="The provider does not know the run any more, so its end cannot be read.",
            unknown=("How the run ended.", "Which effects it had."),
            never=(NO_SECOND_START, NO_END_BY_SILENCE, NO_GUESS),
        ),
    ),
    Rule(
        operations=frozenset({START}),
        states=_only(State.SETTLED),
        phases=LIVE,
        advice=Advice(
            step="Follow the run by its view.",
            who="host",
            why="The receipt proves that the run was created, not that it works or ended.",
            unknown=("How the run ends.",),
            never=(NO_SECOND_START, NO_END_BY_SILENCE),
        ),
    ),
    Rule(
        operations=frozenset({CHOICE}),
        states=_only(State.SETTLED),
        phases=LIVE,
        advice=Advice(
            step="Follow the run by its view.",
            who="host",
            why="The provider took the choice; a later status or event shows what came of it.",
            unknown=("What the released work does.",),
            never=(NO_SECOND_CHOICE,),
        ),
    ),
    Rule(
        operations=frozenset({STOP}),
        states=_only(State.SETTLED),
        phases=LIVE,
        advice=Advice(
            step="Keep reading the run's status until it shows an end.",
            who="host",
            why="The provider's answer to a stop is a receipt; it proves no interruption.",
            unknown=("Whether the run is over.", "Whether a tool call still works."),
            never=(NO_SECOND_STOP, NO_END_BY_SILENCE),
        ),
    ),
    Rule(
        states=_only(State.SETTLED),
        advice=Advice(
            step="Read the run's view once it is there.",
            who="caller",
            why="The provider took it; the run's own record is not in the view yet.",
            unknown=("The state of the run.",),
            never=(NO_SECOND_START,),
        ),
    ),
)

SAYS: dict[str, str] = {
    "action.accepted": "The request was accepted and stored.",
    "action.approval_requested": "A decision under the tenant's policy was asked for.",
    "action.approval_decided": "The decision was made.",
    "action.approval_expired": "The approval ran out unused.",
    "action.cancel_wished": "Somebody asked to cancel it.",
    "attempt.claimed": "The right to send it once was taken.",
    "attempt.accepted": "The provider's receipt came.",
    "attempt.closed": "The attempt proved to be without effect: refused, or never sent.",
    "attempt.unknown": "No answer proves what became of the attempt.",
    "attempt.evidence_found": "Evidence about the attempt came from another source.",
    "action.settled": "The final answer was stored.",
    "owner.changed": "Another host process took the work over.",
    "run.bound": "The provider named the run.",
    "run.status_seen": "A status of the run was read.",
    "run.status_unread": "Status reads began to fail.",
    "run.choice_claimed": "The right to send a choice once was taken.",
    "run.choice_answered": "What became of the choice was stored.",
    "run.stop_claimed": "The right to send a stop once was taken.",
    "run.stop_answered": "What became of the stop was stored.",
    "run.ended": "Terminal evidence of the run was stored.",
    "run.end_disputed": "Later evidence says otherwise about the end.",
    "run.integrity_marked": "Facts that exclude each other were found.",
    "run.deadline_passed": "The run outlived its deadline.",
    "stream.subscription_intended": "The event stream was about to be opened.",
    "stream.subscription_opened": "The event stream was opened.",
    "stream.gap_opened": "From here on events may be missing.",
    "stream.gap_closed": "The far edge of the missing events is known.",
    "stream.closed": "The event stream is over.",
}


def advise(operation: Operation, state: State, effect: Effect, phase: Phase | None) -> Advice:
    """The table's answer; there is one for every combination."""
    return next(rule.advice for rule in TABLE if rule.matches(operation, state, effect, phase))


def _facts(row: ActionRow | RunRow) -> list[dict[str, str]]:
    return [
        {
            "fact": SAYS.get(fact.topic, fact.topic),
            "at": rfc3339(fact.at),
            "event": fact.topic,
            "evidence": fact.evidence,
        }
        | ({"says": fact.word} if fact.word else {})
        for fact in row.facts
    ]


def _unknown(advice: Advice, run: RunRow | None) -> list[dict[str, Any]]:
    unknown: list[dict[str, Any]] = [{"fact": text} for text in advice.unknown]
    if run is not None:
        causes = missing_causes(run)
        if causes:
            unknown.append({"fact": "Why the provider does not know the run.", "can_be": causes})
        unknown += [
            {"fact": "Which events were missed.", "after": gap.after, "before": gap.before} for gap in run.stream.gaps
        ]
        if run.run.ended is not None:
            unknown.append({"fact": "Effects of tools that were at work when the run ended."})
    return unknown


def explain_action(row: ActionRow, run: RunRow | None = None) -> dict[str, Any]:
    """``/views/actions/{id}``. ``run`` is the row of the Action's run, if it has one."""
    action = row.action
    effect = action.settled.effect if action.settled else action.effect
    bound = run if run is not None and run.run.bound is not None else None
    advice = advise(row.request.operation, action.state, effect, bound.run.phase if bound else None)
    body: dict[str, Any] = {
        "action_id": row.request.action_id,
        "operation": row.request.operation.value,
        "endpoint_id": row.request.endpoint_id,
        "state": row.state,
        "effect": effect.value,
        "facts_known": _facts(row),
        "facts_unknown": _unknown(advice, bound),
        "next_step": {"do": advice.step, "who": advice.who, "why": advice.why},
        "must_not": list(advice.never),
        "notices": list(row.request.notices),
        "needs": [need.id for need in row.open_needs],
        "status": action_status(row),
        "run": None,
    }
    if bound is not None:
        body["run"] = {
            "run_id": bound.run.tie.run_id,
            "state": bound.state,
            "unknown_reason": bound.unknown_reason or None,
            "last_observed_at": rfc3339(bound.seen_at) if bound.seen_at else None,
            "facts": _facts(bound),
            "pending_approvals": pending_approvals(bound),
            "needs": [need.id for need in bound.open_needs],
        }
    return body
