"""Whose grammar is compiled next: clients take turns, and each has one compilation at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class CompileQueue(Generic[T]):
    """Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        """Jobs by client. The client that was served last is at the end."""
        self._running: set[str] = set()

    def push(self, client: str, job: T) -> None:
        with self._lock:
            self._waiting.setdefault(client, deque()).append(job)

    def pop(self) -> tuple[str, T] | None:
        """Returns the next client whose job may run, and the job. `finish` must follow."""
        with self._lock:
            client = next((each for each in self._waiting if each not in self._running), None)
            if client is None:
                return None
            jobs = self._waiting[client]
            job = jobs.popleft()
            self._waiting.move_to_end(client)
            if not jobs:
                del self._waiting[client]
            self._running.add(client)
            return client, job

    def finish(self, client: str) -> None:
        with self._lock:
            self._running.discard(client)
