"""The one typed tree of settings, and the only reader of the environment and of settings files.

Defaults, then one TOML file, then variables `HERMES_RECONCILER_<SECTION>__<KEY>` (endpoints by their place:
`HERMES_RECONCILER_ENDPOINTS__0__BASE_URL`; keys outside a section: `HERMES_RECONCILER_BEHIND_PROXY`). Unknown keys are
refused with the nearest known one, and so is what cannot work together. Relative paths are relative to the folder of
the TOML file. Times are milliseconds, sizes bytes. Everyone else receives only the part that concerns them.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec

from adapters.credentials import Secret, bearer_key, read_secret
from domain.errors import HostError
from domain.values import ID_PATTERN, canonical, sha256

PREFIX = "HERMES_RECONCILER_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
DEFAULT_FILE = "hermes-reconciler.toml"
MIB = 2**20
SETTINGS_BYTES = 4 * MIB
REVISION_DIGITS = 16
_HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,251}[a-z0-9])?\Z")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_Kind = TypeVar("_Kind")

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Span = Annotated[int, msgspec.Meta(ge=1, le=86_400_000)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Listener(_Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: Port = 0


class Public(_Listener, frozen=True, kw_only=True):
    """`[public]`: where callers connect. Port 0 lets the system choose."""

    port: Port = 8790


class Operational(_Listener, frozen=True, kw_only=True):
    """`[operational]`: health, readiness and metrics, open to whoever reaches it."""

    port: Port = 8791


class Front(_Listener, frozen=True, kw_only=True):
    """`[front]`: one endpoint's own routes, served when `endpoint` names one."""

    port: Port = 8792
    endpoint: str = ""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "endpoint", self.endpoint.strip().lower())


class Tls(_Section, frozen=True, kw_only=True):
    """`[tls]`: certificate chain and key of all listeners (PEM)."""

    cert_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file are given together")


class Endpoint(_Section, frozen=True, kw_only=True):
    """One of `[[endpoints]]` (AIP 11.4): an admitted Hermes Agent. `base_url` is an origin and nothing more.

    `tenant` binds it to one tenant. `approvals_mode = "manual"` is the operator's word that the agent asks before it
    runs commands. `insecure_http` admits plain HTTP to a host that is not loopback.
    """

    id: str
    base_url: str
    api_key_file: Path | None = None
    tenant: str = ""
    display_name: Annotated[str, msgspec.Meta(max_length=256)] = ""
    max_concurrent_runs: Count = 10
    approval_timeout_ms: Span = 60_000
    approvals_mode: Literal["", "manual"] = ""
    run_deadline_ms: Span = 900_000
    insecure_http: bool = False

    def __post_init__(self) -> None:
        name = self.id.strip().lower()
        if not ID_PATTERN.match(name):
            raise ValueError("an endpoint id is 1 to 128 letters, digits, '-' or '_'")
        if self.tenant and (self.tenant == "-" or not ID_PATTERN.match(self.tenant)):
            raise ValueError("a tenant is 1 to 128 letters, digits, '-' or '_'")
        if not self.display_name.isprintable():
            raise ValueError("display_name holds control characters")
        msgspec.structs.force_setattr(self, "id", name)
        msgspec.structs.force_setattr(self, "base_url", origin(self.base_url, insecure_http=self.insecure_http))

    def key(self) -> Secret | None:
        """The bearer token as its file holds it now; None without a file. HostError `settings.secret_file`."""
        return bearer_key(self.api_key_file) if self.api_key_file is not None else None


class Postgres(_Section, frozen=True, kw_only=True):
    """`[postgres]`: the database; without `dsn` and `dsn_file` the embedded one in the state folder."""

    dsn: Secret | None = None
    dsn_file: Path | None = None

    def __post_init__(self) -> None:
        if self.dsn is not None and self.dsn_file is not None:
            raise ValueError("dsn and dsn_file exclude each other")


class State(_Section, frozen=True, kw_only=True):
    """`[state]`: the folder of the master key, of generated tokens and of the embedded database."""

    dir: Path = Path(".hermes-reconciler")


class File(_Section, frozen=True, kw_only=True):
    """`[principals]` and `[policy]`: a TOML file of their own."""

    file: Path | None = None


class Host(_Section, frozen=True, kw_only=True):
    """`[host]`: this process among others, its lease and its bounds (AIP 9.1)."""

    replica: str = "replica-1"
    instance: str = "hermes-reconciler"
    lease_ttl_ms: Annotated[int, msgspec.Meta(ge=1_000, le=300_000)] = 30_000
    heartbeat_ms: Count = 10_000
    drain_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=300_000)] = 30_000
    health_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=30_000)] = 2_000
    max_in_flight: Count = 32

    def __post_init__(self) -> None:
        if not ID_PATTERN.match(self.replica) or not ID_PATTERN.match(self.instance):
            raise ValueError("replica and instance are 1 to 128 letters, digits, '-' or '_'")
        if self.heartbeat_ms * 2 > self.lease_ttl_ms:
            raise ValueError("heartbeat_ms is at most half of lease_ttl_ms")


class Limits(_Section, frozen=True, kw_only=True):
    """`[limits]`: bytes of a caller's message and of a provider's answer, and how long an append may take."""

    message_bytes: Annotated[int, msgspec.Meta(ge=1024, le=16 * MIB)] = 4 * MIB
    answer_bytes: Annotated[int, msgspec.Meta(ge=1, le=16 * MIB)] = 16 * MIB
    append_deadline_ms: Span = 10_000


class Stream(_Section, frozen=True, kw_only=True):
    """`[stream]`: how frames are gathered before they are stored, and what one stream may hold."""

    batch_ms: Span = 50
    batch_frames: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 256
    idle_s: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 75
    stream_bytes: Annotated[int, msgspec.Meta(ge=1, le=256 * MIB)] = 64 * MIB
    frame_bytes: Count = MIB

    def __post_init__(self) -> None:
        if self.frame_bytes > self.stream_bytes:
            raise ValueError("frame_bytes is at most stream_bytes")


class Poll(_Section, frozen=True, kw_only=True):
    """`[poll]`: shortest and longest pause between two status reads of a run."""

    min_ms: Span = 1_000
    max_ms: Span = 30_000

    def __post_init__(self) -> None:
        if self.min_ms > self.max_ms:
            raise ValueError("min_ms is at most max_ms")


class Registry(_Section, frozen=True, kw_only=True):
    """`[registry]`: whether the public listener serves the replica registry."""

    serve: bool = False


class Logging(_Section, frozen=True, kw_only=True):
    """`[logging]`: the lowest level that is written."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


class Settings(_Section, frozen=True, kw_only=True):
    """Everything that can be set. Construction refuses what cannot work together."""

    public: Public = Public()
    operational: Operational = Operational()
    front: Front = Front()
    tls: Tls = Tls()
    behind_proxy: bool = False
    endpoints: tuple[Endpoint, ...] = ()
    postgres: Postgres = Postgres()
    state: State = State()
    principals: File = File()
    policy: File = File()
    host: Host = Host()
    limits: Limits = Limits()
    stream: Stream = Stream()
    poll: Poll = Poll()
    registry: Registry = Registry()
    logging: Logging = Logging()

    def __post_init__(self) -> None:
        ids = [endpoint.id for endpoint in self.endpoints]
        if len(set(ids)) < len(ids):
            raise ValueError("the ids of endpoints are distinct")
        if self.front.endpoint and self.front.endpoint not in ids:
            raise ValueError(f"front.endpoint names no endpoint: {self.front.endpoint}")
        listeners: dict[str, _Listener] = {"public": self.public, "operational": self.operational}
        if self.front.endpoint:
            listeners["front"] = self.front
        ports = [listener.port for listener in listeners.values() if listener.port]
        if len(set(ports)) < len(ports):
            raise ValueError("the ports of the listeners are distinct")
        for name, listener in listeners.items():
            if not (is_loopback(listener.host) or self.tls.cert_file or self.behind_proxy):
                raise ValueError(f"{name}.host is not loopback: set tls.cert_file and tls.key_file, or behind_proxy")

    def shown(self) -> dict[str, Any]:
        """The tree as JSON values, secrets as ``***``."""
        tree: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        return tree

    def revision(self) -> str:
        """A digest of everything but secrets: 16 hex digits that change with the configuration."""
        return sha256(canonical(self.shown()))[:REVISION_DIGITS]

    def dsn(self) -> Secret | None:
        """Where the database is; None for the embedded one. Reads `postgres.dsn_file`."""
        if self.postgres.dsn_file is not None:
            return Secret(read_secret(self.postgres.dsn_file).decode().strip())
        return self.postgres.dsn


def load(path: Path | None, environment: Mapping[str, str]) -> Settings:
    """Settings from a TOML file and the environment.

    Without `path`, `HERMES_RECONCILER_CONFIG` names the file, else `hermes-reconciler.toml` is read where it exists.
    Raises HostError `settings.invalid` with the key that is wrong and never with its value.
    """
    named = path or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    file = named or Path(DEFAULT_FILE)
    raw = read_toml(file) if named is not None or file.exists() else {}
    _refuse_unknown(raw, Settings, "")
    for name, text in environment.items():
        if name.startswith(PREFIX) and name != CONFIG_VARIABLE:
            _set(raw, name, text)
    return convert(raw, Settings, file.parent)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a bounded TOML file; HostError `settings.invalid` when it is missing, too long or not TOML."""
    try:
        with path.open("rb") as file:
            data = file.read(SETTINGS_BYTES + 1)
        if len(data) > SETTINGS_BYTES:
            raise _invalid(f"{path} is longer than {SETTINGS_BYTES} bytes")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise _invalid(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _invalid(f"{path} is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at [^()]*\)\Z", str(error))
        raise _invalid(f"{path} is not TOML {where[0] if where else ''}".rstrip()) from None


def convert(raw: Mapping[str, Any], kind: type[_Kind], folder: Path) -> _Kind:
    """Tables as a typed tree, paths relative to `folder`; unknown keys and wrong values are refused by name."""
    _refuse_unknown(raw, kind, "")

    def custom(wanted: type, value: object) -> object:
        if not isinstance(value, str) or not value:
            raise ValueError("Expected a text that is not empty")
        return folder / value if issubclass(wanted, Path) else Secret(value)

    try:
        return msgspec.convert(raw, kind, dec_hook=custom)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        key = re.sub(r"\[(\.\.\.|\d+)\]", "", where.rstrip("`").lstrip("."))
        raise _invalid(f"{key}: {what}" if key else what) from error


def origin(text: str, *, insecure_http: bool = False) -> str:
    """The origin ``scheme://host[:port]`` that a `base_url` is, in its one spelling (AIP 11.4); ValueError if none."""
    if not text.isascii() or any(char in text for char in "\\?#@%") or not text.isprintable() or " " in text:
        raise ValueError("base_url is an origin without credentials, query or fragment")
    parts = urlsplit(text)
    host = (parts.hostname or "").rstrip(".")
    if parts.scheme not in _DEFAULT_PORTS or parts.path not in ("", "/"):
        raise ValueError("base_url is an http or https origin without a path")
    if ":" in host:
        host = f"[{ipaddress.IPv6Address(host)}]"
    elif not _HOST_NAME.match(host):
        raise ValueError("base_url has no usable host")
    if parts.scheme == "http" and not insecure_http and not is_loopback(host.strip("[]")):
        raise ValueError("base_url is https unless it is loopback or insecure_http is set")
    port = parts.port
    if port == 0:
        raise ValueError("base_url has no usable port")
    named = port is not None and port != _DEFAULT_PORTS[parts.scheme]
    return f"{parts.scheme}://{host}" + (f":{port}" if named else "")


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _invalid(message: str) -> HostError:
    return HostError("settings.invalid", message)


def _members(kind: Any) -> dict[str, Any]:
    """The members of a section or of the tables in a list, by name."""
    inner = get_args(kind)[0] if get_args(kind) else kind
    return get_type_hints(inner) if isinstance(inner, type) and issubclass(inner, msgspec.Struct) else {}


def _refuse_unknown(raw: Mapping[str, Any], kind: Any, where: str) -> None:
    known = _members(kind)
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5) or [
                f"{section}.{name}"
                for section, inner in known.items()
                for name in difflib.get_close_matches(key, _members(inner), 1, 0.8)
            ]
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise _invalid(f'unknown key "{where}{key}"{hint}')
        for table in value if isinstance(value, list) else [value]:
            if isinstance(table, dict):
                _refuse_unknown(table, known[key], f"{where}{key}.")


def _set(raw: dict[str, Any], name: str, text: str) -> None:
    """Put the value of an environment variable where its name says."""
    table: Any = raw
    kind: Any = Settings
    *sections, key = name.removeprefix(PREFIX).lower().split("__")
    for section in sections:
        if section.isdecimal() and isinstance(table, list):
            if int(section) > len(table):
                raise _invalid(f"{name}: there is no endpoint before this one")
            if int(section) == len(table):
                table.append({})
            table = table[int(section)]
            continue
        if section not in _members(kind):
            near = difflib.get_close_matches(section, _members(kind), 1, 0.5)
            hint = f'; did you mean "{name.replace(section.upper(), near[0].upper())}"?' if near else ""
            raise _invalid(f"unknown variable {name}{hint}")
        kind = _members(kind)[section]
        table = table.setdefault(section, [] if get_args(kind) else {})
    wanted = _members(kind).get(key)
    if wanted is None or not isinstance(table, dict) or _members(wanted):
        near = difflib.get_close_matches(key, _members(kind), 1, 0.5)
        hint = f'; did you mean "{"__".join([*sections, near[0]]).upper()}"?' if near else ""
        raise _invalid(f"unknown variable {name}{hint}")
    inner = wanted if wanted in (bool, int) else None
    try:
        table[key] = text if inner is None else msgspec.convert(text, inner, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(f"{name}: {error}") from error
