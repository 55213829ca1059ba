"""The error tree and the one table of stable codes.

A code's first word names the boundary that met the fault; a published code never changes its meaning. ``retryable``
speaks about transport (the same call may be made again), ``effect`` about the world (what may have happened);
neither is derived from the other. HTTP status follows the category unless the row says otherwise (AIP 7).
"""

from __future__ import annotations

from typing import Any

import msgspec

from domain.values import Effect

CATEGORY_STATUS = {
    "auth": 401,
    "policy": 403,
    "temporary": 503,
    "transport": 503,
    "connector": 502,
    "economic": 402,
    "permanent": 400,
}


class Code(msgspec.Struct, frozen=True):
    """One row of the table: what a code says wherever it appears."""

    code: str
    category: str
    status: int
    retryable: bool
    effect: Effect
    meaning: str


def _row(
    code: str,
    category: str,
    meaning: str,
    *,
    status: int | None = None,
    retryable: bool = False,
    effect: Effect = Effect.NONE,
) -> Code:
    return Code(code, category, status or CATEGORY_STATUS[category], retryable, effect, meaning)


PREFIX = "connector.hermes_agent."

TABLE: dict[str, Code] = {
    row.code: row
    for row in (
        # the request itself
        _row("request.malformed", "permanent", "The body is not a JSON object that can be read."),
        _row("request.too_large", "permanent", "The body is larger than this route takes.", status=413),
        _row("request.timeout", "permanent", "The request was not read completely in time.", status=408),
        _row("request.route_not_found", "permanent", "No such route.", status=404),
        _row("request.method_not_allowed", "permanent", "The route exists, the method does not.", status=405),
        _row("request.invalid", "permanent", "A query parameter or member has a wrong type or value."),
        _row("action.input_schema_invalid", "permanent", "The input cannot form a valid provider request."),
        _row("action.id_conflict", "permanent", "The Action id is in use for another request.", status=409),
        _row("action.not_found", "permanent", "No such object for this caller.", status=404),
        _row(
            "action.result_not_ready",
            "temporary",
            "The Action has no result yet; ask again.",
            retryable=True,
            status=409,
        ),
        _row("action.already_settled", "policy", "The Action has its final result; nothing is to be done.", status=409),
        _row("action.expired", "policy", "The deadline passed before anything was sent.", status=409),
        _row("action.cancelled", "policy", "Cancelled before anything was sent.", status=409),
        _row("capability.unsupported", "permanent", "No such capability at this host.", status=404),
        _row("execution.mode_unsupported", "policy", "The capability does not support this mode.", status=400),
        _row("query.invalid_cursor", "permanent", "The cursor is not one of ours for this list."),
        _row("stream.cursor_expired", "permanent", "The cursor is older than what is kept.", status=410),
        _row("callback.unsupported", "permanent", "The callback's profile or target is not one that can be served."),
        # keys
        _row("idempotency.required", "policy", "The operation needs an idempotency key that is not blank.", status=400),
        _row(
            "idempotency.input_hash_mismatch",
            "policy",
            "The key names another request.",
            status=409,
        ),
        _row("idempotency.conflict", "policy", "The key is in use.", status=409),
        # who may
        _row("auth.unverified_actor", "auth", "No valid bearer token."),
        _row("auth.not_authorized", "policy", "The principal lacks the scope."),
        _row("policy.approval_not_granted", "policy", "The approval was denied; nothing was sent."),
        _row("policy.approval_not_pending", "policy", "The approval is not waiting for a decision.", status=409),
        _row(
            "policy.approval_expired",
            "policy",
            "The approval ran out before it was used; nothing was sent.",
            status=409,
        ),
        _row("policy.approver_unauthorized", "policy", "The principal has no role that may decide this."),
        _row("policy.separation_of_duties.requester", "policy", "The requester may not decide its own request."),
        _row("policy.reason_required", "policy", "The decision needs a reason.", status=400),
        _row("policy.human_approval_required", "policy", "A person has to decide before anything is sent.", status=202),
        _row("policy.choice_denied", "policy", "The tenant's policy does not allow this choice."),
        _row("policy.resolve_all_denied", "policy", "The tenant's policy does not allow deciding several requests."),
        # reviewed provider approvals
        _row(
            "approval.review_required", "policy", "The choice does not name the request that was reviewed.", status=400
        ),
        _row("approval.not_oldest", "policy", "Another request is answered first by the provider.", status=409),
        _row("approval.not_pending", "policy", "The reviewed request is not pending any more.", status=409),
        _row("approval.choice_not_offered", "policy", "The request does not offer this choice.", status=409),
        _row("approval.provider_timeout", "policy", "The provider has given this request up by now.", status=409),
        _row("approval.already_decided", "policy", "A choice for this request was already sent.", status=409),
        _row("approval.after_stop", "policy", "The run was told to stop; only a denial may follow.", status=409),
        _row("run.already_terminal", "policy", "The run's end is known; nothing was sent.", status=409),
        _row("session.busy", "policy", "Another run of this session is active, or its outcome is unknown.", status=409),
        # host
        _row("connector_host.not_ready", "temporary", "The host takes no new work now.", retryable=True),
        _row("connector_host.capacity", "temporary", "All places are taken.", retryable=True, status=429),
        _row("host.owned_elsewhere", "temporary", "Another live host owns this work.", retryable=True),
        _row("storage.unavailable", "temporary", "The store did not take the record in time.", retryable=True),
        _row(
            "storage.unknown",
            "temporary",
            "Whether the record was stored is not known yet; repeat with the same key.",
            retryable=True,
        ),
        _row("storage.unsuitable", "permanent", "The database lacks a property that durability needs.", status=503),
        _row("lease.fenced", "temporary", "A newer process has taken this replica's place.", retryable=True),
        _row("lease.expired", "temporary", "The host's own lease ran out.", retryable=True),
        # integrity
        _row("binding.endpoint_mismatch", "permanent", "The run belongs to another endpoint or tenant.", status=409),
        _row("binding.run_id_reused", "permanent", "The provider gave a handle that is bound already.", status=409),
        _row("history.conflict", "permanent", "The history holds other bytes than expected.", status=409),
        _row("history.unreadable", "permanent", "A stored event cannot be read.", status=500),
        _row("history.newer_version", "permanent", "A stored event was written by a newer release.", status=500),
        _row("private.erased", "permanent", "The content's key was destroyed.", status=410),
        _row("settings.invalid", "permanent", "A setting is unknown, of a wrong type, or cannot work."),
        _row("settings.secret_file", "permanent", "A secret's file is missing, empty or open to others."),
        _row("internal.fault", "permanent", "An unforeseen fault; the log holds it under the trace id.", status=500),
        # the provider (AIP 11.8)
        _row(PREFIX + "outcome_unknown", "temporary", "Sent, and the outcome is not provable.", effect=Effect.POSSIBLE),
        _row(PREFIX + "authentication", "connector", "The endpoint refused its bearer token.", status=502),
        _row(
            PREFIX + "remote_temporary",
            "temporary",
            "The provider is full, draining or failed; read again.",
            retryable=True,
        ),
        _row(
            PREFIX + "remote_refused_temporarily", "temporary", "The provider refused the mutation for now.", status=503
        ),
        _row(PREFIX + "remote_rejected", "permanent", "The provider refused the request.", status=502),
        _row(PREFIX + "run_not_found", "permanent", "The provider's process does not know the run.", status=404),
        _row(PREFIX + "approval_not_active", "policy", "The run has no approval session any more.", status=409),
        _row(
            PREFIX + "approval_not_pending", "policy", "Nothing was pending; not executed by this request.", status=409
        ),
        _row(PREFIX + "transport", "transport", "The exchange broke; a read may be repeated.", retryable=True),
        _row(PREFIX + "not_sent", "transport", "Proven: no byte of the request left the host.", status=503),
        _row(PREFIX + "invalid_response", "connector", "The answer breaks the provider's format or a bound."),
        _row(PREFIX + "redirected", "connector", "The endpoint answered with a redirect: check its configured origin."),
        _row(PREFIX + "missing_credential", "auth", "The endpoint has no key.", status=503),
        _row(PREFIX + "cancelled", "temporary", "Cancelled while it ran.", status=409),
        _row(
            PREFIX + "deadline_exceeded",
            "temporary",
            "The deadline passed; nothing that was stored is lost.",
            status=504,
        ),
        _row(PREFIX + "tenant_mismatch", "auth", "The endpoint is bound to another tenant.", status=403),
        _row(PREFIX + "configuration_or_input", "permanent", "Endpoint, capability or input cannot form a request."),
        _row(
            PREFIX + "stream_incomplete",
            "connector",
            "The events ended before a terminal event.",
            effect=Effect.POSSIBLE,
        ),
        _row(PREFIX + "stream_truncated", "connector", "The event limit was reached.", effect=Effect.POSSIBLE),
        _row(PREFIX + "stream_failed", "connector", "The run ended in failure.", effect=Effect.POSSIBLE),
    )
}


class HostError(Exception):
    """A refusal or fault with a stable code from ``TABLE``. ``details`` never holds secrets or private content."""

    def __init__(
        self,
        code: str,
        message: str = "",
        *,
        retry_after_ms: int | None = None,
        effect: Effect | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        row = TABLE[code]
        super().__init__(message or row.meaning)
        self.code = code
        self.message = message or row.meaning
        self.category = row.category
        self.status = row.status
        self.retryable = row.retryable
        self.effect = effect or row.effect
        self.retry_after_ms = retry_after_ms
        self.details = details or {}

    def body(self) -> dict[str, Any]:
        """The error object of every answer (AIP 1.3, ProtocolError, with ``effect``)."""
        body: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "category": self.category,
            "retryable": self.retryable,
            "effect": self.effect.value,
        }
        if self.retry_after_ms is not None:
            body["retry_after_ms"] = self.retry_after_ms
        if self.details:
            body["details"] = self.details
        return body


class CallerError(HostError):
    """The caller's request cannot be taken as it is."""


class NotNow(HostError):
    """The host cannot take it at this moment."""


class ProviderError(HostError):
    """What the endpoint answered, or failed to answer."""


class IntegrityFault(HostError):
    """Stored facts contradict each other; stops the history, not the host."""
