"""What each client's leases hold of the media cache, so that none holds so much that others are refused. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tandem.runtime.client_share import CLIENT_SHARE
from tandem.runtime.errors import ClientShareExceeded, InvalidRequest


class ClientHolds:
    """Counts the entries that each client's leases hold, by the number of the entry. An entry that several leases of a
    client hold counts once for it; one that two clients hold counts for both.

    The leases of one client may hold CLIENT_SHARE of the space and of the items. Leases without a client, those of
    workers, are not limited.
    """

    def __init__(self, capacity_bytes: int, max_items: int) -> None:
        self.max_bytes = int(capacity_bytes * CLIENT_SHARE)
        self.max_items = max(1, int(max_items * CLIENT_SHARE))
        self._num_leases: dict[str, Counter[int]] = {}
        """Leases of the client by the entry that they hold."""
        self._bytes: Counter[str] = Counter()

    def bytes_of(self, client: str) -> int:
        return self._bytes[client]

    def num_items_of(self, client: str) -> int:
        return len(self._num_leases.get(client, ()))

    def holds(self, client: str, number: int) -> bool:
        return number in self._num_leases.get(client, ())

    def add(self, client: str, number: int, num_bytes: int) -> None:
        """A lease of the client holds the entry from now on."""
        if not client:
            return
        held = self._num_leases.setdefault(client, Counter())
        if number not in held:
            self._bytes[client] += num_bytes
        held[number] += 1

    def remove(self, client: str, number: int, num_bytes: int) -> None:
        """The opposite of `add`."""
        if not client:
            return
        held = self._num_leases[client]
        held[number] -= 1
        if not held[number]:
            del held[number]
            self._bytes[client] -= num_bytes
        if not held:
            del self._num_leases[client]
            assert not self._bytes[client], "a client that holds nothing holds bytes"
            del self._bytes[client]

    def resize(self, clients: Iterable[str], number: int, growth: int) -> None:
        """The entry, which these clients hold, has grown by so many bytes, or shrunk."""
        for client in clients:
            if self.holds(client, number):
                self._bytes[client] += growth

    def check_request(self, num_bytes: int, num_items: int) -> None:
        """Raises InvalidRequest if no client may ever hold so much."""
        if num_bytes > self.max_bytes or num_items > self.max_items:
            raise InvalidRequest(
                f"the request's images and videos take {num_bytes} bytes and {num_items} items of the media cache, "
                f"where one client may hold {self.max_bytes} bytes and {self.max_items} items (three quarters of "
                "--media-cache-mib, and of `ulimit -n`); send fewer or smaller ones"
            )

    def check(self, client: str, num_bytes: int, num_items: int = 0) -> None:
        """Raises ClientShareExceeded if the client may not hold so much more now."""
        held_bytes, num_held = self.bytes_of(client), self.num_items_of(client)
        if held_bytes + num_bytes > self.max_bytes or num_held + num_items > self.max_items:
            raise ClientShareExceeded(
                f"the images and videos of your running requests hold {held_bytes} of the {self.max_bytes} bytes and "
                f"{num_held} of the {self.max_items} items that one client may hold in the media cache; {num_bytes} "
                f"bytes and {num_items} items more are asked for. Send fewer such requests at once, and this one again "
                "when others have begun to be answered."
            )
