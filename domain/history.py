"""Where events stand: the envelope, what is appended together, and the names of histories.

A history is named ``<tenant>/<kind>/<rest>``; those of hosts, fences and handles belong to no tenant and begin with
``-/``. The version of an event is its place in its history, its position the place in the journal.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from domain.events import Event
from domain.values import ID_PATTERN, Fence, PrivateScope, sha256


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """An event where it stands: its history and version, the position in the journal, who decided it and why."""

    history: str
    version: int
    position: int
    event_id: str
    event: Event
    fence: Fence | None = None
    cause: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Events to be appended to one history that stands at version ``expected``."""

    history: str
    expected: int
    events: tuple[Event, ...]
    scope: PrivateScope | None = None


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that are stored together or not at all. With a ``fence`` it is a decision, without one an observation.

    ``not_after`` refuses the command once the database's clock has passed it (approval and key expiry).
    """

    changes: tuple[Change, ...]
    fence: Fence | None = None
    not_after: datetime | None = None
    cause: str = ""


def key_history(tenant: str, digest: str) -> str:
    """History of one idempotency key."""
    return f"{tenant}/key/{digest}"


def session_history(tenant: str, digest: str) -> str:
    """History of one conversation at one endpoint."""
    return f"{tenant}/ses/{digest}"


def action_history(tenant: str, action_id: str) -> str:
    """History of one Action."""
    return f"{tenant}/act/{action_id}"


def refusal_history(tenant: str, refusal_id: str) -> str:
    """History of one audited refusal."""
    return f"{tenant}/aud/{refusal_id}"


def run_history(tenant: str, endpoint_id: str, token: str) -> str:
    """History of one binding."""
    return f"{tenant}/run/{endpoint_id}/{token}"


def stream_history(tenant: str, endpoint_id: str, token: str) -> str:
    """History of one run's stream."""
    return f"{tenant}/str/{endpoint_id}/{token}"


def handle_history(endpoint_id: str, token: str) -> str:
    """History that makes a handle unique at its endpoint."""
    return f"-/handle/{endpoint_id}/{token}"


def host_history(replica: str) -> str:
    """History of one replica's host processes."""
    return f"-/host/{replica}"


def fence_history(replica: str) -> str:
    """History whose version is the replica's current sequence."""
    return f"-/fence/{replica}"


def run_token(run_id: str) -> str:
    """The part of a history's name that stands for a handle: itself if short and plain, else a digest."""
    return run_id if ID_PATTERN.match(run_id) and len(run_id) <= 64 else "h" + sha256(run_id.encode())[:40]
