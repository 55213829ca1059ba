from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.credentials import Secret, bearer_key, credential_revision, master_key, read_secret, write_secret
from adapters.settings import Settings, load, origin
from adapters.vault import MemoryKeys, Vault
from domain.errors import HostError
from tests.golden.event_samples import MASTER, counted_entropy

ENDPOINT = '[[endpoints]]\nid = "one"\nbase_url = "http://127.0.0.1:8642"\n'


def loaded(folder: Path, text: str = "", **variables: str) -> Settings:
    path = folder / "settings.toml"
    path.write_text(text)
    return load(path, {f"HERMES_RECONCILER_{name}": value for name, value in variables.items()})


def refusal(folder: Path, text: str = "", **variables: str) -> str:
    with pytest.raises(HostError) as caught:
        loaded(folder, text, **variables)
    assert caught.value.code == "settings.invalid"
    return caught.value.message


def secret_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.proves("B048")
def test_without_file_and_variables_the_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(None, {"PATH": "/bin", "HERMES_HOME": "/x"})
    assert settings == Settings()
    assert (settings.public.port, settings.operational.port, settings.front.port) == (8790, 8791, 8792)
    assert (settings.host.lease_ttl_ms, settings.host.heartbeat_ms, settings.host.health_timeout_ms) == (
        30_000,
        10_000,
        2_000,
    )
    assert settings.dsn() is None


def test_variables_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    text = '[public]\nport = 1001\nhost = "::1"\n[host]\nreplica = "a"\n' + ENDPOINT
    settings = loaded(
        tmp_path,
        text,
        PUBLIC__PORT="1002",
        BEHIND_PROXY="true",
        ENDPOINTS__0__MAX_CONCURRENT_RUNS="3",
        ENDPOINTS__1__ID="Two",
        ENDPOINTS__1__BASE_URL="https://two.example",
        POSTGRES__DSN="postgresql://u:pw@db/x",
        REGISTRY__SERVE="0",
    )
    assert (settings.public.port, settings.public.host, settings.host.replica) == (1002, "::1", "a")
    assert settings.behind_proxy is True
    assert settings.registry.serve is False
    assert [(one.id, one.max_concurrent_runs) for one in settings.endpoints] == [("one", 3), ("two", 10)]
    dsn = settings.dsn()
    assert dsn is not None
    assert dsn.reveal() == "postgresql://u:pw@db/x"


def test_the_file_may_be_named_by_a_variable_or_stand_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hermes-reconciler.toml").write_text("[public]\nport = 5")
    (tmp_path / "other.toml").write_text("[public]\nport = 6")
    assert load(None, {}).public.port == 5
    assert load(None, {"HERMES_RECONCILER_CONFIG": "other.toml"}).public.port == 6
    with pytest.raises(HostError, match="cannot be read"):
        load(None, {"HERMES_RECONCILER_CONFIG": "missing.toml"})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[publik]\nport = 1", 'unknown key "publik"; did you mean "public"?'),
        ("[public]\nprot = 1", 'unknown key "public.prot"; did you mean "port"?'),
        ("[host]\nlease_tll_ms = 1", 'did you mean "lease_ttl_ms"?'),
        ("[public]\nlease_ttl_ms = 1", 'unknown key "public.lease_ttl_ms"'),
        ("max_in_flight = 1", 'did you mean "host.max_in_flight"?'),
        (ENDPOINT + 'api_key = "x"', 'did you mean "api_key_file"?'),
        ("[limits]\nqqqqqqqqqq = 1", 'unknown key "limits.qqqqqqqqqq"'),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path: Path, text: str, named: str) -> None:
    assert named in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("variable", "named"),
    [
        ("PUBLIK__PORT", "HERMES_RECONCILER_PUBLIC__PORT"),
        ("PUBLIC__PROT", "PUBLIC__PORT"),
        ("BEHIND_PROXI", "BEHIND_PROXY"),
        ("PUBLIC", "unknown variable"),
        ("PUBLIC__PORT__X", "unknown variable"),
        ("ENDPOINTS__7__ID", "no endpoint before"),
        ("ENDPOINTS__0__BASE_URI", "BASE_URL"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_known_one(tmp_path: Path, variable: str, named: str) -> None:
    assert named in refusal(tmp_path, **{variable: "1"})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[public]\nport = "8790"', "public.port: Expected `int`"),
        ("[public]\nport = 70000", "public.port: Expected `int` <= 65535"),
        ("[host]\nlease_ttl_ms = 999", "host.lease_ttl_ms"),
        ("[host]\nlease_ttl_ms = 300001", "host.lease_ttl_ms"),
        ("[host]\nheartbeat_ms = 15001", "heartbeat_ms is at most half"),
        ("[host]\nmax_in_flight = 0", "host.max_in_flight"),
        ('[host]\nreplica = "a/b"', "replica"),
        ("[poll]\nmin_ms = 40000", "min_ms is at most max_ms"),
        ("[stream]\nframe_bytes = 99999999", "frame_bytes"),
        ("[public]\nport = 8791", "ports of the listeners are distinct"),
        ('[public]\nhost = "0.0.0.0"', "public.host is not loopback"),
        ('[operational]\nhost = ""', "operational.host is not loopback"),
        ('[tls]\ncert_file = "c.pem"', "given together"),
        ('[postgres]\ndsn = "x"\ndsn_file = "y"', "exclude each other"),
        ('[front]\nendpoint = "two"\n' + ENDPOINT, "names no endpoint"),
        (ENDPOINT + ENDPOINT.replace("one", " ONE "), "ids of endpoints are distinct"),
        (ENDPOINT.replace("one", "a b"), "endpoint id"),
        (ENDPOINT + 'tenant = "-"', "tenant"),
        (ENDPOINT + 'approvals_mode = "smart"', "approvals_mode"),
        ('[logging]\nlevel = "LOUD"', "logging.level"),
        ("[public\nport = 1", "is not TOML (at line 1"),
        ("endpoints = 3", "endpoints"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    assert named in refusal(tmp_path, text)


def test_listeners_beyond_this_machine_need_tls_or_a_proxy(tmp_path: Path) -> None:
    wide = '[public]\nhost = "0.0.0.0"\n'
    assert loaded(tmp_path, "behind_proxy = true\n" + wide).public.host == "0.0.0.0"
    tls = loaded(tmp_path, wide + '[tls]\ncert_file = "c.pem"\nkey_file = "k.pem"').tls
    assert tls.cert_file == tmp_path / "c.pem"


def test_a_front_that_is_not_served_takes_no_part_in_the_checks(tmp_path: Path) -> None:
    assert loaded(tmp_path, '[front]\nport = 8790\nhost = "0.0.0.0"').front.endpoint == ""
    assert "distinct" in refusal(tmp_path, '[front]\nport = 8790\nendpoint = "one"\n' + ENDPOINT)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("https://Hermes.Example:443/", "https://hermes.example"),
        ("http://127.0.0.1:8642", "http://127.0.0.1:8642"),
        ("http://[::1]:80", "http://[::1]"),
        ("https://h:8443", "https://h:8443"),
        ("http://localhost", "http://localhost"),
    ],
)
def test_an_origin_has_one_spelling(text: str, canonical: str) -> None:
    assert origin(text) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "http://hermes.example", "http://localhost.evil.example", "ftp://h", "https://", "https://u:p@h", "https://@h",
        "https://h/v1", "https://h?", "https://h/#", "https://h/?a", "https://h\\x", "https://h:0", "https://h:99999",
        "https://h:x", "https://[::1", "https://-h", "https://h h", "https://h\n", "//h", "h:8642", "https://é.example",
        "https://h//", "https://[::1%25eth0]",
    ],
)  # fmt: skip
def test_what_is_not_an_origin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"base_url|IPv6|[Pp]ort|address"):
        origin(text)


@given(st.text())
def test_any_text_is_an_origin_in_its_one_spelling_or_refused(text: str) -> None:
    for candidate in (text, f"https://{text}"):
        try:
            found = origin(candidate)
        except ValueError:
            continue
        assert origin(found) == found


def test_a_secret_is_neither_printed_nor_encoded() -> None:
    secret = Secret("canary-1c2b")
    assert [str(secret), repr(secret), f"{secret}", f"{secret!r}", "%s" % secret] == ["***"] * 5  # noqa: UP031
    for encode in (json.dumps, orjson.dumps, msgspec.json.encode, msgspec.to_builtins, pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError):
            encode(secret)  # type: ignore[operator]
    assert secret == Secret("canary-1c2b") != Secret("canary-1c2c")


def test_what_is_shown_holds_every_key_and_no_secret_and_the_revision_follows_it(tmp_path: Path) -> None:
    base = loaded(tmp_path, ENDPOINT, POSTGRES__DSN="postgresql://u:canary@db/x")
    shown = json.dumps(base.shown())
    assert "canary" not in shown
    assert "canary" not in repr(base)
    assert base.shown()["postgres"]["dsn"] == "***"
    assert base.shown()["endpoints"][0]["approval_timeout_ms"] == 60_000
    other_secret = loaded(tmp_path, ENDPOINT, POSTGRES__DSN="postgresql://u:other@db/x")
    other_port = loaded(tmp_path, ENDPOINT, POSTGRES__DSN="postgresql://u:canary@db/x", PUBLIC__PORT="1")
    assert base.revision() == other_secret.revision() != other_port.revision()


def test_an_error_names_the_key_and_never_the_value(tmp_path: Path) -> None:
    for text in ('[postgres]\ndsn = ["canary"]', 'x = "canary', '[public]\nport = "canary"'):
        assert "canary" not in refusal(tmp_path, text)


@pytest.mark.proves("A152")
def test_an_endpoint_key_is_one_word_and_its_revision_changes_with_it(tmp_path: Path) -> None:
    secret_file(tmp_path / "key", "sk-one\n")
    endpoint = loaded(tmp_path, ENDPOINT + 'api_key_file = "key"').endpoints[0]
    key = endpoint.key()
    assert key == Secret("sk-one")
    vault = Vault(MASTER, MemoryKeys(), counted_entropy())
    first = credential_revision(key, vault.digest)
    secret_file(tmp_path / "key", "sk-two\n")
    changed = endpoint.key()
    assert changed is not None
    assert credential_revision(changed, vault.digest) != first
    assert len(first) == 16
    assert loaded(tmp_path, ENDPOINT).endpoints[0].key() is None
    for text in ("two words", "sk\ttab", "é", "a\nb\n", "\n", ""):
        with pytest.raises(HostError) as caught:
            bearer_key(secret_file(tmp_path / "key", text))
        assert caught.value.code == "settings.secret_file"


def test_the_dsn_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    secret_file(tmp_path / "dsn", "postgresql://u:pw@db/x\n")
    assert loaded(tmp_path, '[postgres]\ndsn_file = "dsn"').dsn() == Secret("postgresql://u:pw@db/x")


def test_secret_files_that_others_could_read_or_swap_are_refused(tmp_path: Path) -> None:
    good = secret_file(tmp_path / "good", "x")
    assert read_secret(good) == b"x"
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(good)
    os.mkfifo(fifo, 0o600)
    bad: dict[Path, Any] = {
        secret_file(tmp_path / "open", "x", 0o640): "open to others",
        secret_file(tmp_path / "world", "x", 0o604): "open to others",
        link: "symbolic link",
        fifo: "not a regular file",
        tmp_path: "not a regular file",
        tmp_path / "missing": "cannot be opened",
        secret_file(tmp_path / "blank", " \n"): "empty",
        secret_file(tmp_path / "long", "x" * 16_385): "longer than",
    }
    for path, reason in bad.items():
        with pytest.raises(HostError, match=reason) as caught:
            read_secret(path)
        assert caught.value.code == "settings.secret_file"


def test_the_master_key_is_made_once_closed_to_others_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "state" / "master-key"
    first = master_key(path, counted_entropy(1))
    assert master_key(path, counted_entropy(2)) == first
    assert len(first) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["master-key"]
    assert write_secret(path, b"other", counted_entropy(3)) is False
    assert os.listdir(path.parent) == ["master-key"]
    for text in ("zz" * 32, "00" * 31):
        with pytest.raises(HostError):
            master_key(secret_file(tmp_path / "bad", text), counted_entropy())
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(HostError, match="symbolic link"):
        master_key(dangling, counted_entropy())
