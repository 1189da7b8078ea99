"""ROUTER and DEALER sockets on an asyncio loop, without a task or a future per message.

The loop watches the socket's file descriptor, and a callback gets each decoded message. This has about three times the
rate of `zmq.asyncio`. The descriptor is edge-triggered: after each read and each send the socket must be read until
EAGAIN, or a message may stay unnoticed.

A socket belongs to the thread of its loop. Sends never block: they return False if the message cannot be queued.
Refused messages are reported to the context's `refusals`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.protocol.codec import MAX_MESSAGE_BYTES, Codec
from tandem.protocol.network import Context, NetworkConfig
from tandem.protocol.network_keys import Part
from tandem.protocol.refusals import RefusalReason
from tandem.runtime.errors import InvalidMessage, ProtocolError

log = logging.getLogger(__name__)

M = TypeVar("M")
# Plain numbers: operations on pyzmq's flags cost a microsecond each.
_NOBLOCK, _SNDMORE, _POLLIN, _EVENTS = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN), int(zmq.EVENTS)
_MESSAGES_PER_WAKE = 64
"""Messages read before other callbacks of the loop get their turn."""
_LINGER_MS = 300
"""Time that a closing socket has to deliver queued messages."""
_HIGH_WATER_MARK = 10_000
_FAILED_HANDSHAKES = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)


class _MessageSocket(Generic[M]):
    """Base class of both kinds of socket: reads until EAGAIN, decodes, monitors and closes."""

    def __init__(self, context: Context, kind: int, codec: Codec[M]) -> None:
        self._loop = asyncio.get_running_loop()
        self._codec = codec
        self._refusals = context.refusals
        self._socket = context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._monitor: Any = None
        self._closed = False
        self._read_scheduled = False

    def _start_reading(self, on_event: Callable[[], None] | None = None) -> None:
        """on_event: called for each event of the monitor, if there is one."""
        if on_event is not None:
            self._loop.add_reader(self._monitor.getsockopt(zmq.FD), self._read_events, on_event)
            self._loop.call_soon(self._read_events, on_event)  # events before `add_reader` do not trigger it
        self._loop.add_reader(self._socket.getsockopt(zmq.FD), self._read)
        self._schedule_read()

    def _read_events(self, on_event: Callable[[], None]) -> None:
        while not self._closed and self._monitor.getsockopt(_EVENTS) & _POLLIN:
            recv_monitor_message(self._monitor)
            on_event()

    def _schedule_read(self) -> None:
        if not self._read_scheduled and not self._closed:
            self._read_scheduled = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_scheduled = False
        for _ in range(_MESSAGES_PER_WAKE):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(frames)
            except ProtocolError as error:
                reason: RefusalReason = "not_possible" if isinstance(error, InvalidMessage) else "not_a_message"
                self._refusals.count(reason, error.message)
            except Exception:
                log.exception("a message handler failed")
        self._schedule_read()

    def _handle(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _send_frames(self, frames: list[bytes]) -> bool:
        """Returns False if the queue is full or the peer is unknown."""
        if self._closed:
            return False
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, _NOBLOCK | _SNDMORE)
            self._socket.send(frames[-1], _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        finally:
            if self._socket.getsockopt(_EVENTS) & _POLLIN:
                self._schedule_read()
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.getsockopt(zmq.FD))
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._loop.remove_reader(self._socket.getsockopt(zmq.FD))
        self._socket.close()


class RouterSocket(_MessageSocket[M]):
    """A bound ROUTER. `on_message(identity, message)` runs on the loop; `send` answers by identity.

    tcp_endpoint: a second endpoint to bind, for peers on other hosts. Raises ConfigError for a tcp endpoint without
    protection, zmq's error for one that is in use.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        codec: Codec[M],
        on_message: Callable[[bytes, M], None],
        tcp_endpoint: str = "",
    ) -> None:
        super().__init__(context, zmq.ROUTER, codec)
        self._on_message = on_message
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted peer takes over its identity
        try:
            context.secure_bind(self._socket, endpoint)
            self._socket.bind(endpoint)
            self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            if tcp_endpoint:  # options apply to endpoints that are bound after they are set
                context.secure_bind(self._socket, tcp_endpoint)
                self._socket.bind(tcp_endpoint)
        except BaseException:
            self._socket.close()
            raise
        self._monitor = self._socket.get_monitor_socket(_FAILED_HANDSHAKES)
        self._start_reading(self._count_failed_handshake)

    def _handle(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise ProtocolError(f"{len(frames)} frames instead of identity and message")
        self._on_message(frames[0], self._codec.decode(frames[1]))

    def _count_failed_handshake(self) -> None:
        self._refusals.count("bad_handshake", f"a peer at {self.endpoint} does not speak the protocol")

    def send(self, identity: bytes, message: msgspec.Struct | bytes) -> bool:
        """Queues a message for the peer. Returns False if the peer is not connected or does not read."""
        return self._send_frames([identity, self._codec.encode(message)])

    def close(self) -> None:
        super().close()
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


class DealerSocket(_MessageSocket[M]):
    """A connected DEALER that reconnects by itself. `on_message(message)` runs on the loop.

    peer: the part that owns the endpoint and proves it by its key over tcp. on_broken: called when an open connection
    breaks; messages in flight are lost then, in both directions, and zmq reconnects silently. Raises ConfigError for a
    tcp endpoint without protection.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        codec: Codec[M],
        on_message: Callable[[M], None],
        identity: bytes | None = None,
        peer: Part = "worker",
        on_broken: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(context, zmq.DEALER, codec)
        self._on_message = on_message
        if identity is not None:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.endpoint = endpoint
        try:
            context.secure_connect(self._socket, endpoint, peer)
            if on_broken is not None:
                self._monitor = self._socket.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
            self._socket.connect(endpoint)
        except BaseException:
            self._socket.disable_monitor()
            self._socket.close()
            raise
        self._start_reading(on_broken)

    def _handle(self, frames: list[bytes]) -> None:
        if len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames instead of one message")
        self._on_message(self._codec.decode(frames[0]))

    def send(self, message: msgspec.Struct | bytes) -> bool:
        """Queues a message. Returns False if the queue is full, because the peer has not read for long."""
        return self._send_frames([self._codec.encode(message)])

    def close(self, *, discard: bool = False) -> None:
        """See `protocol.messaging.MessageDealer`."""
        if discard and not self._closed:
            self._socket.setsockopt(zmq.LINGER, 0)
        super().close()


class SocketContext(Context):
    """Implements `protocol.messaging.Network`."""

    def router(
        self, endpoint: str, codec: Codec[M], on_message: Callable[[bytes, M], None], tcp_endpoint: str = ""
    ) -> RouterSocket[M]:
        return RouterSocket(self, endpoint, codec, on_message, tcp_endpoint)

    def dealer(
        self,
        endpoint: str,
        codec: Codec[M],
        on_message: Callable[[M], None],
        identity: bytes | None = None,
        peer: Part = "worker",
        on_broken: Callable[[], None] | None = None,
    ) -> DealerSocket[M]:
        return DealerSocket(self, endpoint, codec, on_message, identity, peer, on_broken)


def listen_on_free_port(host: str) -> tuple[int, int]:
    """Returns (file descriptor, port) of a listening TCP socket on `host`. The caller closes the descriptor."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=128) as listener:
        port: int = listener.getsockname()[1]
        return listener.detach(), port


def new_context(part: Part = "operator", network: NetworkConfig = NetworkConfig()) -> SocketContext:  # noqa: B008  # frozen
    """Returns the process's context. part: role of this process, which selects its key. Raises ConfigError."""
    context = SocketContext(io_threads=1)
    try:
        context.protect(part, network)
    except BaseException:
        context.destroy()
        raise
    return context
