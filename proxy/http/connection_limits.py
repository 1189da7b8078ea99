"""How many connections one server accepts, in all and from one client's network."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from tandem.proxy.answers.errors import TooManyConnections, TooManyFromClient

log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0
_IPV6_CLIENT_BITS = 64
"""One client of IPv6 has a whole /64 at its disposal, so limits for each address would limit nothing."""


def client_network(address: str) -> str:
    """Returns what limits for each client address count by: the IPv4 address, or the /64 network of an IPv6 address.

    An IPv4 address mapped into IPv6 is its IPv4 address. Anything that is no address is returned as it is.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed) >> _IPV6_CLIENT_BITS << _IPV6_CLIENT_BITS, _IPV6_CLIENT_BITS)))


class OpenConnection(Protocol):
    """A connection that may have to make room for another one."""

    @property
    def has_request(self) -> bool:
        """Whether a request has arrived whose answer is not complete."""

    def abandon(self) -> None:
        """Closes the connection at once, and removes it from the limits."""


class ConnectionLimits:
    """Counts the open connections of one server, in all and by client network, from accept to close.

    on_refused: called for each refused connection. closes_oldest: a new connection beyond the limit is not refused;
    the oldest one that has no request is closed instead, or the oldest one. `is_stopping` makes every answer the last
    one of its connection.
    """

    def __init__(
        self,
        max_total: int,
        max_per_client: int,
        on_refused: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        closes_oldest: bool = False,
    ) -> None:
        self._closes_oldest = closes_oldest
        self._open: dict[OpenConnection, None] = {}  # in the order of their arrival
        self._max_total = max_total
        self._max_per_client = max_per_client
        self._on_refused = on_refused
        self._clock = clock
        self._by_client: Counter[str] = Counter()
        self._logged_at: float | None = None
        self.is_stopping = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, address: str, connection: OpenConnection) -> TooManyConnections | None:
        """Counts a connection until `remove`. Returns an error, and counts nothing, where a limit is reached."""
        if self._closes_oldest and self.num_open >= self._max_total:
            next((each for each in self._open if not each.has_request), next(iter(self._open))).abandon()
        if self.num_open >= self._max_total:
            return self._refuse(TooManyConnections(f"This proxy has {self.num_open} connections, which is its limit."))
        client = client_network(address)
        if (num_own := self._by_client[client]) >= self._max_per_client:
            message = f"Your address has {num_own} connections to this proxy, which is the limit; reuse them."
            return self._refuse(TooManyFromClient(message))
        self._by_client[client] += 1
        self._open[connection] = None
        return None

    def remove(self, address: str, connection: OpenConnection) -> None:
        client = client_network(address)
        del self._open[connection]
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def _refuse(self, error: TooManyConnections) -> TooManyConnections:
        self._on_refused()
        now = self._clock()
        if self._logged_at is None or now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("refused a connection: %s", error.message)
        return error
