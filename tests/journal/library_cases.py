"""eventsourcing's test cases for recorders, with its cipher on the cryptography package in place of its other one."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from eventsourcing import cryptography


def persistence_cases() -> Any:
    """The module `eventsourcing.tests.persistence`."""
    sys.modules.setdefault("eventsourcing.cipher", cryptography)
    return importlib.import_module("eventsourcing.tests.persistence")
