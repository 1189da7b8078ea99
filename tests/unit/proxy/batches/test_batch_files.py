"""Files of batches: which lines are accepted, limits, and who sees them."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest

from tandem.proxy.answers.errors import status_of
from tandem.proxy.batches import batch_lines, batch_store, file_store
from tandem.proxy.batches.batch import (
    BatchRequest,
)
from tandem.proxy.batches.batch_lines import parse_line, read_lines, request_body
from tandem.proxy.batches.batch_store import BatchNotFound, BatchStore
from tandem.proxy.batches.file_store import FileNotFound, FileStore
from tandem.proxy.batches.json_files import StorageFull
from tandem.proxy.batches.runner import BatchRunner
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.files.whole_file import ABANDONED_AFTER_S
from tests.support.async_tests import in_loop
from tests.unit.proxy.batches.batch_files import OWNER, URL, App, check_lines, create, line, run_until_ended
from tests.unit.proxy.batches.test_failing_batches import die_while_running, make_batch

# ---- lines


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "no request"),
        (b"[]", "no request"),
        (b'"\xff"', "no request"),
        (line("a", method="GET"), "GET"),
        (line("a", url="/v1/embeddings"), "endpoint"),
        (line("a", url="/health"), "endpoint"),
        (line(""), "length >= 1"),
        (line("a", body={"stream": True}), "stream"),
        (line("a", body=[]), "object"),
    ],
)
def test_wrong_lines_are_named(data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        parse_line(data, 3, URL)
    num_requests, [error] = check_lines([line("x"), b"", data])
    assert num_requests == 2 and error.line == 3 and said in error.message


def test_requests_run_at_the_lowest_priority() -> None:
    sent = json.loads(request_body(bytes(parse_line(line("a", body={"prompt": "p", "priority": -5}), 1, URL).body)))
    assert sent == {"prompt": "p", "priority": 100}


def test_the_lines_of_a_file_are_limited_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_lines([line("a"), line("a")])[1][0].param == "custom_id"
    assert check_lines([b"\n", b"  "])[1][0].code == "empty_file"
    assert len(check_lines([b"x"] * 100)[1]) == batch_lines.MAX_ERRORS
    monkeypatch.setattr(batch_lines, "MAX_LINES", 2)
    assert "more than 2" in check_lines([line(str(i)) for i in range(9)])[1][0].message


def test_a_line_that_is_too_long_is_named_and_never_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 200)
    lines = [line("a"), line("x" * 1000), line("b"), line("y" * 200)]
    found = [data for _, data in read_lines(io.BytesIO(b"\n".join(lines)))]
    assert len(found) == 4 and max(map(len, found)) <= 201
    assert [error.line for error in check_lines(found)[1]] == [2, 4]


def test_bodies_are_sent_as_they_are() -> None:
    nested = "[" * 900 + "]" * 900
    for body in ("{}", "{ }", '{"a": 1}', f'{{"a": {nested}, "priority": 3 }}'):
        data = f'{{"custom_id": "a", "method": "POST", "url": "{URL}", "body": {body} }}'.encode()
        sent = request_body(bytes(parse_line(data, 1, URL).body))
        assert json.loads(sent) == {**json.loads(body), "priority": 100}
        assert msgspec.json.decode(sent, type=CompletionPriority).priority == 100


class CompletionPriority(msgspec.Struct):
    priority: int


# ---- files


def test_files_are_kept_listed_and_deleted(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "c")
    assert store.ids() == []
    one = store.add(io.BytesIO(b"abc"), 3, "a.jsonl", "batch")
    assert (one.bytes, one.filename, one.status) == (3, "a.jsonl", "processed")
    assert store.ids() == [store.get(one.id).id] == [one.id] and store.path(one.id).read_bytes() == b"abc"
    assert store.path(one.id).stat().st_mode & 0o077 == 0
    store.delete(one.id)
    for wrong in (one.id, "", "../../etc/passwd", "file-x", "file-" + "0" * 24):
        for method in (store.get, store.path, store.delete):
            with pytest.raises(FileNotFound):
                method(wrong)
    assert not list((tmp_path / "c" / "files").iterdir())


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(StorageFull) as refused:
        store.add(io.BytesIO(b"abc"), 3, "a", "batch")
    assert status_of(refused.value) == 507 and not list((tmp_path / "files").iterdir())


def test_the_files_of_a_client_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "MAX_CLIENT_BYTES", 5)
    store = FileStore(tmp_path)
    store.add(io.BytesIO(b"abc"), 3, "a", "batch")
    with pytest.raises(InvalidRequest, match="limit of 5"):
        store.add(io.BytesIO(b"abc"), 3, "a", "batch")


@in_loop
async def test_batches_and_files_of_others_are_not_found(tmp_path: Path) -> None:
    batches = BatchRunner(tmp_path, None)
    alice, bob = batches.store("alice"), batches.store("bob")
    batch = create(alice, line("a"))
    assert alice.get(batch.id).id == batch.id and bob.ids() == []
    for method in (bob.get, bob.cancel):
        with pytest.raises(BatchNotFound):
            method(batch.id)
    with pytest.raises(FileNotFound):
        bob.files.get(batch.input_file_id)
    with pytest.raises(FileNotFound):
        request = BatchRequest(input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h")
        bob.create(request, OWNER)


def test_unfinished_batches_are_limited_and_old_ones_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "MAX_UNFINISHED", 2)
    store = BatchStore(tmp_path)
    for _ in range(2):
        create(store, line("a"))
    with pytest.raises(InvalidRequest, match="limit"):
        create(store, line("a"))
    monkeypatch.setattr(batch_store, "MAX_BATCHES", 2)
    for held in store.hold_unfinished():
        held.save(held.batch.became("completed", 1))
        held.close()
    create(store, line("a"))
    assert len(store.ids()) == 2


LONG_AGO = ABANDONED_AFTER_S + 60


def age(*files: Path) -> None:
    for file in files:
        os.utime(file, (time.time() - LONG_AGO, time.time() - LONG_AGO))


# ---- input files


def test_line_breaks_count_as_lines() -> None:
    """Eight batches with 60 MiB of line breaks held the proxy's threads for 111 s."""
    began = time.process_time()
    [error] = batch_lines.check_lines(read_lines(io.BytesIO(b"\n" * (60 << 20))), URL, print).errors
    assert error.code == "too_many_lines" and error.line == batch_lines.MAX_FILE_LINES + 1
    assert time.process_time() - began < 1


def test_an_index_that_was_lost_is_made_again(tmp_path: Path) -> None:
    batch_id = make_batch(tmp_path, *(line(str(i)) for i in range(30)))
    die_while_running(tmp_path, {"0"})
    [index] = tmp_path.glob(f"*/batches/{batch_id}.index")
    index.unlink()
    assert run_until_ended(tmp_path, App(), batch_id).request_counts.completed == 30


def test_what_a_killed_upload_leaves_is_removed(tmp_path: Path) -> None:
    """Also of a client that has no batches."""
    store = BatchRunner(tmp_path, None).store("uploads only")
    kept = store.files.add(io.BytesIO(b"abc"), 3, "a", "batch")
    [folder] = tmp_path.glob("*/files")
    left = [folder / ("file-" + "0" * 24 + ".data"), folder / ".file-1.data.0123.partial"]
    running = folder / ".file-2.data.0123.partial"
    for file in (*left, running):
        file.write_bytes(b"x")
    age(*left, store.files.path(kept.id))
    run_until_ended(tmp_path, App(), make_batch(tmp_path, line("a")))
    assert not any(file.exists() for file in left) and running.exists()
    assert store.files.path(kept.id).read_bytes() == b"abc"


def test_results_on_their_way_to_a_file_are_no_orphans(tmp_path: Path) -> None:
    """A proxy may die after it has moved the results and before it has written their file object."""
    store = BatchStore(tmp_path)
    create(store, line("a"))
    moved = tmp_path / "files" / ("file-" + "1" * 24 + ".data")
    moved.write_bytes(b"results")
    age(moved)
    store.remove_orphans()
    assert moved.exists()


def test_an_upload_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    calls = iter((0, 10**15))
    monkeypatch.setattr(FileStore, "used_bytes", lambda self: next(calls))  # another upload ended meanwhile
    with pytest.raises(InvalidRequest, match="limit of"):
        store.add(io.BytesIO(b"abc"), 3, "a", "batch")
    assert not list((tmp_path / "files").iterdir())
