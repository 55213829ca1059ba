from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from adapters.credentials import Secret
from adapters.logs import DROPPED, bound, configure
from domain.errors import HostError
from domain.values import Effect, Fence, Plain

CANARY = "canary-90ab17"
LOG = logging.getLogger("tests.logs")


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What was logged so far, read anew at each look; logging is put back afterwards."""
    root = logging.getLogger()
    before, level, raising = root.handlers[:], root.level, logging.raiseExceptions
    stream = io.StringIO()
    configure("INFO", stream)
    yield Lines(stream)
    root.handlers[:] = before
    root.setLevel(level)
    logging.raiseExceptions = raising


class Lines(list[dict[str, Any]]):
    def __init__(self, stream: io.StringIO) -> None:
        self.stream = stream

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([json.loads(line) for line in self.text.splitlines()])


def test_a_record_is_one_line_with_its_name_its_members_and_what_is_bound(lines: Lines) -> None:
    with bound(action="act_1", fence="replica-1/3"):
        LOG.info("attempt.claimed", extra={"attempt": "att_1", "effect": Effect.POSSIBLE, "count": 2})
    LOG.warning("no.context %s", "here\nthere")
    first, second = lines
    assert first.pop("at").endswith("Z")
    assert first == {
        "level": "info",
        "event": "attempt.claimed",
        "logger": "tests.logs",
        "action": "act_1",
        "fence": "replica-1/3",
        "attempt": "att_1",
        "effect": "possible",
        "count": 2,
    }
    assert second["event"] == "no.context here\nthere"
    assert "action" not in second


@pytest.mark.proves("A031", "A032")
@pytest.mark.parametrize("name", sorted(DROPPED))
def test_members_that_hold_secrets_or_private_content_are_dropped_at_any_depth(lines: Lines, name: str) -> None:
    spelled = name.upper().replace("_", "-")
    LOG.info("one", extra={name: CANARY, spelled: CANARY, "kept": {name: CANARY, "list": [{spelled: CANARY}]}})
    (line,) = lines
    assert CANARY not in lines.text
    assert line["kept"] == {"list": [{}]}


def test_values_that_are_not_plain_are_told_by_their_type_alone(lines: Lines) -> None:
    values = {"one": Secret(CANARY), "two": Plain(content=CANARY.encode()), "three": Fence(CANARY, 1), "four": b"x"}
    LOG.info("values", extra=values | {"when": datetime(2026, 1, 2, tzinfo=UTC), "huge": 2**80})
    (line,) = lines
    assert CANARY not in lines.text
    assert (line["one"], line["three"], line["four"]) == ("<Secret>", "<Fence>", "<bytes>")
    assert (line["when"], line["huge"]) == ("2026-01-02T00:00:00Z", str(2**80))


def test_a_traceback_keeps_types_codes_and_places_and_loses_foreign_messages(lines: Lines) -> None:
    try:
        try:
            raise ValueError(CANARY)
        except ValueError as error:
            raise HostError("storage.unavailable", "The store is away.") from error
    except HostError:
        LOG.exception("append.failed")
    (line,) = lines
    assert CANARY not in lines.text
    assert line["fault"]["code"] == "storage.unavailable"
    assert line["fault"]["message"] == "The store is away."
    assert line["fault"]["cause"]["type"] == "ValueError"
    assert "test_logs.py" in line["fault"]["places"][0]


def test_each_part_of_an_exception_group_is_told(lines: Lines) -> None:
    try:
        raise ExceptionGroup(CANARY, [KeyError(CANARY), OSError(CANARY)])
    except ExceptionGroup:
        LOG.exception("tasks.failed")
    (line,) = lines
    assert CANARY not in lines.text
    assert [part["type"] for part in line["fault"]["parts"]] == ["KeyError", "OSError"]


@pytest.mark.parametrize(
    "text",
    [f"sent Bearer {CANARY}", f"authorization: bearer {CANARY}", f"postgresql://u:{CANARY}@db", f"password={CANARY} x"],
)
def test_what_looks_like_a_credential_in_a_text_is_masked(lines: Lines, text: str) -> None:
    LOG.info(text, extra={"note": text})
    assert len(list(lines)) == 1
    assert CANARY not in lines.text


def test_records_that_cannot_be_formatted_and_text_that_is_not_unicode_leak_nothing(
    lines: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    LOG.info("%d", CANARY)
    LOG.info("half \ud800")
    assert [line["event"] for line in lines] == ["half ?"]
    captured = capsys.readouterr()
    assert CANARY not in captured.out + captured.err


@pytest.mark.parametrize("name", ["httpx", "httpcore.http11", "psycopg.pool", "eventsourcing.x", "uvicorn.access"])
def test_libraries_are_heard_from_warnings_on(lines: Lines, name: str) -> None:
    logging.getLogger(name).info("HTTP Request: POST %s", CANARY)
    logging.getLogger(name).warning("worth a look")
    assert [line["event"] for line in lines] == ["worth a look"]
