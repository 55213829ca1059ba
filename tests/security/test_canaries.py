"""Nothing secret of ours is left anywhere; what callers said in confidence is told to those alone who may know it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.pg import shared_server
from tests.security.canaries import Left, hits, left_behind, marks

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def left() -> Iterator[Left]:
    """One story for all tests of this file."""
    with shared_server(fsync=True) as server, left_behind(server) as found:
        yield found


def test_the_marks_were_there_to_be_found(left: Left) -> None:
    seen = b"".join(left.scoped.values())
    told = msgspec.structs.asdict(left.payload)
    # an answer that is not the provider's own shape is kept as evidence, and what was refused is kept by no one
    assert {name for name, text in told.items() if text.encode() not in seen} <= {"garbage", "misplaced", "session_key"}


def test_our_secrets_stand_in_no_table_file_log_metric_answer_or_error(left: Left) -> None:
    places = left.rows | left.files | left.logs | left.open_routes | left.errors | left.unscoped | left.scoped
    assert hits(left.secrets.values(), places) == []


@pytest.mark.proves("A031", "A032", "A064", "B013")
def test_confidential_payload_stands_in_no_log_metric_or_error(left: Left) -> None:
    assert any(b"attempt.claimed" in log for log in left.logs.values())
    assert hits(marks(left.payload), left.logs | left.open_routes | left.errors) == []


@pytest.mark.proves("A031", "A032", "A064")
def test_answers_to_readers_without_the_scope_hold_no_payload(left: Left) -> None:
    assert hits(marks(left.payload), left.unscoped) == []


def test_the_database_and_its_log_of_changes_hold_payload_as_ciphertext_alone(left: Left) -> None:
    assert any("pg_wal" in place for place in left.files)
    assert hits(marks(left.payload), left.rows | left.files) == []


def test_after_erasure_the_content_is_gone_and_the_history_is_told(left: Left) -> None:
    assert hits(marks(left.payload), left.erased) == []
    assert sum(b"private.erased" in body for body in left.erased.values()) > 5
    assert left.erased.keys() == left.scoped.keys()


def test_data_keys_of_another_master_key_are_refused_at_the_start(left: Left) -> None:
    assert b"settings.secret_file" in left.refused_start
