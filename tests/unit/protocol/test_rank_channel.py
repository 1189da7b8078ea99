"""A channel to a process that has stopped reading."""

from __future__ import annotations

import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import msgspec
import pytest

from tandem.protocol.codec import Codec
from tandem.protocol.rank_channel import SEND_TIMEOUT_S, RankChannel, accept, connect, listen, open_channel


class Numbers(msgspec.Struct, frozen=True, tag=True):
    numbers: list[int]


def set_send_timeout(connection: Connection, microseconds: int) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, microseconds))


def test_nothing_follows_a_message_that_was_sent_in_part() -> None:
    ours, theirs = open_channel()
    set_send_timeout(ours, 50_000)
    channel: RankChannel[Numbers] = RankChannel(ours, Codec(Numbers))
    peer: RankChannel[Numbers] = RankChannel(theirs, Codec(Numbers))
    message = Numbers(list(range(30_000)))
    num_sent = 0
    with pytest.raises(OSError, match=r"."):
        while True:
            channel.send(message)
            num_sent += 1
    for _ in range(num_sent):  # the peer reads again
        assert peer.receive() == message
    with pytest.raises(OSError, match="in part"):
        channel.send(Numbers([1]))
    channel.close()
    assert peer.receive() is None
    theirs.close()


def test_only_a_process_with_the_key_is_let_in() -> None:
    listener = listen(b"key")
    address: bytes = listener.address
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener)
        with pytest.raises(AuthenticationError):
            connect(address, b"another key")
        with socket.socket(socket.AF_UNIX) as stranger:  # leaves without a word
            stranger.connect(address)
        ours = connect(address, b"key")
        theirs = accepted.result(30)
    channel: RankChannel[Numbers] = RankChannel(theirs, Codec(Numbers))
    RankChannel(ours, Codec(Numbers)).send(Numbers([1, 2]))
    assert channel.receive() == Numbers([1, 2])
    with pytest.raises(OSError, match="refused"):  # the address is closed
        connect(address, b"key")
    for connection in (ours, theirs):
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            seconds, _ = struct.unpack("ll", end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16))
        assert seconds == SEND_TIMEOUT_S
        connection.close()
