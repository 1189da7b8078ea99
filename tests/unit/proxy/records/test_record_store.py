"""Records in files: who may read them, what bounds them, and what becomes of requests when the disk is slow or full."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import StopConditions
from tandem.proxy.proxy_settings import check_folder
from tandem.proxy.records import record_store
from tandem.proxy.records.record import decode_record
from tandem.proxy.records.record_store import Outcome, RecordNotFound, RecordStore
from tandem.proxy.records.recording import Recording
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import ConfigError
from tandem.runtime.files import client_files
from tandem.runtime.files.client_files import FileLimits
from tests.unit.proxy.records.test_record import SAMPLING, recording, route, sampled


def made(owner: str = "alice", request_id: str = "r-1", num_tokens: int = 3) -> Recording:
    record = recording(owner, request_id)
    record.on_prompt(Prompt(pack_token_ids([1, 2]), 2), StopConditions(max(1, num_tokens)), [SAMPLING])
    record.on_tokens(0, [sampled(number, -1.0) for number in range(num_tokens)], "stop", 1, route())
    return record


async def path_of(store: RecordStore, owner: str, request_id: str) -> Path:
    """Returns the file of a record. Raises RecordNotFound."""
    with await store.open(owner, request_id) as file:
        return Path(file.name)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_only_its_client_reads_a_record(tmp_path: Path) -> None:
    async def test() -> None:
        store = RecordStore(tmp_path / "records")
        store.put(made(), "stop")
        file = await path_of(store, "alice", "r-1")
        assert decode_record(file.read_bytes()).head.request_id == "r-1"
        for owner, request_id in (("bob", "r-1"), ("", "r-1"), ("alice", "r-2")):
            with pytest.raises(RecordNotFound):
                await path_of(store, owner, request_id)
        for path in (tmp_path / "records", file.parent, file):
            assert path.stat().st_mode & 0o777 == (0o600 if path == file else 0o700)
        await store.close()

    run(test)


def test_ids_that_look_like_paths_stay_in_the_folder(tmp_path: Path) -> None:
    ids = ["../../etc/passwd", "/etc/passwd", "..", ".", "a/b", "x" * 128, "=" + "a" * 64, "~", "a.jsonl", "CON"]

    async def test() -> None:
        store = RecordStore(tmp_path / "records")
        for request_id in ids:
            store.put(made(request_id=request_id), "stop")
        for request_id in ids:
            found = await path_of(store, "alice", request_id)
            assert decode_record(found.read_bytes()).head.request_id == request_id
            assert (tmp_path / "records") in found.resolve().parents
        assert len(list((tmp_path / "records").glob("*/*.jsonl"))) == len(ids)
        for unknown in ("a\0b", "x" * 5000, "ü"):
            with pytest.raises(RecordNotFound):
                await path_of(store, "alice", unknown)
        await store.close()

    run(test)


def test_a_later_record_of_an_equal_id_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    async def test() -> None:
        store = RecordStore(tmp_path)
        store.put(made(num_tokens=1), "stop")
        store.put(made(num_tokens=2), "stop")
        content = (await path_of(store, "alice", "r-1")).read_bytes()
        assert len(decode_record(content).sequences[0].token_ids) == 2
        await store.close()

    run(test)


def test_records_wait_for_a_slow_disk_up_to_a_limit_and_requests_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the number nor the bytes of what waits exceed their limits, and no call of the loop blocks."""
    disk = threading.Event()
    outcomes: list[Outcome] = []
    write_now = RecordStore._write_now

    def slow(self: RecordStore, path: Path, recording: Recording, outcome: str) -> None:
        assert disk.wait(60)
        write_now(self, path, recording, outcome)

    monkeypatch.setattr(RecordStore, "_write_now", slow)
    monkeypatch.setattr(record_store, "MAX_PENDING", 5)

    async def test() -> None:
        store = RecordStore(tmp_path, on_outcome=outcomes.append)
        with caplog.at_level(logging.WARNING):
            for number in range(50):
                store.put(made(request_id=f"r-{number}"), "stop")
                await asyncio.sleep(0)
        assert outcomes == ["slow_disk"] * 45 and len(caplog.records) == 1, "logged once in a while"
        disk.set()
        assert (await path_of(store, "alice", "r-4")).exists()
        await store.close()
        assert outcomes.count("written") == 5 and not store._pending and not store._pending_bytes.num_held

    run(test)


def test_one_client_cannot_take_all_of_the_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    monkeypatch.setattr(RecordStore, "_write_now", lambda *_: disk.wait(60))
    num_bytes = made().num_bytes
    monkeypatch.setattr(record_store, "MAX_PENDING_BYTES", 8 * num_bytes)
    outcomes: list[Outcome] = []

    async def test() -> None:
        store = RecordStore(tmp_path, on_outcome=outcomes.append)
        for number in range(10):
            store.put(made("mallory", f"r-{number}"), "stop")
        assert outcomes == ["slow_disk"] * 4
        store.put(made("alice"), "stop")
        assert len(outcomes) == 4, "there is room for another client"
        disk.set()
        await store.close()

    run(test)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_disk_that_fails_costs_the_record_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(client_files.ClientFiles, "make_room", fail)
    outcomes: list[Outcome] = []

    async def test() -> None:
        store = RecordStore(tmp_path, on_outcome=outcomes.append)
        store.put(made(), "stop")
        with pytest.raises(RecordNotFound):
            await path_of(store, "alice", "r-1")
        await store.close()

    with caplog.at_level(logging.WARNING):
        run(test)
    assert outcomes == ["disk_error"] and os.strerror(number) in caplog.text


def test_a_record_that_is_larger_than_expected_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_store, "MAX_FILE_BYTES", 300)
    outcomes: list[Outcome] = []

    async def test() -> None:
        store = RecordStore(tmp_path, on_outcome=outcomes.append)
        store.put(made(), "stop")
        await store.close()

    run(test)
    assert outcomes == ["too_large"] and not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_too_large_and_empty_recordings_are_not_written(tmp_path: Path) -> None:
    outcomes: list[Outcome] = []

    async def test() -> None:
        store = RecordStore(tmp_path, on_outcome=outcomes.append)
        large = made()
        large.num_bytes = 1 << 40
        store.put(large, "stop")
        store.put(recording(), "stop")
        await store.close()

    run(test)
    assert outcomes == ["too_large"] and not list(tmp_path.iterdir())


def test_the_folder_keeps_the_newest_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_files, "CHECK_INTERVAL_S", 0)
    size = 0

    async def test() -> None:
        nonlocal size
        store = RecordStore(tmp_path, FileLimits(1 << 20, 4, 3600.0))
        for number in range(8):
            store.put(made(request_id=f"r-{number}"), "stop")
            file = await path_of(store, "alice", f"r-{number}")
            size = file.stat().st_size
            os.utime(file, (2e9 + number, 2e9 + number))
        assert sorted(file.stem for file in tmp_path.rglob("*.jsonl")) == ["r-4", "r-5", "r-6", "r-7"]
        store._files.limits = FileLimits(3 * size, 100, 3600.0)
        store.put(made(request_id="r-8"), "stop")
        assert (await path_of(store, "alice", "r-8")).exists()
        assert sum(file.stat().st_size for file in tmp_path.rglob("*.jsonl")) <= 3 * size + made().num_bytes
        os.utime(await path_of(store, "alice", "r-8"), (1, 1))
        with pytest.raises(RecordNotFound):
            await path_of(store, "alice", "r-8")
        await store.close()

    run(test)


def test_a_client_with_many_records_leaves_others_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_files, "CHECK_INTERVAL_S", 0)

    async def test() -> None:
        store = RecordStore(tmp_path, FileLimits(1 << 20, 8, 3600.0))
        store.put(made("bob"), "stop")
        assert (await path_of(store, "bob", "r-1")).exists()
        for number in range(20):
            store.put(made("alice", f"r-{number}"), "stop")
            os.utime(await path_of(store, "alice", f"r-{number}"), (2e9 + number, 2e9 + number))
        assert (await path_of(store, "bob", "r-1")).exists()
        await store.close()

    run(test)


def test_other_files_of_the_operators_folder_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_files, "CHECK_INTERVAL_S", 0)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "data.csv").write_text("1")
    tmp_path.chmod(0o755)

    async def test() -> None:
        store = RecordStore(tmp_path, FileLimits(1, 1, 0.0))
        for number in range(3):
            store.put(made(request_id=f"r-{number}"), "stop")
            await asyncio.wait(list(store._pending.values()))
        await store.close()

    run(test)
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "own" / "data.csv").exists()
    assert tmp_path.stat().st_mode & 0o777 == 0o755, "an operator's folder keeps its mode"


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "records")
    assert (tmp_path / "new" / "records").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        check_folder(tmp_path / "file" / "records")
