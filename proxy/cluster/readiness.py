"""Holds requests that arrive before the first worker has registered."""

from __future__ import annotations

import asyncio
import contextlib

from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.runtime.errors import Overloaded


class WorkerReadiness:
    """Lets requests wait for the model's limits, without which no prompt can be checked.

    max_waiting: requests beyond this are refused at once. wait_s: longest wait of one request.
    """

    def __init__(self, table: WorkerTable, max_waiting: int, wait_s: float) -> None:
        self._table = table
        self._max_waiting = max_waiting
        self._wait_s = wait_s
        self._num_waiting = 0
        self._has_registered = asyncio.Event()  # stays set: the table remembers the last workers' limits

    def on_cluster_changed(self) -> None:
        if not self._has_registered.is_set() and self._table.workers():
            self._has_registered.set()

    async def limits(self) -> ModelLimits:
        """Returns the model's limits. Raises Overloaded when no worker registers in time."""
        try:
            return self._table.limits()
        except Overloaded:
            if self._num_waiting >= self._max_waiting:
                raise
        self._num_waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s):
                    await self._has_registered.wait()
        finally:
            self._num_waiting -= 1
        return self._table.limits()
