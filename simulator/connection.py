"""One connection in simulated time: messages take time, come in order, and are kept while the network is silent."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tandem.simulator.timeline import ProcessLoop

if TYPE_CHECKING:
    from tandem.simulator.network import SimulatedDealer, SimulatedRouter, Switch

SILENT_S = 4.0, 6.0
"""Time after which an end of a connection notices that nothing comes any more, as ZeroMQ does by its heartbeats."""


class Connection:
    """One connection: two directions, each of which keeps the order."""

    def __init__(self, switch: Switch, dealer: SimulatedDealer, router: SimulatedRouter) -> None:
        self.dealer, self.router = dealer, router
        self._switch = switch
        # By whether it is that of the router, or towards it.
        self._is_open = {True: True, False: True}
        self._queues: dict[bool, deque[bytes | None]] = {True: deque(), False: deque()}
        self._num_arrived = {True: 0, False: 0}  # of these, the first ones
        self._sent_at = {True: 0.0, False: 0.0}  # when the line is free for the next message
        self._last_at = {True: 0.0, False: 0.0}
        switch.connections[self] = None

    def _loop(self, at_router: bool) -> ProcessLoop:
        return self.router.loop if at_router else self.dealer.loop

    def _silent_since(self, to_router: bool) -> float | None:
        """Returns since when nothing arrives at an end, or None."""
        if not self._switch.has_silence:
            return None
        return self._switch.silent_since(self._loop(not to_router).name, self._loop(to_router).name)

    def has_room(self, *, to_router: bool) -> bool:
        return len(self._queues[to_router]) < self._switch.max_queued

    def send(self, encoded: bytes, *, to_router: bool) -> bool:
        if not self.has_room(to_router=to_router):
            return False
        self._post(encoded, to_router)
        return True

    def _post(self, encoded: bytes | None, to_router: bool) -> None:
        """encoded: None for the end of the connection."""
        sent_at = max(self._switch.timeline.now, self._sent_at[to_router])
        sent_at += len(encoded or b"") / self._switch.bytes_per_s
        self._sent_at[to_router] = sent_at
        at = max(sent_at + self._switch.latency_s(), self._last_at[to_router])
        self._last_at[to_router] = at
        self._queues[to_router].append(encoded)
        self._loop(to_router).call_at(at, self._arrive, to_router)

    def _arrive(self, to_router: bool) -> None:
        self._num_arrived[to_router] += 1
        self._advance(to_router)

    def _advance(self, to_router: bool) -> None:
        """Delivers what has come to an end, unless the network is silent."""
        while self._num_arrived[to_router] and self._silent_since(to_router) is None:
            self._num_arrived[to_router] -= 1
            encoded = self._queues[to_router].popleft()
            if encoded is None:
                self.close(at_router=not to_router)
            else:
                self.deliver(encoded, to_router)

    def deliver(self, encoded: bytes, to_router: bool) -> None:
        if self._is_open[to_router]:
            (self.router if to_router else self.dealer).receive(self, encoded)

    def await_heartbeat(self, to_router: bool) -> None:
        """Closes the end at which nothing arrives, if that lasts."""
        since = self._silent_since(to_router)

        def close() -> None:
            if self._silent_since(to_router) == since:
                self._switch.on_change(self.dealer.loop.name, self.router.loop.name)
                self.close(at_router=to_router)

        self._loop(to_router).call_later(self._switch.timeline.rng.uniform(*SILENT_S), close)

    def on_heard(self) -> None:
        """One direction is silent no more. An end whose other end has closed learns of it behind what was kept."""
        for to_router in (True, False):
            self._loop(to_router).call_soon(self._advance, to_router)
            if not self._is_open[not to_router]:
                self._loop(to_router).call_soon(self._tell, not to_router)

    def end_after_delivery(self) -> None:
        """Ends the connection once the router has got what was sent to it."""
        self._post(None, to_router=True)

    def end(self) -> None:
        """Breaks the connection. Both ends learn of it after what was sent before, as far as they live."""
        self._close(True)
        self._close(False)

    def close(self, *, at_router: bool) -> None:
        """Closes one end, and the other one if it can be reached."""
        self._close(at_router)
        self._tell(at_router)

    def _tell(self, at_router: bool) -> None:
        if self._silent_since(not at_router) is None:
            self._close(not at_router)

    def _close(self, at_router: bool) -> None:
        if not self._is_open[at_router]:
            return
        self._is_open[at_router] = False
        if not self._is_open[not at_router]:
            del self._switch.connections[self]
        (self.router if at_router else self.dealer).on_ended(self)
