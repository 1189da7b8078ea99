"""Which job a reader process takes next, so that no client keeps another one's jobs waiting. Pure."""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, NamedTuple, TypeVar

J = TypeVar("J")


class JobTurn(NamedTuple):
    """What jobs take turns by."""

    client: str
    is_transform: bool = False
    """Whether the job is a call of `/tokenize`, `/detokenize` or `count_tokens`, which needs no worker."""


class JobQueue(Generic[J]):
    """A process that is free takes a job of the client that holds the fewest processes, first in, first out.

    A client holds a process from `take` to `release`. It never holds the last one, so another client's job waits for
    the jobs of other clients only.
    """

    def __init__(self, num_processes: int, max_transforms: int) -> None:
        """num_processes: at least 2. max_transforms: processes that one client's calls without a worker may hold."""
        assert num_processes > 1
        self._max_held = num_processes - 1
        self._max_transforms = max_transforms
        self._jobs: dict[JobTurn, deque[J]] = {}  # the turn that waits longest first; only turns with jobs
        self._held: Counter[str] = Counter()
        self._held_by_transforms: Counter[str] = Counter()
        self._num_waiting: Counter[str] = Counter()

    def num_waiting(self, client: str) -> int:
        return self._num_waiting[client]

    def put(self, turn: JobTurn, job: J) -> None:
        self._jobs.setdefault(turn, deque()).append(job)
        self._num_waiting[turn.client] += 1

    def put_back(self, turn: JobTurn, job: J) -> None:
        """Lets the job be the client's next one."""
        own = self._jobs.pop(turn, deque())
        own.appendleft(job)
        self._jobs = {turn: own, **self._jobs}
        self._num_waiting[turn.client] += 1

    def discard(self, turn: JobTurn, job: J) -> bool:
        """Removes a job. Returns whether it was waiting."""
        own = self._jobs.get(turn, deque())
        if job not in own:
            return False
        own.remove(job)
        if not own:
            del self._jobs[turn]
        self._forget(turn.client)
        return True

    def take(self) -> J | None:
        """Removes and returns the next job, whose client now holds a process; None if no client may hold one more."""
        turn = min((each for each in self._jobs if self._may_hold(each)), key=self._num_held, default=None)
        if turn is None:
            return None
        job = self._pop(turn)
        self._held[turn.client] += 1
        self._held_by_transforms[turn.client] += turn.is_transform
        return job

    def release(self, turn: JobTurn) -> None:
        """Ends what `take` has begun: the process is free again, or another one has taken its place."""
        for held, number in ((self._held, 1), (self._held_by_transforms, int(turn.is_transform))):
            held[turn.client] -= number
            if not held[turn.client]:
                del held[turn.client]

    def take_all(self) -> list[J]:
        """Removes and returns all jobs that wait."""
        jobs = [job for own in self._jobs.values() for job in own]
        self._jobs.clear()
        self._num_waiting.clear()
        return jobs

    def _may_hold(self, turn: JobTurn) -> bool:
        if turn.is_transform and self._held_by_transforms[turn.client] >= self._max_transforms:
            return False
        return self._held[turn.client] < self._max_held

    def _num_held(self, turn: JobTurn) -> int:
        return self._held[turn.client]

    def _pop(self, turn: JobTurn) -> J:
        own = self._jobs.pop(turn)
        job = own.popleft()
        if own:
            self._jobs[turn] = own  # the last one now
        self._forget(turn.client)
        return job

    def _forget(self, client: str) -> None:
        self._num_waiting[client] -= 1
        if not self._num_waiting[client]:
            del self._num_waiting[client]
