"""The network in simulated time: connections that delay, fill up, fall silent and break, but neither lose nor reorder.

`SimulatedNetwork` implements `protocol.messaging.Network` as `protocol.sockets` does: a dealer connects again and
again, and queues what it sends until then; a router knows its peers by their identities; messages in flight on a
connection that breaks are lost; a full queue refuses messages. Messages are encoded and decoded as on the wire.

A silent network keeps what one process sends to another. An end of a connection that has heard nothing for a while
closes it; the other end learns of that only if it can be reached (`protocol.network`, heartbeats).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from tandem.protocol.codec import Codec
from tandem.protocol.network_keys import Part
from tandem.protocol.refusals import Refusals
from tandem.runtime.errors import InvalidMessage, ProtocolError
from tandem.simulator.timeline import ProcessLoop, Timeline

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


M = TypeVar("M")
RECONNECT_S = 0.05
LINGER_S = 0.3
"""Time that a closing dealer has to deliver queued messages, see `protocol.sockets`."""
OnMessage = Callable[[str, str, Any], None]


class Switch:
    """Joins the networks of all processes. max_queued: messages on one connection that have not been read.

    bytes_per_s: of each direction of a connection. on_message: called with sender, receiver and message when a process
    gets one.
    """

    def __init__(
        self,
        timeline: Timeline,
        max_queued: int,
        max_latency_s: float = 0.002,
        bytes_per_s: float = math.inf,
        on_message: OnMessage = lambda *_: None,
    ) -> None:
        self.timeline = timeline
        self.on_message = on_message
        self._max_latency_s = max_latency_s
        self.bytes_per_s = bytes_per_s
        self.max_queued = max_queued
        self.routers: dict[str, SimulatedRouter] = {}
        self.connections: dict[Connection, None] = {}  # in the order of their beginning
        self._cuts: list[tuple[str, str]] = []  # processes that cannot connect to the other
        self._silent: Counter[tuple[str, str]] = Counter()  # processes that the other one does not hear
        self._silent_since: dict[tuple[str, str], float] = {}
        self._changed_at: dict[tuple[str, str], float] = {}  # last time at which they broke or healed
        self.numbers = itertools.count()

    def latency_s(self) -> float:
        return self.timeline.rng.uniform(0.00002, self._max_latency_s)

    def can_connect(self, dealer: str, router: str) -> bool:
        return (dealer, router) not in self._cuts and not self.is_silent(dealer, router)

    def is_silent(self, one: str, two: str) -> bool:
        """Whether what one of two processes sends to the other is kept."""
        return not self._silent_since.keys().isdisjoint([(one, two), (two, one)])

    @property
    def has_silence(self) -> bool:
        """Whether what some process sends to some other one is kept."""
        return bool(self._silent_since)

    def silent_since(self, sender: str, receiver: str) -> float | None:
        return self._silent_since.get((sender, receiver))

    def changed_at(self, dealer: str, router: str) -> float:
        """Returns when connections between two processes last broke, or became possible again."""
        return self._changed_at.get((dealer, router), 0.0)

    def break_connections(self, is_broken: Callable[[str, str], bool]) -> None:
        """is_broken: called with the names of the processes of dealer and router."""
        for connection in list(self.connections):
            ends = connection.dealer.loop.name, connection.router.loop.name
            if is_broken(*ends):
                self._changed_at[ends] = self.timeline.now
                connection.end()

    def cut(self, dealer: str, router: str) -> None:
        """Keeps one process from connecting to another, until `heal`."""
        if self.can_connect(dealer, router):
            self._changed_at[dealer, router] = self.timeline.now
        self._cuts.append((dealer, router))
        self.break_connections(lambda *ends: ends == (dealer, router))

    def heal(self, dealer: str, router: str) -> None:
        self._cuts.remove((dealer, router))
        self._changed_at[dealer, router] = self.timeline.now

    def silence(self, sender: str, receiver: str) -> None:
        """Keeps what one process sends to another, until `end_silence`. They do not connect then."""
        self._silent[sender, receiver] += 1
        if self._silent[sender, receiver] == 1:
            self._silent_since[sender, receiver] = self.timeline.now
            self.on_change(sender, receiver)
            for connection, to_router in self._between(sender, receiver):
                connection.await_heartbeat(to_router)

    def end_silence(self, sender: str, receiver: str) -> None:
        self._silent[sender, receiver] -= 1
        if not self._silent[sender, receiver]:
            del self._silent_since[sender, receiver]
            self.on_change(sender, receiver)
            for connection, _ in self._between(sender, receiver):
                connection.on_heard()

    def on_change(self, one: str, two: str) -> None:
        self._changed_at[one, two] = self._changed_at[two, one] = self.timeline.now

    def _between(self, sender: str, receiver: str) -> Iterator[tuple[Connection, bool]]:
        """Yields the connections of two processes, and whether the sender's messages go to the router."""
        for connection in list(self.connections):
            ends = connection.dealer.loop.name, connection.router.loop.name
            if ends in ((sender, receiver), (receiver, sender)):
                yield connection, ends == (sender, receiver)

    def on_killed(self, name: str) -> None:
        """The kernel closes the sockets of a process that has ended. What it has sent may still arrive."""
        for endpoint in [endpoint for endpoint, router in self.routers.items() if router.loop.name == name]:
            if self.routers[endpoint].loop.is_dead:
                del self.routers[endpoint]
        for connection in list(self.connections):
            dealer = connection.dealer
            if connection.router.loop.is_dead:
                connection.close(at_router=True)
            elif dealer.loop.is_dead and not dealer.is_closed:  # else it ends after what was sent on it
                if self.timeline.rng.random() < 0.5:
                    connection.close(at_router=False)
                else:
                    connection.end_after_delivery()


class SimulatedNetwork:
    """The network of one process."""

    def __init__(self, switch: Switch, loop: ProcessLoop) -> None:
        self.switch = switch
        self.loop = loop
        self._sockets: list[SimulatedRouter | SimulatedDealer] = []
        self.refusals = Refusals(clock=loop.time)

    def router(
        self, endpoint: str, codec: Codec[M], on_message: Callable[[bytes, M], None], tcp_endpoint: str = ""
    ) -> SimulatedRouter:
        socket = SimulatedRouter(self, endpoint, codec, on_message)
        self._sockets.append(socket)
        return socket

    def dealer(
        self,
        endpoint: str,
        codec: Codec[M],
        on_message: Callable[[M], None],
        identity: bytes | None = None,
        peer: Part = "worker",
        on_broken: Callable[[], None] | None = None,
    ) -> SimulatedDealer:
        socket = SimulatedDealer(self, endpoint, codec, on_message, identity, on_broken)
        self._sockets.append(socket)
        return socket

    @property
    def num_dealers(self) -> int:
        """Dealers that are not closed."""
        return sum(isinstance(socket, SimulatedDealer) and not socket.is_closed for socket in self._sockets)

    def destroy(self, linger: int | None = None) -> None:
        for socket in self._sockets:
            socket.close()


class _Socket:
    def __init__(self, network: SimulatedNetwork, endpoint: str, codec: Codec[Any]) -> None:
        self.loop = network.loop
        self.endpoint = endpoint
        self.is_closed = False
        self._switch = network.switch
        self._codec = codec
        self._refusals = network.refusals

    @property
    def _is_over(self) -> bool:
        """Also of a killed process, whose coroutines still run their `finally` blocks when they are collected."""
        return self.is_closed or self.loop.is_dead

    def _handle(self, sender: _Socket, handle: Callable[[Any], None], encoded: bytes) -> None:
        if self._is_over:
            return
        try:
            message = self._codec.decode(encoded)
            self._switch.on_message(sender.loop.name, self.loop.name, message)
            handle(message)
        except ProtocolError as error:
            reason: Any = "not_possible" if isinstance(error, InvalidMessage) else "not_a_message"
            self._refusals.count(reason, error.message)


class SimulatedRouter(_Socket):
    """See `protocol.sockets.RouterSocket`."""

    def __init__(
        self,
        network: SimulatedNetwork,
        endpoint: str,
        codec: Codec[Any],
        on_message: Callable[[bytes, Any], None],
    ) -> None:
        super().__init__(network, endpoint, codec)
        routers = self._switch.routers
        before = routers.get(endpoint)
        assert before is None or before.loop is not self.loop, f"{endpoint} is bound"
        routers[endpoint] = self  # in place of a process that ends, as the file of an ipc socket is replaced
        self._on_message = on_message
        self._peers: dict[bytes, Connection] = {}

    def accept(self, connection: Connection) -> None:
        identity = connection.dealer.identity
        before, self._peers[identity] = self._peers.get(identity), connection
        if before is not None:  # a restarted peer takes over its identity
            is_successor = connection.dealer.loop is not before.dealer.loop or before.dealer.is_closed
            assert is_successor or not connection.dealer.is_closed, f"a closed socket takes over from {identity!r}"
            before.close(at_router=True)

    def on_ended(self, connection: Connection) -> None:
        if self._peers.get(connection.dealer.identity) is connection:
            del self._peers[connection.dealer.identity]

    def receive(self, connection: Connection, encoded: bytes) -> None:
        dealer = connection.dealer
        self._handle(dealer, lambda message: self._on_message(dealer.identity, message), encoded)

    def send(self, identity: bytes, message: msgspec.Struct | bytes) -> bool:
        encoded, connection = self._codec.encode(message), self._peers.get(identity)
        return not self._is_over and connection is not None and connection.send(encoded, to_router=False)

    def close(self) -> None:
        if not self._is_over:
            self.is_closed = True
            if self._switch.routers.get(self.endpoint) is self:
                del self._switch.routers[self.endpoint]
            for connection in list(self._peers.values()):
                connection.close(at_router=True)


class SimulatedDealer(_Socket):
    """See `protocol.sockets.DealerSocket`."""

    def __init__(
        self,
        network: SimulatedNetwork,
        endpoint: str,
        codec: Codec[Any],
        on_message: Callable[[Any], None],
        identity: bytes | None,
        on_broken: Callable[[], None] | None,
    ) -> None:
        super().__init__(network, endpoint, codec)
        self.identity = identity if identity is not None else f"dealer-{next(self._switch.numbers)}".encode()
        self._on_message = on_message
        self._on_broken = on_broken
        self._connection: Connection | None = None
        self._unsent: deque[bytes] = deque()
        self._closed_at = math.inf
        self.loop.call_later(self._switch.latency_s(), self._connect)

    def _connect(self) -> None:
        if self.is_closed and not self._unsent:
            return
        router = self._switch.routers.get(self.endpoint)
        if router is None or router.loop.is_dead or not self._switch.can_connect(self.loop.name, router.loop.name):
            if self.loop.time() < self._closed_at + LINGER_S:
                self.loop.call_later(RECONNECT_S, self._connect)
            return
        self._connection = Connection(self._switch, self, router)
        router.accept(self._connection)
        while self._unsent and self._connection.has_room(to_router=True):
            self._connection.send(self._unsent.popleft(), to_router=True)

    def send(self, message: msgspec.Struct | bytes) -> bool:
        encoded = self._codec.encode(message)
        if self._is_over:
            return False
        if self._connection is not None and not self._unsent:
            return self._connection.send(encoded, to_router=True)
        if len(self._unsent) >= self._switch.max_queued:
            return False
        self._unsent.append(encoded)
        return True

    def receive(self, connection: Connection, encoded: bytes) -> None:
        self._handle(connection.router, self._on_message, encoded)

    def on_ended(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None
            self.loop.call_later(self._switch.latency_s(), self._broke)

    def _broke(self) -> None:
        if self.is_closed:
            return
        if self._on_broken is not None:
            self._on_broken()
        self.loop.call_later(RECONNECT_S, self._connect)

    def close(self, *, discard: bool = False) -> None:
        """What was sent is delivered unless `discard` is set, then the router forgets this socket."""
        if self._is_over:
            return
        self.is_closed, self._closed_at = True, self.loop.time()
        connection, self._connection = self._connection, None
        if discard:
            self._unsent.clear()
            if connection is not None:
                connection.close(at_router=False)
        elif connection is not None:
            connection.end_after_delivery()
