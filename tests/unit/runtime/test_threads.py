"""Work that blocks delays its own kind only, and its callers wait for a bounded time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from tandem.runtime.errors import DeadlineExceeded, Overloaded
from tandem.runtime.threads import Threads, post


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


def test_a_callback_for_a_loop_that_is_closed_is_dropped() -> None:
    """Its process ends. A thread that reported to it would fail, and with it what the thread does next."""
    called: list[object] = []
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=post, args=(loop, called.append, 1))
    thread.start()
    thread.join()
    loop.run_until_complete(asyncio.sleep(0))
    assert called == [1]
    loop.close()
    post(loop, called.append, 2)
    assert called == [1]


def test_other_errors_of_a_loop_are_raised() -> None:
    class Broken(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
            raise RuntimeError("another reason")

    loop = Broken()
    with pytest.raises(RuntimeError, match="another reason"):
        post(loop, print)
    loop.close()
