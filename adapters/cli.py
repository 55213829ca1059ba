"""``hermes-reconciler``: the command line. Heavy parts are imported by the command that needs them.

Exit codes: 0 done, 1 refused or a failed check, 2 wrong usage, 3 sent with an unknown outcome.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from adapters import cli_actions, cli_local, cli_views
from adapters.cli_output import DONE, REFUSED, USAGE, note, program, say, tell_error, tell_json
from adapters.cli_remote import HERE, Remote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from adapters.serve import Addresses
    from adapters.settings import Settings

INTERRUPTED, BROKEN_PIPE = 130, 141


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hermes-reconciler")
    except PackageNotFoundError:
        from adapters.endpoints import RELEASE

        return RELEASE


app = App(
    name="hermes-reconciler",
    help="A durable host in front of Hermes Agent: claims before effects, evidence before answers.",
    help_epilogue="Exit codes: 0 done, 1 refused or a failed check, 2 wrong usage, 3 unknown outcome.",
    help_format="plaintext",
    help_formatter="plain",
    version=_version,
    default_parameter=Parameter(negative=""),
)
for sub in (
    cli_actions.app,
    cli_views.runs,
    cli_views.approvals,
    cli_views.recovery,
    cli_views.audit,
    cli_local.settings,
    cli_local.token,
):
    app.command(sub)

State = Annotated[Path | None, Parameter(help="State folder (default: .hermes-reconciler).")]


@app.command
def serve(
    *,
    config: Annotated[Path | None, Parameter(help="Settings file (default: hermes-reconciler.toml)")] = None,
    state: State = None,
    public_port: Annotated[int | None, Parameter(help="Port of the public listener; 0: any free one.")] = None,
    operational_port: Annotated[int | None, Parameter(help="Port of the operational listener; 0: any.")] = None,
    json: Annotated[bool, Parameter(help="Tell the start as JSON, one object a line.")] = False,
) -> int:
    """Run the host until Ctrl-C or SIGTERM, which let calls in hand end; a second one ends it at once."""
    import anyio

    from adapters import logs
    from adapters.serve import serve as run
    from adapters.settings import load

    read = load(config, _environment(state, public_port, operational_port))
    logs.configure(read.logging.level)

    def progress(text: str) -> None:
        tell_json({"progress": text}, line=True) if json else say(text)

    def ready(addresses: Addresses) -> None:
        _tell_ready(read, addresses, as_json=json)

    anyio.run(lambda: run(read, environ=os.environ, progress=progress, ready=ready))
    progress("ended")
    return DONE


def _environment(state: Path | None, public: int | None, operational: int | None) -> Mapping[str, str]:
    given = {"STATE__DIR": state, "PUBLIC__PORT": public, "OPERATIONAL__PORT": operational}
    if state is not None:
        given["STATE__DIR"] = state.absolute()
    return os.environ | {f"HERMES_RECONCILER_{name}": str(value) for name, value in given.items() if value is not None}


def _tell_ready(read: Settings, addresses: Addresses, *, as_json: bool) -> None:
    """Where it listens, where the tokens are, and what to try."""
    state = read.state.dir
    own = (
        None
        if read.principals.file
        else {"admin": str(state / "admin-token"), "approver": str(state / "approver-token")}
    )
    if as_json:
        listening = {"public": addresses.public, "operational": addresses.operational}
        tell_json({"ready": listening, "token_files": own, "pid": os.getpid()}, line=True)
        return
    say(f"public       {addresses.public}  (OpenAPI at /openapi.json)")
    say(f"operational  {addresses.operational}  (/health /ready /metrics)")
    if own is None:
        say(f"principals   {read.principals.file}")
        token = "TOKEN_FILE"
    else:
        say(f"tokens       {own['admin']} and {own['approver']}")
        token = own["admin"]
    command = program()
    to = f"--url {addresses.public} --token-file {token}"
    say("Try:")
    say(f"  curl -s {addresses.operational}/ready")
    say(f"  {command} actions submit run_start --text 'Say hello' {to}")
    say(f"  {command} runs list {to}")
    say("Ctrl-C ends it; calls in hand are awaited. A second Ctrl-C ends it at once.")


@app.command
def tour(
    *,
    state: Annotated[Path | None, Parameter(help="Empty folder to work in (default: a temporary one).")] = None,
    json: Annotated[bool, Parameter(help="Print what was expected and seen as JSON.")] = False,
) -> int:
    """Play start, approval, stop, lost receipts and killed processes against a practice Hermes; under a minute."""
    from adapters.tour import play

    report = play(state, note if json else say)
    if json:
        tell_json(report)
    else:
        cli_views.tell_tour(report["views"])
        say("Everything was as expected." if report["passed"] else "NOT everything was as expected.")
    return DONE if report["passed"] else REFUSED


@app.command
def verify(
    *,
    endpoint: Annotated[tuple[str, ...], Parameter(help="Endpoint to check; all admitted ones if none is named.")] = (),
    start_runs: Annotated[bool, Parameter(help="Permit runs with a harmless prompt.")] = False,
    start_prompt: Annotated[str, Parameter(help="The harmless prompt.")] = "Answer with the single word ready.",
    approval_prompt: Annotated[
        str,
        Parameter(
            help="Prompt that makes the agent ask before a command, and go on when denied; answered with deny, or "
            "stopped."
        ),
    ] = "",
    restart_command: Annotated[str, Parameter(help="Command that kills and restarts the endpoint's process.")] = "",
    retention: Annotated[
        bool,
        Parameter(
            help="Wait until the endpoint has dropped a finished run: an hour, or a day where it keeps keyed runs."
        ),
    ] = False,
    approver_token_file: Annotated[Path | None, Parameter(help="Token of a principal that may approve.")] = None,
    record: Annotated[Path | None, Parameter(help="Write the evidence record to this JSON file.")] = None,
    wait: Annotated[int, Parameter(help="Seconds until a step counts as failed.")] = 120,
    host: Remote = HERE,
) -> int:
    """Check an integration through a running host; 0 only if all eight checks passed for every endpoint."""
    from adapters.verify import Permits, endpoint_keys, tell, verify_host, write_record

    permits = Permits(
        start_runs=start_runs,
        start_prompt=start_prompt,
        approval_prompt=approval_prompt,
        restart_command=restart_command,
        retention=retention,
        wait_s=wait,
    )
    approver = Remote(url=host.url, token_file=approver_token_file, config=host.config).api("approver-token")
    report = verify_host(host.api(), approver, permits, endpoint, endpoint_keys(host.config), note)
    if record is not None:
        write_record(record, report)
    if host.json:
        tell_json(report)
    else:
        tell(report, say)
    return DONE if report["passed"] else REFUSED


def main(words: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    words = list(sys.argv[1:] if words is None else words)
    try:
        code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        code = code if isinstance(code, int) else DONE
    except CycloptsError as error:
        name = next((word for word in words[:1] if not word.startswith("-")), "")
        note(f"{error}\nSee: hermes-reconciler {name} --help")
        code = USAGE
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    except Exception as error:
        told = _error_object(error)
        if told is not None:
            code = tell_error(told, as_json="--json" in words)
        elif isinstance(error, ValueError):
            note(str(error))
            code = USAGE
        else:
            raise
    sys.exit(code)


def _error_object(error: Exception) -> Mapping[str, Any] | None:
    """What a refusal tells of itself; None for any other exception."""
    from adapters.client import CallFailed
    from domain.errors import HostError

    if isinstance(error, CallFailed):
        return error.error
    return error.body() if isinstance(error, HostError) else None


if __name__ == "__main__":
    main()
