"""How long the state machine looks: ``--hypothesis-profile nightly`` looks longer, and elsewhere every night."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.register_profile("ci", COMMON, max_examples=200, stateful_step_count=50, derandomize=True, database=None)
settings.register_profile("nightly", COMMON, max_examples=5_000, stateful_step_count=100)
