"""The admitted endpoints: their keys, what they advertise, and the provider port of each.

Keys are read once at start; a changed file is told as "restart needed". What an endpoint advertises is read at start
and again from time to time, and travels with each claim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from adapters.credentials import Secret, credential_revision
from adapters.hermes import BearerKey, HermesEndpoint, HermesLimits
from adapters.probes import read_endpoint
from adapters.settings import Endpoint
from domain.errors import HostError
from domain.events import Target
from domain.provider import Features

log = logging.getLogger(__name__)

RELEASE = "0.1.0"


class Endpoints:
    """Every admitted endpoint by its normalised id."""

    def __init__(
        self,
        settings: Sequence[Endpoint],
        digest: Callable[[bytes], str],
        config_revision: str,
        limits: HermesLimits,
    ) -> None:
        self._settings = {endpoint.id: endpoint for endpoint in settings}
        self._digest = digest
        self._keys: dict[str, Secret | None] = {endpoint.id: endpoint.key() for endpoint in settings}
        self._known: set[str] = set()
        self.providers: dict[str, HermesEndpoint] = {}
        for endpoint in settings:
            key = self._keys[endpoint.id]
            target = Target(
                endpoint_id=endpoint.id,
                origin=endpoint.base_url,
                tenant_binding=endpoint.tenant,
                config_revision=config_revision[:16],
                credential_revision=credential_revision(key, digest) if key else "",
            )
            self.providers[endpoint.id] = HermesEndpoint(
                target,
                BearerKey(key.reveal()) if key else None,
                limits=limits,
                allow_http=endpoint.insecure_http,
                agent=f"hermes-reconciler/{RELEASE}",
            )

    def published(self) -> list[tuple[str, str, str, str]]:
        """(id, display name, origin, tenant binding) of each, in id order."""
        return [
            (
                name,
                self._settings[name].display_name or name,
                self._settings[name].base_url,
                self._settings[name].tenant,
            )
            for name in sorted(self._settings)
        ]

    @property
    def approval_timeouts_ms(self) -> Mapping[str, int]:
        """How long each endpoint's agent waits for an answer."""
        return {name: endpoint.approval_timeout_ms for name, endpoint in self._settings.items()}

    def setting(self, endpoint_id: str) -> Endpoint:
        """The settings of one endpoint."""
        return self._settings[endpoint_id]

    async def refresh(self, endpoint_id: str) -> tuple[Features, str]:
        """Read again what an endpoint advertises; the features in force, and what its protected read said.

        An endpoint that cannot be read keeps what it advertised before.
        """
        provider = self.providers[endpoint_id]
        features, models = await read_endpoint(provider)
        answered = models.complete and models.status == 200
        if answered and (features.version or endpoint_id not in self._known):
            self._known.add(endpoint_id)
            if features != provider.target.features:
                provider.target = msgspec.structs.replace(provider.target, features=features)
                log.info("endpoint.features", extra={"endpoint": endpoint_id, "flags": list(features.flags)})
        said = "ok" if answered else models.failure.value or f"HTTP {models.status}"
        return provider.target.features, said

    def restart_needed(self, endpoint_id: str) -> bool:
        """True if the key file holds another key than the one in use, or cannot be read."""
        try:
            now = self._settings[endpoint_id].key()
        except HostError:
            return True
        return now != self._keys[endpoint_id]

    async def close(self) -> None:
        """Close every connection."""
        for provider in self.providers.values():
            await provider.close()
