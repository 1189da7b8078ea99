"""The disk tier on a disk that is full, read-only or broken."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from tandem.kv_transfer.tiers import disk
from tandem.kv_transfer.tiers.disk import DiskTier
from tandem.kv_transfer.tiers.tier import TierFailed
from tests.unit.kv_transfer.tiers.stored_blocks import (
    BLOCK_BYTES,
    IDENTITY,
    content_of,
    files_below,
    get,
    hash_of,
    held,
    put,
)

BIG_BYTES = 64 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir(0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount the file system that this test fills")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def put_big(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        tier.store(hash_of(number), content_of(hash_of(number), BIG_BYTES))


def get_big(tier: DiskTier, number: int) -> bool:
    block = memoryview(bytearray(BIG_BYTES))
    return tier.load(hash_of(number), block) and block == content_of(hash_of(number), BIG_BYTES)


def test_a_full_disk_evicts_and_fails_clearly_when_nothing_is_left_to_evict(small_disk: Path) -> None:
    tier = DiskTier(str(small_disk), 1 << 30, IDENTITY, BIG_BYTES)
    tier.open()
    for number in range(40):
        put_big(tier, number)
        assert get_big(tier, number)
    assert 10 <= len(held(tier, *range(40))) <= 15
    assert all(get_big(tier, number) for number in held(tier, *range(40)))
    tier.clear()
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(2 << 20))
    with pytest.raises(TierFailed, match="cannot store a block: No space left on device"):
        put_big(tier, 1)
    assert held(tier, 1) == [] and files_below(small_disk) == [ballast]
    ballast.unlink()
    put_big(tier, 1)
    assert get_big(tier, 1)


def test_blocks_on_a_read_only_disk_are_loaded_but_not_stored(small_disk: Path) -> None:
    tier = DiskTier(str(small_disk), 1 << 30, IDENTITY, BIG_BYTES)
    tier.open()
    put_big(tier, 1)
    [file] = files_below(small_disk)
    os.utime(file, (time.time() - 100, time.time() - 100))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        assert get_big(tier, 1)
        with pytest.raises(TierFailed, match="cannot store a block: Read-only file system"):
            put_big(tier, 2)
        with pytest.raises(TierFailed, match="cannot clear the folder: Read-only file system"):
            tier.clear()
        assert get_big(tier, 1) and held(tier, 1, 2) == [1]
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    put_big(tier, 2)
    assert get_big(tier, 2)
    tier.clear()
    assert held(tier, 1, 2) == []


def test_a_folder_without_permission_to_write_fails_clearly(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tier = DiskTier(str(tmp_path), 1 << 30, IDENTITY, BLOCK_BYTES)
    tier.open()
    put(tier, 1)
    temporaries = tmp_path / "tandem-kv-1" / IDENTITY.hex() / "tmp"
    temporaries.chmod(0o500)
    with pytest.raises(TierFailed, match="cannot store a block: Permission denied"):
        put(tier, 2)
    temporaries.chmod(0o700)
    put(tier, 2)
    assert get(tier, 1) and get(tier, 2)


def test_a_file_size_limit_fails_clearly_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), 1 << 30, IDENTITY, BIG_BYTES)
    tier.open()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(TierFailed, match="cannot store a block: File too large"):
            put_big(tier, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files_below(tmp_path) == [] and held(tier, 1) == []
    put_big(tier, 1)
    assert get_big(tier, 1)


@pytest.mark.parametrize(("number", "text"), [(errno.EIO, "Input/output error"), (errno.EDQUOT, "Disk quota exceeded")])
def test_errors_of_the_disk_fail_clearly_and_the_tier_goes_on(
    tmp_path: Path, number: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenFile(FileIO):
        def write(self, data: Any) -> int:
            raise OSError(number, os.strerror(number))

        def readinto(self, buffer: Any) -> int:
            raise OSError(number, os.strerror(number))

    tier = DiskTier(str(tmp_path), 1 << 30, IDENTITY, BLOCK_BYTES)
    tier.open()
    put(tier, *range(20))
    tier.changes.take()
    with monkeypatch.context() as patch:
        patch.setattr(disk, "FileIO", BrokenFile)
        with pytest.raises(TierFailed, match=f"cannot store a block: {text}"):
            put(tier, 99)
        survivor = held(tier, *range(20))[-1]
        with pytest.raises(TierFailed, match=f"cannot load a block: {text}"):
            get(tier, survivor)
        assert held(tier, survivor, 99) == [], "it is not tried again"
        assert hash_of(survivor) in tier.changes.take().removed
    put(tier, 99, survivor)
    assert get(tier, 99) and get(tier, survivor)
    assert tier.num_corrupt == 0
