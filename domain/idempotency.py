"""Idempotency: one key, one request, one Action.

A key is scoped by tenant and capability and lives 24 hours from acceptance, never ending before its Action is settled.
The reservation is a history named after scope and key, appended together with the Action: the first version wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from domain.action import Action, State
from domain.contracts import KEY_TTL_MS
from domain.errors import CallerError
from domain.events import KeyReserved
from domain.history import Recorded
from domain.values import KEY_LIMIT, Actor, after, canonical

FINGERPRINT_VERSION = "f1"


def check_key(key: str | None, *, required: bool) -> str:
    """The key as it is stored and sent: 1 to 255 visible ASCII characters, not blank; empty if none is needed."""
    if key is None or not key.strip():
        if required:
            raise CallerError("idempotency.required")
        if key:
            raise CallerError("idempotency.required", "A key that is given must not be blank.")
        return ""
    if len(key) > KEY_LIMIT or not all(33 <= ord(char) <= 126 for char in key):
        raise CallerError("request.invalid", "A key is 1 to 255 visible ASCII characters.", details={"field": "key"})
    return key


def scope_text(tenant: str, capability_id: str, key: str) -> bytes:
    """What a reservation's history is named after (by a digest of it)."""
    return canonical([tenant, capability_id, key])


def fingerprint_text(capability_id: str, request: dict[str, Any]) -> bytes:
    """The caller's request in canonical form: what a repeat must equal. What we add to it is not part of it."""
    return canonical([FINGERPRINT_VERSION, capability_id, request])


def reserve(*, action_id: str, capability_id: str, principal: str, fingerprint: str, at: datetime) -> KeyReserved:
    """The reservation of a key for 24 hours."""
    return KeyReserved(
        at=at,
        action_id=action_id,
        capability_id=capability_id,
        principal=principal,
        fingerprint=fingerprint,
        expires_at=after(at, KEY_TTL_MS),
    )


def holder(history: Iterable[Recorded]) -> KeyReserved | None:
    """The latest reservation of a key."""
    latest = None
    for recorded in history:
        if isinstance(recorded.event, KeyReserved):
            latest = recorded.event
    return latest


def expired(reserved: KeyReserved, action: Action, *, at: datetime) -> bool:
    """True once 24 hours are over and the Action is settled: a key with an unknown outcome does not expire."""
    return at >= reserved.expires_at and action.state is State.SETTLED


def check_repeat(reserved: KeyReserved, fingerprint: str, actor: Actor) -> None:
    """Let a repeat have the original, or refuse: another request under the key, or another principal's key."""
    if reserved.principal != actor.id and not actor.may_any("action:read"):
        raise CallerError("idempotency.conflict")
    if reserved.fingerprint != fingerprint:
        raise CallerError("idempotency.input_hash_mismatch")
