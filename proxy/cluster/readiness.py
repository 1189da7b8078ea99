"""Those who wait for the first worker: before one has registered, a proxy cannot even say whether a prompt fits."""

from __future__ import annotations

import asyncio

from tandem.proxy.cluster.registry import ModelLimits, Registry
from tandem.runtime.errors import Overloaded


class WorkerReadiness:
    """max_waiting: more are refused at once. wait_s: how long one waits."""

    def __init__(self, registry: Registry, max_waiting: int, wait_s: float) -> None:
        self._registry = registry
        self._max_waiting = max_waiting
        self._wait_s = wait_s
        self._waiting: set[asyncio.Future[None]] = set()

    def on_cluster_changed(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def limits(self) -> ModelLimits:
        """What the workers can take. Raises Overloaded when none comes in time."""
        try:
            return self._registry.limits()
        except Overloaded:
            if len(self._waiting) >= self._max_waiting:
                raise
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await asyncio.wait([waiting], timeout=self._wait_s)
        finally:
            self._waiting.remove(waiting)
        return self._registry.limits()
