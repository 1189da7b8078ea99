"""A channel to a process that has stopped reading."""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing.connection import Connection

import msgspec
import pytest

from tandem.protocol.codec import Codec
from tandem.protocol.rank_channel import RankChannel, open_channel


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
