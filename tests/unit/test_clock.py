from __future__ import annotations

import os
import re
from datetime import UTC

import pytest

from adapters.clock import SystemClock

CLOCK = SystemClock()


def test_ids_are_prefixed_time_ordered_uuids_of_version_7_and_never_the_same() -> None:
    before, ids, after = CLOCK.now(), [CLOCK.new_id("act_") for _ in range(2000)], CLOCK.now()
    assert all(re.fullmatch(r"act_[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15}", one) for one in ids)
    assert len(set(ids)) == len(ids)
    first, last = (int(one[4:16], 16) / 1000 for one in (ids[0], ids[-1]))
    assert before.timestamp() - 0.002 <= first <= last <= after.timestamp()
    assert [one[4:20] for one in ids] == sorted(one[4:20] for one in ids)


def test_time_is_utc_and_chance_is_in_its_range() -> None:
    assert CLOCK.now().tzinfo is UTC
    assert CLOCK.monotonic() <= CLOCK.monotonic()
    assert all(0 <= CLOCK.jitter() < 1 for _ in range(1000))
    assert len({CLOCK.entropy(16) for _ in range(100)}) == 100


@pytest.mark.anyio
async def test_sleeping_lasts_at_least_as_long_as_asked() -> None:
    began = CLOCK.monotonic()
    await CLOCK.sleep(0.01)
    assert CLOCK.monotonic() - began >= 0.01


def test_a_child_process_is_given_other_random_bytes_than_its_parent() -> None:
    CLOCK.entropy(1)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, CLOCK.entropy(32))
        os._exit(0)
    os.waitpid(child, 0)
    given = os.read(reader, 32)
    assert len(given) == 32
    assert given != CLOCK.entropy(32)
