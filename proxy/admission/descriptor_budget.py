"""The file descriptors of one proxy, shared among its clients so that none of them leaves it without. Pure.

A descriptor is taken before it is opened, so a request that would need one too many is refused, and the process never
meets its limit because of clients. Each kind of request takes what it opens: a connection one; a large body, while it
arrives and is read, one; a download one; an upload two; an image or video of a running request one. What no client
opens (workers' connections, pipes to readers, listeners, running batches) is measured, not counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.runtime.client_share import CLIENT_SHARE
from tandem.runtime.errors import ClientShareExceeded, Overloaded

_RESERVE, _MAX_RESERVE_SHARE = 512, 1 / 8
"""Descriptors that are never given away, and how much of a low limit they may be. They are for what is opened between
two measurements: connections that are accepted and refused, workers that join, readers that start again."""
_NUM_MEASUREMENTS = 3
"""Of so many measurements the lowest one counts, because refused connections are open for a moment."""
UNLIMITED = 1 << 20


class DescriptorBudget:
    """limit: descriptors that the process may open. wanted_connections: of clients. num_open: descriptors that are open
    now, before any client has connected.

    Half of what is free at most is for connections (`max_connections`), so that both they and what their requests open
    find room. One client may take three quarters of the other half.
    """

    def __init__(self, limit: int = UNLIMITED, wanted_connections: int = 8192, num_open: int = 0) -> None:
        self._usable = limit - min(_RESERVE, int(limit * _MAX_RESERVE_SHARE))
        self.max_connections = max(1, min(wanted_connections, (self._usable - num_open) // 2))
        self._measured = deque([num_open], maxlen=_NUM_MEASUREMENTS)
        self._taken: Counter[str] = Counter()

    @property
    def max_batches(self) -> int:
        """Batches that may run at the same time. Each has two files open, which are measured."""
        return max(1, self.room // 16)

    @property
    def num_taken(self) -> int:
        return self._taken.total()

    @property
    def room(self) -> int:
        """Descriptors that clients' requests may take in all."""
        return max(0, self._usable - self.max_connections - min(self._measured))

    def measure(self, num_open: int, num_connections: int) -> None:
        """Notes how many descriptors are open, and how many of them are clients' connections."""
        self._measured.append(max(0, num_open - num_connections - self.num_taken))

    def take(self, client: str, number: int = 1) -> None:
        """Counts descriptors until `give_back`. Raises ClientShareExceeded or Overloaded, and counts nothing then."""
        room, num_own = self.room, self._taken[client]
        if num_own + number > int(room * CLIENT_SHARE):
            raise ClientShareExceeded(
                f"Your requests have {num_own} of the {int(room * CLIENT_SHARE)} file descriptors that one client may "
                "have open for downloads, uploads, large bodies and images. Send fewer at once, read the answers, and "
                "try again."
            )
        if self.num_taken + number > room:
            raise Overloaded(
                f"Requests have {self.num_taken} of {room} file descriptors open; try again later. The operator can "
                "raise `ulimit -n`."
            )
        self._taken[client] += number

    def give_back(self, client: str, number: int = 1) -> None:
        self._taken[client] -= number
        assert self._taken[client] >= 0, "more descriptors given back than taken"
        if not self._taken[client]:
            del self._taken[client]

    @contextmanager
    def hold(self, client: str, number: int = 1) -> Iterator[None]:
        """Takes descriptors until the end of the context. Raises like `take`."""
        self.take(client, number)
        try:
            yield
        finally:
            self.give_back(client, number)
