"""Reader pools with real processes, for tests whose functions stand in for a reader's methods."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import cast
from unittest import mock

from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.runtime.processes import forked_process

CONFIG = ProxyConfig("proxy-0", "", "m", "m")


def fork_pool(num_per_client: int, reader: object = None) -> ReaderPool:
    """Returns a pool whose fork server is forked from the tests' process, which may have threads that hold no lock.

    num_per_client: processes that one client may hold. There is one more.
    """
    pool = ReaderPool(cast(BodyReader, reader), CONFIG, num_per_client + 1)
    with mock.patch.object(forked_process, "why_unsafe_to_fork", lambda: ""):
        pool.fork()
    gc.unfreeze()
    return pool


def run_with(pool: ReaderPool, run: Callable[[], Awaitable[None]], timeout_s: float = 60.0) -> None:
    async def main() -> None:
        try:
            await asyncio.wait_for(run(), timeout_s)
        finally:
            await close(pool)

    asyncio.run(main())


async def close(pool: ReaderPool) -> None:
    """Closes the pool and waits until its tasks have closed their sockets."""
    pool.close()
    await asyncio.gather(*pool._sandboxes._keeping, return_exceptions=True)
    await asyncio.sleep(0.05)
