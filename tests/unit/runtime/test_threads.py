"""Work that blocks delays its own kind only, and its callers wait for a bounded time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from tandem.runtime.errors import DeadlineExceeded, Overloaded
from tandem.runtime.threads import Threads


def play(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_work_that_never_ends_is_limited_and_delays_no_other_kind() -> None:
    async def test() -> None:
        release = threading.Event()
        stuck, others = Threads("stuck", 1, max_pending=2, timeout_s=0.2), Threads("others", 1)
        try:
            for _ in range(2):
                with pytest.raises(DeadlineExceeded, match="stuck have not answered within"):
                    await stuck.run(release.wait)
            assert await others.run(lambda: 1) == 1
            with pytest.raises(DeadlineExceeded):  # the second call was cancelled before it began
                await stuck.run(release.wait)
            running = [asyncio.ensure_future(stuck.run(release.wait))]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="2 calls that need the threads for stuck"):
                await stuck.run(lambda: 1)
            release.set()
            await asyncio.gather(*running, return_exceptions=True)
            assert await stuck.run(lambda: 2) == 2
        finally:
            release.set()
            stuck.close()
            others.close()

    play(test())


def test_an_error_of_the_work_reaches_its_caller() -> None:
    async def test() -> None:
        def fail() -> None:
            raise TimeoutError("of the work")

        threads = Threads("failing", 1, timeout_s=20)
        with pytest.raises(TimeoutError, match="of the work"):
            await threads.run(fail)
        threads.close()

    play(test())
