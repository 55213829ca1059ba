"""Private content at rest, sealed under data keys that can be destroyed and that a key outside the database wraps.

One data key serves one tenant, principal and month. It is stored wrapped (AES-256-GCM) under a key derived from the
master key; deleting its row erases everything that was sealed under it, in the journal and in all copies of it. The
associated data of sealed content are the key's id, the history and the version, so ciphertext opens only where it was
put. Digests of content are keyed too: after erasure nobody can confirm a guess with the database alone.
"""

from __future__ import annotations

import base64
import hmac
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString, Protocol

import anyio
import msgspec
import orjson
import psycopg
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from adapters.append_call import pinned
from adapters.bounded_connection import BoundedConnection
from domain.errors import HostError, IntegrityFault
from domain.values import Private, PrivateScope, Sealed, canonical

KEY_BYTES = 32
NONCE_BYTES = 12
COMPRESS_ABOVE = 256
COMPRESSION = 1  # the fastest: frames of one kind repeat themselves enough
CACHE_LIFE = timedelta(seconds=60)
CONNECT_TIMEOUT_S = 5
_COLUMNS: LiteralString = "id, tenant, principal_digest, month, wrapped"
_OWNER: LiteralString = "tenant = %s and principal_digest = %s and month = %s"
_OFFER: LiteralString = f"insert into data_keys ({_COLUMNS}) values (%s, %s, %s, %s, %s) on conflict do nothing"
_FIND: LiteralString = f"select {_COLUMNS} from data_keys where {_OWNER}"
_LOAD: LiteralString = f"select {_COLUMNS} from data_keys where id = any(%s)"
_ANY: LiteralString = f"select {_COLUMNS} from data_keys limit 1"
_DELETE: LiteralString = f"delete from data_keys where {_OWNER} returning id"
_STORED_AS_IS, _COMPRESSED = b"\x00", b"\x01"


class DataKey(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `data_keys`: a wrapped key and whose it is. `month` is ``YYYY-MM`` in UTC."""

    id: str
    tenant: str
    principal_digest: str
    month: str
    wrapped: bytes


class KeyTable(Protocol):
    """Where wrapped data keys are kept. Raises HostError `storage.unavailable` when it cannot be reached."""

    async def offer(self, row: DataKey) -> DataKey:
        """Keep the row unless its owner and month have one; the row that stands is returned."""

    async def find(self, tenant: str, principal_digest: str, month: str) -> DataKey | None:
        """The row of an owner and month."""

    async def load(self, ids: Sequence[str]) -> list[DataKey]:
        """The rows that exist among these ids."""

    async def any(self) -> DataKey | None:
        """Some row, or None if the table is empty."""

    async def delete(self, tenant: str, principal_digest: str, month: str) -> list[str]:
        """Destroy the key of an owner and month; the ids that are gone."""


class MemoryKeys:
    """Data keys in memory, beside the journal in memory."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], DataKey] = {}

    async def offer(self, row: DataKey) -> DataKey:
        """As `KeyTable.offer`."""
        return self._rows.setdefault((row.tenant, row.principal_digest, row.month), row)

    async def find(self, tenant: str, principal_digest: str, month: str) -> DataKey | None:
        """As `KeyTable.find`."""
        return self._rows.get((tenant, principal_digest, month))

    async def load(self, ids: Sequence[str]) -> list[DataKey]:
        """As `KeyTable.load`."""
        return [row for row in self._rows.values() if row.id in ids]

    async def any(self) -> DataKey | None:
        """As `KeyTable.any`."""
        return next(iter(self._rows.values()), None)

    async def delete(self, tenant: str, principal_digest: str, month: str) -> list[str]:
        """As `KeyTable.delete`."""
        row = self._rows.pop((tenant, principal_digest, month), None)
        return [row.id] if row else []


class PostgresKeys:
    """Data keys in the table `data_keys`, over one connection that is opened at the first call and again when lost.

    Each statement may be repeated without harm, so a call whose connection broke is tried once more on a new one.
    """

    def __init__(self, dsn: str, *, schema: str = "public") -> None:
        self._dsn = pinned(dsn, schema, "vault")
        self._lock = threading.Lock()
        self._connection: psycopg.Connection | None = None

    async def offer(self, row: DataKey) -> DataKey:
        """As `KeyTable.offer`."""
        while True:
            await self._run(_OFFER, [row.id, row.tenant, row.principal_digest, row.month, row.wrapped])
            standing = await self.find(row.tenant, row.principal_digest, row.month)
            if standing is not None:
                return standing

    async def find(self, tenant: str, principal_digest: str, month: str) -> DataKey | None:
        """As `KeyTable.find`."""
        rows = await self._run(_FIND, [tenant, principal_digest, month])
        return _row(rows[0]) if rows else None

    async def load(self, ids: Sequence[str]) -> list[DataKey]:
        """As `KeyTable.load`."""
        return [_row(row) for row in await self._run(_LOAD, [list(ids)])]

    async def any(self) -> DataKey | None:
        """As `KeyTable.any`."""
        rows = await self._run(_ANY, [])
        return _row(rows[0]) if rows else None

    async def delete(self, tenant: str, principal_digest: str, month: str) -> list[str]:
        """As `KeyTable.delete`."""
        return [row[0] for row in await self._run(_DELETE, [tenant, principal_digest, month])]

    async def close(self) -> None:
        """Close the connection; a later call opens another."""
        await anyio.to_thread.run_sync(self._drop)

    async def _run(self, statement: LiteralString, values: list[Any]) -> list[tuple[Any, ...]]:
        return await anyio.to_thread.run_sync(self._run_in_thread, statement, values)

    def _run_in_thread(self, statement: LiteralString, values: list[Any]) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._once(statement, values)
            except psycopg.OperationalError:
                self._close()
            try:
                return self._once(statement, values)
            except psycopg.OperationalError as error:
                self._close()
                raise HostError("storage.unavailable", "The table of data keys cannot be reached.") from error

    def _once(self, statement: LiteralString, values: list[Any]) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = BoundedConnection.connect(self._dsn, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S)
        cursor = self._connection.execute(statement, values)
        return cursor.fetchall() if cursor.description else []

    def _drop(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Vault:
    """Seals and opens private content; implements `domain.ports.Vault`.

    `entropy(n)` gives n random bytes (`SystemClock.entropy`). Opened data keys are held for at most a minute of the
    times handed to `prepare`, so a key that another process destroyed stops being used here within that minute.
    """

    def __init__(self, master: bytes, keys: KeyTable, entropy: Callable[[int], bytes]) -> None:
        if len(master) != KEY_BYTES:
            raise HostError("settings.secret_file", f"A master key has {KEY_BYTES} bytes.")
        self._keys = keys
        self._entropy = entropy
        self._wrapping = AESGCM(_derived(master, "wrap data keys"))
        self._digesting = hmac.new(_derived(master, "digest content"), digestmod="sha256")
        self._naming = hmac.new(_derived(master, "digest principals"), digestmod="sha256")
        self._ids: dict[tuple[str, str, str], str] = {}
        self._ciphers: dict[str, AESGCM] = {}
        self._emptied_at: datetime | None = None

    async def admit(self) -> None:
        """Refuse a master key that does not fit the stored data keys (HostError `settings.secret_file`)."""
        row = await self._keys.any()
        if row is not None:
            self._unwrap(row)

    async def prepare(self, scopes: Iterable[PrivateScope], at: datetime) -> None:
        """Have the data keys of these scopes and of this month ready for `seal`, making those that do not exist."""
        if self._emptied_at is None or abs(at - self._emptied_at) > CACHE_LIFE:
            self._ids.clear()
            self._ciphers.clear()
            self._emptied_at = at
        owners = {_owner(scope, at) for scope in scopes}
        while missing := owners - self._ids.keys():
            for owner in missing:
                tenant, principal, month = owner
                wanted = (tenant, self._principal_digest(tenant, principal), month)
                row = await self._keys.find(*wanted) or await self._keys.offer(self._make(*wanted))
                self._ciphers[row.id] = self._unwrap(row)
                self._ids[owner] = row.id

    def seal(self, content: bytes, scope: PrivateScope, at: datetime, history: str, version: int) -> Sealed:
        """Content as it is stored at this place. The scope was prepared for the month of `at`."""
        key = self._ids[_owner(scope, at)]
        packed = _STORED_AS_IS + content
        if len(content) > COMPRESS_ABOVE:
            packed = min(packed, _COMPRESSED + zlib.compress(content, COMPRESSION), key=len)
        nonce = self._entropy(NONCE_BYTES)
        box = nonce + self._ciphers[key].encrypt(nonce, packed, _place(key, history, version, len(content)))
        return Sealed(key=key, history=history, version=version, size=len(content), box=_text(box))

    async def open(self, private: Private) -> bytes:
        """The plain content; HostError `private.erased` when its key is destroyed, IntegrityFault when it was moved."""
        return (await self.open_many([private]))[0]

    async def open_many(self, privates: Sequence[Private]) -> list[bytes]:
        """As `open`, in order, with one look-up of keys for all."""
        ids = {private.key for private in privates if isinstance(private, Sealed)}
        ciphers = {key: self._ciphers[key] for key in ids & self._ciphers.keys()}
        if missing := ids - ciphers.keys():
            loaded = {row.id: self._unwrap(row) for row in await self._keys.load(sorted(missing))}
            self._ciphers |= loaded
            ciphers |= loaded
        return [_opened(private, ciphers) if isinstance(private, Sealed) else private.content for private in privates]

    def digest(self, content: bytes) -> str:
        """HMAC-SHA256 under a key derived from the master key: 64 hex digits."""
        return _digest(self._digesting, content)

    async def forget(self, tenant: str, principal: str, month: str) -> int:
        """Destroy the data key of a principal and month (``YYYY-MM``), and so its content; how many keys are gone."""
        gone = await self._keys.delete(tenant, self._principal_digest(tenant, principal), month)
        self._ids.pop((tenant, principal, month), None)
        for key in gone:
            self._ciphers.pop(key, None)
        return len(gone)

    def _principal_digest(self, tenant: str, principal: str) -> str:
        return _digest(self._naming, canonical([tenant, principal]))

    def _make(self, tenant: str, principal_digest: str, month: str) -> DataKey:
        key_id, nonce = "dk" + self._entropy(10).hex(), self._entropy(NONCE_BYTES)
        label = canonical([key_id, tenant, principal_digest, month])
        wrapped = nonce + self._wrapping.encrypt(nonce, self._entropy(KEY_BYTES), label)
        return DataKey(id=key_id, tenant=tenant, principal_digest=principal_digest, month=month, wrapped=wrapped)

    def _unwrap(self, row: DataKey) -> AESGCM:
        label = canonical([row.id, row.tenant, row.principal_digest, row.month])
        try:
            return AESGCM(self._wrapping.decrypt(row.wrapped[:NONCE_BYTES], row.wrapped[NONCE_BYTES:], label))
        except (InvalidTag, ValueError) as error:
            raise HostError(
                "settings.secret_file", "The master key does not open the data keys of this database."
            ) from error


def _row(values: tuple[Any, ...]) -> DataKey:
    key, tenant, principal_digest, month, wrapped = values
    return DataKey(id=key, tenant=tenant, principal_digest=principal_digest, month=month, wrapped=wrapped)


def _owner(scope: PrivateScope, at: datetime) -> tuple[str, str, str]:
    """Whose data key it is, and of which month of UTC."""
    day = at.astimezone(UTC)
    return (scope.tenant, scope.principal, f"{day.year:04}-{day.month:02}")


def _digest(keyed: hmac.HMAC, content: bytes) -> str:
    """The digest by a copy of this: unlike the one-shot function it does not hand the interpreter to other threads."""
    mine = keyed.copy()
    mine.update(content)
    return mine.hexdigest()


def _derived(master: bytes, purpose: str) -> bytes:
    info = f"hermes-reconciler v1: {purpose}".encode()
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(master)


def _place(key: str, history: str, version: int, size: int) -> bytes:
    return orjson.dumps([key, history, version, size])


def _text(box: bytes) -> str:
    return base64.urlsafe_b64encode(box).rstrip(b"=").decode()


def _opened(sealed: Sealed, ciphers: Mapping[str, AESGCM]) -> bytes:
    cipher = ciphers.get(sealed.key)
    if cipher is None:
        raise HostError("private.erased")
    try:
        box = base64.b64decode(sealed.box + "=" * (-len(sealed.box) % 4), altchars=b"-_", validate=True)
        place = _place(sealed.key, sealed.history, sealed.version, sealed.size)
        packed = cipher.decrypt(box[:NONCE_BYTES], box[NONCE_BYTES:], place)
    except (InvalidTag, ValueError) as error:
        raise IntegrityFault(
            "history.unreadable",
            "Private content does not open at its place.",
            details={"history": sealed.history, "version": sealed.version},
        ) from error
    if packed[:1] == _COMPRESSED:
        return zlib.decompressobj().decompress(packed[1:], sealed.size)
    return packed[1:]
