"""Holds requests that arrive before the first worker has registered."""

from __future__ import annotations

import asyncio
import contextlib

from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.runtime.errors import Overloaded, TandemError


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
        self._error: TandemError | None = None

    def on_cluster_changed(self) -> None:
        if not self._has_registered.is_set() and self._table.workers():
            self._has_registered.set()

    def fail_all(self, error: TandemError) -> None:
        """Ends all waits. `limits` raises the error."""
        self._error = error
        self._has_registered.set()

    async def limits(self) -> ModelLimits:
        """Returns the model's limits. Raises Overloaded if no worker registers in time, or the error of `fail_all`."""
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
        if self._error is not None:
            raise self._error
        return self._table.limits()
