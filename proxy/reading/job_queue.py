"""The jobs that wait for a reader process, in turns of their clients. Pure."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

J = TypeVar("J")


class JobQueue(Generic[J]):
    """First in, first out for the jobs of one client; clients take turns, so that one with many jobs delays its own."""

    def __init__(self) -> None:
        self._jobs: dict[str, deque[J]] = {}  # by client, the next one first; only clients with jobs

    def put(self, client: str, job: J) -> None:
        self._jobs.setdefault(client, deque()).append(job)

    def put_back(self, client: str, job: J) -> None:
        """Lets the job be the next one."""
        own = self._jobs.pop(client, deque())
        own.appendleft(job)
        self._jobs = {client: own, **self._jobs}

    def discard(self, client: str, job: J) -> bool:
        """Removes a job. Returns whether it was waiting."""
        own = self._jobs.get(client, deque())
        if job not in own:
            return False
        own.remove(job)
        if not own:
            del self._jobs[client]
        return True

    def take(self) -> J | None:
        """Removes and returns the next job; None if there is none."""
        if not self._jobs:
            return None
        client = next(iter(self._jobs))
        own = self._jobs.pop(client)
        job = own.popleft()
        if own:
            self._jobs[client] = own  # the last one now
        return job
