from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.credentials import Secret
from adapters.principals import (
    Entry,
    Policies,
    Principals,
    entry_toml,
    import_token,
    make_token,
    read_policies,
    read_principals,
    token_digest,
)
from domain.approval import TenantPolicy
from domain.errors import HostError
from domain.values import Actor
from tests.golden.event_samples import counted_entropy

TOKEN = "a-token-made-elsewhere"


def file(folder: Path, text: str, mode: int = 0o644) -> Path:
    path = folder / "file.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def entry(**members: object) -> str:
    values = {"id": "svc:orders", "token_sha256": token_digest(TOKEN)} | members
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in values.items()]
    return "\n".join(["[[principals]]", *lines, ""])


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(HostError) as caught:
        read_principals(file(folder, text))
    assert caught.value.code == "settings.invalid"
    return caught.value.message


def test_a_token_names_its_principal_and_any_other_names_nobody(tmp_path: Path) -> None:
    text = entry(tenant="acme", kind="human", scopes=["action:read", "approval:write:any"], roles=["approver"])
    known = Principals(file=file(tmp_path, text))
    assert known.find(TOKEN) == Actor(
        id="svc:orders",
        kind="human",
        tenant="acme",
        scopes=("action:read", "approval:write:any"),
        roles=("approver",),
    )
    for other in ("", TOKEN + " ", TOKEN[:-1], token_digest(TOKEN), "é", "\ud800"):
        assert known.find(other) is None


def test_a_fresh_token_is_admitted_by_the_entry_that_was_made_with_it(tmp_path: Path) -> None:
    token, made = make_token(counted_entropy(), id='odd "id"\\', scopes=["*"], roles=["approver"])
    path = file(tmp_path, entry() + entry_toml(made))
    known = Principals(file=path)
    assert len(known) == 2
    assert known.find(token.reveal()) == made.actor
    assert token.reveal().startswith("hr_")
    assert len(token.reveal()) == 46
    assert token.reveal() not in path.read_text()
    assert str(token) == "***"


def test_a_token_made_elsewhere_is_taken_as_it_is() -> None:
    known = Principals([import_token(Secret(TOKEN), id="svc:orders", scopes=["action:write"])])
    found = known.find(TOKEN)
    assert found is not None
    assert found.may("action:write")
    for unusable in ("short", "with a space in it", "x" * 5000, "ümläut-umlaut-umlaut"):
        with pytest.raises(HostError, match="visible ASCII"):
            import_token(Secret(unusable), id="svc:orders")


def test_one_principal_may_have_two_tokens_while_they_are_exchanged() -> None:
    old, new = import_token(Secret(TOKEN), id="one"), import_token(Secret(TOKEN + "2"), id="one")
    known = Principals([old, new])
    assert known.find(TOKEN) == known.find(TOKEN + "2") == old.actor


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (entry(token="x"), 'unknown key "principals.token"; did you mean "token_sha256"?'),
        (entry(scopes=["action:wirte"]), "unknown scope action:wirte"),
        (entry(scopes=["data:sensitive:read:any:any"]), "unknown scope"),
        (entry(kind="robot"), "kind"),
        (entry(tenant="-"), "tenant"),
        (entry(tenant="a/b"), "tenant"),
        (entry(id="system:reconciler"), "system:"),
        (entry(id=""), "principals.id"),
        (entry(token_sha256="ABC"), "64 lower-case hex digits"),
        ("[[principals]]\nid = 'x'", "token_sha256"),
        ("principals = 1", "principals"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    assert named in refusal(tmp_path, text)


def test_entries_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="same token"):
        Principals(file=file(tmp_path, entry() + entry(id="other")))
    with pytest.raises(HostError, match="contradict"):
        Principals(file=file(tmp_path, entry() + entry(token_sha256="0" * 64, roles=["approver"])))
    both = Principals(file=file(tmp_path, entry() + entry(token_sha256="0" * 64, tenant="other", roles=["approver"])))
    assert len(both) == 2


def test_reading_again_admits_and_withdraws_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    path = file(tmp_path, entry())
    known = Principals(file=path)
    file(tmp_path, entry(token_sha256=token_digest(TOKEN + "2")))
    known.reload()
    assert known.find(TOKEN) is None
    assert known.find(TOKEN + "2") is not None
    for broken in ("[[principals", entry() + entry(id="other")):
        file(tmp_path, broken)
        with pytest.raises(HostError):
            known.reload()
        assert known.find(TOKEN + "2") is not None


def test_files_that_others_may_write_are_refused(tmp_path: Path) -> None:
    for read in (read_principals, read_policies):
        with pytest.raises(HostError, match="written by others"):
            read(file(tmp_path, "", 0o664))
        with pytest.raises(HostError, match="cannot be read"):
            read(tmp_path / "missing.toml")


def test_a_policy_says_what_a_tenant_grants_and_without_one_a_person_decides(tmp_path: Path) -> None:
    text = (
        '[[tenants]]\nid = "acme"\napprover_roles = ["lead"]\ndirect = ["run_start"]\n'
        'choices = ["once", "session", "deny"]\nresolve_all = true\nallow_self_approval = true\n'
    )
    policies = Policies(file=file(tmp_path, text))
    assert policies.of("acme") == TenantPolicy(
        id="acme",
        approver_roles=("lead",),
        direct=("run_start",),
        choices=("once", "session", "deny"),
        resolve_all=True,
        allow_self_approval=True,
    )
    assert policies.of("other") == TenantPolicy(id="other")
    assert policies.of("other").direct == ()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('direct = ["run_status"]', "direct names no mutation: run_status"),
        ('choices = ["maybe"]', "choices names no choice: maybe"),
        ("resolve_al = true", 'did you mean "resolve_all"?'),
        ('resolve_all = "yes"', "resolve_all"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_name(tmp_path: Path, line: str, named: str) -> None:
    with pytest.raises(HostError, match=named.replace("?", r"\?")):
        read_policies(file(tmp_path, f'[[tenants]]\nid = "acme"\n{line}\n'))
    with pytest.raises(HostError, match="two policies"):
        Policies([TenantPolicy(id="acme"), TenantPolicy(id="acme")])


@given(st.lists(st.text(min_size=1, max_size=40), unique=True, min_size=1, max_size=6), st.text(max_size=40))
def test_exactly_the_kept_tokens_are_admitted(tokens: list[str], other: str) -> None:
    digests = {token_digest(token): token for token in tokens}
    known = Principals([Entry(id=f"p{place}", token_sha256=digest) for place, digest in enumerate(digests)])
    for place, token in enumerate(digests.values()):
        assert known.find(token) == Actor(id=f"p{place}")
    assert (known.find(other) is not None) == (token_digest(other) in digests)
