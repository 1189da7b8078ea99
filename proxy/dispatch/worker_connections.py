"""Connections to the workers: one DEALER socket for each, opened when a worker joins and closed when it is lost.

All messages to a worker take the same socket, so an AbortAttempt cannot overtake its StartPrefill.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tandem.protocol.codec import Codec
from tandem.protocol.messages.dispatch import ToProxy
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messaging import MessageDealer, Network


class WorkerConnections:
    def __init__(self, network: Network, proxy_id: str) -> None:
        self._network = network
        self._identity = f"{proxy_id}:0".encode()
        self._codec: Codec[ToProxy] = Codec(ToProxy)
        self._sockets: dict[str, MessageDealer] = {}  # by epoch

    def open(
        self,
        worker: WorkerInfo,
        on_message: Callable[[WorkerInfo, ToProxy], None],
        on_broken: Callable[[WorkerInfo], None],
    ) -> None:
        """Connects to a worker. on_message: called on the loop for each message. on_broken: called when the connection
        breaks, and with it messages in flight are lost."""
        assert worker.epoch not in self._sockets
        self._sockets[worker.epoch] = self._network.dealer(
            worker.endpoint,
            self._codec,
            lambda message: on_message(worker, message),
            identity=self._identity,
            on_broken=lambda: on_broken(worker),
        )

    def close(self, worker: WorkerInfo, *, is_gone: bool = False) -> None:
        """is_gone: nobody waits for what is queued. The next connection to this address must not meet the one that
        delivers it: connections from this proxy have one identity, and the later one takes over the replies."""
        if (socket := self._sockets.pop(worker.epoch, None)) is not None:
            socket.close(discard=is_gone)

    def send(self, worker: WorkerInfo, message: msgspec.Struct) -> bool:
        """Returns False when the worker is lost, or has not read for so long that its queue is full."""
        socket = self._sockets.get(worker.epoch)
        return socket is not None and socket.send(message)

    def close_all(self) -> None:
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()
