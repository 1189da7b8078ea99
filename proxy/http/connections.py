"""How many HTTP connections there may be, in all and from one address. Each costs a descriptor and some memory."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from tandem.proxy.answers.errors import TooManyConnections, TooManyFromClient
from tandem.runtime.file_limits import take_all_descriptors

log = logging.getLogger(__name__)

_OTHER_FDS = 512
"""Of the process's descriptors, those for workers, readers, spooled bodies and files; workers take the most."""
_LOG_INTERVAL_S = 10.0


class Connections:
    """max_per_client: 0 takes half of max_total. on_refused: called for each that is refused."""

    def __init__(
        self,
        max_total: int,
        max_per_client: int = 0,
        on_refused: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_total = max_total
        self._max_per_client = max_per_client or max(1, max_total // 2)
        self._on_refused = on_refused
        self._clock = clock
        self._by_client: Counter[str] = Counter()
        self._logged_at: float | None = None
        self.num_open = 0

    def add(self, client: str) -> TooManyConnections | None:
        """None: counted until `remove`. Otherwise not counted, and this is to be told."""
        if self.num_open >= self._max_total:
            return self._refuse(TooManyConnections(f"This proxy has {self.num_open} connections, as many as it may."))
        if (num_own := self._by_client[client]) >= self._max_per_client:
            message = f"Your address has {num_own} connections to this proxy, as many as one may have; use them again."
            return self._refuse(TooManyFromClient(message))
        self._by_client[client] += 1
        self.num_open += 1
        return None

    def remove(self, client: str) -> None:
        self.num_open -= 1
        self._by_client[client] -= 1
        assert self.num_open >= 0 and self._by_client[client] >= 0
        if not self._by_client[client]:
            del self._by_client[client]

    def _refuse(self, error: TooManyConnections) -> TooManyConnections:
        self._on_refused()
        now = self._clock()
        if self._logged_at is None or now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("refused a connection: %s", error.message)
        return error


def affordable_connections(wanted: int) -> int:
    """As many of them as the system lets this process have; asks for all descriptors that it may have."""
    most = take_all_descriptors()
    affordable = max(most // 2, most - _OTHER_FDS)
    if affordable < wanted:
        log.warning("%d connections at most, for this process may have %d descriptors (ulimit -n)", affordable, most)
    return min(wanted, affordable)
