"""Secrets of this host: a type that cannot be printed or encoded, and the files in which secrets are kept.

A secret's file is regular, no link, owned by this user or root and closed to all others (AIP 9.3).
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from domain.errors import HostError

SECRET_BYTES = 16 * 1024
MASTER_BYTES = 32
REVISION_DIGITS = 16


class Secret:
    """A value that is not printed and cannot be encoded; `reveal` is the only way to it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value itself, for the one call that needs it."""
        return self._value

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be encoded")


def read_secret(path: Path, limit: int = SECRET_BYTES) -> bytes:
    """The bytes of a secret's file: regular, no link, owned by us or root, closed to others, not empty, bounded.

    HostError `settings.secret_file` otherwise; it names the file and never its content.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        link = path.is_symlink()
        reason = "is a symbolic link" if link else f"cannot be opened: {error.strerror}"
        raise HostError("settings.secret_file", f"{path} {reason}.") from error
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise HostError("settings.secret_file", f"{path} is not a regular file.")
        if found.st_uid not in (os.geteuid(), 0):
            raise HostError("settings.secret_file", f"{path} belongs to another user.")
        if found.st_mode & 0o077:
            raise HostError("settings.secret_file", f"{path} is open to others: give it mode 0600.")
        data = os.read(handle, limit + 1)
    finally:
        os.close(handle)
    if not data.strip() or len(data) > limit:
        raise HostError("settings.secret_file", f"{path} is empty or longer than {limit} bytes.")
    return data


def write_secret(path: Path, data: bytes, entropy: Callable[[int], bytes]) -> bool:
    """Make a secret's file, whole or not at all; False, and nothing changed, where the path is taken already.

    The folder is made when it is missing, and others cannot list it. The file is durable on return.
    """
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{entropy(8).hex()}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        with suppress(FileExistsError):
            os.link(draft, path)
            _sync_folder(path.parent)
            return True
        return False
    finally:
        os.unlink(draft)


def master_key(path: Path, entropy: Callable[[int], bytes]) -> bytes:
    """The 32 bytes of the master key, kept as hex digits in a file that is made where there is none.

    Hosts that start together end with the same key. Without this file no private content can ever be opened again.
    """
    if not os.path.lexists(path):
        write_secret(path, entropy(MASTER_BYTES).hex().encode() + b"\n", entropy)
    try:
        key = bytes.fromhex(read_secret(path, 256).decode("ascii"))
    except ValueError as error:
        raise HostError("settings.secret_file", f"{path} holds no hex digits.") from error
    if len(key) != MASTER_BYTES:
        raise HostError("settings.secret_file", f"{path} does not hold {MASTER_BYTES} bytes.")
    return key


def bearer_key(path: Path) -> Secret:
    """The bearer token that a file holds: one word of visible ASCII, a line end after it aside (AIP 11.4)."""
    data = read_secret(path).removesuffix(b"\n").removesuffix(b"\r")
    if not all(0x21 <= byte <= 0x7E for byte in data):
        raise HostError("settings.secret_file", f"{path} does not hold exactly one word of visible ASCII.")
    return Secret(data.decode())


def credential_revision(key: Secret, digest: Callable[[bytes], str]) -> str:
    """16 hex digits that change with the key and, under a keyed `digest` (`Vault.digest`), tell nothing of it."""
    return digest(b"endpoint key\0" + key.reveal().encode())[:REVISION_DIGITS]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
