"""Waits for conditions that have no event to wait for. The limits only end a hopeless wait; they assert no speed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_PAUSE_S = 0.01


async def until(holds: Callable[[], bool], limit_s: float = 240) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_S)


def comes_true(holds: Callable[[], bool], limit_s: float) -> bool:
    """Returns whether the condition came true in time."""
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def wait_until(holds: Callable[[], bool], limit_s: float = 20) -> None:
    assert comes_true(holds, limit_s), f"{holds} did not hold within {limit_s} s"
