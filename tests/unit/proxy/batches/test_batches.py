"""Files and batches: lines, limits, owners, full disks, and a runner that ends at any moment and begins again."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proxy.admission.api_key import ApiKey
from tandem.proxy.batches import batch_run, batch_store, runner
from tandem.proxy.batches.batch import (
    FINAL,
    WINDOW_S,
    BatchRequest,
    LineResponse,
    LineResult,
)
from tandem.proxy.batches.batch_run import BatchRun, call
from tandem.proxy.batches.batch_store import BatchFiles, BatchStore, Owner
from tandem.proxy.batches.json_files import StorageFull
from tandem.proxy.batches.line_check import write_index
from tandem.proxy.batches.runner import BatchRunner
from tandem.runtime.errors import InvalidRequest
from tests.support.async_tests import in_loop
from tests.unit.proxy.batches.batch_files import URL, App, create, ended, line, results, run_until_ended, upload

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


@in_loop
async def test_batches_share_the_limit_of_a_proxy_and_leave_one_file_each(tmp_path: Path) -> None:
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


@in_loop
async def test_only_lines_that_run_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    def counted(*arguments: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return next_line(*arguments)

    next_line = BatchRun._next
    monkeypatch.setattr(BatchRun, "_next", counted)
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


@in_loop
async def test_only_one_proxy_runs_a_batch(tmp_path: Path) -> None:
    app = App()
    batches = [BatchRunner(tmp_path, None) for _ in range(2)]
    batch_id = create(batches[0].store(""), *(line(str(i)) for i in range(40))).id
    tasks = [asyncio.create_task(each.run(app)) for each in batches]
    assert (await ended(batches[1].store(""), batch_id)).status == "completed"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(app.asked.values()) == {1} and len(app.asked) == 40


@in_loop
async def test_a_cancelled_batch_keeps_its_results(tmp_path: Path) -> None:
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


@in_loop
async def test_a_call_within_the_process_returns_the_answer() -> None:
    status, headers, body = await call(App(), URL, b'{"prompt": "a"}', "h", None)
    assert (status, headers["x-request-id"], msgspec.json.decode(body)) == (200, "r", {"echo": "a"})


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
