"""Typed messages between the processes of one tensor parallel worker, over a socket pair that nothing else can reach.

A socket pair has no name that could be left behind, and the end of either process ends the other's wait at once.
"""

from __future__ import annotations

import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import msgspec

from tandem.protocol.codec import MAX_MESSAGE_BYTES, Codec

SEND_TIMEOUT_S = 5
"""A peer that leaves a full buffer unread for so long is frozen."""

M = TypeVar("M")


def open_channel() -> tuple[Connection, Connection]:
    """Two connected ends. Either is closed with its process; children inherit what they are told to."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
    return Connection(ends[0].detach()), Connection(ends[1].detach())


class RankChannel(Generic[M]):
    """One end. Many threads may send, one may receive; the codec is that of the messages that arrive here."""

    def __init__(self, connection: Connection, codec: Codec[M]) -> None:
        self._connection = connection
        self._codec = codec
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError when the other process is gone, or frozen with its buffer full."""
        with self._sending:
            self._connection.send_bytes(self._codec.encode(message))

    def receive(self) -> M | None:
        """The next message, or None when the other process is gone. Raises ProtocolError."""
        try:
            data = self._connection.recv_bytes(MAX_MESSAGE_BYTES)
        except (EOFError, OSError):
            return None
        return self._codec.decode(data)

    def has_message(self, timeout_s: float) -> bool:
        """Whether `receive` would return at once, now or within the time."""
        return self._connection.poll(timeout_s)

    def close(self) -> None:
        self._connection.close()
