from __future__ import annotations

import asyncio


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock the test sets."""

    now = 0.0

    def time(self) -> float:
        return self.now
