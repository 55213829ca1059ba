"""Credential-looking parts are masked, and the rest stays readable."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from projections.masking import MASK, REDACTED, mask, mask_text

SECRET = "s3cr3tCanaryValue"

FORMS = [
    "curl -H 'Authorization: Bearer {}' https://api.example.test/v1",
    'curl -H "Authorization: Basic {}" https://api.example.test',
    "Authorization: {}",
    "proxy-authorization: Token {}",
    '{{"authorization": "Bearer {}"}}',
    "use bearer {} please",
    "psql postgres://app:{}@db.example.test:5432/main --echo-all",
    "redis://:{}@cache.example.test/0",
    "git clone https://{}@git.example.test/repo.git",
    "export API_KEY={} && run",
    'OPENAI_API_KEY="{}" python x.py',
    "AWS_SECRET_ACCESS_KEY={}",
    "password={};user=app",
    "password: {}",
    "Password := '{}'",
    '{{"password":"{}","host":"db"}}',
    '{{\\"client_secret\\":\\"{}\\"}}',
    "mysql --password={} -h db",
    "mysql --password {} -h db",
    "tool --api-key {} --verbose",
    "tool --auth-token={} --verbose",
    "curl -u user:{} https://example.test",
    "curl --user admin:{} https://example.test",
    "X-Api-Key: {}",
    "Cookie: session={}; theme=dark",
    "set-cookie: id={}; HttpOnly",
    "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\n{}",
    "passphrase = {}",
    "refresh_token={}&grant_type=x",
    "private_key={}",
    "credential => {}",
]


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_in_any_of_these_forms_is_masked(form: str) -> None:
    masked = mask_text(form.format(SECRET))
    assert SECRET not in masked
    assert MASK in masked


@pytest.mark.parametrize(
    "token",
    [
        "sk-proj-abcdefgh12345678",
        "ghp_abcdefghijklmnop1234",
        "github_pat_abcdefghijklmnopqrst",
        "AKIAABCDEFGHIJKLMNOP",
        "xoxb-1234567890-abcdef",
        "glpat-abcdefghijklmnop",
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
    ],
)
def test_tokens_of_a_known_form_are_masked_wherever_they_stand(token: str) -> None:
    assert token not in mask_text(f"echo {token} | sh")


@pytest.mark.parametrize(
    "text",
    [
        "rm -rf build && make test",
        "curl -X POST https://api.example.test/v1/items?limit=10 --max-time 5",
        "the total was 12 tokens, tokens: 12",
        '{"usage":{"input_tokens":5,"output_tokens":7}}',
        "ssh deploy@host.example.test 'ls -l'",
        "basic understanding of keys and authors",
        "https://host.example.test:8443/path",
        "Die Prüfung läuft – 日本語",
    ],
)
def test_what_is_no_secret_stays_as_it_is(text: str) -> None:
    assert mask_text(text) == text


def test_target_and_flags_of_a_masked_command_stay_readable() -> None:
    masked = mask_text(f"curl -s -H 'Authorization: Bearer {SECRET}' https://api.example.test/v1 --fail")
    assert masked == "curl -s -H 'Authorization: ***' https://api.example.test/v1 --fail"
    masked = mask_text(f"psql postgres://app:{SECRET}@db.example.test:5432/main -c 'select 1'")
    assert masked == "psql postgres://app:***@db.example.test:5432/main -c 'select 1'"


def test_texts_under_the_name_of_a_secret_go_completely_and_numbers_stay() -> None:
    given_value: dict[str, Any] = {
        "api_key": "x", "session_key": "y", "Authorization": "z", "cookie": ["a"], "credentials": {"a": "b"},
        "token": "t", "usage": {"total_tokens": 7}, "tokens": 3, "password": "", "items": [{"client_secret": "s"}],
    }  # fmt: skip
    assert mask(given_value) == {
        "api_key": REDACTED, "session_key": REDACTED, "Authorization": REDACTED, "cookie": REDACTED,
        "credentials": REDACTED, "token": REDACTED, "usage": {"total_tokens": 7}, "tokens": 3, "password": "",
        "items": [{"client_secret": REDACTED}],
    }  # fmt: skip


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=40),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
        max_leaves=20,
    )
)
def test_masking_twice_is_masking_once_and_gives_json(value: Any) -> None:
    once = mask(value)
    assert mask(once) == once or MASK in json.dumps(once)
    json.dumps(once)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 200_000,
        "token" * 40_000,
        "://" * 60_000,
        "password=" * 20_000,
        '"' * 200_000,
        "-u a:" * 40_000,
        "-" * 200_000,
        "--a" * 60_000,
        "sk_" * 60_000,
        "-----BEGIN " * 20_000,
    ],
)
def test_long_texts_are_masked_in_time(text: str) -> None:
    assert isinstance(mask_text(text), str)
