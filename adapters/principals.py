"""Who callers are: bearer tokens to principals, and what each tenant's policy grants, both from TOML files.

Only SHA-256 digests of tokens are kept. A look-up compares with every entry in constant time, so that neither the time
nor the order of entries tells how close a guess was. A file that cannot be read again leaves the earlier one in force.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import msgspec

from adapters.credentials import Secret
from adapters.settings import convert, read_toml
from domain.approval import TenantPolicy
from domain.errors import HostError
from domain.provider import CHOICES
from domain.values import ID_PATTERN, MUTATIONS, Actor

SCOPES = frozenset(
    {
        "action:write", "action:read", "approval:read", "approval:write", "events:read", "audit:read", "audit:export",
        "recovery:write", "data:sensitive:read",
    }
)  # fmt: skip
TOKEN_PREFIX = "hr_"
TOKEN_BYTES = 32
SHORTEST_TOKEN, LONGEST_TOKEN = 16, 4096
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

Words = tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=128)], ...]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `[[principals]]`. Several entries may share an id while a token is exchanged for another."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    token_sha256: str
    kind: Literal["human", "agent", "service", "tenant", "customer", "contact", "system"] = "service"
    tenant: str = "default"
    scopes: Words = ()
    roles: Words = ()

    def __post_init__(self) -> None:
        if not self.id.isprintable() or self.id.startswith("system:"):
            raise ValueError("the id of a principal is printable and does not begin with 'system:'")
        _check_tenant(self.tenant)
        if not _DIGEST.match(self.token_sha256):
            raise ValueError("token_sha256 is 64 lower-case hex digits")
        for scope in self.scopes:
            if scope != "*" and scope.removesuffix(":any") not in SCOPES:
                raise ValueError(f"unknown scope {scope}; known: *, {', '.join(sorted(SCOPES))}, each also with :any")

    @property
    def actor(self) -> Actor:
        """The principal as it acts."""
        return Actor(id=self.id, kind=self.kind, tenant=self.tenant, scopes=self.scopes, roles=self.roles)


class _PrincipalsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    principals: tuple[Entry, ...] = ()


class _PolicyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenants: tuple[TenantPolicy, ...] = ()


class Principals:
    """The principals of a host. `reload` reads `file` again; without a file the given entries stay."""

    def __init__(self, entries: Sequence[Entry] = (), *, file: Path | None = None) -> None:
        """Raises HostError `settings.invalid` for a file or entries that cannot be."""
        self._file = file
        self._given = tuple(entries)
        self._known: tuple[tuple[bytes, Actor], ...] = ()
        self.reload()

    def __len__(self) -> int:
        return len(self._known)

    def reload(self) -> None:
        """Read the file again. On HostError `settings.invalid` everything stays as it was."""
        entries = self._given + (read_principals(self._file) if self._file is not None else ())
        actors: dict[tuple[str, str], Actor] = {}
        for entry in entries:
            if actors.setdefault((entry.tenant, entry.id), entry.actor) != entry.actor:
                raise HostError("settings.invalid", f"principals: entries of {entry.id} contradict each other")
        if len({entry.token_sha256 for entry in entries}) < len(entries):
            raise HostError("settings.invalid", "principals: two entries have the same token")
        self._known = tuple((entry.token_sha256.encode(), entry.actor) for entry in entries)

    def find(self, token: str) -> Actor | None:
        """The principal that a bearer token names, or None."""
        digest = token_digest(token).encode()
        found: Actor | None = None
        for known, actor in self._known:
            if hmac.compare_digest(known, digest):
                found = actor
        return found


class Policies:
    """The policies of a host by tenant. A tenant without one has the closed default: a person decides everything."""

    def __init__(self, policies: Sequence[TenantPolicy] = (), *, file: Path | None = None) -> None:
        """Raises HostError `settings.invalid` for a file that cannot be."""
        self._file = file
        self._given = tuple(policies)
        self._known: Mapping[str, TenantPolicy] = {}
        self.reload()

    def reload(self) -> None:
        """Read the file again. On HostError `settings.invalid` everything stays as it was."""
        policies = self._given + (read_policies(self._file) if self._file is not None else ())
        if len({policy.id for policy in policies}) < len(policies):
            raise HostError("settings.invalid", "policy: a tenant has two policies")
        self._known = {policy.id: policy for policy in policies}

    def of(self, tenant: str) -> TenantPolicy:
        """The policy of a tenant."""
        return self._known.get(tenant) or TenantPolicy(id=tenant)


def read_principals(file: Path) -> tuple[Entry, ...]:
    """The entries of a principals file. Nobody but its owner may be able to write it."""
    _check_writers(file)
    return convert(read_toml(file), _PrincipalsFile, file.parent).principals


def read_policies(file: Path) -> tuple[TenantPolicy, ...]:
    """The policies of a policy file. Nobody but its owner may be able to write it."""
    _check_writers(file)
    policies = convert(read_toml(file), _PolicyFile, file.parent).tenants
    for policy in policies:
        if policy.id == "-" or not ID_PATTERN.match(policy.id):
            _refuse(f"policy: {policy.id!r} cannot be a tenant")
        if unknown := set(policy.direct) - MUTATIONS:
            _refuse(f"policy of {policy.id}: direct names no mutation: {', '.join(sorted(unknown))}")
        if unknown := set(policy.choices) - set(CHOICES):
            _refuse(f"policy of {policy.id}: choices names no choice: {', '.join(sorted(unknown))}")
    return policies


def token_digest(token: str) -> str:
    """What is kept of a token: 64 lower-case hex digits."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def make_token(
    entropy: Callable[[int], bytes],
    *,
    id: str,  # noqa: A002
    kind: str = "service",
    tenant: str = "default",
    scopes: Sequence[str] = (),
    roles: Sequence[str] = (),
) -> tuple[Secret, Entry]:
    """A fresh token of 256 random bits and the entry that admits it. The token is shown once and kept nowhere."""
    token = Secret(TOKEN_PREFIX + base64.urlsafe_b64encode(entropy(TOKEN_BYTES)).rstrip(b"=").decode())
    return token, import_token(token, id=id, kind=kind, tenant=tenant, scopes=scopes, roles=roles)


def import_token(
    token: Secret,
    *,
    id: str,  # noqa: A002
    kind: str = "service",
    tenant: str = "default",
    scopes: Sequence[str] = (),
    roles: Sequence[str] = (),
) -> Entry:
    """The entry that admits a token made elsewhere: 16 to 4096 visible ASCII characters."""
    text = token.reveal()
    if not SHORTEST_TOKEN <= len(text) <= LONGEST_TOKEN or not all("!" <= char <= "~" for char in text):
        _refuse(f"a token is {SHORTEST_TOKEN} to {LONGEST_TOKEN} visible ASCII characters")
    members = {
        "id": id,
        "kind": kind,
        "tenant": tenant,
        "scopes": list(scopes),
        "roles": list(roles),
        "token_sha256": token_digest(text),
    }
    return convert(members, Entry, Path())


def entry_toml(entry: Entry) -> str:
    """The entry as a table to append to a principals file."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in msgspec.to_builtins(entry).items()]
    return "\n".join(["[[principals]]", *lines, ""])


def _check_tenant(tenant: str) -> None:
    if tenant == "-" or not ID_PATTERN.match(tenant):
        raise ValueError("a tenant is 1 to 128 letters, digits, '-' or '_', and not '-' alone")


def _check_writers(file: Path) -> None:
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise HostError("settings.invalid", f"{file} cannot be read: {error.strerror}") from error
    if mode & 0o022:
        _refuse(f"{file} can be written by others")


def _refuse(message: str) -> NoReturn:
    raise HostError("settings.invalid", message)
