"""Reports connections and messages that this process has refused, by reason.

Each reason is logged at most once in ten seconds, so that a misbehaving peer cannot fill the disk.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

log = logging.getLogger(__name__)

RefusalReason = Literal["unknown_key", "bad_handshake", "not_a_message", "not_possible", "implausible_figure"]
"""For connections: a key that is not on the list; a failed handshake. For messages: bytes that are no expected message;
a message with invalid values; figures that cannot be true, without which the message was accepted. ZeroMQ closes
connections with oversized messages by itself, unreported."""

_LOG_INTERVAL_S = 10.0


class Refusals:
    """One per process. on_refused: called with the reason of each refusal."""

    def __init__(
        self, on_refused: Callable[[RefusalReason], object] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.on_refused = on_refused
        self._logged_at: dict[RefusalReason, float] = {}
        self._num_unlogged: Counter[RefusalReason] = Counter()

    def count(self, reason: RefusalReason, detail: str) -> None:
        """Reports and logs a refusal. detail: for the log; must not contain client data."""
        if self.on_refused is not None:
            self.on_refused(reason)
        now = self._clock()
        if now - self._logged_at.get(reason, now - _LOG_INTERVAL_S) < _LOG_INTERVAL_S:
            self._num_unlogged[reason] += 1
            return
        self._logged_at[reason] = now
        more = f" ({self._num_unlogged[reason]} more since the last such line)" if self._num_unlogged[reason] else ""
        self._num_unlogged[reason] = 0
        log.warning("refused, %s: %s%s", reason, detail, more)
