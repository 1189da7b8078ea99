"""Batches of one client never hurt those of others: refusals, proxies that die, files that are damaged or too much."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.proxy.batches import batch_run, batch_store, file_store, runner
from tandem.proxy.batches.batch_run import MAX_CONCURRENT, MAX_DEATHS, finish_on_thread
from tandem.proxy.batches.batch_store import BatchStore, LineJournal
from tandem.proxy.batches.file_store import FileNotFound
from tandem.proxy.batches.json_files import StorageFull
from tandem.proxy.batches.runner import BatchRunner
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.tasks import keep_running
from tandem.runtime.threads import Threads
from tests.support.async_tests import in_loop
from tests.unit.proxy.batches.batch_files import App, create, ended, line, results, run_until_ended


def make_batch(folder: Path, *lines: bytes, client: str = "") -> str:
    async def make() -> str:
        return create(BatchRunner(folder, None).store(client), *lines, client=client).id

    return asyncio.run(make())


# ---- places


@in_loop
async def test_refused_lines_hold_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that were answered with 429 kept all 16 places of the proxy for up to 24 hours."""
    monkeypatch.setattr(batch_run, "MIN_RETRY_S", 1000.0)
    app = App(lambda prompt, attempt: 429 if prompt.startswith("refused") else 200)
    batches = BatchRunner(tmp_path, None)
    alice, bob = batches.store("alice"), batches.store("bob")
    refused = [create(alice, *(line(f"refused-{batch}-{i}") for i in range(30))).id for batch in range(3)]
    task = asyncio.create_task(batches.run(app))
    async with asyncio.timeout(20):
        while app.asked.total() < 2 * MAX_CONCURRENT:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    batch_id = create(bob, *(line(str(i)) for i in range(40))).id
    batches.wake()
    assert (await ended(bob, batch_id)).request_counts.completed == 40
    assert {alice.get(each).status for each in refused} == {"in_progress"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert app.num_running == 0


def test_a_refused_line_is_tried_again_later_and_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "MIN_RETRY_S", 0.02)
    began = time.monotonic()
    app = App(lambda prompt, attempt: 503 if attempt < 5 else 200)
    batch = run_until_ended(tmp_path, app, make_batch(tmp_path, line("a")))
    assert batch.request_counts.completed == 1 and app.asked["a"] == 5
    assert time.monotonic() - began >= 0.02 + 0.04 + 0.08 + 0.16


def test_an_answer_that_is_cut_off_is_no_result(tmp_path: Path) -> None:
    """The part of it that had been written was stored as the line's answer, and was no JSON."""

    class FailingApp(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b'{"echo":', "more_body": True})

    batch = run_until_ended(tmp_path, FailingApp(), make_batch(tmp_path, line("a")))
    store = BatchStore(next(tmp_path.iterdir()))
    assert batch.request_counts.failed == 1
    assert results(store, batch.error_file_id)[0]["error"]["code"] == "internal_error"


# ---- proxies that die


class Died(BaseException):
    """Stands for the end of the proxy: nothing after it runs."""


def die_while_running(folder: Path, prompts: set[str], innocent: int = 0) -> None:
    """Runs the batches of a folder and forgets them, as SIGKILL does, while the named lines and others run."""

    async def main() -> None:
        app = App()
        app.may_answer.clear()
        batches = BatchRunner(folder, None)
        task = asyncio.create_task(batches.run(app))
        async with asyncio.timeout(20):
            while not (prompts <= set(app.asked) and app.num_running >= len(prompts) + innocent):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        # A dead process writes nothing more and holds no lock.
        LineJournal.end_all, kept = (lambda self: None), LineJournal.end_all  # type: ignore[method-assign]
        try:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        finally:
            LineJournal.end_all = kept  # type: ignore[method-assign]

    asyncio.run(main())


def test_a_line_that_kills_the_proxy_is_not_run_for_ever(tmp_path: Path) -> None:
    batch_id = make_batch(tmp_path, *(line(str(i)) for i in range(30)), line("killer"))
    die_while_running(tmp_path, {str(i) for i in range(batch_run.MAX_CONCURRENT_PER_CLIENT)})
    app = App()
    batch = run_until_ended(tmp_path, app, batch_id)
    assert batch.request_counts.completed == 31, "lines that were running beside it are run again"
    first = make_batch(tmp_path, line("killer"))
    for _ in range(MAX_DEATHS):
        die_while_running(tmp_path, {"killer"})
    app = App()
    batch = run_until_ended(tmp_path, app, first)
    assert not app.asked and (batch.status, batch.request_counts.failed) == ("completed", 1)
    [error] = results(BatchStore(next(tmp_path.iterdir())), batch.error_file_id)
    assert error["error"]["code"] == "server_ended" and "3 times" in error["error"]["message"]


def test_lines_that_ran_when_a_proxy_died_run_alone(tmp_path: Path) -> None:
    """Otherwise an innocent line beside a killer has as many deaths as the killer."""
    batch_id = make_batch(tmp_path, *(line(str(i)) for i in range(40)))
    other = make_batch(tmp_path, *(line(f"b{i}") for i in range(40)), client="bob")
    die_while_running(tmp_path, {"0"}, innocent=MAX_CONCURRENT - 1)
    suspects: set[str] = set()
    for batch, prefix in ((batch_id, ""), (other, "b")):
        [journal] = tmp_path.glob(f"*/batches/{batch}.lines")
        suspects |= {f"{prefix}{number - 1}" for number in LineJournal(journal).deaths()}
    assert len(suspects) == MAX_CONCURRENT
    beside: dict[str, set[str]] = {}
    running: set[str] = set()

    class Alone(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            message = await receive()
            prompt = json.loads(message["body"])["prompt"]
            beside[prompt] = set(running)
            for each in running:
                beside[each].add(prompt)
            running.add(prompt)
            await asyncio.sleep(0.002)
            running.discard(prompt)
            await super().__call__(scope, partial(asyncio.sleep, 0, message), send)

    async def main() -> None:
        app = Alone()
        batches = BatchRunner(tmp_path, None)
        task = asyncio.create_task(batches.run(app))
        for store, each in ((batches.store(""), batch_id), (batches.store("bob"), other)):
            assert (await ended(store, each)).request_counts.completed == 40
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert not any(beside[each] for each in suspects) and any(beside.values())


def test_a_proxy_that_stops_in_order_blames_no_line(tmp_path: Path) -> None:
    batch_id = make_batch(tmp_path, *(line(str(i)) for i in range(20)))

    async def main() -> None:
        app = App()
        app.may_answer.clear()
        task = asyncio.create_task(BatchRunner(tmp_path, None).run(app))
        async with asyncio.timeout(20):
            while app.num_running < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    [journal] = tmp_path.glob(f"*/batches/{batch_id}.lines")
    assert not LineJournal(journal).deaths()


def test_the_journal_survives_a_line_that_was_cut_off(tmp_path: Path) -> None:
    journal = LineJournal(tmp_path / "x.lines")
    assert not journal.deaths()
    for number in (7, 8):
        journal.begin(number)
    journal.end(8)
    with (tmp_path / "x.lines").open("a") as file:
        file.write("+9")
    again = LineJournal(tmp_path / "x.lines")
    assert again.deaths() == {7: 1}
    again.begin(7)
    again.begin(12)
    num_bytes = (tmp_path / "x.lines").stat().st_size
    again.end(12)
    again.end(12)
    assert (tmp_path / "x.lines").stat().st_size == num_bytes, "a full disk blames no line"
    assert LineJournal(tmp_path / "x.lines").deaths() == {7: 2}


def test_a_line_that_times_out_has_that_result_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "MIN_RETRY_S", 0.001)
    app = App(lambda prompt, attempt: 503 if attempt == 2 else 504)
    batch = run_until_ended(tmp_path, app, make_batch(tmp_path, line("a")))
    store = BatchStore(next(tmp_path.iterdir()))
    [failed] = results(store, batch.error_file_id)
    assert failed["response"]["status_code"] == 504 and app.asked["a"] == 4
    assert failed["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("num_refused", [0, 5])
def test_a_line_that_never_is_in_time_is_not_tried_until_its_batch_expires(
    num_refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals for what else runs do not count; those for the line itself do, as time-outs do."""
    monkeypatch.setattr(batch_run, "MIN_RETRY_S", 0.001)
    app = App(lambda prompt, attempt: 200 if prompt == "b" else 504 if attempt == 1 else 503)
    app.is_lasting = lambda prompt, attempt: attempt > 1 + num_refused
    batch = run_until_ended(tmp_path, app, make_batch(tmp_path, line("a"), line("b")))
    store = BatchStore(next(tmp_path.iterdir()))
    [failed] = results(store, batch.error_file_id)
    assert (failed["response"]["status_code"], failed["error"]["code"]) == (503, "request_timeout")
    assert app.asked["a"] == num_refused + batch_run.MAX_TIMEOUTS
    assert batch.status == "completed" and batch.request_counts.completed == 1


@in_loop
async def test_one_failing_disk_access_does_not_end_all_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OSError outside of the inner `try` ended the runner without a word until the proxy restarted."""
    calls = iter(range(100))
    hold = BatchRunner._hold

    def fails_once(self: BatchRunner) -> Any:
        if next(calls) == 0:
            raise OSError("I/O error")
        return hold(self)

    monkeypatch.setattr(BatchRunner, "_hold", fails_once)
    batches = BatchRunner(tmp_path, None)
    batch_id = create(batches.store(""), line("a")).id
    task = keep_running(lambda: batches.run(App()), "running batches", 0.01)
    assert (await ended(batches.store(""), batch_id)).status == "completed"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_folder_that_cannot_be_read_stops_no_other_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_batch(tmp_path, line("a"), client="mallory")
    [owner] = tmp_path.glob("*/batches/batch_*.owner")
    owner.unlink()
    owner.mkdir()
    assert run_until_ended(tmp_path, App(), make_batch(tmp_path, line("b"))).status == "completed"
    assert "cannot be read" in caplog.text


@in_loop
async def test_a_client_has_a_share_of_the_running_batches(tmp_path: Path) -> None:
    batches = BatchRunner(tmp_path, None)
    for _ in range(runner.MAX_RUNNING_PER_CLIENT + 3):
        create(batches.store("alice"), line("a"))
    create(batches.store("bob"), line("b"))
    held = batches._hold()
    assert len(held) == runner.MAX_RUNNING_PER_CLIENT + 1
    for _, each in held:
        each.close()


# ---- room


def test_results_count_towards_the_limit_and_end_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "MAX_CLIENT_BYTES", 12_000)
    batch_id = make_batch(tmp_path, *(line(f"{i:04}") for i in range(80)))
    app = App()
    batch = run_until_ended(tmp_path, app, batch_id)
    store = BatchStore(next(tmp_path.iterdir()))
    assert batch.status == "failed" and batch.errors is not None
    assert batch.errors.data[0].code == "storage_limit_exceeded" and "delete files" in batch.errors.data[0].message
    kept = results(store, batch.output_file_id)
    assert 0 < len(kept) == app.asked.total() < 80, "each line that has run has its result"
    assert store.files.used_bytes() < 12_000 + 40 * 200
    with pytest.raises(InvalidRequest, match="limit of 12000"):
        create(store, line("x"))


def test_results_that_are_being_written_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "MAX_CLIENT_BYTES", 10_000)
    store = BatchStore(tmp_path)
    create(store, line("a"))
    (tmp_path / "batches" / "batch_x.output").write_bytes(b"x" * 9_000)
    with pytest.raises(InvalidRequest, match="limit of 10000"):
        store.files.add(io.BytesIO(b"x" * 1000), 1000, "a", "batch")


# ---- damage


def test_damaged_objects_stop_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One JSON file that could not be read broke all lists of its client, and all of its batches."""
    batch_id = make_batch(tmp_path, line("a"))
    [folder] = tmp_path.iterdir()
    store = BatchStore(folder)
    wrong = [create(store, line("b")) for _ in range(2)]
    (folder / "batches" / f"{wrong[0].id}.json").write_text("{")
    (folder / "batches" / f"{wrong[1].id}.owner").write_bytes(b"\xff")
    upload = store.files.add(io.BytesIO(b"abc"), 3, "a", "batch").id
    (folder / "files" / f"{upload}.json").write_text("")
    assert store.files.find(upload) is None and store.find(wrong[0].id) is None
    with pytest.raises(FileNotFound):
        store.files.get(upload)
    assert upload not in store.files.ids() and wrong[0].id not in store.ids()
    assert run_until_ended(tmp_path, App(), batch_id).status == "completed"
    assert caplog.text.count("cannot be read") == 3
    assert store.get(wrong[1].id).status == "failed"
    assert len(list(folder.rglob("*.damaged"))) == 3


def test_a_disk_that_hangs_holds_no_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that touches the files of a batch runs on threads."""
    on_loop: list[str] = []

    def noted(name: str) -> None:
        method = getattr(Path, name)

        def called(self: Path, *arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread() and tmp_path in self.parents:
                on_loop.append(f"{name} of {self.name}")
            return method(self, *arguments, **options)

        monkeypatch.setattr(Path, name, called)

    batch_id = make_batch(tmp_path, line("a"))
    for name in ("open", "stat", "read_bytes", "exists", "unlink", "glob"):
        noted(name)

    async def main() -> None:
        runner = BatchRunner(tmp_path, None)
        task = asyncio.create_task(runner.run(App()))
        async with asyncio.timeout(20):
            while await asyncio.to_thread(lambda: runner.store("").get(batch_id).status) != "completed":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert on_loop == []


def test_a_full_disk_costs_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of a client are looked for again every 5 s."""
    batch_id = make_batch(tmp_path, line("a"))
    run_until_ended(tmp_path, App(), batch_id)
    folder = next(tmp_path.iterdir()) / "batches"
    (folder / f"{batch_id}.owner").write_bytes(b'{"client":"","host":"127.0.0.1"}')  # as when its proxy died at the end

    def full(*arguments: Any, **options: Any) -> None:
        raise StorageFull("no room")

    monkeypatch.setattr(batch_store, "write_json", full)
    store, descriptors = BatchStore(next(tmp_path.iterdir())), Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(5):
        with pytest.raises(StorageFull):
            list(store.hold_unfinished())
    assert len(list(descriptors.iterdir())) <= before  # garbage of other tests may be closed meanwhile


@in_loop
async def test_a_run_that_is_cancelled_twice_waits_for_its_files() -> None:
    """Each line of a batch that is cancelled is cancelled by two tasks."""
    threads, may_end, ended = Threads("batches", 1), threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(10)
        ended.set()

    task = asyncio.create_task(finish_on_thread(threads, work))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    asyncio.get_running_loop().call_later(0.05, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    threads.close()
