"""Persistent connections to the workers: a few lanes to each, opened when it joins and closed when it is lost.

Requests are multiplexed over a lane by their id, so a socket is never handed from one request to the next. All messages
about one request take the same lane: an AbortAttempt cannot overtake its StartPrefill. Workers answer on lane 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from zlib import crc32

import msgspec

from tandem.protocol.codec import Codec
from tandem.protocol.messages.dispatch import ToProxy
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.sockets import DealerSocket

log = logging.getLogger(__name__)


class WorkerPool:
    """on_message(worker, message) is called on the loop for everything that a worker sends.

    on_broken(worker): a connection to it broke, and what was on its way is lost.
    """

    def __init__(
        self,
        context: Any,
        proxy_id: str,
        sockets_per_worker: int,
        on_message: Callable[[WorkerInfo, ToProxy], None],
        on_broken: Callable[[WorkerInfo], None],
    ) -> None:
        self._context = context
        self._proxy_id = proxy_id
        self._sockets_per_worker = sockets_per_worker
        self._on_message = on_message
        self._on_broken = on_broken
        self._codec: Codec[ToProxy] = Codec(ToProxy)
        self._lanes: dict[str, list[DealerSocket[ToProxy]]] = {}  # by epoch

    def open(self, worker: WorkerInfo) -> None:
        assert worker.epoch not in self._lanes
        self._lanes[worker.epoch] = [
            DealerSocket(
                self._context,
                worker.endpoint,
                self._codec,
                lambda message: self._on_message(worker, message),
                identity=f"{self._proxy_id}:{lane}".encode(),
                on_broken=lambda: self._on_broken(worker),
            )
            for lane in range(self._sockets_per_worker)
        ]

    def close(self, worker: WorkerInfo) -> None:
        for lane in self._lanes.pop(worker.epoch, []):
            lane.close()

    def send(self, worker: WorkerInfo, connection_key: str, message: msgspec.Struct) -> bool:
        """False when the worker is lost or has not read for so long that its queue is full."""
        lanes = self._lanes.get(worker.epoch)
        if lanes is None:
            return False
        lane = lanes[crc32(connection_key.encode()) % len(lanes)] if len(lanes) > 1 else lanes[0]
        return lane.send(message)

    def close_all(self) -> None:
        for lanes in self._lanes.values():
            for lane in lanes:
                lane.close()
        self._lanes.clear()
