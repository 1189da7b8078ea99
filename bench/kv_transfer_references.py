"""The raw transports that `bench.kv_transfer` compares connectors with. Each moves the first blocks of a pair."""

from __future__ import annotations

import ctypes
import random
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Literal, cast

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroup
from torch.distributed import ProcessGroupGloo

from tandem.kv_transfer.connectors.nixl import new_agent

HOST = "127.0.0.1"
TIMEOUT_S = 120.0

Mode = Literal["raw", "raw scattered", "adjacent", "scattered"]
Side = Literal["source", "destination"]
Copy = Callable[[int, int], None]
"""Moves the first N blocks of a pair M times."""


ONE_SIDED = ("ipc", "nixl")
"""Connectors whose raw transport takes only the sender, and moves scattered blocks, too."""


def modes_of(connector: str) -> tuple[Mode, ...]:
    return (
        ("raw", "raw scattered", "adjacent", "scattered")
        if connector in ONE_SIDED
        else ("raw", "adjacent", "scattered")
    )


def raw_of(connector: str, mode: Mode) -> Mode:
    """Returns the raw mode that a mode of the connector is compared with."""
    return "raw scattered" if connector in ONE_SIDED and mode == "scattered" else "raw"


def block_ids(mode: Mode, num_blocks: int, side: Side) -> list[int]:
    """Returns block ids within one pair's share of the pool; both processes get the same order."""
    ids = list(range(num_blocks))
    if mode in ("scattered", "raw scattered"):
        random.Random(f"{side} {num_blocks}").shuffle(ids)
    return ids


def raw_gloo(store: Path, pair: int, rank: int, blocks: torch.Tensor) -> Copy:
    """Builds a two-rank gloo group and returns its bare send (rank 0) or receive (rank 1)."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    group = cast(ProcessGroup, ProcessGroupGloo(PrefixStore(f"raw-{pair}", FileStore(str(store), 2)), rank, 2, options))

    def move(num_blocks: int, count: int) -> None:
        for _ in range(count):
            if rank == 0:
                group.send([blocks[:num_blocks]], 1, 0).wait()
            else:
                group.recv([blocks[:num_blocks]], 0, 0).wait()

    return move


def raw_socket(store: Path, pair: int, rank: int, blocks: torch.Tensor) -> Copy:
    """Connects two plain sockets and returns a bare send (rank 0) or receive (rank 1)."""
    # A store with a fixed number of users deletes its file after the last, though the next pair may be using it.
    meeting = PrefixStore(f"raw-{pair}", FileStore(str(store), -1))
    if rank == 0:
        connection = socket.create_connection((HOST, int(meeting.get("port"))), TIMEOUT_S)
    else:
        with socket.create_server((HOST, 0)) as listener:
            meeting.set("port", str(listener.getsockname()[1]))
            connection, _ = listener.accept()

    def move(num_blocks: int, count: int) -> None:
        data = blocks[:num_blocks].view(-1).numpy().data
        for _ in range(count):
            if rank == 0:
                connection.sendall(data)
            elif connection.recv_into(data, 0, socket.MSG_WAITALL) != len(data):
                raise ConnectionError("the sender closed the connection")

    return move


def raw_ipc(source: torch.Tensor, destination: torch.Tensor, mode: Mode) -> Copy:
    """Returns a memmove of the whole range, or of block after block. ctypes releases the GIL during each."""

    def copy(num_blocks: int, count: int) -> None:
        block_bytes = source.shape[1]
        if mode == "raw":
            moves = [(destination.data_ptr(), source.data_ptr(), num_blocks * block_bytes)]
        else:
            pairs = zip(block_ids(mode, num_blocks, "destination"), block_ids(mode, num_blocks, "source"), strict=True)
            moves = [
                (destination.data_ptr() + to * block_bytes, source.data_ptr() + from_ * block_bytes, block_bytes)
                for to, from_ in pairs
            ]
        for _ in range(count):
            for move in moves:
                ctypes.memmove(*move)

    return copy


class NixlReference:
    """Plain use of NIXL: one agent in each process, and one request for all blocks, polled without pause.

    The agents are the connector's, because NIXL's default would keep a core of the receiving process busy.
    """

    def __init__(self, store: Path, rank: int, pool: torch.Tensor) -> None:
        """pool: uint8 [num_pairs, blocks of a pair, block bytes]. rank: 0 sends."""
        meeting = PrefixStore("nixl", FileStore(str(store), 2))
        self._agent, self._pool = new_agent(f"raw-{rank}"), pool
        self._registered = self._agent.register_memory(pool.view(-1))
        if rank == 1:
            meeting.set("address", str(pool.data_ptr()))
            meeting.set("metadata", self._agent.get_agent_metadata().hex())
            return
        found = self._agent.add_remote_agent(bytes.fromhex(meeting.get("metadata").decode()))
        self._peer: str = found.decode() if isinstance(found, bytes) else found
        self._peer_address = int(meeting.get("address"))

    def writes_of(self, pair: int, mode: Mode) -> Copy:
        agent, peer, (pair_bytes, block_bytes) = self._agent, self._peer, self._pool.stride()[:2]

        def move(num_blocks: int, count: int) -> None:
            ends: tuple[tuple[int, Side], ...] = (
                (self._pool.data_ptr(), "source"), (self._peer_address, "destination"),
            )  # fmt: skip
            source, destination = (
                [
                    (base + pair * pair_bytes + i * block_bytes, block_bytes, 0)
                    for i in block_ids(mode, num_blocks, side)
                ]
                for base, side in ends
            )
            request = agent.initialize_xfer(
                "WRITE", agent.get_xfer_descs(source, "DRAM"), agent.get_xfer_descs(destination, "DRAM"), peer
            )
            for _ in range(count):
                state = agent.transfer(request)
                while state == "PROC":
                    state = agent.check_xfer_state(request)
                if state != "DONE":
                    raise ConnectionError(f"NIXL's write ended with {state}")
            agent.release_xfer_handle(request)

        return move


RAW: dict[str, Callable[[Path, int, int, torch.Tensor], Copy]] = {
    "gloo": raw_gloo, "tcp": raw_socket, "tls": raw_socket,
}  # fmt: skip
"""The raw transport of each connector whose receiver takes part."""
