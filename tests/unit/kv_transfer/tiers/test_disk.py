"""The disk tier: files, permissions, damage, eviction by use, and folders that others change."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from tandem.kv_transfer.tiers import block_record
from tandem.kv_transfer.tiers.disk import DiskTier
from tandem.kv_transfer.tiers.tier import TierChanges, TierFailed
from tests.unit.kv_transfer.tiers.stored_blocks import (
    BLOCK_BYTES,
    DISK_RECORD_BYTES,
    IDENTITY,
    OTHER_IDENTITY,
    bytes_on_disk,
    files_below,
    get,
    hash_of,
    held,
    put,
)

NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "above" / "tier"


def open_tier(folder: Path, num_blocks: int = 100, identity: bytes = IDENTITY) -> DiskTier:
    tier = DiskTier(str(folder), num_blocks * DISK_RECORD_BYTES, identity, BLOCK_BYTES)
    tier.open()
    return tier


def file_of(folder: Path, number: int, identity: bytes = IDENTITY, version: int = 1) -> Path:
    name = hash_of(number).hex()
    return folder / f"tandem-kv-{version}" / identity.hex() / name[:2] / name


def set_age(path: Path, age_s: float) -> None:
    os.utime(path, (time.time() - age_s, time.time() - age_s))


def age_of(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def test_only_the_owner_has_access(folder: Path) -> None:
    put(open_tier(folder), 1, 2)
    assert file_of(folder, 1) in files_below(folder) and len(files_below(folder)) == 2
    for path in files_below(folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_folder_that_others_may_change_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o775)
    with pytest.raises(TierFailed, match=r"is open to other users \(mode 0775\): run chmod 700"):
        open_tier(folder)
    folder.chmod(0o755)
    open_tier(folder)
    (folder / "tandem-kv-1").chmod(0o755)
    with pytest.raises(TierFailed, match=r"tandem-kv-1 is open to other users \(mode 0755\)"):
        open_tier(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(TierFailed, match="link is a symbolic link: name the folder itself"):
        open_tier(tmp_path / "link")
    shutil.rmtree(folder / "tandem-kv-1")
    (folder / "tandem-kv-1").symlink_to(tmp_path)
    with pytest.raises(TierFailed, match="tandem-kv-1 is a symbolic link"):
        open_tier(folder)


def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    if os.geteuid() == 0:
        folder.mkdir(parents=True)
        os.chown(folder, NOBODY, NOBODY)
    else:
        folder = Path("/usr")
    with pytest.raises(TierFailed, match=r"belongs to user \d+, who could change the KV blocks in it"):
        open_tier(folder)


@pytest.mark.parametrize("change", ["truncated", "emptied", "flipped", "overwritten"])
def test_a_damaged_file_is_removed_and_counted(folder: Path, change: str) -> None:
    tier = open_tier(folder)
    put(tier, 1, 2)
    tier.changes.take()
    data = file_of(folder, 1).read_bytes()
    damaged = {
        "truncated": data[:-1],
        "emptied": b"",
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
        "overwritten": file_of(folder, 2).read_bytes(),
    }
    file_of(folder, 1).write_bytes(damaged[change])
    assert not get(tier, 1) and tier.num_corrupt == 1
    assert not file_of(folder, 1).exists()
    assert tier.changes.take() == TierChanges([], [hash_of(1)])
    put(tier, 1)
    assert get(tier, 1) and get(tier, 2) and tier.num_corrupt == 1


def test_a_truncated_file_is_not_found_and_is_stored_anew(folder: Path) -> None:
    tier = open_tier(folder)
    put(tier, 1)
    file_of(folder, 1).write_bytes(b"x")
    assert held(open_tier(folder), 1) == []
    put(tier, 1)
    assert get(tier, 1) and tier.num_corrupt == 0
    assert tier.num_bytes == bytes_on_disk(folder)


@pytest.mark.parametrize("version", [block_record.FORMAT_VERSION - 1, block_record.FORMAT_VERSION + 1])
def test_files_of_other_versions_and_identities_are_left_alone(
    folder: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where their names are those of this version and identity."""
    tier = open_tier(folder)
    put(tier, 1)
    own = file_of(folder, 1).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(block_record, "FORMAT_VERSION", version)
        put(tier, 2)
    put(open_tier(folder, identity=OTHER_IDENTITY), 3)
    file_of(folder, 3, OTHER_IDENTITY).rename(file_of(folder, 3))
    other = file_of(folder, 4, version=version)
    other.parent.mkdir(parents=True)
    other.write_bytes(own)
    tier.refresh()
    tier.changes.take()
    assert not get(tier, 2) and not get(tier, 3) and not get(tier, 4)
    assert set(tier.changes.take().removed) == {hash_of(2), hash_of(3)}
    tier.refresh()
    assert held(tier, 1, 2, 3, 4) == [1] and tier.num_corrupt == 0
    assert file_of(folder, 2).exists() and file_of(folder, 3).exists() and other.exists()
    assert tier.num_bytes == bytes_on_disk(folder) == 4 * DISK_RECORD_BYTES
    tier.clear()
    assert files_below(folder) == [other]


def test_files_with_other_names_are_neither_counted_nor_removed(folder: Path) -> None:
    tier = open_tier(folder, num_blocks=2)
    own = folder / "tandem-kv-1" / IDENTITY.hex()
    strangers = [folder / "README", folder / "tandem-kv-1" / "x", own / "y", own / "aa" / "z", own / "aa" / ("b" * 32)]
    for path in strangers:
        path.write_bytes(bytes(10_000))
    (own / "aa" / ("a" * 32)).mkdir()
    put(tier, 1, 2, 3)
    tier.refresh()
    assert tier.num_bytes == 2 * DISK_RECORD_BYTES
    tier.clear()
    assert sorted(files_below(folder)) == sorted(strangers)


def test_the_file_that_was_used_longest_ago_is_evicted(folder: Path) -> None:
    tier = open_tier(folder, num_blocks=3)
    put(tier, 1, 2, 3)
    for number in (1, 2, 3):
        set_age(file_of(folder, number), 1000 - number)
    tier = open_tier(folder, num_blocks=3)
    assert get(open_tier(folder, num_blocks=3), 1), "another worker uses it"
    put(tier, 2)  # it is there, and this is a use
    put(tier, 4)
    assert held(tier, 1, 2, 3, 4) == [1, 2, 4]
    assert sorted(path.name for path in files_below(folder)) == sorted(hash_of(n).hex() for n in (1, 2, 4))


def test_uses_are_noted_once_a_minute(folder: Path) -> None:
    tier = open_tier(folder)
    put(tier, 1)
    for age_s, expected in ((30, 30), (100, 0), (-100, 0)):  # -100: by a clock that is ahead
        set_age(file_of(folder, 1), age_s)
        assert get(tier, 1)
        assert abs(age_of(file_of(folder, 1)) - expected) < 25


def test_blocks_of_other_workers_are_found_and_their_removal_is_noticed(folder: Path) -> None:
    first, second = open_tier(folder), open_tier(folder)
    put(first, 1, 2)
    assert second.find([hash_of(1), hash_of(2), hash_of(3)]) == 2, "without a refresh"
    put(first, 4)
    second.refresh()
    assert set(second.changes.take().added) == {hash_of(number) for number in (1, 2, 4)}
    first.clear()
    assert not get(second, 1)
    assert second.changes.take() == TierChanges([], [hash_of(1)])
    second.refresh()
    assert set(second.changes.take().removed) == {hash_of(2), hash_of(4)} and second.num_bytes == 0


def test_a_folder_is_listed_again_only_if_it_has_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = open_tier(folder), open_tier(folder)
    put(first, 1, 2)
    for path in (folder / "tandem-kv-1" / IDENTITY.hex()).iterdir():
        set_age(path, 10)
    second.refresh()
    listed: list[str] = []
    scandir = os.scandir

    def noting(path: str) -> object:
        listed.append(Path(path).name)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", noting)
    second.refresh()
    assert len(listed) < 10
    put(first, 3)
    second.refresh()
    assert hash_of(3).hex()[:2] in listed and len(listed) < 20
    assert held(second, 1, 2, 3) == [1, 2, 3]


def test_a_file_that_leaves_its_folders_modification_time_as_it_was_is_found(folder: Path) -> None:
    """Times of files are coarse, so two changes in a row may leave the same one."""
    first, second = open_tier(folder), open_tier(folder)
    fan_out = file_of(folder, 1).parent
    now = time.time()
    os.utime(fan_out, (now, now))
    second.refresh()
    put(first, 1)
    os.utime(fan_out, (now, now))
    second.refresh()
    assert second.changes.take() == TierChanges([hash_of(1)], [])


def test_the_limit_covers_all_identities_and_versions(folder: Path) -> None:
    first, other = open_tier(folder, 4), open_tier(folder, 6, OTHER_IDENTITY)
    put(other, 1, 2, 3, 4)
    old = file_of(folder, 5, version=0)
    old.parent.mkdir(parents=True)
    old.write_bytes(b"of an old version")
    for age, path in enumerate([old, *(file_of(folder, number, OTHER_IDENTITY) for number in (1, 2, 3, 4))]):
        set_age(path, 1000 - age)
    first.refresh()
    assert not old.exists() and held(other, 1, 2, 3, 4) == [1, 2, 3, 4]
    put(first, 1, 2)
    first.refresh()
    other.refresh()
    assert held(other, 1, 2, 3, 4) == [3, 4] and held(first, 1, 2) == [1, 2]
    assert first.num_bytes == other.num_bytes == bytes_on_disk(folder) == 4 * DISK_RECORD_BYTES


def test_a_store_counts_what_others_have_stored_after_some_seconds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_tier(folder, 4), open_tier(folder, 4)
    put(first, 1, 2, 3)
    put(second, 4, 5, 6)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    put(second, 7)
    assert bytes_on_disk(folder) == 4 * DISK_RECORD_BYTES


def test_temporary_files_of_dead_writers_are_removed_when_old(folder: Path) -> None:
    tier = open_tier(folder)
    temporaries = folder / "tandem-kv-1" / IDENTITY.hex() / "tmp"
    dead, new = temporaries / ("a" * 32), temporaries / ("b" * 32)
    for path in (dead, new):
        path.write_bytes(b"part of a block")
    set_age(dead, 3600)
    open_tier(folder, identity=OTHER_IDENTITY).refresh()
    assert files_below(folder) == [new]
    assert tier.num_bytes == 0


def test_a_removed_folder_is_made_again(folder: Path) -> None:
    tier = open_tier(folder)
    put(tier, 1, 2)
    tier.changes.take()
    shutil.rmtree(folder)
    assert not get(tier, 1)
    tier.refresh()
    assert held(tier, 1, 2) == [] and set(tier.changes.take().removed) == {hash_of(1), hash_of(2)}
    put(tier, 3)
    assert get(tier, 3) and held(open_tier(folder), 1, 2, 3) == [3]
    shutil.rmtree(folder)
    put(tier, 4)
    assert held(tier, 3, 4) == [4]


def test_a_folder_that_became_a_file_fails_clearly_until_it_is_gone(folder: Path) -> None:
    tier = open_tier(folder)
    put(tier, 1)
    shutil.rmtree(folder)
    folder.touch()
    assert not get(tier, 1) and held(tier, 1) == []
    tier.refresh()
    tier.clear()
    with pytest.raises(TierFailed, match="tier is not a folder"):
        put(tier, 2)
    with pytest.raises(TierFailed, match="tier is not a folder"):
        open_tier(folder)
    folder.unlink()
    put(tier, 2)
    assert get(tier, 2)
