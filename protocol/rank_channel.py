"""Typed messages between the processes of one tensor parallel worker, over a socket pair.

A socket pair has no name that could be left behind, and the exit of either process ends the other's wait at once. A
process that inherits no socket is reached at an address of Linux's abstract namespace, which ends with that process.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import msgspec

from tandem.protocol.codec import MAX_MESSAGE_BYTES, Codec

SEND_TIMEOUT_S = 5
"""A peer that leaves a full buffer unread for this long is considered frozen."""

M = TypeVar("M")


def open_channel() -> tuple[Connection, Connection]:
    """Returns two connected ends. Children inherit only the ends that are passed to them."""
    ends = socket.socketpair()
    for end in ends:
        _limit_sends(end)
    return Connection(ends[0].detach()), Connection(ends[1].detach())


def listen() -> socket.socket:
    """Opens an address of this host, which one process may connect to (`accept`, `connect`)."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0tandem-{secrets.token_hex(16)}")
    listener.listen()
    return listener


def accept(listener: socket.socket, pid: int) -> Connection:
    """Blocks until process `pid` has connected; others are turned away. Closes the address then."""
    with listener:
        while True:
            end, _ = listener.accept()
            if _peer_pid(end) == pid:
                return _as_connection(end)
            end.close()


def connect(address: bytes, pid: int) -> Connection:
    """Connects to process `pid`, which listens. Raises OSError, also if another process listens there."""
    end = socket.socket(socket.AF_UNIX)
    try:
        end.settimeout(SEND_TIMEOUT_S)
        end.connect(address)
        if _peer_pid(end) != pid:
            raise PermissionError(f"process {_peer_pid(end)} listens in place of {pid}")
    except OSError:
        end.close()
        raise
    return _as_connection(end)


def _peer_pid(end: socket.socket) -> int:
    """Returns the process that has connected or listens, as the kernel has noted it."""
    pid: int = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def _as_connection(end: socket.socket) -> Connection:
    end.setblocking(True)
    _limit_sends(end)
    return Connection(end.detach())


def _limit_sends(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))


class RankChannel(Generic[M]):
    """One end of a channel. Any thread may send, one thread may receive. codec: decodes the received messages."""

    def __init__(self, connection: Connection, codec: Codec[M]) -> None:
        self._connection = connection
        self._codec = codec
        self._sending = threading.Lock()  # also of the next
        self._is_broken = False

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError if the other process is gone, or frozen with a full buffer, and from then on in every call.

        A send that times out may have written part of its message, so the peer would misread whatever follows.
        """
        data = self._codec.encode(message)
        with self._sending:
            if self._is_broken:
                raise OSError("an earlier message was sent in part")
            try:
                self._connection.send_bytes(data)
            except OSError:
                self._is_broken = True
                raise

    def receive(self) -> M | None:
        """Returns the next message, or None if the other process is gone. Raises ProtocolError."""
        try:
            data = self._connection.recv_bytes(MAX_MESSAGE_BYTES)
        except (EOFError, OSError):
            return None
        return self._codec.decode(data)

    def has_message(self, timeout_s: float) -> bool:
        """Returns whether a message, or the end of the channel, arrives within the time."""
        return self._connection.poll(timeout_s)

    def close(self) -> None:
        self._connection.close()
