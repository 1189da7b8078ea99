"""Files and batches: lines, limits, owners, full disks, and a runner that ends at any moment and begins again."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proxy.admission.api_key import ApiKey
from tandem.proxy.answers.errors import status_of
from tandem.proxy.batches import batch_lines, batch_run, batch_store, file_store, runner
from tandem.proxy.batches.batch import (
    FINAL,
    WINDOW_S,
    BatchObject,
    BatchRequest,
    Endpoint,
    LineResponse,
    LineResult,
)
from tandem.proxy.batches.batch_lines import parse_line, read_lines, request_body
from tandem.proxy.batches.batch_run import BatchRun
from tandem.proxy.batches.batch_store import BatchFiles, BatchNotFound, BatchStore, Owner
from tandem.proxy.batches.file_store import FileNotFound, FileStore
from tandem.proxy.batches.json_files import StorageFull
from tandem.proxy.batches.line_check import write_index
from tandem.proxy.batches.local_call import call
from tandem.proxy.batches.runner import BatchRunner
from tandem.runtime.errors import InvalidRequest

URL: Endpoint = "/v1/completions"
OWNER = Owner("", "127.0.0.1")


def line(custom_id: str, **fields: Any) -> bytes:
    body = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": custom_id}, **fields}
    return json.dumps(body).encode()


def check_lines(lines: list[bytes]) -> tuple[int, list[Any]]:
    checked = batch_lines.check_lines(((0, each) for each in lines), URL, lambda line: None)
    return checked.num_requests, checked.errors


def upload(store: BatchStore, *lines: bytes) -> str:
    data = b"\n".join(lines)
    return store.files.add(io.BytesIO(data), len(data), "in.jsonl", "batch").id


def create(store: BatchStore, *lines: bytes, client: str = "", **fields: Any) -> BatchObject:
    request = BatchRequest(input_file_id=upload(store, *lines), endpoint=URL, completion_window="24h", **fields)
    return store.create(request, Owner(client, "127.0.0.1"))


def results(store: BatchStore, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(each) for each in store.files.path(file_id).read_bytes().splitlines()]


class App:
    """An application that answers with the prompt; `answers` may say otherwise, by prompt."""

    def __init__(self, answers: Callable[[str, int], int] = lambda prompt, attempt: 200) -> None:
        self._answers = answers
        self.asked: Counter[str] = Counter()
        self.seen: list[dict[str, Any]] = []
        self.num_running = self.most_running = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.release_at = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        self.asked[body["prompt"]] += 1
        self.seen.append({**body, "scope": scope})
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if self.num_running == self.release_at:
                self.may_answer.set()
            await self.may_answer.wait()
        finally:
            self.num_running -= 1
        status = self._answers(body["prompt"], self.asked[body["prompt"]])
        headers = [(b"x-request-id", b"r"), (b"retry-after", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"echo":', "more_body": True})
        await send({"type": "http.response.body", "body": json.dumps(body["prompt"]).encode() + b"}"})


async def ended(store: BatchStore, batch_id: str) -> BatchObject:
    async with asyncio.timeout(20):
        while (batch := store.get(batch_id)).status not in FINAL:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return batch


def run_until_ended(folder: Path, app: App, batch_id: str, key_of: Any = None) -> BatchObject:
    async def run() -> BatchObject:
        batches = BatchRunner(folder, key_of)
        task = asyncio.create_task(batches.run(app))
        try:
            return await ended(batches.store(""), batch_id)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return asyncio.run(run())


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


def test_batches_and_files_of_others_are_not_found(tmp_path: Path) -> None:
    async def run() -> None:
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

    asyncio.run(run())


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


# ---- runs


def test_results_have_every_request_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "MIN_RETRY_S", 0.01)

    async def make() -> str:
        store = BatchRunner(tmp_path, None).store("")
        return create(store, *(line(str(i)) for i in range(50)), metadata={"a": "b"}).id

    batch_id = asyncio.run(make())
    app = App(lambda prompt, attempt: 400 if prompt == "7" else 429 if prompt == "8" and attempt < 3 else 200)
    app.may_answer.clear()
    app.release_at = batch_run.MAX_CONCURRENT_PER_CLIENT
    batch = run_until_ended(tmp_path, app, batch_id)
    store = BatchStore(next(tmp_path.iterdir()))
    assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (50, 49, 1)
    output = results(store, batch.output_file_id)
    assert sorted(int(each["custom_id"]) for each in output) == [i for i in range(50) if i != 7]
    assert all(each["response"]["body"] == {"echo": each["custom_id"]} for each in output)
    [failed] = results(store, batch.error_file_id)
    assert failed["response"]["status_code"] == 400 and failed["response"]["request_id"] == "r"
    assert app.asked["8"] == 3 and all(body["priority"] == 100 for body in app.seen)
    assert app.most_running == batch_run.MAX_CONCURRENT_PER_CLIENT
    assert {stored.purpose for stored in map(store.files.get, store.files.ids())} == {"batch", "batch_output"}


def test_a_wrong_file_fails_the_batch(tmp_path: Path) -> None:
    async def make() -> str:
        return create(BatchRunner(tmp_path, None).store(""), line("a"), b"nonsense").id

    batch = run_until_ended(tmp_path, App(), asyncio.run(make()))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data[0].line == 2


@settings(max_examples=25, deadline=None)
@given(stops=st.lists(st.integers(0, 40), max_size=4), cut=st.integers(0, 30))
def test_a_batch_goes_on_after_its_proxy_has_ended(stops: list[int], cut: int) -> None:
    """stops: answers after which the runner is ended. cut: bytes of the last result that a crash leaves."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        async def make() -> str:
            return create(BatchRunner(folder, None).store(""), *(line(str(i)) for i in range(30))).id

        async def run_for(num_answers: int) -> None:
            batches = BatchRunner(folder, None)
            app = App()
            task = asyncio.create_task(batches.run(app))
            async with asyncio.timeout(20):
                while app.asked.total() < num_answers and batches.store("").get(batch_id).status not in FINAL:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        batch_id = asyncio.run(make())
        for stop in stops:
            asyncio.run(run_for(stop))
            for partial in folder.glob("*/batches/*.output"):
                if cut:
                    with partial.open("ab") as file:
                        file.write(b'{"id": "batch_req_1", "custom_id": "99'[:cut])
        batch = run_until_ended(folder, App(), batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)
        output = results(BatchStore(next(folder.iterdir())), batch.output_file_id)
        assert sorted(int(each["custom_id"]) for each in output) == list(range(30))


def test_a_batch_whose_input_was_deleted_fails_and_keeps_its_results(tmp_path: Path) -> None:
    async def make() -> str:
        store = BatchRunner(tmp_path, None).store("")
        batch = create(store, line("a"), line("b"))
        [held] = store.hold_unfinished()
        held.save_check(write_index(held.input_file(), URL, held.index))
        held.append(LineResult("batch_req_1", "a", LineResponse(200, "r", msgspec.Raw(b"{}"))))
        held.close()
        store.files.delete(batch.input_file_id)
        return batch.id

    app = App()
    batch = run_until_ended(tmp_path, app, asyncio.run(make()))
    store = BatchStore(next(tmp_path.iterdir()))
    assert batch.status == "failed" and batch.errors is not None and not app.asked
    assert batch.errors.data[0].code == "file_not_found"
    assert [each["custom_id"] for each in results(store, batch.output_file_id)] == ["a"]


def test_a_file_that_cannot_be_read_stops_no_other_client(tmp_path: Path, caplog: Any) -> None:
    async def make() -> str:
        batches = BatchRunner(tmp_path, None)
        wrong = create(batches.store("mallory"), line("a"))
        [file] = tmp_path.glob(f"*/batches/{wrong.id}.json")
        file.write_text("{")
        return create(batches.store(""), line("a")).id

    assert run_until_ended(tmp_path, App(), asyncio.run(make())).status == "completed"
    assert "cannot be read" in caplog.text


def test_batches_share_the_limit_of_a_proxy_and_leave_one_file_each(tmp_path: Path) -> None:
    async def run() -> None:
        app = App()
        batches = BatchRunner(tmp_path, None)
        store = batches.store("")
        ids = [create(store, *(line(f"{batch}-{i}") for i in range(30))).id for batch in range(3)]
        task = asyncio.create_task(batches.run(app))
        for batch_id in ids:
            assert (await ended(store, batch_id)).request_counts.completed == 30
        [folder] = tmp_path.glob("*/batches")
        async with asyncio.timeout(20):  # `save` writes the batch before it removes the other files
            while {file.name for file in folder.iterdir()} != {f"{i}.json" for i in ids}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert app.most_running <= batch_run.MAX_CONCURRENT_PER_CLIENT

    asyncio.run(run())


def test_only_lines_that_run_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    def counted(*arguments: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return next_line(*arguments)

    next_line = BatchRun._next
    monkeypatch.setattr(BatchRun, "_next", counted)

    async def run() -> None:
        app = App()
        app.may_answer.clear()
        batches = BatchRunner(tmp_path, None)
        store = batches.store("")
        ids = [create(store, *(line(f"{batch}-{i}") for i in range(20))).id for batch in range(3)]
        task = asyncio.create_task(batches.run(app))
        async with asyncio.timeout(20):
            while app.num_running < batch_run.MAX_CONCURRENT_PER_CLIENT:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert num_read == batch_run.MAX_CONCURRENT_PER_CLIENT
        app.may_answer.set()
        for batch_id in ids:
            assert (await ended(store, batch_id)).request_counts.completed == 20
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_only_one_proxy_runs_a_batch(tmp_path: Path) -> None:
    async def run() -> None:
        app = App()
        batches = [BatchRunner(tmp_path, None) for _ in range(2)]
        batch_id = create(batches[0].store(""), *(line(str(i)) for i in range(40))).id
        tasks = [asyncio.create_task(each.run(app)) for each in batches]
        assert (await ended(batches[1].store(""), batch_id)).status == "completed"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert set(app.asked.values()) == {1} and len(app.asked) == 40

    asyncio.run(run())


def test_a_cancelled_batch_keeps_its_results(tmp_path: Path) -> None:
    async def run() -> None:
        app = App()
        batches = BatchRunner(tmp_path, None)
        store = batches.store("")
        batch_id = create(store, *(line(str(i)) for i in range(100))).id
        task = asyncio.create_task(batches.run(app))
        async with asyncio.timeout(20):
            while app.asked.total() < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        app.may_answer.clear()
        assert store.cancel(batch_id).status == "cancelling"
        batch = await ended(store, batch_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert batch.status == "cancelled" and app.num_running == 0
        assert len(results(store, batch.output_file_id)) == batch.request_counts.completed < 100
        with pytest.raises(InvalidRequest, match="cannot be cancelled"):
            store.cancel(batch_id)

    asyncio.run(run())


def test_requests_past_the_window_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "WINDOW_S", 0)

    async def make() -> str:
        return create(BatchRunner(tmp_path, None).store(""), line("a"), line("b")).id

    app = App()
    batch = run_until_ended(tmp_path, app, asyncio.run(make()))
    store = BatchStore(next(tmp_path.iterdir()))
    assert batch.status == "expired" and batch.output_file_id is None and not app.asked
    assert [each["error"]["code"] for each in results(store, batch.error_file_id)] == ["batch_expired"] * 2


def test_requests_have_the_key_of_their_client(tmp_path: Path) -> None:
    key = ApiKey("alice")

    async def make(client: str) -> str:
        store = BatchRunner(tmp_path, None).store("")
        request = BatchRequest(input_file_id=upload(store, line("a")), endpoint=URL, completion_window="24h")
        return store.create(request, Owner(client, "h")).id

    app = App()
    batch = run_until_ended(
        tmp_path, app, asyncio.run(make("alice")), lambda client: key if client == "alice" else None
    )
    assert batch.request_counts.completed == 1
    assert app.seen[0]["scope"]["state"]["api_key"] is key and app.seen[0]["scope"]["client"] == ("h", 0)
    batch = run_until_ended(tmp_path, app, asyncio.run(make("bob")), lambda client: None)
    store = BatchStore(next(tmp_path.iterdir()))
    assert results(store, batch.error_file_id)[0]["error"]["code"] == "invalid_api_key" and len(app.seen) == 1


def test_a_full_disk_delays_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(runner, "_RETRY_AFTER_FAILURE_S", 0.01)
    monkeypatch.setattr(runner, "POLL_INTERVAL_S", 0.01)
    append = batch_store.BatchFiles.append
    calls = iter(range(1000))

    def sometimes_full(self: Any, result: Any) -> None:
        if next(calls) in (3, 9):
            raise StorageFull("the disk is full")
        append(self, result)

    monkeypatch.setattr(batch_store.BatchFiles, "append", sometimes_full)

    async def make() -> str:
        return create(BatchRunner(tmp_path, None).store(""), *(line(str(i)) for i in range(20))).id

    batch = run_until_ended(tmp_path, App(), asyncio.run(make()))
    store = BatchStore(next(tmp_path.iterdir()))
    assert sorted(int(each["custom_id"]) for each in results(store, batch.output_file_id)) == list(range(20))
    assert "the disk is full" in caplog.text


def test_a_call_within_the_process_returns_the_answer() -> None:
    async def run() -> None:
        status, headers, body = await call(App(), URL, b'{"prompt": "a"}', "h", None)
        assert (status, headers["x-request-id"], msgspec.json.decode(body)) == (200, "r", {"echo": "a"})

    asyncio.run(run())


def test_times_of_a_batch_are_noted(tmp_path: Path) -> None:
    batch = create(BatchStore(tmp_path), line("a")).became("in_progress", time.time())
    assert batch.in_progress_at is not None and batch.expires_at - batch.created_at == WINDOW_S


def test_a_batch_is_held_until_its_last_write_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another proxy that takes the batch over misses a result, and runs the line a second time."""
    store = BatchRunner(tmp_path, None).store("")
    create(store, line("a"))
    begun, may_write = threading.Event(), threading.Event()
    append = BatchFiles.append

    def slow_append(held: BatchFiles, result: LineResult) -> None:
        begun.set()
        assert may_write.wait(10)
        append(held, result)

    monkeypatch.setattr(BatchFiles, "append", slow_append)

    async def run() -> None:
        task = asyncio.create_task(BatchRunner(tmp_path, None).run(App()))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.sleep(0.1)
        assert list(store.hold_unfinished()) == [], "another proxy could take the batch"
        may_write.set()
        await asyncio.gather(task, return_exceptions=True)

    try:
        asyncio.run(run())
    finally:
        may_write.set()
    [held] = store.hold_unfinished()
    assert held.finished() == {"a"}
    held.close()
