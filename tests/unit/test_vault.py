from __future__ import annotations

from datetime import UTC, datetime, timedelta

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.vault import DataKey, MemoryKeys, Vault
from domain.errors import HostError, IntegrityFault
from domain.values import Plain, PrivateScope, Sealed
from tests.golden.event_samples import MASTER, counted_entropy

pytestmark = pytest.mark.anyio
AT = datetime(2026, 11, 30, 12, tzinfo=UTC)
ALICE = PrivateScope(tenant="acme", principal="alice@example.org")
BOB = PrivateScope(tenant="acme", principal="bob@example.org")
HISTORY = "acme/act/act_1"


class ShyKeys(MemoryKeys):
    """Keys that two hosts ask for at the same time: neither finds one before both have made theirs."""

    async def find(self, tenant: str, principal_digest: str, month: str) -> DataKey | None:
        return None


def vault_on(keys: MemoryKeys, seed: int = 0) -> Vault:
    return Vault(MASTER, keys, counted_entropy(seed))


async def sealed_with(vault: Vault, content: bytes, scope: PrivateScope = ALICE, at: datetime = AT) -> Sealed:
    await vault.prepare([scope], at)
    return vault.seal(content, scope, at, HISTORY, 3)


@pytest.mark.parametrize("size", [0, 1, 256, 257, 5_000, 400_000])
async def test_content_of_any_size_opens_as_it_was(size: int) -> None:
    vault, content = vault_on(MemoryKeys()), bytes(n * n % 251 for n in range(size))
    sealed = await sealed_with(vault, content)
    assert await vault.open(sealed) == content
    assert sealed.size == size
    assert await vault.open(Plain(content=content)) == content


async def test_long_text_is_compressed_before_it_is_sealed_and_noise_is_not_blown_up() -> None:
    vault, noise = vault_on(MemoryKeys()), counted_entropy()(10_000)
    assert len((await sealed_with(vault, b"the same words " * 1000)).box) < 300
    assert len((await sealed_with(vault, noise)).box) <= (len(noise) + 29) * 4 / 3 + 1


@given(
    member=st.sampled_from(["history", "version", "key", "size", "box"]),
    place=st.integers(0, 40),
)
def test_moved_or_changed_ciphertext_does_not_open(member: str, place: int) -> None:
    async def move() -> None:
        vault = vault_on(MemoryKeys())
        sealed = await sealed_with(vault, b"private words here", ALICE)
        other = await sealed_with(vault, b"other private words", BOB)
        box = sealed.box
        changes: dict[str, object] = {
            "history": "acme/act/act_2",
            "version": 4,
            "key": other.key,
            "size": 17,
            "box": box[:place] + ("A" if box[place] != "A" else "B") + box[place + 1 :],
        }
        with pytest.raises(IntegrityFault) as caught:
            await vault.open(msgspec.structs.replace(sealed, **{member: changes[member]}))
        assert caught.value.code == "history.unreadable"

    anyio.run(move)


async def test_two_vaults_that_make_a_key_at_once_end_with_the_same_one() -> None:
    keys = ShyKeys()
    one, two = vault_on(keys, 1), vault_on(keys, 2)
    first, second = await sealed_with(one, b"from one"), await sealed_with(two, b"from two")
    assert first.key == second.key
    assert await two.open(first) == b"from one"
    assert await one.open(second) == b"from two"


async def test_each_tenant_principal_and_month_has_a_key_of_its_own() -> None:
    vault = vault_on(MemoryKeys())
    elsewhere = PrivateScope(tenant="other", principal=ALICE.principal)
    december = AT + timedelta(days=1)
    keys = {
        (await sealed_with(vault, b"x", scope, at)).key
        for scope in (ALICE, BOB, elsewhere)
        for at in (AT, december, AT - timedelta(days=2))
    }
    assert len(keys) == 6


async def test_forgetting_a_key_erases_what_it_sealed_and_nothing_else() -> None:
    keys = MemoryKeys()
    vault = vault_on(keys)
    gone, kept = await sealed_with(vault, b"alice's", ALICE), await sealed_with(vault, b"bob's", BOB)
    assert await vault.forget("acme", ALICE.principal, "2026-11") == 1
    for reader in (vault, vault_on(keys)):
        with pytest.raises(HostError) as caught:
            await reader.open(gone)
        assert caught.value.code == "private.erased"
        assert await reader.open(kept) == b"bob's"
    assert await vault.forget("acme", ALICE.principal, "2026-11") == 0
    again = await sealed_with(vault, b"new words", ALICE)
    assert again.key != gone.key
    assert await vault.open(again) == b"new words"


async def test_a_key_destroyed_by_another_process_is_out_of_use_within_a_minute() -> None:
    keys = MemoryKeys()
    here, there = vault_on(keys, 1), vault_on(keys, 2)
    before = await sealed_with(here, b"words")
    await there.forget("acme", ALICE.principal, "2026-11")
    after = await sealed_with(here, b"words", at=AT + timedelta(seconds=61))
    assert after.key != before.key
    assert await there.open(after) == b"words"
    with pytest.raises(HostError, match="destroyed"):
        await here.open(before)


async def test_the_table_of_keys_holds_neither_a_name_nor_a_usable_key() -> None:
    keys = MemoryKeys()
    await sealed_with(vault_on(keys), b"words")
    row = await keys.any()
    assert row is not None
    assert b"alice" not in msgspec.json.encode(row)
    with pytest.raises(HostError) as caught:
        await Vault(bytes(32), keys, counted_entropy()).admit()
    assert caught.value.code == "settings.secret_file"
    await vault_on(keys).admit()


async def test_digests_are_equal_for_equal_content_and_only_for_holders_of_the_key() -> None:
    one, two = vault_on(MemoryKeys(), 1), vault_on(MemoryKeys(), 2)
    stranger = Vault(bytes(32), MemoryKeys(), counted_entropy())
    assert one.digest(b"content") == two.digest(b"content") != one.digest(b"contents")
    assert stranger.digest(b"content") != one.digest(b"content")
    assert len(one.digest(b"")) == 64


def test_a_master_key_of_another_length_is_refused() -> None:
    with pytest.raises(HostError) as caught:
        Vault(b"short", MemoryKeys(), counted_entropy())
    assert caught.value.code == "settings.secret_file"
