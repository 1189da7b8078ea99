"""Outcomes of KV transfers, which other threads report."""

from __future__ import annotations

import queue
from typing import Generic, TypeVar

from tandem.runtime.errors import KVTransferFailed

T = TypeVar("T")


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


class Addresses(Generic[T]):
    """Takes the addresses of paths from another thread."""

    def __init__(self) -> None:
        self._queue: queue.Queue[T | KVTransferFailed] = queue.Queue()

    def __call__(self, addresses: T | KVTransferFailed) -> None:
        self._queue.put(addresses)

    def get(self) -> T:
        addresses = self._queue.get(timeout=30)
        assert not isinstance(addresses, KVTransferFailed), addresses
        return addresses
