"""Moves KV blocks through files in a folder that all hosts mount, $TANDEM_KV_FOLDER.

The sender writes a file for each transfer; the receiver waits for it, reads it and removes it. Both count transfers in
the same order, so the files need no names on the wire.
"""

import hashlib
import os
import threading
import time
from pathlib import Path

import torch

from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.runtime.errors import KVTransferFailed

FOLDER = Path(os.environ["TANDEM_KV_FOLDER"])
TIMEOUT_S = 20.0


class PathEnd:
    """What both ends share: the pool, a thread, and the names of the files."""

    def __init__(self, path_id, blocks):
        self._name = hashlib.sha256(path_id.encode()).hexdigest()  # a peer may send any id
        self._blocks = blocks  # uint8 [num_blocks, ...]
        self._closing = threading.Event()
        self._thread = JobThread("folder")
        self._num_transfers = 0

    def _submit(self, move, block_ids, on_done):
        file, ids = FOLDER / f"{self._name}-{self._num_transfers}", list(block_ids)
        self._num_transfers += 1
        self._thread.submit(lambda: move(file, ids), on_done)

    def close(self, on_closed=lambda: None):
        self._closing.set()
        self._thread.close(on_closed)


class FolderSender(PathEnd):
    def prepare(self, dst_block_ids):
        pass  # the receiver writes to its own pool

    def send(self, src_block_ids, dst_block_ids, on_done):
        self._submit(self._write, src_block_ids, on_done)

    def _write(self, file, block_ids):
        unfinished = file.with_suffix(".part")
        unfinished.write_bytes(self._blocks[block_ids].numpy().tobytes())
        unfinished.rename(file)


class FolderReceiver(PathEnd):
    def receive(self, block_ids, on_done):
        self._submit(self._read, block_ids, on_done)

    def _read(self, file, block_ids):
        deadline = time.monotonic() + TIMEOUT_S
        while not file.exists():
            if self._closing.wait(0.001) or time.monotonic() > deadline:
                raise KVTransferFailed("the peer's file did not come")
        data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        file.unlink()
        self._blocks[block_ids] = data.view(len(block_ids), *self._blocks.shape[1:])


class FolderConnector:
    """Implements `tandem.kv_transfer.connector.KVConnector`."""

    devices = ("cpu",)
    crosses_hosts = True  # if they mount the folder
    encrypts = False
    one_sided = False  # the receiver takes part

    def open_receiver(self, path_id, blocks, network, on_address):
        on_address(b"folder")  # the sender needs no address
        return FolderReceiver(path_id, blocks)

    def open_sender(self, peer, blocks, network, on_ready):
        on_ready(None)
        return FolderSender(peer.path_id, blocks)


connector = FolderConnector()
