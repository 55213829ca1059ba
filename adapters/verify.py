"""Verification of an integration (runs page): eight checks for each endpoint, and the record that is kept of them.

What was not tried is not proven, and the whole has passed only if every check of every endpoint has. The record names
every identity that the result speaks of, and neither prompts nor outputs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import adapters
import domain
import projections
from adapters.client import Api
from adapters.clock import SystemClock
from adapters.conversation import Conversation
from adapters.credentials import Secret, bearer_key
from adapters.endpoints import RELEASE
from adapters.settings import load
from adapters.verify_checks import CHECKS
from adapters.verify_trial import NOT_TRIED, PASSED, Permits, Trial
from domain.values import rfc3339

__all__ = ["Permits", "artifact", "endpoint_keys", "tell", "verify_host", "write_record"]
RECORD = "hermes-reconciler.verification.v1"
BUILD_DIGITS = 16
CONNECTOR = (
    "adapters/hermes.py",
    "adapters/sse.py",
    "adapters/endpoints.py",
    "domain/provider.py",
    "domain/requests.py",
    "domain/contracts.py",
)
Key = Callable[[str], Secret | None]


def verify_host(
    asker: Api, approver: Api, permits: Permits, wanted: Sequence[str], key_of: Key, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Make every check that is permitted; ``wanted`` names endpoints, all if empty. CallFailed without a host.

    ``key_of`` gives an endpoint's own key, which check 7 needs to read beside the host. ValueError for an endpoint
    that is not admitted.
    """
    clock = SystemClock()
    began = clock.now()
    manifest = asker.get("/aip/v1/manifest").body
    admitted = manifest["compatibility"]["endpoints"]
    if unknown := set(wanted) - set(admitted):
        raise ValueError(f"not admitted: {', '.join(sorted(unknown))}; admitted: {', '.join(admitted)}")
    endpoints = []
    for endpoint_id in wanted or admitted:
        talk = Conversation(asker=asker, approver=approver, endpoint_id=endpoint_id, wait_s=permits.wait_s)
        endpoints.append(_verify_endpoint(Trial(talk, permits, manifest, key_of(endpoint_id)), tell))
    host = artifact()
    return {
        "record": RECORD,
        "source_revision": {"release": RELEASE, "build": host["sha256"][:BUILD_DIGITS]},
        "artifacts": {"host": host, "connector": artifact(CONNECTOR)},
        "artifacts_measured": "the installation that made this verification",
        "host_url": asker.url,
        "began_at": rfc3339(began),
        "ended_at": rfc3339(clock.now()),
        "passed": bool(endpoints) and all(endpoint["passed"] for endpoint in endpoints),
        "endpoints": endpoints,
    }


def _verify_endpoint(trial: Trial, tell: Callable[[str], None]) -> dict[str, Any]:
    results = []
    for number, (title, check) in enumerate(CHECKS, 1):
        tell(f"{trial.endpoint_id}: check {number} of {len(CHECKS)}: {title}")
        results.append(trial.make(number, title, check))
    compatibility, target = trial.manifest["compatibility"], trial.target
    bound = {item["endpoint_id"]: item["tenant_id"] for item in compatibility["tenant_bound_endpoints"]}
    origins = [
        capability["bindings"][0]["base_url"]
        for capability in trial.manifest["capabilities"]
        if capability["bindings"][0]["endpoint_id"] == trial.endpoint_id
    ]
    return {
        "endpoint_id": trial.endpoint_id,
        "origin": origins[0] if origins else None,
        "tenant_binding": bound.get(trial.endpoint_id),
        "hermes_revision": (target.get("features") or {}).get("version") or None,
        "hermes_features": list((target.get("features") or {}).get("flags") or ()),
        "credential_revision": target.get("credential_revision"),
        "configuration_revision": target.get("config_revision"),
        "passed": all(result.result == PASSED for result in results),
        "not_proven": [result.number for result in results if result.result != PASSED],
        "checks": msgspec.to_builtins(results),
    }


def endpoint_keys(config: Path | None) -> Key:
    """The keys of endpoints by the settings in force here, and that of a practice Hermes which the host made."""
    read = load(config, os.environ)
    files = {endpoint.id: endpoint.api_key_file for endpoint in read.endpoints}
    files = files or {"practice": read.state.dir / "practice" / "key"}

    def key_of(endpoint_id: str) -> Secret | None:
        file = files.get(endpoint_id)
        return bearer_key(file) if file is not None and file.exists() else None

    return key_of


def artifact(names: Sequence[str] = ()) -> dict[str, Any]:
    """Digest of the product's own files, or of those named: SHA-256 over each path and content in order of path."""
    root = Path(adapters.__file__).resolve().parents[1]
    packages = [Path(package.__file__ or "").resolve().parent for package in (domain, projections, adapters)]
    files = [root / name for name in names] or [
        path for package in packages for path in package.rglob("*") if path.suffix in (".py", ".sql")
    ]
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return {"files": len(files), "sha256": digest.hexdigest()}


def write_record(file: Path, report: dict[str, Any]) -> None:
    """Keep the record, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.draft")
    draft.write_text(json.dumps(report, ensure_ascii=False, indent=2) + "\n", "utf-8")
    draft.replace(file)


def tell(report: dict[str, Any], say: Callable[[str], None]) -> None:
    """The result for people: what passed, what failed and by which expectation, what is not proven and why."""
    for endpoint in report["endpoints"]:
        revision = endpoint["hermes_revision"] or "of unknown revision (no run was started)"
        say(f"{endpoint['endpoint_id']}: Hermes {revision} at {endpoint['origin']}")
        for check in endpoint["checks"]:
            say(f"  {check['number']}  {check['result']:9}  {check['title']}")
            if check["result"] == NOT_TRIED:
                say(f"       not proven; permit it with {check['permit']}")
            if check["problem"]:
                say(f"       {check['problem']}")
            for item in check["observations"]:
                if not item["seen"]:
                    say(f"       not seen: {item['expected']}")
        if others := endpoint["checks"][0]["other_capabilities"]:
            say(f"  beside the run capabilities: {', '.join(others)}")
    source = report["source_revision"]
    say(f"release {source['release']}, build {source['build']}")
    open_checks = sum(len(endpoint["not_proven"]) for endpoint in report["endpoints"])
    say("All checks passed." if report["passed"] else f"NOT verified: {open_checks} checks are not proven.")
