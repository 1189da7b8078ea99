"""The `nixl` connector: prefill writes into the decode worker's pool, one-sided, through NVIDIA's NIXL (RDMA, NVLink or
TCP, by UCX). The same code moves CPU and GPU memory. NIXL is an extra: `pip install tandem-serve[nixl]`.

Each process has one agent, whose registered memory is the whole pool; all its paths share it. A path's address has the
agent's metadata and the pool's place in memory. NIXL neither encrypts nor authenticates.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tandem.kv_transfer.connector import DataNetwork, KVReceiver, KVSender, OnAddress, OnDone, Peer
from tandem.kv_transfer.connectors.addresses import read_address
from tandem.kv_transfer.connectors.job_thread import JobThread, PassiveReceiver
from tandem.kv_transfer.connectors.mapped_memory import same_heads
from tandem.runtime.errors import KVTransferFailed, first_line

log = logging.getLogger(__name__)

MESSAGE_BYTES = 64 << 20
"""Transfers are divided into messages of about this size, because a deadline holds for a message."""
MESSAGE_TIMEOUT_S = 5.0
_MIN_POLL_S, _MAX_POLL_S = 0.00005, 0.002
_POLLS_PER_WRITE = 16
"""NIXL has no wait with a deadline, so the path's thread polls: after a pause of this fraction of the time so far."""
_PROGRESS_DELAY_US = 1000
"""Longest sleep of NIXL's own thread between two events. With 0, the default in Python, it spins on a core."""


class NixlPool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the decode end's pool is reached. metadata: of its agent. address, num_blocks, block_bytes: of the pool."""

    metadata: bytes
    address: int
    num_blocks: int
    block_bytes: int
    device: int


@dataclass(frozen=True)
class BlockPieces:
    """The contiguous pieces of a pool's blocks: `num_planes` in each block. Sizes are in bytes.

    address: of the first piece of block 0.
    """

    address: int
    num_blocks: int
    block_stride: int
    num_planes: int
    plane_stride: int
    piece_bytes: int

    @classmethod
    def of(cls, blocks: torch.Tensor, address: int, by_plane: bool) -> BlockPieces:
        """blocks: uint8 [num_blocks, num_planes, heads, bytes per head] if by_plane, else contiguous blocks."""
        num_blocks, block_stride = len(blocks), blocks.stride(0)
        if not by_plane:
            return cls(address, num_blocks, block_stride, 1, 0, blocks[0].numel())
        return cls(address, num_blocks, block_stride, blocks.shape[1], blocks.stride(1), blocks[0, 0].numel())

    def descriptors(self, device: int) -> npt.NDArray[np.uint64]:
        """Returns a row for each plane, in NIXL's strided form: address, bytes, device, stride, count."""
        rows = [
            (self.address + plane * self.plane_stride, self.piece_bytes, device, self.block_stride, self.num_blocks)
            for plane in range(self.num_planes)
        ]
        return np.array(rows, np.uint64)

    def numbers(self, block_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Returns the numbers of the blocks' pieces in `descriptors`, plane after plane."""
        planes = np.arange(self.num_planes, dtype=np.int32)[:, None] * self.num_blocks
        numbers: npt.NDArray[np.int32] = (planes + np.array(block_ids, np.int32)).reshape(-1)
        return numbers


class NixlAgent:
    """This process's agent for one pool. Any thread may use it."""

    def __init__(self, blocks: torch.Tensor) -> None:
        """blocks: any view of the pool. Raises what NIXL raises."""
        storage = blocks.untyped_storage()
        pool = torch.empty(0, dtype=torch.uint8, device=blocks.device).set_(storage)
        on_gpu = blocks.device.type == "cuda"
        self.memory = "VRAM" if on_gpu else "DRAM"
        self.device: int = (blocks.device.index or 0) if on_gpu else 0
        self.address: int = storage.data_ptr()
        self.api: Any = new_agent(f"tandem-{uuid.uuid4()}")
        self._registered = self.api.register_memory(pool), pool
        self._lock = threading.Lock()
        self._num_paths: Counter[str] = Counter()  # 0: the connection stays open for the next path

    @cached_property
    def metadata(self) -> bytes:
        metadata: bytes = self.api.get_agent_metadata()
        return metadata

    def connect(self, metadata: bytes) -> str:
        """Returns the name of a peer's agent. The caller owes one `disconnect`.

        A connection stays open after its last path, because NIXL leaks the sockets of one that is closed while the
        peer runs. A peer that was not known before may replace one that has ended, so idle connections are dropped.
        """
        with self._lock:
            found = self.api.add_remote_agent(metadata)
            name: str = found.decode() if isinstance(found, bytes) else found
            if name not in self._num_paths:
                for idle in [peer for peer, count in self._num_paths.items() if not count]:
                    del self._num_paths[idle]
                    self._remove(idle)
            self._num_paths[name] += 1
            return name

    def disconnect(self, name: str) -> None:
        with self._lock:
            self._num_paths[name] -= 1

    def drop(self, name: str) -> None:
        """Gives up a broken connection. The next `connect` makes another."""
        with self._lock:
            self._remove(name)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(Exception):  # it is gone
            self.api.remove_remote_agent(name)


def new_agent(name: str) -> Any:
    """Returns NIXL's agent with the backend UCX. NIXL's own class does not let callers choose the progress delay."""
    nixl = importlib.import_module("nixl")
    sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.pthrDelay, config.syncMode = True, _PROGRESS_DELAY_US, sync.value
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(sync_mode=sync, backends=[]))
    agent.agent = nixl.nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent


_agents: dict[int, NixlAgent] = {}
_agents_lock = threading.Lock()


def agent_of(blocks: torch.Tensor) -> NixlAgent:
    """Returns the agent of the pool that `blocks` is a view of. The first call takes about a second."""
    address = blocks.untyped_storage().data_ptr()
    with _agents_lock:
        if address not in _agents:
            _agents[address] = NixlAgent(blocks)
        return _agents[address]


class NixlSender:
    """The prefill end."""

    def __init__(self, peer: Peer, blocks: torch.Tensor, on_ready: OnDone) -> None:
        self._peer = peer
        self._blocks = blocks  # uint8 [num_blocks, ...]: whole blocks, or some heads of each
        self._is_closed = False
        self._agent: NixlAgent | None = None
        self._peer_agent = ""
        self._ours: tuple[BlockPieces, Any] | None = None
        self._theirs: tuple[BlockPieces, Any] | None = None
        self._unfinished: Any = None  # a write that may still go on
        self._thread = JobThread(f"ship-{peer.path_id}")
        self._thread.submit(self._connect, on_ready)

    def _connect(self) -> None:
        pool = read_address(self._peer.address, NixlPool)
        whole = torch.empty((pool.num_blocks, pool.block_bytes), dtype=torch.uint8, device="meta")
        theirs = same_heads(whole, self._blocks, self._peer.view)
        self._agent = agent_of(self._blocks)
        self._peer_agent = self._agent.connect(pool.metadata)
        by_plane = not (self._blocks.is_contiguous() and theirs.is_contiguous())
        own_pieces = BlockPieces.of(self._blocks, self._blocks.data_ptr(), by_plane)
        peer_pieces = BlockPieces.of(theirs, pool.address + int(theirs.storage_offset()), by_plane)
        prepare = self._agent.api.prep_xfer_dlist
        memory = self._agent.memory
        self._ours = own_pieces, prepare("NIXL_INIT_AGENT", own_pieces.descriptors(self._agent.device), memory)
        self._theirs = peer_pieces, prepare(self._peer_agent, peer_pieces.descriptors(pool.device), memory)

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """Does nothing: the peer's memory is registered, so its pages exist."""

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        src, dst = list(src_block_ids), list(dst_block_ids)
        self._thread.submit(lambda: self._send(src, dst), on_done)

    def _send(self, src: list[int], dst: list[int]) -> None:
        num_blocks = max(1, MESSAGE_BYTES // self._blocks[0].numel())
        for first in range(0, len(src), num_blocks):
            self._write(src[first : first + num_blocks], dst[first : first + num_blocks])

    def _write(self, src: list[int], dst: list[int]) -> None:
        assert self._agent is not None and self._ours is not None and self._theirs is not None
        api, (ours, own_list), (theirs, peer_list) = self._agent.api, self._ours, self._theirs
        self._unfinished = api.make_prepped_xfer("WRITE", own_list, ours.numbers(src), peer_list, theirs.numbers(dst))
        begun = time.monotonic()
        is_written = self._has_ended(api.transfer)
        while not is_written:
            elapsed_s = time.monotonic() - begun
            if self._is_closed:
                raise KVTransferFailed("the pair was closed")
            if elapsed_s > MESSAGE_TIMEOUT_S:
                raise KVTransferFailed(f"the peer did not take the blocks within {MESSAGE_TIMEOUT_S:g} s")
            time.sleep(min(_MAX_POLL_S, max(_MIN_POLL_S, elapsed_s / _POLLS_PER_WRITE)))
            is_written = self._has_ended(api.check_xfer_state)

    def _has_ended(self, ask: Callable[[Any], str]) -> bool:
        """Returns whether the unfinished write has arrived. If the connection is broken, drops it and raises."""
        assert self._agent is not None
        try:
            state = ask(self._unfinished)
            error = "" if state in ("PROC", "DONE") else f"state {state}"
        except Exception as failure:
            state, error = "ERR", first_line(failure)
        if state == "PROC":
            return False
        with contextlib.suppress(Exception):
            self._agent.api.release_xfer_handle(self._unfinished)
        self._unfinished = None
        if error:
            self._agent.drop(self._peer_agent)
            raise KVTransferFailed(f"NIXL could not write to the peer: {error}")
        return True

    def close(self, on_closed: Callable[[], None]) -> None:
        self._is_closed = True
        self._thread.close(on_closed, self._release)

    def _release(self) -> None:
        """Waits for a write that was given up, until the peer has taken it or has exited.

        It must not be released before: NIXL would forget it, but the peer would still take what is on its way.
        """
        if self._agent is None:
            return
        with contextlib.suppress(KVTransferFailed):
            while self._unfinished is not None and not self._has_ended(self._agent.api.check_xfer_state):
                time.sleep(_MAX_POLL_S)
        for side in (self._ours, self._theirs):
            if side is not None:
                try:
                    self._agent.api.release_dlist_handle(side[1])
                except Exception as error:  # NIXL's own; the other list and the connection are released nevertheless
                    log.warning("NIXL did not release a list of blocks: %s", first_line(error))
        if self._peer_agent:
            self._agent.disconnect(self._peer_agent)


def pool_address(blocks: torch.Tensor) -> bytes:
    """Returns the address of the pool that `blocks` is a view of. Blocks in its first call."""
    agent = agent_of(blocks)
    num_bytes = blocks.untyped_storage().nbytes()
    pool = NixlPool(agent.metadata, agent.address, len(blocks), num_bytes // len(blocks), agent.device)
    return msgspec.msgpack.encode(pool)


class NixlConnector:
    """Implements `kv_transfer.connector.KVConnector`, where NIXL is installed."""

    crosses_hosts = True
    encrypts = False
    one_sided = True

    @cached_property
    def devices(self) -> Sequence[str]:
        return ("cpu", "cuda") if importlib.util.find_spec("nixl") is not None else ()

    def open_sender(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> KVSender:
        return NixlSender(peer, blocks, on_ready)

    def open_receiver(
        self, path_id: str, blocks: torch.Tensor, network: DataNetwork, on_address: OnAddress
    ) -> KVReceiver:
        return PassiveReceiver(f"take-{path_id}", lambda: pool_address(blocks), on_address)


connector = NixlConnector()
