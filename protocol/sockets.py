"""ROUTER and DEALER sockets on an asyncio loop, without a task or a future per message.

`zmq.asyncio` costs a future a message; here the loop watches the socket's file descriptor and a callback gets each
decoded message (about three times the rate, measured on uvloop). The descriptor is edge-triggered: after each read
and each send the socket must be drained until EAGAIN, or a message may lie unseen.

A socket belongs to the thread of its loop. Sends never block: what cannot be queued is reported to the caller. What is
refused is counted in the context's `refusals`.
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
# As plain numbers: operations on pyzmq's flags cost a microsecond each.
_NOBLOCK, _SNDMORE, _POLLIN, _EVENTS = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN), int(zmq.EVENTS)
_MESSAGES_PER_WAKE = 64
"""Fairness: after so many messages the loop gets its turn before the rest is read."""
_LINGER_MS = 300
"""How long a closing socket may take to hand over what was sent last."""
_HIGH_WATER_MARK = 10_000
_FAILED_HANDSHAKES = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)


class _MessageSocket(Generic[M]):
    """What both kinds share: reading until EAGAIN, decoding, closing."""

    def __init__(self, context: Context, kind: int, codec: Codec[M]) -> None:
        self._loop = asyncio.get_running_loop()
        self._codec = codec
        self._refusals = context.refusals
        self._socket = context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._closed = False
        self._drain_scheduled = False

    def _watch(self) -> None:
        self._loop.add_reader(self._socket.getsockopt(zmq.FD), self._drain)
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled and not self._closed:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_scheduled = False
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
        self._schedule_drain()

    def _handle(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _send_frames(self, frames: list[bytes]) -> bool:
        """True when the frames were queued; False when the queue is full or the peer is unknown."""
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
                self._schedule_drain()
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.getsockopt(zmq.FD))
            self._socket.close()


class RouterSocket(_MessageSocket[M]):
    """A bound ROUTER. `on_message(identity, message)` runs on the loop; `send` answers by identity.

    tcp_endpoint: bound as well, for peers on other hosts. Raises ConfigError for a tcp endpoint without protection,
    zmq's error for one that is taken.
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
            if tcp_endpoint:  # options count for what is bound after them: what was bound before stays as it is
                context.secure_bind(self._socket, tcp_endpoint)
                self._socket.bind(tcp_endpoint)
        except BaseException:
            self._socket.close()
            raise
        self._handshakes = self._socket.get_monitor_socket(_FAILED_HANDSHAKES)
        self._loop.add_reader(self._handshakes.getsockopt(zmq.FD), self._count_handshakes)
        self._loop.call_soon(self._count_handshakes)  # as with `_drain`: from then on the descriptor tells
        self._watch()

    def _handle(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise ProtocolError(f"{len(frames)} frames where identity and message are expected")
        self._on_message(frames[0], self._codec.decode(frames[1]))

    def _count_handshakes(self) -> None:
        while not self._closed and self._handshakes.getsockopt(_EVENTS) & _POLLIN:
            recv_monitor_message(self._handshakes)
            self._refusals.count("bad_handshake", f"something at {self.endpoint} does not speak as our peers do")

    def send(self, identity: bytes, message: msgspec.Struct) -> bool:
        """Queue `message` for the peer; False when it is not connected or does not read."""
        return self._send_frames([identity, self._codec.encode(message)])

    def close(self) -> None:
        path = self.endpoint.removeprefix("ipc://") if self.endpoint.startswith("ipc://") else None
        if not self._closed:
            self._loop.remove_reader(self._handshakes.getsockopt(zmq.FD))
            self._socket.disable_monitor()
            self._handshakes.close(linger=0)
        super().close()
        if path is not None:
            Path(path).unlink(missing_ok=True)


class DealerSocket(_MessageSocket[M]):
    """A connected DEALER that reconnects by itself. `on_message(message)` runs on the loop.

    peer: whose socket it is, which must prove it by its key where the endpoint is tcp. on_broken: called when an open
    connection breaks: what was on its way is lost, in either direction, and a new connection says nothing of it. Raises
    ConfigError for a tcp endpoint without protection.
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
        self._on_broken = on_broken
        self._breaks: Any = None  # zmq's monitor
        if identity is not None:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.endpoint = endpoint
        try:
            context.secure_connect(self._socket, endpoint, peer)
            if on_broken is not None:
                self._breaks = self._socket.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
            self._socket.connect(endpoint)
        except BaseException:
            self._socket.disable_monitor()
            self._socket.close()
            raise
        if self._breaks is not None:
            self._loop.add_reader(self._breaks.getsockopt(zmq.FD), self._tell_breaks)
            self._loop.call_soon(self._tell_breaks)  # as with `_drain`: from then on the descriptor tells
        self._watch()

    def _tell_breaks(self) -> None:
        while not self._closed and self._breaks is not None and self._breaks.getsockopt(_EVENTS) & _POLLIN:
            recv_monitor_message(self._breaks)
            assert self._on_broken is not None
            self._on_broken()

    def _handle(self, frames: list[bytes]) -> None:
        if len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames where one message is expected")
        self._on_message(self._codec.decode(frames[0]))

    def send(self, message: msgspec.Struct) -> bool:
        """Queue `message`; False when the queue is full, that is when the peer has not read for long."""
        return self._send_frames([self._codec.encode(message)])

    def close(self) -> None:
        if not self._closed and self._breaks is not None:
            self._loop.remove_reader(self._breaks.getsockopt(zmq.FD))
            self._socket.disable_monitor()
            self._breaks.close(linger=0)
        super().close()


def listen_on_free_port(host: str) -> tuple[int, int]:
    """(file descriptor, port) of a listening TCP socket on `host` only; the descriptor is the caller's to close."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(128)
        port: int = listener.getsockname()[1]
        return listener.detach(), port


def new_context(part: Part = "operator", network: NetworkConfig = NetworkConfig()) -> Context:  # noqa: B008  # frozen
    """One per process. part: what this process is, and so which of the keys is its own. Raises ConfigError."""
    context = Context(io_threads=1)
    try:
        context.protect(part, network)
    except BaseException:
        context.destroy()
        raise
    return context
