from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import Enum
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

import anyio
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.codec import decode, encode, encode_event
from adapters.command import Stored
from adapters.vault import DataKey, MemoryKeys, Vault
from domain.errors import IntegrityFault
from domain.events import TOPICS, Event, KeyReserved, RunBound, StatusSeen
from domain.history import Change, Command
from domain.values import Fence, Plain, Sealed
from tests.golden.event_samples import (
    AT,
    FOLDER,
    HISTORY,
    KEY_FILE,
    MASTER,
    PRIVATE,
    SCOPE,
    counted_entropy,
    file_of,
    sample,
)

KINDS = list(TOPICS.values())
CANARY = b"canary-7f3c91d2"


def ready_vault() -> Vault:
    vault = Vault(MASTER, MemoryKeys(), counted_entropy())
    anyio.run(vault.prepare, [SCOPE], AT)
    return vault


def rows_of(*events: Event, vault: Vault, history: str = HISTORY) -> list[Stored]:
    change = Change(history=history, expected=4, events=events, scope=SCOPE)
    command = Command(changes=(change,), fence=Fence("host-1", 3), cause="because")
    return [row for row, _ in encode(command, [f"evt_{number}" for number in range(len(events))], vault)]


def boxes(value: Any) -> Iterator[Sealed]:
    if isinstance(value, Sealed):
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from boxes(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from boxes(item)


def without_private(value: Any) -> Any:
    """The value with private content replaced by a mark, to compare what was stored with what was meant."""
    if isinstance(value, Plain | Sealed):
        return "private"
    if isinstance(value, msgspec.Struct):
        return (type(value), [without_private(getattr(value, name)) for name in value.__struct_fields__])
    if isinstance(value, tuple):
        return tuple(without_private(item) for item in value)
    return value


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of(*(values_of(part) for part in arguments if part is not Sealed))
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), values_of(arguments[1]), max_size=3)
    if hint is type(None):
        return st.none()
    if hint is Plain:
        return st.builds(Plain, content=st.binary(max_size=400).map(lambda noise: CANARY + noise))
    if issubclass(hint, msgspec.Struct):
        return st.builds(hint, **{name: values_of(part) for name, part in members(hint).items()})
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    moments = st.datetimes(datetime(1970, 1, 2), datetime(2100, 1, 1), timezones=st.just(UTC))
    plain: dict[type, st.SearchStrategy[Any]] = {
        datetime: moments,
        str: st.text(max_size=20),
        bool: st.booleans(),
        int: st.integers(-(2**53), 2**53),
        float: st.floats(allow_nan=False, allow_infinity=False),
    }
    return plain[hint]


def members(kind: type[msgspec.Struct]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__struct_fields__}


@pytest.mark.proves("A031", "A032")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.topic)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_event_comes_back_as_it_was_and_its_private_content_is_not_in_the_bytes(
    kind: type[Event], data: st.DataObject
) -> None:
    event = data.draw(values_of(kind))
    vault = Vault(MASTER, MemoryKeys(), counted_entropy())
    anyio.run(vault.prepare, [SCOPE], event.at)
    (row,) = rows_of(event, vault=vault)
    recorded = decode(row)
    assert without_private(recorded.event) == without_private(event)
    assert (recorded.history, recorded.version, recorded.event_id) == (HISTORY, 5, "evt_0")
    assert (recorded.fence, recorded.cause) == (Fence("host-1", 3), "because")
    assert CANARY not in row.state
    assert encode_event(recorded.event, "evt_0", recorded.fence, "because") == row.state


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.topic)
def test_every_event_version_has_a_golden_sample(kind: type[Event]) -> None:
    assert file_of(kind).exists(), "run `python -m tests.golden.event_samples`"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_golden_sample_is_read_and_opened_and_written_again_byte_for_byte(path: Any) -> None:
    topic, _, version = path.stem.rpartition(".v")
    row = Stored(history=HISTORY, version=1, topic=topic, state=path.read_bytes())
    recorded = decode(row)
    keys = MemoryKeys()
    anyio.run(keys.offer, msgspec.json.decode(KEY_FILE.read_bytes(), type=DataKey))
    contents = anyio.run(Vault(MASTER, keys, counted_entropy()).open_many, list(boxes(recorded.event)))
    assert all(content == PRIVATE for content in contents)
    if int(version) == TOPICS[topic].class_version:
        assert without_private(recorded.event) == without_private(sample(TOPICS[topic]))
        assert encode_event(recorded.event, recorded.event_id, recorded.fence, recorded.cause) == row.state


def test_a_topic_outside_the_table_is_a_newer_releases_and_nothing_is_imported_for_it() -> None:
    before = set(sys.modules)
    for topic in ("this:s", "wave:open", "antigravity", "domain.events:RunBound", "run.bound2"):
        with pytest.raises(IntegrityFault) as caught:
            decode(Stored(history=HISTORY, version=1, topic=topic, state=b'{"id":"x","v":1,"e":{}}'))
        assert caught.value.code == "history.newer_version"
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda stored: stored | {"v": 2}, "history.newer_version"),
        (lambda stored: stored | {"later": 1}, "history.newer_version"),
        (lambda stored: stored | {"e": stored["e"] | {"later": 1}}, "history.newer_version"),
        (lambda stored: stored | {"e": stored["e"] | {"owner": {"replica": "r", "sequence": 1, "later": 1}}},
         "history.newer_version"),
        (lambda stored: stored | {"v": 0}, "history.unreadable"),
        (lambda stored: stored | {"v": "1"}, "history.unreadable"),
        (lambda stored: stored | {"e": {}}, "history.unreadable"),
        (lambda stored: stored | {"e": stored["e"] | {"run_id": 7}}, "history.unreadable"),
        (lambda stored: stored | {"e": stored["e"] | {"started_at": "soon"}}, "history.unreadable"),
        (lambda stored: {"e": stored["e"]}, "history.unreadable"),
    ],
)  # fmt: skip
def test_what_a_newer_release_wrote_and_what_is_broken_are_told_apart(change: Any, code: str) -> None:
    (row,) = rows_of(sample(RunBound), vault=ready_vault())
    state = json.dumps(change(json.loads(row.state))).encode()
    with pytest.raises(IntegrityFault) as caught:
        decode(msgspec.structs.replace(row, state=state))
    assert caught.value.code == code
    assert caught.value.details == {"history": HISTORY, "version": 5, "topic": "run.bound"}


@given(noise=st.one_of(st.binary(max_size=60), st.sampled_from([b"[" * 100_000, b'{"id":"', b"\xff", b"null"])))
@settings(deadline=None)
def test_any_bytes_are_an_event_or_an_integrity_fault(noise: bytes) -> None:
    for state in (noise, b'{"id":"x","v":1,"e":' + noise + b"}"):
        with pytest.raises(IntegrityFault):
            decode(Stored(history=HISTORY, version=1, topic="run.bound", state=state))


class Renamed(Event, frozen=True, kw_only=True):
    """A sample of an event that changed twice."""

    topic = "codec_sample.renamed"
    class_version: ClassVar[int] = 3
    wait_ms: int
    state: str

    @staticmethod
    def upcast_v1_v2(state: dict[str, Any]) -> None:
        state["wait_ms"] = state.pop("wait_s") * 1000

    @staticmethod
    def upcast_v2_v3(state: dict[str, Any]) -> None:
        state["state"] = "new"


def test_older_versions_are_read_through_the_upcasters_beside_the_event() -> None:
    TOPICS[Renamed.topic] = Renamed
    try:
        for version, member in ((1, b'"wait_s":2'), (2, b'"wait_ms":2000')):
            state = b'{"id":"x","v":%d,"e":{"at":"2026-01-02T03:04:05.678901Z",%b}}' % (version, member)
            event = decode(Stored(history=HISTORY, version=1, topic=Renamed.topic, state=state)).event
            assert event == Renamed(at=AT, wait_ms=2000, state="new")
    finally:
        del TOPICS[Renamed.topic]


def test_private_content_of_another_tenant_is_not_read() -> None:
    (row,) = rows_of(sample(StatusSeen), vault=ready_vault())
    with pytest.raises(IntegrityFault, match="another tenant"):
        decode(msgspec.structs.replace(row, history="other/act/act_0001"))


def test_private_content_without_a_scope_and_text_that_is_not_unicode_are_refused() -> None:
    change = Change(history=HISTORY, expected=0, events=(sample(StatusSeen),))
    with pytest.raises(ValueError, match="without a scope"):
        encode(Command(changes=(change,)), ["evt_1"], ready_vault())
    with pytest.raises(ValueError, match="not Unicode"):
        rows_of(msgspec.structs.replace(sample(KeyReserved), principal="\ud800"), vault=ready_vault())


def test_sealed_content_that_is_recorded_again_keeps_its_first_place() -> None:
    vault = ready_vault()
    (first,) = rows_of(sample(StatusSeen), vault=vault)
    event = decode(first).event
    assert isinstance(event, StatusSeen)
    (second,) = rows_of(event, vault=vault, history="acme/run/one/r1")
    assert decode(second).event == event
