"""``settings`` and ``token``: what needs no running host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from adapters.cli_output import DONE, note, say, tell_json
from adapters.cli_remote import group

if TYPE_CHECKING:
    from adapters.principals import Entry
    from adapters.settings import Settings

settings = group("settings", "Settings as a host would read them.")
token = group("token", "Bearer tokens and the principals that they name.")

Config = Annotated[Path | None, Parameter(help="Settings file (default: hermes-reconciler.toml where it exists).")]
Json = Annotated[bool, Parameter(help="Print the answer as JSON.")]
Into = Annotated[Path | None, Parameter(help="Principals file to append the entry to; else it is printed.")]
Kind = Literal["human", "agent", "service", "tenant", "customer", "contact", "system"]
Scopes = Annotated[
    tuple[str, ...],
    Parameter(name="--scope", help="A scope of the principal, such as action:write, or * for all; may be repeated."),
]
Roles = Annotated[
    tuple[str, ...],
    Parameter(name="--role", help="A role of the principal, such as approver; may be repeated."),
]


# ---- settings --------------------------------------------------------------------------------------------------------


@settings.command
def show(*, config: Config = None, json: Json = False) -> int:
    """Every setting in force, secrets masked."""
    from adapters.settings import load

    read = load(config, os.environ)
    if json:
        tell_json(read.shown())
        return DONE
    _tell_section(read.shown(), "")
    say(f"revision {read.revision()}")
    return DONE


def _tell_section(values: dict[str, object], where: str) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _tell_section(value, f"{where}{name}.")
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                _tell_section(item, f"{where}{name}[{number}].") if isinstance(item, dict) else say(
                    f"{where}{name} = {item}"
                )
        else:
            say(f"{where}{name} = {value}")


@settings.command
def check(*, config: Config = None, json: Json = False) -> int:
    """Read settings, keys, principals and policies as a host would at its start, and tell what is wrong."""
    from adapters.settings import load

    read = load(config, os.environ)
    found = {"settings": f"revision {read.revision()}"} | _secrets(read) | _files(read)
    if json:
        tell_json({"valid": True, "checked": found})
    else:
        for name, what in found.items():
            say(f"ok  {name}: {what}")
    return DONE


def _secrets(read: Settings) -> dict[str, str]:
    found = {"postgres": "the embedded database" if read.dsn() is None else "an external database"}
    for endpoint in read.endpoints:
        key = endpoint.key()
        found[f"endpoint {endpoint.id}"] = f"{endpoint.base_url}, {'with a key' if key else 'without a key'}"
    if not read.endpoints:
        found["endpoints"] = "none; a host would serve a practice Hermes"
    return found


def _files(read: Settings) -> dict[str, str]:
    from adapters.principals import Policies, Principals

    found = {}
    if read.principals.file:
        found["principals"] = f"{len(Principals(file=read.principals.file))} tokens"
    if read.policy.file:
        Policies(file=read.policy.file)
        found["policy"] = str(read.policy.file)
    return found


# ---- tokens ----------------------------------------------------------------------------------------------------------


@token.command
def new(
    id: str,  # noqa: A002
    *,
    token_file: Annotated[Path, Parameter(help="Where the token is written (0600); an existing file is kept.")],
    principals: Into = None,
    kind: Kind = "service",
    tenant: str = "default",
    scopes: Scopes = (),
    roles: Roles = (),
    json: Json = False,
) -> int:
    """Make a token: the token goes into a file, only its digest into the entry."""
    from adapters.clock import SystemClock
    from adapters.credentials import write_secret
    from adapters.principals import make_token

    clock = SystemClock()
    secret, entry = make_token(clock.entropy, id=id, kind=kind, tenant=tenant, scopes=scopes, roles=roles)
    if principals is not None:
        _check_admits(entry, principals)
    if not write_secret(token_file, secret.reveal().encode() + b"\n", clock.entropy):
        raise ValueError(f"{token_file} exists; name another file")
    return _tell_entry(entry, principals, token_file, as_json=json)


@token.command(name="import")
def import_(
    id: str,  # noqa: A002
    *,
    token_file: Annotated[Path, Parameter(help="File (0600) with a token that was made elsewhere.")],
    principals: Into = None,
    kind: Kind = "service",
    tenant: str = "default",
    scopes: Scopes = (),
    roles: Roles = (),
    json: Json = False,
) -> int:
    """Admit a token that was made elsewhere."""
    from adapters.credentials import bearer_key
    from adapters.principals import import_token

    entry = import_token(bearer_key(token_file), id=id, kind=kind, tenant=tenant, scopes=scopes, roles=roles)
    if principals is not None:
        _check_admits(entry, principals)
    return _tell_entry(entry, principals, token_file, as_json=json)


def _check_admits(entry: Entry, file: Path) -> None:
    """Refuse an entry that contradicts those of the file, before anything is written."""
    from adapters.principals import Principals, read_principals

    Principals((*(read_principals(file) if file.exists() else ()), entry))


def _tell_entry(entry: Entry, principals: Path | None, token_file: Path, *, as_json: bool) -> int:
    from adapters.principals import entry_toml

    if principals is not None:
        _append(principals, entry_toml(entry))
    if as_json:
        import msgspec

        told = {"entry": msgspec.to_builtins(entry), "token_file": str(token_file)}
        tell_json(told | ({"principals_file": str(principals)} if principals else {}))
        return DONE
    if principals is None:
        say(entry_toml(entry))
        note("Append this entry to the principals file, then send SIGHUP to the host.")
    else:
        say(f"{entry.id} of tenant {entry.tenant} is in {principals}; a running host reads it at SIGHUP.")
    say(f"The token is in {token_file}." if principals is not None else f"# The token is in {token_file}.")
    return DONE


def _append(file: Path, text: str) -> None:
    """Add an entry, durably; a new file can be written by its owner alone."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.write(("\n" if out.tell() else "") + text)
        out.flush()
        os.fsync(handle)
