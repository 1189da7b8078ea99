"""What a process needs of its network: sockets for typed messages.

`protocol.sockets` implements it with ZeroMQ, and `simulator.network` in simulated time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from tandem.protocol.codec import Codec
from tandem.protocol.network_keys import Part
from tandem.protocol.refusals import Refusals

M = TypeVar("M")


class MessageRouter(Protocol):
    """A bound socket that answers peers by their identity. See `protocol.sockets.RouterSocket`.

    Messages that are encoded already (`Codec.encode`) may be sent as bytes.
    """

    endpoint: str

    def send(self, identity: bytes, message: msgspec.Struct | bytes) -> bool: ...

    def close(self) -> None: ...


class MessageDealer(Protocol):
    """A socket that connects to a router, again and again. See `protocol.sockets.DealerSocket`.

    Messages that are encoded already (`Codec.encode`) may be sent as bytes.
    """

    endpoint: str

    def send(self, message: msgspec.Struct | bytes) -> bool: ...

    def close(self, *, discard: bool = False) -> None:
        """Closes the socket. Queued messages are still delivered, for a while, unless `discard` is set."""
        ...


class Network(Protocol):
    """Makes the sockets of one process, on its event loop. refusals: reports the messages that were refused."""

    refusals: Refusals

    def router(
        self, endpoint: str, codec: Codec[M], on_message: Callable[[bytes, M], None], tcp_endpoint: str = ""
    ) -> MessageRouter:
        """Binds a router. `on_message(identity, message)` is called on the loop."""
        ...

    def dealer(
        self,
        endpoint: str,
        codec: Codec[M],
        on_message: Callable[[M], None],
        identity: bytes | None = None,
        peer: Part = "worker",
        on_broken: Callable[[], None] | None = None,
    ) -> MessageDealer:
        """Connects a dealer. on_broken: called when an open connection breaks."""
        ...

    def destroy(self, linger: int | None = None) -> None:
        """Closes all sockets and ends the network. linger: milliseconds to deliver what they have queued."""
        ...
