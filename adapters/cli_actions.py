"""``actions``: submit work, see where it stands, cancel it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from adapters.cli_output import DONE, REFUSED, UNKNOWN, note, pairs, program, say, table, tell_json
from adapters.cli_remote import HERE, Remote, group

if TYPE_CHECKING:
    from adapters.client import Api, Told

app = group("actions", "Submit Actions, see where they stand, cancel them.")
STATUS_CODES = {"completed": DONE, "pending_approval": DONE, "requires_human": UNKNOWN}


@app.command(name="list")
def list_(
    *,
    state: str = "",
    capability_id: str = "",
    endpoint_id: str = "",
    run_id: str = "",
    principal_id: str = "",
    session_id: str = "",
    since: Annotated[str, Parameter(help="Accepted at or after this RFC 3339 time.")] = "",
    until: Annotated[str, Parameter(help="Accepted before this RFC 3339 time.")] = "",
    limit: int = 100,
    cursor: str = "",
    host: Remote = HERE,
) -> int:
    """List Actions by the position of their last change."""
    told = host.api().get(
        "/aip/v1/actions",
        state=state,
        capability_id=capability_id,
        endpoint_id=endpoint_id,
        run_id=run_id,
        principal_id=principal_id,
        session_id=session_id,
        since=since,
        until=until,
        limit=limit,
        cursor=cursor,
    )
    if host.json:
        tell_json(told.body)
        return DONE
    page = told.body["action_list"]
    rows = [
        (a["action_id"], a["capability_id"].rpartition(":")[2], a["state"], a["updated_at"]) for a in page["actions"]
    ]
    table(("action", "operation", "state", "changed"), rows, none="No Actions.")
    more(page)
    return DONE


@app.command
def show(action_id: str, *, host: Remote = HERE) -> int:
    """Explain one Action: what is known and by which event, what is not, and the one next step."""
    from adapters.client import segment

    explained = host.api().get(f"/views/actions/{segment(action_id)}").body
    if host.json:
        tell_json(explained)
    else:
        explain(explained)
    return DONE


def explain(body: dict[str, Any]) -> None:
    """An explained Action for people."""
    say(f"{body['action_id']}  {body['operation']} at {body['endpoint_id']}: {body['state']}, effect {body['effect']}")
    for fact in body["facts_known"]:
        said = f" ({fact['says']})" if fact.get("says") else ""
        say(f"  known    {fact['at']}  {fact['fact']}{said}  [{fact['evidence']}]")
    for fact in body["facts_unknown"]:
        say(f"  unknown  {fact['fact']}")
    step = body["next_step"]
    say(f"  next     {step['do']} (by {step['who']}) {step['why']}")
    for never in body["must_not"]:
        say(f"  never    {never}")
    if body.get("run"):
        run = body["run"]
        why = f" ({run['unknown_reason']})" if run.get("unknown_reason") else ""
        say(f"  run      {run['run_id']}: {run['state']}{why}")


@app.command
def submit(
    capability: Annotated[str, Parameter(help="Capability id, or an operation such as run_start.")],
    *,
    endpoint: Annotated[str, Parameter(help="Endpoint of an operation; needed where several are admitted.")] = "",
    text: Annotated[str, Parameter(help="Prompt of a run_start.")] = "",
    run_id: Annotated[str, Parameter(help="Run that the operation speaks to.")] = "",
    choice: Annotated[str, Parameter(help="Choice of a run_approval: once or deny.")] = "",
    reviewed: Annotated[str, Parameter(help="Digest of the reviewed request of a run_approval.")] = "",
    input: Annotated[str, Parameter(help="The whole input as a JSON object.")] = "",  # noqa: A002
    key: Annotated[str, Parameter(help="Idempotency key; one is made and told if a mutation has none.")] = "",
    mode: Annotated[str, Parameter(help="sync: wait for the result; async: be told that it is accepted.")] = "sync",
    timeout_ms: int | None = None,
    reason: Annotated[str, Parameter(help="Why; kept with the approval.")] = "",
    host: Remote = HERE,
) -> int:
    """Submit one Action. Repeat it with the same --key whenever its answer was lost."""
    import json

    from adapters.clock import SystemClock

    try:
        given = json.loads(input) if input else {}
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ValueError("--input is a JSON object")
    given |= {"body": given.get("body", {}) | {"input": text}} if text else {}
    wanted = {"run_id": run_id, "choice": choice, "reviewed": reviewed}
    given |= {name: value for name, value in wanted.items() if value}
    api = host.api()
    capability_id = (
        capability if capability.startswith("cap:") else f"cap:hermes_agent:{_one(api, endpoint)}:{capability}"
    )
    if not key and capability_id.rpartition(":")[2] in ("run_start", "run_approval", "run_stop"):
        key = SystemClock().new_id("key_")
        note(f"idempotency key: {key}")
    body = {"capability_id": capability_id, "input": given, "mode": mode, "timeout_ms": timeout_ms, "reason": reason}
    told = api.post(
        "/aip/v1/actions", {name: value for name, value in body.items() if value not in (None, "")}, key=key
    )
    return tell_result(told, as_json=host.json)


def _one(api: Api, endpoint: str) -> str:
    if endpoint:
        return endpoint
    admitted = api.get("/aip/v1/manifest").body["compatibility"]["endpoints"]
    if len(admitted) != 1:
        raise ValueError(f"name one --endpoint of: {', '.join(admitted) or 'none is admitted'}")
    return str(admitted[0])


def tell_result(told: Told, *, as_json: bool) -> int:
    """Print a result or an acknowledgement; the exit code."""
    result = told.body.get("action_result")
    if as_json:
        tell_json(told.body)
    elif result is None:
        ack = told.body["ack"]
        say(f"{ack['action_id']}: {ack['status']}")
    else:
        say(f"{result['action_id']}: {result['status']}" + ("" if result["settled"] else " (not settled)"))
        output = result.get("output")
        pairs(output.items() if isinstance(output, dict) else [("output", output)])
        if result["status"] == "pending_approval" and isinstance(output, dict):
            decide = f"approvals decide {output['approval_id']} approved --reason WHY"
            say(f"Another principal decides: {program()} {decide}")
        if (error := result.get("error")) and result["status"] != "pending_approval":
            say(f"  {error['code']}: {error['message']} Effect: {error['effect']}.")
            if error["effect"] == "possible":
                say(f"  It is never sent again by this host; see: {program()} actions show {result['action_id']}")
    return DONE if result is None else STATUS_CODES.get(result["status"], REFUSED)


@app.command
def result(action_id: str, *, host: Remote = HERE) -> int:
    """Print the retained result; 3 if the outcome is unknown, 1 if it failed or is not there yet."""
    from adapters.client import segment

    return tell_result(host.api().get(f"/aip/v1/actions/{segment(action_id)}/result"), as_json=host.json)


@app.command
def events(
    action_id: str,
    *,
    follow: Annotated[bool, Parameter(help="Go on until nothing can follow.")] = False,
    limit: int = 100,
    cursor: str = "",
    host: Remote = HERE,
) -> int:
    """Print the stored events of one Action; with --follow and --json one object a line."""
    from adapters.client import segment

    path = f"/aip/v1/actions/{segment(action_id)}/events"
    if follow:
        return tell_feed(host, path, limit=limit, cursor=cursor)
    page = host.api().get(path, limit=limit, cursor=cursor).body
    if host.json:
        tell_json(page)
        return DONE
    for event in page["action_events"]["events"]:
        tell_event(event)
    for chunk in page["action_events"]["chunks"]:
        say(f"chunk {chunk['sequence']}  {chunk['kind']}")
    more(page["action_events"])
    return DONE


def tell_feed(host: Remote, path: str, **query: Any) -> int:
    """Follow a feed and print what comes."""
    for notice in host.api().follow(path, follow=True, **query):
        if host.json:
            tell_json({"event": notice.event, "id": notice.id, "data": notice.data}, line=True)
        elif "event" in notice.data:
            tell_event(notice.data["event"])
        elif "chunk" in notice.data:
            say(f"chunk {notice.data['chunk']['sequence']}  {notice.data['chunk']['kind']}")
        elif notice.data.get("terminal"):
            say("Nothing can follow.")
    return DONE


def tell_event(event: dict[str, Any]) -> None:
    """One event of a feed for people."""
    at = event.get("occurred_at") or event.get("at") or event.get("since") or ""
    about = event.get("why") or event.get("data") or ""
    pairs([(f"{at}  {event.get('reason') or event.get('kind')}", about or "-")])


def more(page: dict[str, Any]) -> None:
    """Where a list goes on, if it does."""
    if page.get("cursor") and not page.get("terminal"):
        say(f"More: --cursor {page['cursor']}")


@app.command
def cancel(action_id: str, *, reason: str = "", host: Remote = HERE) -> int:
    """Cancel an Action that is not settled; a run that was started is stopped by run_stop."""
    from adapters.client import segment

    told = host.api().post(f"/aip/v1/actions/{segment(action_id)}/cancel", {"reason": reason})
    if host.json:
        tell_json(told.body)
    else:
        done = told.body["cancel"]
        say(f"{action_id}: {done['what'].replace('_', ' ')}; now {told.body['action_status']['state']}")
        if done.get("stop_action_id"):
            say(f"  stop: {done['stop_action_id']}")
    return DONE
