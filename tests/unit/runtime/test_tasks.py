"""No task ends silently: what is logged, and what happens then."""

from __future__ import annotations

import asyncio

import pytest

from tandem.runtime.tasks import keep_running, start_job


async def fails() -> None:
    raise OSError("no disk")


async def test_a_job_that_fails_is_logged_and_acted_upon(caplog: pytest.LogCaptureFixture) -> None:
    failed = asyncio.Event()
    start_job(fails(), "the job", failed.set)
    async with asyncio.timeout(5):
        await failed.wait()
    done = asyncio.Event()

    async def works() -> None:
        done.set()

    task = start_job(works(), "another", failed.clear)
    await task
    assert failed.is_set(), "a job that works has no failure"
    assert "the job failed" in caplog.text and "no disk" in caplog.text and "another" not in caplog.text


def test_work_that_must_not_end_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        begun = 0
        third = asyncio.Event()

        async def work() -> None:
            nonlocal begun
            begun += 1
            if begun == 1:
                raise OSError("no disk")
            if begun == 3:
                third.set()
                await asyncio.Event().wait()

        task = keep_running(work, "the service", 0.001)
        async with asyncio.timeout(5):
            await third.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() and begun == 3

    asyncio.run(main())
    assert "the service failed" in caplog.text and "the service has ended" in caplog.text
