"""Bytes of requests that wait to be read, shared among clients so that none of them can have all. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.runtime.client_share import CLIENT_SHARE
from tandem.runtime.errors import ClientShareExceeded, Overloaded


class ByteBudget:
    """max_bytes: of all clients together, three quarters of it of one."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_client: Counter[str] = Counter()
        self.num_bytes = 0

    def add(self, client: str, num_bytes: int) -> None:
        """num_bytes: below 0 if they are no longer held. Raises ClientShareExceeded or Overloaded without room."""
        if num_bytes > 0:
            if self._by_client[client] + num_bytes > self._max_bytes * CLIENT_SHARE:
                raise ClientShareExceeded(
                    "Your large requests that are waiting to be read have as many bytes as those of one client may "
                    "have; send fewer at once, and try again later."
                )
            if self.num_bytes + num_bytes > self._max_bytes:
                raise Overloaded("too many large requests are waiting to be read; try again later")
        self.num_bytes += num_bytes
        self._by_client[client] += num_bytes
        if not self._by_client[client]:
            del self._by_client[client]

    @contextmanager
    def hold(self, client: str, num_bytes: int) -> Iterator[None]:
        """Counts bytes until the end of the context. Raises like `add`."""
        self.add(client, num_bytes)
        try:
            yield
        finally:
            self.add(client, -num_bytes)
