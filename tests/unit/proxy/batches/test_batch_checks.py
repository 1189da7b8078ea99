"""Checks of a batch's lines before it runs: on threads and in processes of their own, with limits."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tandem.proxy.batches import batch_store, line_check, runner
from tandem.proxy.batches.batch_lines import finished_id
from tandem.proxy.batches.batch_store import BatchStore
from tandem.proxy.batches.runner import BatchRunner
from tests.support.async_tests import in_loop
from tests.unit.proxy.batches.batch_files import App, create, ended, line, run_until_ended
from tests.unit.proxy.batches.test_failing_batches import make_batch


@in_loop
async def test_checks_wait_on_threads_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client's files wait behind each other; other clients' batches and asyncio's threads do not wait for them."""
    asked: list[str] = []
    may_end = threading.Event()
    write_index = line_check.write_index

    def slow_check(input_file: Path, endpoint: str, index: Path) -> Any:
        owner = json.loads(index.with_suffix(".owner").read_bytes())["client"]
        asked.append(owner)
        if owner == "mallory":
            assert may_end.wait(20)
        return write_index(input_file, endpoint, index)

    monkeypatch.setattr(line_check, "write_index", slow_check)
    batches = BatchRunner(tmp_path, None)
    mallory, bob = batches.store("mallory"), batches.store("bob")
    for _ in range(8):
        create(mallory, line("a"), client="mallory")
    task = asyncio.create_task(batches.run(App()))
    async with asyncio.timeout(20):
        while not asked:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        batch_id = create(bob, line("b"), client="bob").id
        batches.wake()
        assert (await ended(bob, batch_id)).status == "completed"
        await asyncio.to_thread(int)
    assert asked.count("mallory") == 1
    may_end.set()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_large_files_are_checked_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line with millions of numbers held the interpreter's lock, and thereby the proxy, for a second."""
    monkeypatch.setattr(line_check, "write_index", None)  # here it would be noticed
    numbers = list(range(100_000))
    lines = [line('"a\\', body={"prompt": "p", "numbers": numbers}), b"", line("é", body={"prompt": "q"})]
    app = App()
    batch = run_until_ended(tmp_path, app, make_batch(tmp_path, *lines))
    assert batch.request_counts.completed == 2
    assert [each["prompt"] for each in app.seen] == ["p", "q"] and app.seen[0]["numbers"] == numbers
    store = BatchStore(next(tmp_path.iterdir()))
    found = store.files.path(batch.output_file_id or "").read_bytes().splitlines()
    assert {finished_id(each) for each in found} == {'"a\\', "é"}
    wrong = make_batch(tmp_path, *lines, b"{" + b" " * 300_000)
    batch = run_until_ended(tmp_path, app, wrong)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data[0].line == 4


def test_a_check_that_takes_too_long_fails_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_check, "TIMEOUT_S", 0.01)
    batch = run_until_ended(tmp_path, App(), make_batch(tmp_path, line("a", body={"prompt": "p" * 300_000})))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data[0].code == "too_slow"


def test_a_check_that_fails_for_ever_ends_with_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "WINDOW_S", 2)
    monkeypatch.setattr(runner, "_RETRY_AFTER_FAILURE_S", 0.05)
    num_checks = 0

    def fails(*arguments: object) -> None:
        nonlocal num_checks
        num_checks += 1
        raise OSError("no disk")

    monkeypatch.setattr(line_check, "write_index", fails)
    app = App()
    assert run_until_ended(tmp_path, app, make_batch(tmp_path, line("a"))).status == "expired"
    assert num_checks > 1 and not app.asked
