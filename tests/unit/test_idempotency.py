"""Keys: one key, one request, one Action, for 24 hours and never less long than the outcome is open."""

from __future__ import annotations

import pytest

from domain.action import Action
from domain.errors import CallerError
from domain.events import KeyReserved
from domain.idempotency import (
    check_key,
    check_repeat,
    expired,
    fingerprint_text,
    holder,
    reserve,
    scope_text,
)
from domain.values import Actor
from tests.builders import (
    AT,
    History,
    action,
    claimed,
    denied,
    in_doubt,
    moment,
    ready,
    received,
    recorded,
    refused,
    settled,
)

DAY = 86_400


def reserved(at: float = 0, fingerprint: str = "f1", principal: str = "user:ada") -> KeyReserved:
    return reserve(
        action_id="act_1",
        capability_id="cap:hermes_agent:main:run_start",
        principal=principal,
        fingerprint=fingerprint,
        at=moment(at),
    )


@pytest.mark.proves("A129")
@pytest.mark.parametrize("key", [None, "", " ", "\t\n"])
def test_a_mutation_without_a_key_or_with_a_blank_one_is_refused(key: str | None) -> None:
    with pytest.raises(CallerError) as caught:
        check_key(key, required=True)
    assert caught.value.code == "idempotency.required"


def test_a_read_needs_no_key_but_a_given_one_must_not_be_blank() -> None:
    assert check_key(None, required=False) == check_key("", required=False) == ""
    assert check_key("key-1", required=False) == "key-1"
    with pytest.raises(CallerError) as caught:
        check_key("  ", required=False)
    assert caught.value.code == "idempotency.required"


@pytest.mark.parametrize("key", ["k" * 256, "a b", " key", "key\r\n", "schlüssel", "a\0"])
def test_a_key_that_cannot_travel_in_a_header_is_refused(key: str) -> None:
    with pytest.raises(CallerError) as caught:
        check_key(key, required=True)
    assert caught.value.code == "request.invalid"


@pytest.mark.parametrize("key", ["k", "k" * 255, "!~-_.:/"])
def test_a_key_of_visible_ascii_is_kept_as_it_is(key: str) -> None:
    assert check_key(key, required=True) == key


@pytest.mark.proves("A129")
def test_a_key_is_scoped_by_tenant_and_capability() -> None:
    places = {
        scope_text("acme", "cap:hermes_agent:main:run_start", "k"),
        scope_text("acme", "cap:hermes_agent:main:run_stop", "k"),
        scope_text("other", "cap:hermes_agent:main:run_start", "k"),
        scope_text("acme", "cap:hermes_agent:main:run_start", "l"),
        scope_text("acme", "cap:hermes_agent:main", ":run_startk"),
    }
    assert len(places) == 5
    assert scope_text("acme", "cap", "k") == scope_text("acme", "cap", "k")


@pytest.mark.proves("A130")
@pytest.mark.parametrize(("seconds", "over"), [(0, False), (DAY - 0.001, False), (DAY, True), (DAY * 30, True)])
def test_a_key_of_a_settled_action_lives_24_hours(seconds: float, over: bool) -> None:
    assert reserved().expires_at == moment(DAY)
    assert expired(reserved(), action(settled()), at=moment(seconds)) is over


@pytest.mark.proves("A130", "A142")
@pytest.mark.parametrize("history", [ready(), claimed(), in_doubt(), received(), refused()])
def test_a_key_whose_action_is_not_settled_never_expires(history: History) -> None:
    assert not expired(reserved(), action(history), at=moment(DAY * 365))


def test_a_key_whose_action_was_not_even_stored_does_not_expire() -> None:
    assert not expired(reserved(), Action(), at=moment(DAY * 2))


def test_a_denied_action_frees_its_key_after_24_hours_like_any_other() -> None:
    assert expired(reserved(), action(denied()), at=moment(DAY))


@pytest.mark.proves("A046", "A131")
def test_the_same_request_by_the_same_principal_is_a_repeat() -> None:
    asked = Actor(id="user:ada")
    key = reserved()
    check_repeat(key, "f1", asked)
    assert (key.principal, key.fingerprint, key.action_id) == (asked.id, "f1", "act_1")


@pytest.mark.parametrize(
    ("actor", "fingerprint", "code"),
    [
        (Actor(id="user:ada"), "f2", "idempotency.input_hash_mismatch"),
        (Actor(id="user:bo"), "f1", "idempotency.conflict"),
        (Actor(id="user:bo", scopes=("action:read",)), "f1", "idempotency.conflict"),
        (Actor(id="user:bo"), "f2", "idempotency.conflict"),
        (Actor(id="user:bo", scopes=("action:read:any",)), "f2", "idempotency.input_hash_mismatch"),
    ],
)
def test_another_request_or_another_principal_under_the_key_is_refused(
    actor: Actor, fingerprint: str, code: str
) -> None:
    with pytest.raises(CallerError) as caught:
        check_repeat(reserved(), fingerprint, actor)
    assert (caught.value.code, caught.value.status, caught.value.retryable) == (code, 409, False)


def test_who_may_read_everybodys_actions_may_have_the_original() -> None:
    reader = Actor(id="user:bo", scopes=("action:read:any",))
    check_repeat(reserved(), "f1", reader)
    assert reader.may_any("action:read")


def test_the_latest_reservation_holds_the_key() -> None:
    first, second = reserved(), reserved(at=DAY + 1, fingerprint="f2")
    assert holder(()) is None
    assert holder(recorded((first, second))) == second


def test_a_fingerprint_ignores_the_order_of_members_and_nothing_else() -> None:
    capability = "cap:hermes_agent:main:run_start"
    same = fingerprint_text(capability, {"b": {"y": 1, "x": 2}, "a": [1, 2]})
    assert fingerprint_text(capability, {"a": [1, 2], "b": {"x": 2, "y": 1}}) == same
    others = [
        fingerprint_text(capability, {"a": [2, 1], "b": {"x": 2, "y": 1}}),
        fingerprint_text(capability, {"a": [1, 2], "b": {"x": 2, "y": 1, "z": None}}),
        fingerprint_text(capability, {"a": [1, 2], "b": {"x": 2, "y": 1.0}}),
        fingerprint_text("cap:hermes_agent:main:run_stop", {"a": [1, 2], "b": {"x": 2, "y": 1}}),
    ]
    assert len({same, *others}) == 5


def test_a_reservation_names_its_action_and_time() -> None:
    key = reserved()
    assert (key.at, key.action_id, key.capability_id) == (AT, "act_1", "cap:hermes_agent:main:run_start")
