"""The host memory tier: eviction order across restarts, damage, other memory, memory that cannot be mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.kv_transfer.tiers.block_record import HEADER_BYTES
from tandem.kv_transfer.tiers.host_memory import HostMemoryTier
from tandem.kv_transfer.tiers.tier import TierChanges, TierFailed
from tests.unit.kv_transfer.tiers.stored_blocks import (
    BLOCK_BYTES,
    IDENTITY,
    OTHER_IDENTITY,
    content_of,
    get,
    hash_of,
    held,
    host_bytes,
    put,
)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test-host-tier")
    yield fd
    os.close(fd)


def open_tier(
    fd: int, num_blocks: int = 3, identity: bytes = IDENTITY, block_bytes: int = BLOCK_BYTES
) -> HostMemoryTier:
    tier = HostMemoryTier(f"/proc/{os.getpid()}/fd/{fd}", host_bytes(num_blocks), identity, block_bytes)
    tier.open()
    return tier


def test_the_least_recently_used_block_is_evicted_also_after_a_restart(fd: int) -> None:
    tier = open_tier(fd)
    put(tier, 1, 2, 3)
    assert get(tier, 1)
    put(tier, 2)  # it is there, and this is a use
    tier = open_tier(fd)
    put(tier, 4)
    assert held(tier, 1, 2, 3, 4) == [1, 2, 4]
    tier = open_tier(fd)
    put(tier, 5)
    assert held(tier, 1, 2, 4, 5) == [2, 4, 5]


def test_the_file_is_grown_to_the_tiers_size_and_never_shrunk(fd: int) -> None:
    open_tier(fd)
    assert os.fstat(fd).st_size == host_bytes(3)
    os.ftruncate(fd, 100_000)
    open_tier(fd)
    assert os.fstat(fd).st_size == 100_000


def test_pages_of_blocks_are_not_touched_by_opening(fd: int) -> None:
    tier = HostMemoryTier(f"/proc/{os.getpid()}/fd/{fd}", 1 << 30, IDENTITY, 1 << 20)
    tier.open()
    tier.clear()
    assert os.fstat(fd).st_blocks * 512 <= 1 << 20


@pytest.mark.parametrize("damaged", ["header", "block"])
def test_a_damaged_block_is_dropped_and_counted(fd: int, damaged: str) -> None:
    tier = open_tier(fd)
    put(tier, 1, 2)
    wanted = hash_of(1) if damaged == "header" else bytes(content_of(hash_of(1)))
    place = os.pread(fd, os.fstat(fd).st_size, 0).index(wanted)
    os.pwrite(fd, bytes([os.pread(fd, 1, place)[0] ^ 1]), place)
    tier.changes.take()
    assert not get(tier, 1) and held(tier, 1) == [] and tier.num_corrupt == 1
    assert tier.changes.take() == TierChanges([], [hash_of(1)])
    assert get(tier, 2)
    put(tier, 1)
    assert get(tier, 1) and tier.num_corrupt == 1


def test_a_damaged_header_is_not_found_after_a_restart(fd: int) -> None:
    put(open_tier(fd), 1, 2)
    os.pwrite(fd, b"\xff", HEADER_BYTES - 40)
    assert len(held(open_tier(fd), 1, 2)) == 1


def test_memory_of_another_model_is_used_anew(fd: int) -> None:
    put(open_tier(fd), 1, 2, 3)
    other = open_tier(fd, identity=OTHER_IDENTITY, block_bytes=BLOCK_BYTES)
    put(other, 4, 5, 6)
    assert get(other, 4) and get(other, 5) and get(other, 6)
    assert held(open_tier(fd), 1, 2, 3, 4) == []


def test_memory_of_another_size_gives_no_wrong_block(fd: int) -> None:
    put(open_tier(fd, 3), 1, 2, 3)
    tier = open_tier(fd, 40)
    for number in (1, 2, 3):
        get(tier, number)  # compares the content, if it finds one
    put(tier, *range(10, 50))
    assert all(get(tier, number) for number in range(10, 50))


def test_memory_that_cannot_be_mapped_fails_clearly_and_may_be_there_later(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    tier = HostMemoryTier(str(path), host_bytes(3), IDENTITY, BLOCK_BYTES)
    with pytest.raises(TierFailed, match=r"cannot map the host memory tier .*: No such file or directory"):
        tier.open()
    assert tier.changes.take() == TierChanges([], []) and tier.num_bytes == 0
    path.touch()
    tier.open()
    put(tier, 1)
    assert get(tier, 1)


def test_closing_releases_the_memory(fd: int) -> None:
    def num_mappings() -> int:
        return Path("/proc/self/maps").read_text().count("test-host-tier")

    tier = open_tier(fd)
    put(tier, 1)
    assert get(tier, 1) and num_mappings() == 1
    tier.close()
    assert num_mappings() == 0
