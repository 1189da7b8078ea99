"""What the host memory tier and the disk tier have in common, as users of `KVTier` see it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.kv_transfer.tiers import block_record
from tandem.kv_transfer.tiers.disk import DiskTier
from tandem.kv_transfer.tiers.host_memory import HostMemoryTier
from tandem.kv_transfer.tiers.tier import KVTier, TierChanges, TierFailed
from tests.unit.kv_transfer.tiers.stored_blocks import (
    BLOCK_BYTES,
    DISK_RECORD_BYTES,
    IDENTITY,
    OTHER_IDENTITY,
    content_of,
    get,
    hash_of,
    held,
    host_bytes,
    put,
)

NUM_BLOCKS = 4
OpenTier = Callable[..., KVTier]


@pytest.fixture(params=["host", "disk"])
def open_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenTier]:
    """Opens a tier for `NUM_BLOCKS` blocks, each time on the same memory or folder."""
    fd = os.memfd_create("test-tier")

    def opened(identity: bytes = IDENTITY) -> KVTier:
        tier: KVTier
        if request.param == "host":
            tier = HostMemoryTier(f"/proc/{os.getpid()}/fd/{fd}", host_bytes(NUM_BLOCKS), identity, BLOCK_BYTES)
        else:
            tier = DiskTier(str(tmp_path / "tier"), NUM_BLOCKS * DISK_RECORD_BYTES, identity, BLOCK_BYTES)
        tier.open()
        assert tier.name == request.param
        return tier

    yield opened
    os.close(fd)


def test_blocks_are_found_and_loaded_again(open_tier: OpenTier) -> None:
    tier = open_tier()
    put(tier, 1, 2)
    assert tier.find([]) == 0
    assert tier.find([hash_of(1), hash_of(2), hash_of(3)]) == 2
    assert tier.find([hash_of(3), hash_of(1)]) == 0
    assert get(tier, 1) and get(tier, 2) and not get(tier, 3)
    assert 0 < tier.num_bytes <= tier.max_bytes
    assert tier.num_corrupt == 0


def test_blocks_outlive_the_tier_that_stored_them(open_tier: OpenTier) -> None:
    first = open_tier()
    put(first, 1, 2, 3)
    first.close()
    second = open_tier()
    assert set(second.changes.take().added) == {hash_of(number) for number in (1, 2, 3)}
    assert second.num_bytes > 0
    assert get(second, 1) and get(second, 2) and get(second, 3)


def test_a_full_tier_evicts(open_tier: OpenTier) -> None:
    tier = open_tier()
    put(tier, *range(10))
    assert len(held(tier, *range(10))) == NUM_BLOCKS and held(tier, 9) == [9]
    assert tier.num_bytes <= tier.max_bytes
    changes = tier.changes.take()
    assert set(changes.added) == {hash_of(number) for number in held(tier, *range(10))} and changes.removed == []


def test_changes_are_told_once(open_tier: OpenTier) -> None:
    tier = open_tier()
    put(tier, 1, 1, 2)
    assert tier.changes.take() == TierChanges([hash_of(1), hash_of(2)], [])
    assert tier.changes.take() == TierChanges([], [])
    tier.clear()
    put(tier, 1)
    assert tier.changes.take() == TierChanges([], [hash_of(2)])


def test_clear_removes_blocks_for_good(open_tier: OpenTier) -> None:
    tier = open_tier()
    put(tier, 1, 2)
    tier.clear()
    assert held(tier, 1, 2) == [] and not get(tier, 1) and tier.num_bytes == 0
    assert held(open_tier(), 1, 2) == []
    put(tier, 3)
    assert get(tier, 3)


def test_blocks_of_another_identity_are_not_found(open_tier: OpenTier) -> None:
    put(open_tier(), 1)
    other = open_tier(OTHER_IDENTITY)
    assert held(other, 1) == [] and not get(other, 1)
    assert other.changes.take() == TierChanges([], [])
    assert other.num_corrupt == 0
    assert get(open_tier(), 1), "it is still there"


@pytest.mark.parametrize("version", [block_record.FORMAT_VERSION - 1, block_record.FORMAT_VERSION + 1])
def test_blocks_of_another_format_version_are_not_found(
    open_tier: OpenTier, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(block_record, "FORMAT_VERSION", version)
        put(open_tier(), 1)
    tier = open_tier()
    assert not get(tier, 1) and held(tier, 1) == []
    assert tier.num_corrupt == 0
    tier.refresh()
    assert held(tier, 1) == []
    put(tier, 1)
    assert get(tier, 1)


def test_a_block_of_another_size_is_refused(open_tier: OpenTier) -> None:
    with pytest.raises(ValueError, match="a block of 5"):
        open_tier().store(hash_of(1), content_of(hash_of(1), 5))


def test_a_tier_that_holds_no_block_does_not_open(tmp_path: Path) -> None:
    for tier in (
        HostMemoryTier(str(tmp_path / "memory"), host_bytes(0), IDENTITY, BLOCK_BYTES),
        DiskTier(str(tmp_path), DISK_RECORD_BYTES - 1, IDENTITY, BLOCK_BYTES),
    ):
        with pytest.raises(TierFailed, match="give the tier more"):
            tier.open()
