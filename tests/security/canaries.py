"""Canaries: random marks in everything that is secret, a host that works with them, and what it left behind."""

from __future__ import annotations

import base64
import binascii
import http.client
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import psycopg
from psycopg.conninfo import make_conninfo

from adapters.client import CallFailed, segment
from adapters.credentials import write_secret
from adapters.migrate import migrate
from adapters.postgres import EmbeddedPostgres
from adapters.principals import entry_toml, make_token
from tests.pg import until
from tests.process.site import CLOCK, HostProcess, Site, found, site

SCOPES = {
    "admin": ("*",),
    "approver": ("action:read:any", "approval:read:any", "approval:write", "data:sensitive:read"),
    "reader": ("action:read:any", "approval:read:any", "events:read:any", "audit:read:any", "action:write"),
}
TENANT, WRONG = "default", "wrong-token-"


def mark(name: str) -> str:
    """A text that stands nowhere else."""
    return f"{name}{CLOCK.entropy(16).hex()}"


class Payload(msgspec.Struct, frozen=True):
    """What callers and the provider say in confidence."""

    input: str = msgspec.field(default_factory=lambda: mark("inp"))
    instructions: str = msgspec.field(default_factory=lambda: mark("ins"))
    session_key: str = msgspec.field(default_factory=lambda: mark("sek"))
    tool: str = msgspec.field(default_factory=lambda: mark("too"))
    output: str = msgspec.field(default_factory=lambda: mark("out"))
    failure: str = msgspec.field(default_factory=lambda: mark("fai"))
    refusal: str = msgspec.field(default_factory=lambda: mark("ref"))
    garbage: str = msgspec.field(default_factory=lambda: mark("gar"))
    command: str = msgspec.field(default_factory=lambda: mark("cmd"))
    misplaced: str = msgspec.field(default_factory=lambda: mark("mis"))


class Left(msgspec.Struct, kw_only=True):
    """Everything that was left behind, as bytes by place."""

    payload: Payload
    secrets: dict[str, bytes]
    rows: dict[str, bytes]
    files: dict[str, bytes] = {}
    logs: dict[str, bytes] = {}
    open_routes: dict[str, bytes] = {}
    errors: dict[str, bytes] = {}
    unscoped: dict[str, bytes] = {}
    scoped: dict[str, bytes] = {}
    erased: dict[str, bytes] = {}
    refused_start: bytes = b""


def forms(secret: bytes) -> list[bytes]:
    """The ways in which bytes may stand in other bytes: as they are, quoted, in hex, and in base64 at any offset."""
    shifted = [base64.b64encode(b"\0" * pad + secret)[4 if pad else 0 : -4] for pad in range(3)]
    hexed = binascii.hexlify(secret)
    plain = [secret, hexed, hexed.upper(), quote(secret).encode(), *shifted]
    return [form for form in plain if len(form) >= 16]


def hits(marks: Iterable[bytes], places: dict[str, bytes]) -> list[str]:
    """Where any of the marks stands, in any of its forms."""
    wanted = [form for secret in marks for form in forms(secret)]
    return [place for place, content in places.items() if any(form in content for form in wanted)]


def marks(payload: Payload) -> list[bytes]:
    """All marks of a payload."""
    return [text.encode() for text in msgspec.structs.astuple(payload)]


@contextmanager
def left_behind(server: EmbeddedPostgres) -> Iterator[Left]:
    """A host with secrets at every place works through the main flows; what it left, also after erasure."""
    with site(server) as place:
        password = mark("pwd")
        dsn = _with_password(server, place.dsn, password)
        tokens = _principals(place)
        more = '[principals]\nfile = "principals.toml"'
        host = place.host("one", level="DEBUG", dsn_file=place.through(dsn, "secret-dsn"), more=more)
        payload = Payload()
        host.start()
        master = (host.state / "master-key").read_bytes().strip()
        secrets = {name: token.encode() for name, token in tokens.items()}
        secrets |= {
            "endpoint key": (place.folder / "hermes-key").read_bytes().strip(),
            "database password": password.encode(),
            "master key": bytes.fromhex(master.decode()),
        }
        left = Left(payload=payload, secrets=secrets, rows={})
        actions = _flows(place, host, payload, left)
        _outage(server, host)
        host.kill()
        host.start()
        paths = _paths(host, actions)
        left.unscoped |= _read(host, tokens["reader"], paths)
        left.scoped |= _read(host, tokens["admin"], paths)
        left.errors |= _refusals(host, payload, actions)
        left.open_routes |= {
            path: _get(host.operational, path, "")[1] for path in ("/metrics", "/ready", "/health", "/none")
        }
        host.terminate()
        left.rows |= _rows(place.dsn)
        _forget(place, dsn, host)
        host.start()
        left.erased |= _read(host, tokens["admin"], paths)
        host.terminate()
        left.refused_start = _start_with_another_master_key(place, dsn, more)
        server.stop()
        state = server.data_dir.parent
        left.files |= {str(path): path.read_bytes() for path in server.data_dir.rglob("*") if path.is_file()}
        left.logs |= {str(path): path.read_bytes() for path in state.glob("postgres.log*")}
        left.logs |= {
            path.name: path.read_bytes() for suffix in ("out", "err") for path in place.folder.glob(f"*.{suffix}")
        }
        yield left


def _with_password(server: EmbeddedPostgres, dsn: str, password: str) -> str:
    """A role that must prove its password, a member of the application's role and owner of nothing."""
    migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"create role keeper login in role hermes_application password '{password}'".encode())
    rules = server.data_dir / "pg_hba.conf"
    rules.write_text("local all keeper scram-sha-256\n" + rules.read_text("utf-8"), "utf-8")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pg_reload_conf()")
    return make_conninfo(dsn, user="keeper", password=password, require_auth="scram-sha-256")


def _principals(place: Site) -> dict[str, str]:
    tokens, entries = {}, []
    for name, scopes in SCOPES.items():
        roles = ("approver",) if name == "approver" else ()
        token, entry = make_token(CLOCK.entropy, id=name, kind="human", tenant=TENANT, scopes=scopes, roles=roles)
        tokens[name] = token.reveal()
        entries.append(entry_toml(entry))
        write_secret(place.folder / "state" / f"{name}-token", token.reveal().encode(), CLOCK.entropy)
    (place.folder / "principals.toml").write_text("\n".join(entries), "utf-8")
    (place.folder / "principals.toml").chmod(0o600)
    return tokens


# ---- the flows -------------------------------------------------------------------------------------------------------


def _flows(place: Site, host: HostProcess, payload: Payload, left: Left) -> dict[str, str]:
    """Start, tools, failure, approval, stop, status, events, refused and garbled starts; Actions and runs by name."""
    ids: dict[str, str] = {}

    def start(name: str, prompt: str) -> str:
        given = {"body": {"input": prompt, "instructions": payload.instructions}, "session_key": payload.session_key}
        told = host.submit("run_start", given, f"key-{name}")["action_result"]
        ids[name] = told["action_id"]
        return str((told.get("output") or {}).get("run_id", ""))

    work = start("work", f"{payload.input}\nSAY {payload.output}\nTOOL echo {payload.tool}\nTEXT {payload.output}")
    ids["work-run"] = work
    host.run_in(work, "completed")
    failing = start("fail", f"{payload.input}\nFAIL {payload.failure}")
    ids["fail-run"] = failing
    host.run_in(failing, "failed")
    asking = start("ask", f"{payload.input}\nASK rm -rf /srv/{payload.command}")
    ids["ask-run"] = asking
    given = {"run_id": asking, "choice": "once", "reviewed": host.asked(asking), "session_key": payload.session_key}
    pending = host.submit("run_approval", given, "key-choice")["action_result"]
    ids["choice"], ids["approval"] = pending["action_id"], pending["output"]["approval_id"]
    host.decide(ids["approval"])
    host.run_in(asking, "completed")
    long = start("long", f"{payload.input}\nSLEEP 60")
    ids["stop"] = host.submit("run_stop", {"run_id": long}, "key-stop")["action_result"]["action_id"]
    host.run_in(long, "cancelled")
    for name, operation, mode in (("status", "run_status", "sync"), ("events", "run_events", "async")):
        told = host.submit(operation, {"run_id": work}, f"key-{name}", mode=mode)
        ids[name] = (told.get("action_result") or told["ack"])["action_id"]
        host.answered(ids[name])
    refusal = f'{{"error": {{"message": "{payload.refusal}", "type": "invalid_request_error", "code": "bad"}}}}'
    for name, status, kind, body in (
        ("refused", 400, "application/json", refusal),
        ("garbled", 202, "text/html", f"<p>{payload.garbage}</p>"),
        ("broken", 502, "text/html", f"<p>{payload.garbage}</p>"),
    ):
        place.hermes.fault(kind="answer", route="start", status=status, content_type=kind, body=body, carried_out=False)
        start(name, payload.input)
    waiting = start("waiting", f"{payload.input}\nASK rm -rf /srv/{payload.command}")
    ids["waiting-run"] = waiting
    host.asked(waiting)
    place.hermes.fault(kind="answer", route="status", status=500, content_type="text/plain", body=payload.garbage)
    host.submit("run_status", {"run_id": waiting}, "key-bad-status")
    return ids


def _outage(server: EmbeddedPostgres, host: HostProcess) -> None:
    """The database dies under the host and comes back."""
    server.kill()
    until(lambda: host.readiness()[0] == 503)
    server.start()
    until(host.ready, 60)


def _refusals(host: HostProcess, payload: Payload, actions: dict[str, str]) -> dict[str, bytes]:
    """Error bodies of calls that carry marks where they do not belong."""
    wrong = payload.misplaced
    start = {"capability_id": "cap:hermes_agent:practice:run_start"}
    bodies: dict[str, Any] = {
        "unknown member": start | {"input": {"body": {"input": "x"}}, "surplus": wrong},
        "wrong type": start | {"input": {"body": {"input": {"nested": wrong}}}},
        "wrong session key": start | {"input": {"body": {"input": "x"}, "session_key": [wrong]}},
        "changed input": start | {"input": {"body": {"input": wrong}}, "idempotency_key": "key-work"},
        "unknown run": {
            "capability_id": "cap:hermes_agent:practice:run_status",
            "input": {"run_id": "run_x", "a": wrong},
        },
        "no such operation": {"capability_id": "cap:hermes_agent:practice:run_x", "input": {"body": wrong}},
    }
    token = (host.state / "admin-token").read_text("utf-8")
    told = {
        name: _post(host.public, "/aip/v1/actions", msgspec.json.encode(body), token) for name, body in bodies.items()
    }
    told["broken json"] = _post(host.public, "/aip/v1/actions", f'{{"input": "{wrong}'.encode(), token)
    told["wrong token"] = _get(host.public, "/aip/v1/actions", WRONG + wrong)
    told["other path"] = _get(host.public, "/aip/v1/nothing", token)
    told["refused scope"] = _post(
        host.public,
        f"/aip/v1/approvals/{segment(actions['approval'])}/decision",
        msgspec.json.encode({"decision": "approved", "reason": wrong}),
        (host.state / "reader-token").read_text("utf-8"),
    )
    assert {name: status for name, (status, _) in told.items() if status < 400} == {}
    return {name: body for name, (_, body) in told.items()}


# ---- what can be read ------------------------------------------------------------------------------------------------


def _paths(host: HostProcess, ids: dict[str, str]) -> list[str]:
    lists = ["/aip/v1/actions", "/aip/v1/approvals", "/aip/v1/audit/events?limit=500", "/aip/v1/callback-deliveries"]
    lists += ["/views/runs", "/views/recovery", "/views/needs-person", "/aip/v1/manifest", "/aip/v1/capabilities"]
    for name, given in ids.items():
        if name.endswith("-run"):
            lists += [f"/views/runs/{segment(given)}", f"/views/runs/{segment(given)}/events?limit=500"]
        elif name == "approval":
            lists.append(f"/aip/v1/approvals/{segment(given)}")
        else:
            own = f"/aip/v1/actions/{segment(given)}"
            lists += [own, f"{own}/result", f"{own}/events?limit=500", f"{own}/chunks?limit=500"]
            lists.append(f"/views/actions/{segment(given)}")
    return lists


def _read(host: HostProcess, token: str, paths: list[str]) -> dict[str, bytes]:
    told = {path: _get(host.public, path, token) for path in paths}
    assert {path: status for path, (status, _) in told.items() if status >= 500} == {}
    answers = {path: body for path, (_, body) in told.items()}
    for path in paths:
        if path.endswith("/events?limit=500") and "/aip/v1/actions/" in path:
            with suppress(CallFailed):
                followed = host.caller(token, wait_s=3).follow(path.partition("?")[0], follow=True)
                answers[f"{path}&follow"] = msgspec.json.encode([next(followed).data])
    return answers


def _get(origin: str, path: str, token: str) -> tuple[int, bytes]:
    return _call(origin, "GET", path, None, token)


def _post(origin: str, path: str, body: bytes, token: str) -> tuple[int, bytes]:
    return _call(origin, "POST", path, body, token)


def _call(origin: str, method: str, path: str, body: bytes | None, token: str) -> tuple[int, bytes]:
    parts = urlsplit(origin)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        head = "\n".join(f"{name}: {value}" for name, value in answer.getheaders()).encode()
        return answer.status, head + b"\n\n" + answer.read()
    finally:
        connection.close()


def _rows(dsn: str) -> dict[str, bytes]:
    """Every column of every table, and what the server keeps of statements and settings."""
    kept = {}
    with psycopg.connect(dsn, autocommit=True) as connection:
        tables = connection.execute(
            "select format('%I.%I', schemaname, tablename) from pg_tables where schemaname = 'public'"
        ).fetchall()
        names = [table for (table,) in tables] + ["pg_settings", "pg_stat_activity", "pg_db_role_setting"]
        for name in names:
            rows = connection.execute(f"select * from {name}".encode()).fetchall()
            kept[name] = b"\n".join(
                bytes(value) if isinstance(value, bytes | memoryview) else str(value).encode()
                for row in rows
                for value in row
            )
    return kept


# ---- erasure ---------------------------------------------------------------------------------------------------------


def _forget(place: Site, dsn: str, host: HostProcess) -> None:
    """Destroy the data keys of everybody and of this month, as an operator's tool would."""
    import anyio

    from adapters.credentials import master_key
    from adapters.vault import PostgresKeys, Vault

    async def forget() -> int:
        keys = PostgresKeys(dsn)
        vault = Vault(master_key(host.state / "master-key", CLOCK.entropy), keys, CLOCK.entropy)
        gone = sum([await vault.forget(TENANT, name, f"{CLOCK.now():%Y-%m}") for name in SCOPES])
        await keys.close()
        return gone

    assert anyio.run(forget) > 0


def _start_with_another_master_key(place: Site, dsn: str, more: str) -> bytes:
    """What a host says that finds data keys of another master key."""
    other = place.host("two", state="other-state", dsn_file="secret-dsn", more=more, level="DEBUG")
    with psycopg.connect(place.dsn, autocommit=True) as connection:
        connection.execute(
            "insert into data_keys (id, tenant, principal_digest, month, wrapped) values (%s, %s, %s, %s, %s)",
            ["k", "t", "p", "2026-01", CLOCK.entropy(60)],
        )
    other.spawn()
    assert other.process is not None
    assert found(lambda: other.process.poll() if other.process else None) != 0
    return other.out.read_bytes() + other.err.read_bytes()
