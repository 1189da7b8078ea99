"""A path's thread reports every job and its end, whatever raises."""

from __future__ import annotations

import queue

import pytest

from tandem.kv_transfer.connectors.job_thread import JobThread


def fail() -> None:
    raise OSError("cannot be released")


def test_an_end_is_reported_though_something_cannot_be_released(caplog: pytest.LogCaptureFixture) -> None:
    ended: queue.Queue[str] = queue.Queue()
    JobThread("path").close(lambda: ended.put("closed"), fail)
    assert ended.get(timeout=30) == "closed"
    assert "path could not release everything" in caplog.text and "cannot be released" in caplog.text


def test_what_is_released_is_released_before_the_end_is_reported() -> None:
    ended: queue.Queue[str] = queue.Queue()
    thread = JobThread("path")
    thread.submit(lambda: "job", ended.put)  # type: ignore[arg-type]
    assert ended.get(timeout=30) == "job"
    thread.close(lambda: ended.put("closed"), lambda: ended.put("released"))
    thread.close(lambda: ended.put("closed again"), lambda: ended.put("released again"))
    assert [ended.get(timeout=30) for _ in range(2)] == ["released", "closed"]
    thread._executor.shutdown(wait=True)
    assert ended.empty()


def test_an_end_that_cannot_be_reported_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    thread = JobThread("path")
    thread.close(fail)
    thread._executor.shutdown(wait=True)
    assert "path could not report its end" in caplog.text
