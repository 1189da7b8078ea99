"""A channel to a process that has stopped reading."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


def test_only_the_named_process_is_let_in() -> None:
    listener = listen()
    address: bytes = listener.getsockname()
    stranger = (
        "import socket, sys\n"
        "end = socket.socket(socket.AF_UNIX)\n"
        "end.connect(bytes.fromhex(sys.argv[1]))\n"
        "sys.exit(len(end.recv(1)))\n"
    )
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener, os.getpid())
        subprocess.run([sys.executable, "-c", stranger, address.hex()], check=True, timeout=60)  # is turned away
        with pytest.raises(PermissionError, match=f"process {os.getpid()} listens in place of {os.getppid()}"):
            connect(address, os.getppid())
        accepted.result(30).close()  # of the one that has found another process
    listener = listen()
    address = listener.getsockname()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener, os.getpid())
        ours = connect(address, os.getpid())
        theirs = accepted.result(30)
    channel: RankChannel[Numbers] = RankChannel(theirs, Codec(Numbers))
    RankChannel(ours, Codec(Numbers)).send(Numbers([1, 2]))
    assert channel.receive() == Numbers([1, 2])
    with pytest.raises(OSError, match="refused"):  # the address is closed
        connect(address, os.getpid())
    for connection in (ours, theirs):
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            seconds, _ = struct.unpack("ll", end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16))
        assert seconds == SEND_TIMEOUT_S
        connection.close()
