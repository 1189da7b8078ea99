"""The header of a stored block: round trips, damage, other versions and identities."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from xxhash import xxh3_128_digest

from tandem.kv_transfer.tiers import block_record
from tandem.kv_transfer.tiers.block_record import (
    HEADER_BYTES,
    BlockFormat,
    BlockHeader,
    HeaderFault,
    block_identity,
    write_last_use,
)
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.transfer import KVLayout
from tests.unit.kv_transfer.tiers.stored_blocks import BLOCK_BYTES, IDENTITY, OTHER_IDENTITY, content_of, hash_of

FORMAT = BlockFormat(IDENTITY, BLOCK_BYTES)
BLOCK = content_of(hash_of(1))


def test_a_header_names_its_block_and_verifies_it() -> None:
    made = FORMAT.make_header(hash_of(1), BLOCK, last_use=7)
    header = FORMAT.parse_header(made)
    assert len(made) == HEADER_BYTES
    assert isinstance(header, BlockHeader)
    assert (header.block_hash, header.last_use) == (hash_of(1), 7)
    assert FORMAT.is_whole(header, hash_of(1), BLOCK)
    assert not FORMAT.is_whole(header, hash_of(2), BLOCK)
    assert not FORMAT.is_whole(header, hash_of(1), content_of(hash_of(2)))


def test_the_layout_on_disk_is_the_documented_one() -> None:
    made = FORMAT.make_header(hash_of(1), BLOCK, last_use=7)
    assert made[:8] == b"TandemKV"
    assert struct.unpack_from("<II", made, 8) == (1, 0)
    assert made[16:48] == IDENTITY + hash_of(1)
    assert struct.unpack_from("<Q", made, 48) == (BLOCK_BYTES,)
    assert made[56:72] == xxh3_128_digest(BLOCK)
    assert made[96:112] == xxh3_128_digest(made[:96])
    assert struct.unpack_from("<Q", made, 112) == (7,)


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_is_damage_unless_it_is_in_the_last_use_or_after_it(bit: int) -> None:
    flipped = bytearray(FORMAT.make_header(hash_of(1), BLOCK))
    flipped[bit // 8] ^= 1 << bit % 8
    parsed = FORMAT.parse_header(memoryview(flipped))
    if bit // 8 < 112:
        assert parsed is HeaderFault.DAMAGED
    else:
        assert isinstance(parsed, BlockHeader) and FORMAT.is_whole(parsed, hash_of(1), BLOCK)


@given(st.binary(max_size=300))
def test_any_bytes_can_be_parsed(header: bytes) -> None:
    assert FORMAT.parse_header(header) is HeaderFault.DAMAGED
    made = FORMAT.make_header(hash_of(1), BLOCK)
    assert FORMAT.parse_header(made[: len(header) % HEADER_BYTES]) is HeaderFault.DAMAGED


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_a_header_of_another_version_is_foreign(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(block_record, "FORMAT_VERSION", version)
        made = FORMAT.make_header(hash_of(1), BLOCK)
    assert FORMAT.parse_header(made) is HeaderFault.FOREIGN


@pytest.mark.parametrize("other", [BlockFormat(OTHER_IDENTITY, BLOCK_BYTES), BlockFormat(IDENTITY, BLOCK_BYTES // 2)])
def test_a_header_of_another_identity_or_size_is_foreign(other: BlockFormat) -> None:
    made = other.make_header(hash_of(1), BLOCK[: other.block_bytes])
    assert FORMAT.parse_header(made) is HeaderFault.FOREIGN


def test_the_last_use_is_updated_in_place() -> None:
    made = memoryview(bytearray(FORMAT.make_header(hash_of(1), BLOCK)))
    write_last_use(made, 2**63)
    header = FORMAT.parse_header(made)
    assert isinstance(header, BlockHeader) and header.last_use == 2**63


def test_identities_differ_in_each_field_of_the_layout_and_in_the_rank() -> None:
    layout = KVLayout("model", "bfloat16", 2, 2, 16, 16)
    changes: list[dict[str, object]] = [
        {"model_id": "model2"}, {"dtype": "float16"}, {"num_layers": 3}, {"num_kv_heads": 3}, {"head_dim": 17},
        {"block_size": 17}, {"tensor_parallel_size": 2}, {"engine": "tandem"}, {"immovable": "why"},
        {"numerics": Numerics(instruction_set="avx2")},
    ]  # fmt: skip
    assert {name for change in changes for name in change} == set(KVLayout.__struct_fields__)
    identities = [block_identity(replace(layout, **change), 0) for change in [{}, *changes]]
    identities.append(block_identity(layout, 1))
    assert len(set(identities)) == len(identities) and {len(identity) for identity in identities} == {16}
    assert block_identity(KVLayout("model", "bfloat16", 2, 2, 16, 16), 0) == identities[0]


def test_blocks_of_other_numerics_are_misses_and_the_wording_of_a_problem_is_no_difference() -> None:
    layout = KVLayout("model", "bfloat16", 2, 2, 16, 16)

    def format_of(numerics: Numerics) -> BlockFormat:
        return BlockFormat(block_identity(replace(layout, numerics=numerics), 0), BLOCK_BYTES)

    exact, other = Numerics(num_threads=1), Numerics(num_threads=2)
    inexact, reworded = replace(exact, problem="no kernel"), replace(exact, problem="another reason")
    stored = {each: format_of(each).make_header(hash_of(1), BLOCK) for each in (exact, other, inexact, reworded)}
    assert isinstance(format_of(exact).parse_header(stored[exact]), BlockHeader)
    assert format_of(exact).parse_header(stored[other]) is HeaderFault.FOREIGN
    assert format_of(exact).parse_header(stored[inexact]) is HeaderFault.FOREIGN, "its bits depend on the batch"
    assert isinstance(format_of(inexact).parse_header(stored[reworded]), BlockHeader)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="a block of 47"):
        FORMAT.make_header(hash_of(1), BLOCK[:-1])
    with pytest.raises(ValueError, match="a hash of 15 bytes"):
        FORMAT.make_header(hash_of(1)[:-1], BLOCK)
    with pytest.raises(ValueError, match="an identity of 3 bytes"):
        BlockFormat(b"abc", BLOCK_BYTES)
