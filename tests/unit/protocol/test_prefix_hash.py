"""Hashes of blocks: which sequences share them, and that none do by accident."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages.dispatch import AdapterRef
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher

BLOCK_SIZE = 4
NAMES = st.sampled_from(["", "a", "b", "ab", "ba", "a\0", "\0a", "a" * 64, "\0\0\0\0", "\x01\0\0\0a", "é"])
"""Names that would be one another's if they were joined without their lengths."""
ORIGINS = st.tuples(NAMES, NAMES, st.none() | NAMES)
"""Model, salt, and digest of the adapter."""


def hashes(origin: tuple[str, str, str | None], token_ids: list[int]) -> list[bytes]:
    model_id, cache_salt, digest = origin
    adapter = AdapterRef(digest, "/adapters/x") if digest is not None else None
    return BlockHasher(BLOCK_SIZE, model_id, cache_salt, (), adapter).prompt_hashes(pack_token_ids(token_ids))


@given(ORIGINS, ORIGINS, st.lists(st.integers(0, 3), min_size=BLOCK_SIZE, max_size=20))
def test_sequences_of_another_model_salt_or_adapter_share_no_block(
    one: tuple[str, str, str | None], other: tuple[str, str, str | None], token_ids: list[int]
) -> None:
    first, second = hashes(one, token_ids), hashes(other, token_ids)
    assert first == second if one == other else not set(first) & set(second)


@given(st.lists(st.integers(0, 2), max_size=24), st.lists(st.integers(0, 2), max_size=24))
def test_exactly_the_common_full_blocks_are_shared(one: list[int], other: list[int]) -> None:
    """A block depends on all tokens before it, also where blocks have equal tokens."""
    num_common = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    num_shared = (min(len(one), len(other)) if num_common is None else num_common) // BLOCK_SIZE
    first, second = (hashes(("m", "", None), token_ids) for token_ids in (one, other))
    assert first[:num_shared] == second[:num_shared]
    assert not set(first[num_shared:]) & set(second[num_shared:])
    assert len(set(first)) == len(first) == len(one) // BLOCK_SIZE


def test_an_adapters_folder_does_not_matter() -> None:
    """Hosts may have the same files in different folders."""
    here, there = (
        BlockHasher(BLOCK_SIZE, "m", "", (), AdapterRef("d", folder)).prompt_hashes(pack_token_ids([1, 2, 3, 4]))
        for folder in ("/a", "/b")
    )
    assert here == there


@given(st.lists(st.integers(0, 9), min_size=BLOCK_SIZE, max_size=20))
def test_blocks_hashed_one_by_one_have_the_hashes_of_the_whole_prompt(token_ids: list[int]) -> None:
    """The blocks of answers are hashed one by one; the next turn of the chat has them in its prompt."""
    hasher = BlockHasher(BLOCK_SIZE, "m", "salt")
    parent, found = hasher.root, []
    for number in range(len(token_ids) // BLOCK_SIZE):
        parent = hasher.next_hash(parent, token_ids[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE], number)
        found.append(parent)
    assert found == hasher.prompt_hashes(pack_token_ids(token_ids))
