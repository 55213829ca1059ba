"""``runs``, ``approvals``, ``recovery`` and ``audit``: what the host knows, and the decisions that wait for people."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from adapters.cli_actions import explain, more, tell_feed
from adapters.cli_output import DONE, pairs, say, table, tell_json
from adapters.cli_remote import APPROVER, HERE, Remote, group

runs = group("runs", "What is known of each Hermes run.")
approvals = group("approvals", "Decisions that the tenant's policy asks of people.")
recovery = group("recovery", "Work that is not settled, and what to do about it.")
audit = group("audit", "The stored events, as they were stored.")

More = Annotated[str, Parameter(help="Where an earlier page ended.")]


# ---- runs ------------------------------------------------------------------------------------------------------------


@runs.command(name="list")
def list_runs(
    *,
    state: str = "",
    endpoint_id: str = "",
    session_id: str = "",
    newest: Annotated[bool, Parameter(help="Latest change first.")] = False,
    limit: int = 100,
    cursor: More = "",
    host: Remote = HERE,
) -> int:
    """List runs with their state."""
    page = (
        host.api()
        .get(
            "/views/runs",
            state=state,
            endpoint_id=endpoint_id,
            session_id=session_id,
            newest=newest,
            limit=limit,
            cursor=cursor,
        )
        .body
    )
    if host.json:
        tell_json(page)
        return DONE
    rows = [
        (r["run_id"], r["endpoint_id"], _state(r), r["pending_approvals"], r["gaps"], r["updated_at"])
        for r in page["runs"]
    ]
    table(("run", "endpoint", "state", "asks", "gaps", "changed"), rows, none="No runs.")
    more(page)
    return DONE


@runs.command(name="show")
def show_run(run_id: str, *, endpoint_id: str = "", host: Remote = HERE) -> int:
    """Everything known of one run, and what is missing."""
    from adapters.client import segment

    view = host.api().get(f"/views/runs/{segment(run_id)}", endpoint_id=endpoint_id).body
    if host.json:
        tell_json(view)
    else:
        tell_run(view)
    return DONE


def tell_run(view: dict[str, Any]) -> None:
    """The view of a run for people."""
    say(f"{view['run_id']} at {view['endpoint_id']}: {_state(view)}")
    events, end = view["events"], view["end"]
    pairs(
        [
            ("started", view["started_at"]),
            ("last observed", view["last_observed_at"]),
            ("provider said", [f"{s['state']} at {s['first_seen_at']}" for s in view["states"]]),
            (
                "events",
                f"{events['stored']} stored ({', '.join(f'{n} {kind}' for kind, n in events['by_kind'].items())})",
            ),
            ("gaps", [f"after event {gap['after']}: {gap['reason']}" for gap in events["gaps"]]),
            ("marks", view["marks"]),
            ("end", f"{end['state']}, by {end['source']} [{end['evidence']}]" if end["known"] else end["why"]),
            ("end can be missing by", [cause["cause"] for cause in end.get("missing_can_mean", ())]),
            ("output", (view.get("result") or {}).get("output")),
            ("actions", [f"{name}: {', '.join(ids)}" for name, ids in view["actions"].items()]),
        ]
    )
    for ask in view["pending_approvals"]:
        say(f"  the provider waits for a choice ({', '.join(ask['choices'])}); reviewed digest: {ask['digest']}")


def _state(run: dict[str, Any]) -> str:
    return str(run["state"]) + (f" ({run['unknown_reason']})" if run.get("unknown_reason") else "")


@runs.command(name="events")
def run_events(
    run_id: str,
    *,
    endpoint_id: str = "",
    follow: Annotated[bool, Parameter(help="Go on until the observation is over.")] = False,
    limit: int = 100,
    after: More = "",
    host: Remote = HERE,
) -> int:
    """Every stored event of one run, the provider's among them."""
    from adapters.client import segment

    path = f"/views/runs/{segment(run_id)}/events"
    if follow:
        return tell_feed(host, path, endpoint_id=endpoint_id, limit=limit, after=after)
    page = host.api().get(path, endpoint_id=endpoint_id, limit=limit, after=after).body
    if host.json:
        tell_json(page)
        return DONE
    table(
        ("at", "kind", "data"),
        [(e.get("occurred_at"), e.get("kind"), e.get("data")) for e in page["events"]],
        none="No events.",
    )
    if not page["terminal"]:
        say(f"More may follow: --after {page['cursor']}")
    return DONE


# ---- approvals -------------------------------------------------------------------------------------------------------


@approvals.command(name="list")
def list_approvals(
    *,
    status: Literal["", "pending", "approved", "denied", "expired", "revoked"] = "",
    limit: int = 100,
    cursor: More = "",
    host: Remote = HERE,
) -> int:
    """List approvals, waiting and settled."""
    page = host.api().get("/aip/v1/approvals", status=status, limit=limit, cursor=cursor).body
    if host.json:
        tell_json(page)
        return DONE
    rows = [
        (r["request"]["id"], r["status"], r["request"]["operation"], r["request"].get("choice"), r["request"]["run_id"])
        for r in page["approval_list"]["approvals"]
    ]
    table(("approval", "status", "operation", "choice", "run"), rows, none="No approvals.")
    more(page["approval_list"])
    return DONE


@approvals.command(name="show")
def show_approval(approval_id: str, *, host: Remote = HERE) -> int:
    """One approval with its evidence."""
    from adapters.client import segment

    told = host.api().get(f"/aip/v1/approvals/{segment(approval_id)}").body
    return _tell_approval(told, host)


@approvals.command
def decide(
    approval_id: str,
    decision: Literal["approved", "denied"],
    *,
    reason: Annotated[str, Parameter(help="Why; kept with the decision, which needs one.")] = "",
    host: Remote = HERE,
) -> int:
    """Decide as the principal `approver` of the state folder, or of --token-file; the requester is refused."""
    from adapters.client import segment

    body = {"decision": decision, "reason": reason}
    told = host.api(APPROVER).post(f"/aip/v1/approvals/{segment(approval_id)}/decision", body).body
    return _tell_approval(told, host)


def _tell_approval(told: dict[str, Any], host: Remote) -> int:
    if host.json:
        tell_json(told)
        return DONE
    record = told["approval_record_view"]
    request, decided = record["request"], record.get("decision") or {}
    say(f"{request['id']}: {record['status']}")
    pairs(
        [
            ("asks for", f"{request['operation']} of run {request['run_id']}"),
            ("choice", request.get("choice")),
            ("asked by", request["requester"]["id"]),
            ("reason", request["reason"]),
            ("expires", request["expires_at"]),
            ("decided by", (decided.get("approver") or {}).get("id")),
            ("decision", decided.get("decision")),
            ("input", (record.get("evidence_payload") or {}).get("input")),
        ]
    )
    return DONE


# ---- recovery --------------------------------------------------------------------------------------------------------


@recovery.command(name="show")
def show_recovery(*, limit: int = 100, host: Remote = HERE) -> int:
    """Work that is not settled, grouped by reason, and what start-up recovery found."""
    view = host.api().get("/views/recovery", limit=limit).body
    if host.json:
        tell_json(view)
    else:
        tell_recovery(view)
    return DONE


def tell_recovery(view: dict[str, Any]) -> None:
    """The recovery view for people."""
    say(f"{view['total']} {'piece of work is' if view['total'] == 1 else 'pieces of work are'} not settled.")
    for part in view["groups"]:
        say(f"{part['count']} {part['reason']}: {part['means']}")
        for work in part["work"]:
            about = [work.get("operation"), work["action_id"], work.get("run_id"), f"at {work['endpoint_id']}"]
            say("  " + "  ".join(str(word) for word in about if word))
    if view["at_start"]:
        say("At start: " + ", ".join(f"{name} {value}" for name, value in view["at_start"].items()))


@recovery.command(name="explain")
def explain_one(action_id: str, *, host: Remote = HERE) -> int:
    """Explain one Action: facts, what is unknown, the one next step, and what must not be done."""
    from adapters.client import segment

    body = host.api().get(f"/views/actions/{segment(action_id)}").body
    if host.json:
        tell_json(body)
    else:
        explain(body)
    return DONE


@recovery.command
def needs_person(
    *,
    follow: Annotated[bool, Parameter(help="Go on with what begins to wait.")] = False,
    limit: int = 100,
    cursor: More = "",
    host: Remote = HERE,
) -> int:
    """Work that waits for a person, with the possible decisions."""
    if follow:
        return tell_feed(host, "/views/needs-person", limit=limit, cursor=cursor)
    page = host.api().get("/views/needs-person", limit=limit, cursor=cursor).body
    if host.json:
        tell_json(page)
        return DONE
    for need in page["needs_person"]:
        say(f"{need['since']}  {need['reason']}: {need['why']}")
        pairs([("action", need["action_id"]), ("run", need.get("run_id")), ("decisions", need["decisions"])])
    if not page["needs_person"]:
        say("Nothing waits for a person.")
    more(page)
    return DONE


def tell_tour(views: dict[str, Any]) -> None:
    """The views at the end of a tour."""
    for title, run in (
        ("A run that completed", views["first_run"]),
        ("A run whose evidence is lost", views["lost_run"]),
    ):
        say(f"\n{title}:")
        tell_run(run)
    say("\nThe start whose host was killed:")
    explain(views["explained"])
    say("\nRecovery:")
    tell_recovery(views["recovery"])


# ---- audit -----------------------------------------------------------------------------------------------------------


@audit.command(name="events")
def audit_events(
    *,
    action_id: str = "",
    run_id: str = "",
    principal_id: str = "",
    since: Annotated[str, Parameter(help="At or after this RFC 3339 time.")] = "",
    until: Annotated[str, Parameter(help="Before this RFC 3339 time.")] = "",
    limit: int = 100,
    cursor: More = "",
    host: Remote = HERE,
) -> int:
    """Stored events with their place in the journal."""
    query = {"from": since, "to": until, "action_id": action_id, "run_id": run_id, "principal_id": principal_id}
    page = host.api().get("/aip/v1/audit/events", **query, limit=limit, cursor=cursor).body
    if host.json:
        tell_json(page)
        return DONE
    found = page["audit_query_result"]
    rows = [
        (e["data"]["position"], e["occurred_at"], e["actor"]["id"], e["action"], e["data"]["history"])
        for e in found["events"]
    ]
    table(("position", "at", "actor", "event", "history"), rows, none="No events on this page.")
    more(found)
    return DONE
