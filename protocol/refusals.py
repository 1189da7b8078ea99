"""What came to this process's sockets and was refused, counted by reason.

A peer that sends rubbish as fast as it can must not fill the disk with log lines: each reason has one in ten seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal, get_args

log = logging.getLogger(__name__)

RefusalReason = Literal["unknown_key", "bad_handshake", "not_a_message", "not_possible"]
"""Of a connection: a key that is not on the list; no handshake that we know. Of a message: bytes that are none of those
expected; one that makes no sense. (Over the size limit ZeroMQ closes the connection, and tells nobody.)"""

REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)
_LOG_INTERVAL_S = 10.0


class Refusals:
    """One for each process. clock: seconds. on_refused(reason): called for each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.on_refused: Callable[[RefusalReason], None] = lambda reason: None
        self._counts: dict[RefusalReason, int] = dict.fromkeys(REASONS, 0)
        self._logged_at: dict[RefusalReason, float] = {}
        self._num_unlogged: dict[RefusalReason, int] = dict.fromkeys(REASONS, 0)

    def count(self, reason: RefusalReason, detail: str) -> None:
        """detail: for the log, without anything that a client has sent."""
        self._counts[reason] += 1
        self.on_refused(reason)
        now = self._clock()
        if now - self._logged_at.get(reason, now - _LOG_INTERVAL_S) < _LOG_INTERVAL_S:
            self._num_unlogged[reason] += 1
            return
        self._logged_at[reason] = now
        more = (
            f" (and {self._num_unlogged[reason]} more since the last such line)" if self._num_unlogged[reason] else ""
        )
        self._num_unlogged[reason] = 0
        log.warning("refused, %s: %s%s", reason, detail, more)

    def totals(self) -> list[tuple[str, int]]:
        """(reason, how many so far), of those that have happened."""
        return [(reason, count) for reason, count in self._counts.items() if count]

    @property
    def total(self) -> int:
        return sum(self._counts.values())
