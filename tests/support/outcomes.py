"""Outcomes of KV transfers, which other threads report."""

from __future__ import annotations

import queue

from tandem.runtime.errors import KVTransferFailed


class Outcomes:
    """Collects `on_done` calls from other threads."""

    def __init__(self, timeout_s: float = 30) -> None:
        self._timeout_s = timeout_s
        self._queue: queue.Queue[KVTransferFailed | None] = queue.Queue()

    def __call__(self, error: KVTransferFailed | None) -> None:
        self._queue.put(error)

    def next(self) -> KVTransferFailed | None:
        return self._queue.get(timeout=self._timeout_s)

    def check_next(self) -> None:
        """Raises the error of a transfer that has failed."""
        if (error := self.next()) is not None:
            raise error

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()
