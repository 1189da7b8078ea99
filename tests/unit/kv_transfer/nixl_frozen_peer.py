"""The `nixl` connector over TCP, to a peer process that is frozen or dies. Run by test_nixl.py."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tandem.kv_transfer.connector import DataNetwork, Peer
from tandem.kv_transfer.connectors import nixl
from tandem.runtime.errors import KVTransferFailed
from tests.faults.phases import is_stopped
from tests.support.waiting import comes_true

HOST = "127.0.0.1"
NUM_BLOCKS, BLOCK_BYTES = 128, 1 << 20
"""More than the sockets of a frozen peer take."""
ALL = range(NUM_BLOCKS)


def serve_peer() -> None:
    """Opens a receiver for each path id on stdin, and prints its address. Then, and after each blank line, prints how
    many blocks are written."""
    pool = torch.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    receivers = []
    for line in sys.stdin:
        if path_id := line.strip():
            addresses = queue.Queue[bytes | KVTransferFailed]()
            receivers.append(nixl.connector.open_receiver(path_id, pool, DataNetwork(HOST), addresses.put))
            address = addresses.get(timeout=30)
            assert isinstance(address, bytes), address
            sys.stdout.write(f"address {address.hex()}\n")
        sys.stdout.write(f"written {int(pool[:, -1].count_nonzero())}\n")
        sys.stdout.flush()


class PeerProcess:
    def __init__(self) -> None:
        command = [sys.executable, "-c", f"from {__name__} import serve_peer; serve_peer()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = b""
        self.num_written("first")

    def num_written(self, path_id: str = "") -> int:
        """Opens another path, if one is named. Returns the number of blocks that have been written completely."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{path_id}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:  # NIXL prints there, too
            name, _, value = line.strip().partition(" ")
            if name == "address":
                self.address = bytes.fromhex(value)
            elif name == "written":
                return int(value)
        raise AssertionError("the peer ended")

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        assert comes_true(lambda: is_stopped(self.process.pid), 10)


@pytest.fixture
def peer() -> Iterator[PeerProcess]:
    made = PeerProcess()
    yield made
    made.process.kill()
    made.process.communicate()


POOL = torch.ones((NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
"""Kept, because its agent is."""


class OpenedSender:
    def __init__(self, peer: PeerProcess, path_id: str) -> None:
        self._results: queue.Queue[KVTransferFailed | None] = queue.Queue()
        network = DataNetwork(HOST)
        self._sender = nixl.connector.open_sender(Peer(path_id, peer.address), POOL, network, self._results.put)
        self.is_closed = threading.Event()
        assert self.result() is None

    def send(self, block_ids: range) -> None:
        self._sender.send(block_ids, block_ids, self._results.put)

    def result(self) -> KVTransferFailed | None:
        return self._results.get(timeout=30)

    def close(self) -> None:
        self._sender.close(self.is_closed.set)


def test_a_path_is_closed_only_when_a_frozen_peer_has_taken_what_was_sent(
    peer: PeerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "MESSAGE_TIMEOUT_S", 0.5)
    sender = OpenedSender(peer, "first")
    sender.send(range(1))
    assert sender.result() is None
    peer.freeze()
    sender.send(ALL)
    error = sender.result()
    assert error is not None and "did not take the blocks" in error.message
    sender.close()
    assert not sender.is_closed.wait(1), "NIXL may still write"
    os.kill(peer.process.pid, signal.SIGCONT)
    assert sender.is_closed.wait(30)
    written = peer.num_written()
    assert written == peer.num_written("second"), "nothing is written after the close"
    monkeypatch.undo()
    again = OpenedSender(peer, "second")
    again.send(ALL)
    assert again.result() is None and peer.num_written() == NUM_BLOCKS
    again.close()
    assert again.is_closed.wait(30)


@pytest.mark.parametrize("is_frozen", [True, False], ids=["while it is written to", "when idle"])
def test_a_peer_that_dies_closes_its_path(peer: PeerProcess, is_frozen: bool) -> None:
    sender = OpenedSender(peer, "first")
    sender.send(range(1))
    assert sender.result() is None
    if is_frozen:
        peer.freeze()
        sender.send(ALL)
    peer.process.kill()
    peer.process.wait()
    if not is_frozen:
        sender.send(ALL)
    error = sender.result()
    assert error is not None and "could not write" in error.message
    sender.close()
    assert sender.is_closed.wait(30)
