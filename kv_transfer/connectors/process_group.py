"""The `gloo` and `nccl` connectors: a two-rank process group per path, without a default group or a world.

A path leads from one rank of a prefill worker to one of a decode worker; here its two ends are ranks 0 and 1.

A group hangs on a PrefixStore (its path id: pair and ranks) over a TCPStore that the decode worker owns, so paths come
and go alone: one group for all would let a frozen peer take down healthy pairs at its time-out. A wait that runs out
closes the path for good; a new pair id starts afresh.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import ClassVar, cast

import torch
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    Store,
    TCPStore,
    Work,
)  # typed here, not where it is exported
from torch.distributed import ProcessGroupGloo, ProcessGroupNCCL

from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone, OpenStore, Peer
from tandem.kv_transfer.connectors.block_runs import is_run
from tandem.kv_transfer.connectors.cuda_stream import SideStream
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.connectors.staging import copy_blocks
from tandem.protocol.messages.transfer import ConnectorParams
from tandem.protocol.sockets import listen_on_free_port
from tandem.runtime.errors import KVTransferFailed

CONNECT_TIMEOUT_S = 20.0
TRANSFER_TIMEOUT_S = 5.0
"""Deadline of one message: a peer that does not take or give one in this time is taken for dead."""
DIRECT_BLOCK_BYTES = {"gloo": 256 * 1024, "nccl": 16 * 1024 * 1024}
"""Blocks from this size on travel one by one from where they lie to where they belong. To gather smaller ones into a
message costs less than a message each, which wakes threads on both sides."""
MESSAGE_BYTES = {"gloo": 4 * 1024 * 1024, "nccl": 16 * 1024 * 1024}
"""Of smaller blocks that travel in one message."""


def message_plan(backend: str, block_bytes: int) -> tuple[int, int]:
    """(blocks in a message, messages under way at once); the same on both sides, which must cut alike.

    Two messages at least, so that blocks are gathered or scattered while others are on the wire.
    """
    message_bytes = MESSAGE_BYTES[backend]
    is_direct = block_bytes >= DIRECT_BLOCK_BYTES[backend]
    num_blocks = 1 if is_direct else message_bytes // block_bytes
    return num_blocks, max(2, 2 * message_bytes // (num_blocks * block_bytes))


_SENDER, _RECEIVER = 0, 1


class StoreServer:
    """The TCPStore at which a decode worker's pairs meet, on a free port of `host` only."""

    def __init__(self, host: str) -> None:
        fd, port = listen_on_free_port(host)  # the store closes it
        self._store = TCPStore(host, port, None, True, timedelta(seconds=CONNECT_TIMEOUT_S), False, master_listen_fd=fd)
        self.host = host
        self.port: int = port

    def store(self, path_id: str) -> Store:
        return PrefixStore(path_id, self._store)


def connect_store(path_id: str, params: ConnectorParams) -> Store:
    """The decode worker's store, as the prefill worker sees it."""
    client = TCPStore(params.store_host, params.store_port, None, False, timedelta(seconds=CONNECT_TIMEOUT_S), False)
    return PrefixStore(path_id, client)


def _new_group(backend: str, store: Store, rank: int, host: str) -> ProcessGroup:
    timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    if backend == "gloo":
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # never by this machine's own name
        return cast(ProcessGroup, ProcessGroupGloo(store, rank, 2, options))
    if backend == "nccl":
        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        return cast(ProcessGroup, ProcessGroupNCCL(store, rank, 2, nccl_options))
    raise KVTransferFailed(f"unknown process group backend {backend!r}; known are gloo and nccl")


@dataclass(frozen=True)
class _Message:
    """Blocks that travel together. data: they themselves where they lie side by side, else a staging buffer."""

    block_ids: list[int]
    data: torch.Tensor
    is_staged: bool


class _ProcessGroupEnd:
    """What both ends share: the group, a thread, and the cutting of a job into pieces.

    The group is built on the thread, so the caller does not wait; jobs queue behind it; `on_ready` tells how it went.
    """

    _rank: ClassVar[int]

    def __init__(
        self,
        name: str,
        backend: str,
        open_store: Callable[[], Store],
        host: str,
        blocks: torch.Tensor,
        on_ready: OnDone,
    ) -> None:
        self._blocks = blocks  # uint8 [num_blocks, ...]: whole blocks, or some heads of each
        self._block_bytes = blocks[0].numel()
        self._message_blocks, self._num_under_way = message_plan(backend, self._block_bytes)
        self._buffers: torch.Tensor | None = None  # made when first needed
        self._backend = backend
        self._thread = JobThread(name)
        self._group: ProcessGroup | None = None
        self._side_stream = SideStream(blocks.device) if blocks.device.type == "cuda" else None

        def build() -> None:
            self._group = _new_group(backend, open_store(), self._rank, host)
            self._handshake(self._group)

        self._submit(build, on_ready)

    def _submit(self, job: Callable[[], None], on_done: OnDone) -> None:
        """On CUDA the job's work is ordered behind what has been computed by now."""
        side_stream = self._side_stream
        if side_stream is None:
            self._thread.submit(job, on_done)
        else:
            computed = side_stream.after_computed()
            self._thread.submit(lambda: side_stream.run(job, computed), on_done)

    def _handshake(self, group: ProcessGroup) -> None:
        """One byte across, so that a pair is ready only when its data path has been used (gloo connects lazily)."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._blocks.device)
        self._move(group, byte, CONNECT_TIMEOUT_S)

    def _carry(
        self, block_ids: list[int], before: Callable[[_Message], None], after: Callable[[_Message], None]
    ) -> None:
        """Cut the blocks into messages and carry them over, some at a time. `before` and `after` are called for each.

        When a wait runs out, gloo closes the connection, so the messages behind it cannot be written any more either.
        """
        under_way: deque[tuple[Work, _Message]] = deque()

        def finish_first() -> None:
            work, message = under_way.popleft()
            self._wait(work, TRANSFER_TIMEOUT_S)
            after(message)

        for index, first in enumerate(range(0, len(block_ids), self._message_blocks)):
            if len(under_way) == self._num_under_way:
                finish_first()
            message = self._message(block_ids[first : first + self._message_blocks], index % self._num_under_way)
            before(message)
            group = self._group
            if group is None:
                raise KVTransferFailed("the pair was closed")
            under_way.append((self._start(group, message.data), message))
        while under_way:
            finish_first()

    def _message(self, block_ids: list[int], buffer: int) -> _Message:
        if is_run(block_ids) and self._blocks.is_contiguous():
            return _Message(block_ids, self._blocks[block_ids[0] : block_ids[0] + len(block_ids)], is_staged=False)
        if self._buffers is None:
            shape = (self._num_under_way, self._message_blocks, *self._blocks.shape[1:])
            self._buffers = self._blocks.new_empty(shape)
        return _Message(block_ids, self._buffers[buffer, : len(block_ids)], is_staged=True)

    def _move(self, group: ProcessGroup, data: torch.Tensor, timeout_s: float) -> None:
        self._wait(self._start(group, data), timeout_s)

    def _start(self, group: ProcessGroup, data: torch.Tensor) -> Work:
        return group.send([data], _RECEIVER, 0) if self._rank == _SENDER else group.recv([data], _SENDER, 0)

    def _wait(self, work: Work, timeout_s: float) -> None:
        if self._side_stream is None:
            work.wait(timedelta(seconds=timeout_s))
            return
        work.wait()  # makes the stream wait, not us
        try:
            self._side_stream.wait(timeout_s)
        except KVTransferFailed:
            group, self._group = self._group, None
            if group is not None:
                group.abort()  # else the stream would wait for ever
            raise

    def close(self, on_closed: Callable[[], None] = lambda: None) -> None:
        self._thread.close(on_closed)
        group, self._group = self._group, None
        if group is not None and self._backend == "nccl":
            group.abort()


class ProcessGroupSender(_ProcessGroupEnd):
    """Prefill side."""

    _rank: ClassVar[int] = _SENDER

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        pass

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        src = list(src_block_ids)
        self._submit(lambda: self._send(src), on_done)

    def _send(self, src: list[int]) -> None:
        def gather(message: _Message) -> None:
            if message.is_staged:
                copy_blocks(self._blocks, message.block_ids, message.data, range(len(message.block_ids)))

        self._carry(src, before=gather, after=lambda message: None)


class ProcessGroupReceiver(_ProcessGroupEnd):
    """Decode side. It alone writes to its pool, so a closed pair cannot be written through."""

    _rank: ClassVar[int] = _RECEIVER

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        dst = list(block_ids)
        self._submit(lambda: self._receive(dst), on_done)

    def _receive(self, dst: list[int]) -> None:
        def scatter(message: _Message) -> None:
            if message.is_staged:
                copy_blocks(message.data, range(len(message.block_ids)), self._blocks, message.block_ids)

        self._carry(dst, before=lambda message: None, after=scatter)


class ProcessGroupConnector:
    """See `kv_transfer.connector.KVConnector`. backend: gloo or nccl."""

    crosses_hosts = True
    crosses_devices = True
    one_sided = False
    meets_in_store = True

    def __init__(self, backend: str, device: str) -> None:
        self._backend = backend
        self.devices = (device,)

    def open_sender(self, peer: Peer, blocks: torch.Tensor, host: str, on_ready: OnDone) -> KVSender:
        name, open_store = f"ship-{peer.path_id}", partial(connect_store, peer.path_id, peer.params)
        return ProcessGroupSender(name, self._backend, open_store, host, blocks, on_ready)

    def open_receiver(
        self, path_id: str, open_store: OpenStore, blocks: torch.Tensor, host: str, on_ready: OnDone
    ) -> KVReceiver:
        return ProcessGroupReceiver(f"take-{path_id}", self._backend, open_store, host, blocks, on_ready)


gloo = ProcessGroupConnector("gloo", "cpu")
nccl = ProcessGroupConnector("nccl", "cuda")
