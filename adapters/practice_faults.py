"""Settings and faults of the practice Hermes; faults are switched while it runs, each for a number of requests."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Flavour = Literal["0.19", "0.22"]


class PracticeOptions(msgspec.Struct, frozen=True):
    """Settings of a practice provider; all times in seconds, defaults as measured on Hermes 0.19.0."""

    max_concurrent_runs: int = 10  #: 0 = no limit
    approval_timeout: float = 60.0
    keepalive: float | None = None  #: None = 30 s, 10 s on flavour 0.22
    subscribe_wait: float = 1.0  #: how long an events read waits for an unknown run
    stop_delay: float = 0.15  #: from the moment a stop is noticed until the run is cancelled
    approval_stop_delay: float = 1.0  #: from a stop until a waiting approval gives up
    stream_retention: float = 300.0
    status_retention: float = 3600.0
    sweep_every: float = 60.0
    body_limit: int = 10_000_000


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One misbehaviour, applied to the next ``times`` requests of a route.

    ``drop`` closes the connection without an answer, ``hang`` waits ``seconds`` and then closes it, ``delay`` waits and
    then answers, ``answer`` replaces the answer, ``cut`` ends an event stream after ``frames`` frames without its close
    comment.  ``carried_out`` says whether the provider does what was asked before it misbehaves.
    """

    kind: Literal["drop", "hang", "delay", "answer", "cut"]
    route: str = "any"  #: start, status, events, approval, stop, health, session, messages, ... or any
    times: int = 1
    carried_out: bool = True
    seconds: float = 0.0
    frames: int = 0
    status: int = 502
    content_type: str = "text/html"
    body: str = ""
    headers: dict[str, str] = msgspec.field(default_factory=dict)


class FaultOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change of the provider's behaviour; members that are left out change nothing."""

    clear: bool = False  #: first remove all faults, status overrides and draining
    add: list[Fault] = msgspec.field(default_factory=list)
    forget_runs: bool = False
    approval_timeout: float | None = None
    draining: bool | None = None
    statuses: list[dict[str, Any]] = msgspec.field(default_factory=list)  #: merged one by one into status answers


class Faults:
    """The misbehaviour that is switched on."""

    def __init__(self) -> None:
        self.draining = False
        self._waiting: list[tuple[Fault, int]] = []
        self._statuses: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def order(self, order: FaultOrder) -> None:
        """Apply the members of an order that concern requests."""
        if order.clear:
            self._waiting, self._statuses, self.draining = [], [], False
        self._waiting += [(fault, fault.times) for fault in order.add]
        self._statuses += order.statuses
        if order.draining is not None:
            self.draining = order.draining

    def next(self, route: str) -> Fault | None:
        """The oldest fault that concerns a request of this route; it is used up by one."""
        for index, (fault, left) in enumerate(self._waiting):
            if fault.route in (route, "any") and (fault.kind != "cut" or route == "events"):
                self._waiting[index : index + 1] = [(fault, left - 1)] if left > 1 else []
                return fault
        return None

    def next_status(self) -> dict[str, Any]:
        """Members that replace those of the next status answer."""
        return self._statuses.pop(0) if self._statuses else {}
