"""Lets workers that share a GPU load one after another.

vLLM measures the memory of its largest step as the difference of what is free on the GPU before and after. What another
worker takes or gives back meanwhile would count as its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

_POLL_S = 0.1


@asynccontextmanager
async def turn_to_load(files: Sequence[str]) -> AsyncIterator[None]:
    """Waits until no other worker has one of the turns, and gives them back at the end.

    files: one for each shared GPU, the same in all workers. The kernel releases those of a worker that is killed. The
    launcher ends workers that are not ready in time, so no turn is kept for ever.
    """
    async with AsyncExitStack() as turns:
        for file in sorted(files):  # in the same order everywhere, so that no two workers wait for each other
            await turns.enter_async_context(_turn(file))
        yield


@asynccontextmanager
async def _turn(file: str) -> AsyncIterator[None]:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # ranks that were forked meanwhile keep the descriptor open
    finally:
        os.close(descriptor)
