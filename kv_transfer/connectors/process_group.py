"""The `gloo` and `nccl` connectors: one process group of two ranks per path.

The prefill end is rank 0, the decode end rank 1. They rendezvous in a PrefixStore (prefix: path id) of a TCPStore
that the decode worker owns. Groups are independent of each other, so a frozen peer cannot take down healthy pairs when
it times out. A wait that times out breaks the path for good; prefill then opens a pair with a new id.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import gcd
from typing import ClassVar, cast

import torch
from torch._C._distributed_c10d import (  # typed here only
    BroadcastOptions,
    PrefixStore,
    ProcessGroup,
    Store,
    TCPStore,
    Work,
)

from tandem.kv_transfer.connector import DataNetwork, KVReceiver, KVSender, OnDone, OpenStore, Peer
from tandem.kv_transfer.connectors.block_runs import is_run
from tandem.kv_transfer.connectors.cuda_stream import Mark, SideStream
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.connectors.staging import copy_blocks, gather_on_device, scatter_on_device
from tandem.protocol.messages.transfer import ConnectorParams
from tandem.protocol.sockets import listen_on_free_port
from tandem.runtime.errors import KVTransferFailed

CONNECT_TIMEOUT_S = 20.0
TRANSFER_TIMEOUT_S = 5.0
"""Deadline of one message, after which the peer counts as dead."""
NCCL_GROUP_TIMEOUT = timedelta(days=365)
"""Of NCCL's watchdog, which would end the process. The deadlines above end a group instead."""
NCCL_MAX_CTAS = 4
"""Multiprocessors that a message occupies at most, until its peer's has run. More move no more over a network: each of
them moves about 20 GB/s. NCCL's buffers grow with their number."""
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
"""What a pair's group must find in the environment: its fault neither ends the process nor reaches another group."""
DIRECT_BLOCK_BYTES = {"gloo": 256 * 1024, "nccl": 16 * 1024 * 1024}
"""Blocks of at least this size are sent one per message, without staging. Smaller ones are gathered into messages,
because the fixed cost of a message exceeds that of the copy."""
MESSAGE_BYTES = {"gloo": 4 * 1024 * 1024, "nccl": 16 * 1024 * 1024}
"""Size of a message of gathered blocks."""
MESSAGES_AHEAD = 16
"""Messages that the host queues on a GPU before it waits for the oldest. NVLink takes 0.6 ms or more for 256 MiB, which
is longer than a poll, so polls cost no bandwidth. A stream takes about a thousand launches before it blocks the host,
which would be a wait without a deadline."""


def message_plan(backend: str, block_bytes: int) -> tuple[int, int]:
    """Returns (blocks per message, staging buffers). Both sides must compute the same plan.

    gloo has as many messages in flight as buffers, at least two, so that staging overlaps with sending. With NCCL one
    stream gathers, sends and scatters, one message after another.
    """
    message_bytes = MESSAGE_BYTES[backend]
    is_direct = block_bytes >= DIRECT_BLOCK_BYTES[backend]
    num_blocks = 1 if is_direct else message_bytes // block_bytes
    return num_blocks, 1 if backend == "nccl" else max(2, 2 * message_bytes // (num_blocks * block_bytes))


_SENDER, _RECEIVER = 0, 1


class StoreServer:
    """The TCPStore in which a decode worker's paths rendezvous, on a free port of `host` only."""

    def __init__(self, host: str) -> None:
        fd, port = listen_on_free_port(host)  # the store closes the descriptor
        self._store = TCPStore(host, port, None, True, timedelta(seconds=CONNECT_TIMEOUT_S), False, master_listen_fd=fd)
        self.host = host
        self.port: int = port

    def store(self, path_id: str) -> Store:
        return PrefixStore(path_id, self._store)


def connect_store(path_id: str, params: ConnectorParams) -> Store:
    """Connects to the decode worker's store. Blocks for up to CONNECT_TIMEOUT_S."""
    client = TCPStore(params.store_host, params.store_port, None, False, timedelta(seconds=CONNECT_TIMEOUT_S), False)
    return PrefixStore(path_id, client)


def disable_nccl_watchdog() -> None:
    """Turns torch's watchdog off for all NCCL groups that this process makes from now on.

    Call it once, at the start: the groups of tensor parallelism have been made, and keep a watchdog that ends all
    ranks; and no thread reads the environment, which it would do while the environment moves.
    """
    os.environ.update(NCCL_ENVIRONMENT)


def _new_group(backend: str, store: Store, rank: int, host: str) -> ProcessGroup:
    if backend == "gloo":
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # by default gloo resolves the host name
        return cast(ProcessGroup, ProcessGroupGloo(store, rank, 2, options))
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL  # torch may be built without it

        if any(os.environ.get(name) != value for name, value in NCCL_ENVIRONMENT.items()):
            raise KVTransferFailed("NCCL's watchdog is on, and would end this process with its peer")
        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = NCCL_GROUP_TIMEOUT
        nccl_options.config.max_ctas = NCCL_MAX_CTAS
        return cast(ProcessGroup, ProcessGroupNCCL(store, rank, 2, nccl_options))
    raise KVTransferFailed(f"unknown process group backend {backend!r}; known are gloo and nccl")


def _abort_apart(group: ProcessGroup | None, then: Callable[[], None] = lambda: None) -> None:
    """Aborts and drops a group on a thread of its own, as both may block for seconds. Then calls `then`."""

    def abort() -> None:
        nonlocal group
        if group is not None:
            group.abort()
        group = None
        then()

    threading.Thread(target=abort, name="abort-group", daemon=True).start()


@dataclass(frozen=True)
class _Message:
    """Blocks sent together. data: the blocks in the pool if they are contiguous, else a staging buffer.

    ids_on_device: the block ids of a staged message, if the pool is on a GPU.
    """

    block_ids: list[int]
    data: torch.Tensor
    is_staged: bool
    ids_on_device: torch.Tensor | None = None


class _ProcessGroupEnd:
    """Base class of both ends: owns the group and its thread, and divides jobs into messages.

    The group is created on the thread; jobs queue behind its creation. `on_ready` reports the result, after twice
    CONNECT_TIMEOUT_S at the latest: NCCL connects without a deadline.
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
        self._blocks_per_message, self._num_buffers = message_plan(backend, blocks[0].numel())
        self._buffers: torch.Tensor | None = None  # of messages that are not in their place in the pool
        self._is_nccl = backend == "nccl"
        self._thread = JobThread(name)
        self._lock = threading.Lock()  # of the next three
        self._group: ProcessGroup | None = None
        self._is_connected = self._is_closed = False
        self._side_stream: SideStream | None = None

        def build() -> None:
            self._prepare_staging()
            group = _new_group(backend, open_store(), self._rank, host)
            with self._lock:
                if not self._is_closed:
                    self._group = group
            if self._group is None and self._is_nccl:
                _abort_apart(group)
            self._handshake()

        self._submit(build, self._with_deadline(on_ready) if self._is_nccl else on_ready)

    def _with_deadline(self, on_ready: OnDone) -> OnDone:
        """Returns an `on_ready` that counts once, and fails by itself when connecting takes too long."""
        once = threading.Lock()

        def report(error: KVTransferFailed | None) -> None:
            if once.acquire(blocking=False):
                timer.cancel()
                on_ready(error)

        def give_up() -> None:
            if once.acquire(blocking=False):
                on_ready(KVTransferFailed(f"the peer was not connected in {2 * CONNECT_TIMEOUT_S:g} s"))

        timer = threading.Timer(2 * CONNECT_TIMEOUT_S, give_up)  # the store and the group have one deadline each
        timer.daemon = True
        timer.start()
        return report

    def _submit(self, job: Callable[[], None], on_done: OnDone) -> None:
        """Runs `job` on the thread. On CUDA its copies run on the side stream, and are done when it ends."""
        self._thread.submit(lambda: self._run(job), on_done)

    def _run(self, job: Callable[[], None]) -> None:
        if not self._is_nccl:
            job()
            return
        if self._side_stream is None:
            self._side_stream = SideStream(self._blocks.device)
        self._side_stream.run(job)

    def _open_group(self) -> ProcessGroup:
        """Returns the group. Raises KVTransferFailed once it has been dropped."""
        group = self._group
        if group is None:
            raise KVTransferFailed("the pair was closed")
        return group

    def _prepare_staging(self) -> None:
        """Allocates the buffers, and runs the kernels that gather and scatter, whose results nobody reads.

        CUDA loads a kernel at its first launch, and may wait for the whole device then, as for an allocation. Later
        there would be messages on it that wait for their peers, also for such as wait for this path.
        """
        size = self._blocks_per_message
        if size == 1 and self._blocks.is_contiguous():
            return  # each message is one block, in its place
        self._buffers = self._blocks.new_empty((self._num_buffers, size, *self._blocks.shape[1:]))
        if not self._is_nccl:
            return
        zeros = torch.zeros(size, dtype=torch.int64, device=self._blocks.device)
        for count in (1, size):  # torch has kernels for few blocks and for many
            gather_on_device(self._blocks, zeros[:count], self._buffers[0, :count])
        rows = self._blocks.new_zeros(
            2, gcd(self._blocks.shape[-1], 8)
        )  # the kernel depends on the element's size only
        scatter_on_device(rows[:1], rows[1:], zeros[:1])

    def _handshake(self) -> None:
        """Moves one byte, because groups connect lazily: a path is ready only once it has carried data."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._blocks.device)
        try:
            if self._is_nccl:
                self._move_on_stream(byte)
                self._await(self._end_of_queue(), CONNECT_TIMEOUT_S)
            else:
                self._start(byte).wait(timedelta(seconds=CONNECT_TIMEOUT_S))
        except Exception:
            group, self._group = self._group, None
            if group is not None and self._is_nccl:
                _abort_apart(group)
            raise
        with self._lock:
            self._open_group()
            self._is_connected = True

    def _transfer(
        self, block_ids: list[int], before: Callable[[_Message], None], after: Callable[[_Message], None]
    ) -> None:
        """Moves the blocks in messages. Calls `before` and `after` for each message.

        After an error nothing more is written once `_run` has returned. Till then the blocks belong to the transfer:
        messages in NCCL's stream that an abort has ended are still scattered. gloo cancels a receive when its work is
        dropped.
        """
        try:
            (self._queue_messages if self._is_nccl else self._pass_messages)(block_ids, before, after)
        except Exception:
            group, self._group = self._group, None
            if group is not None and self._is_nccl:
                group.abort()
            raise

    def _pass_messages(
        self, block_ids: list[int], before: Callable[[_Message], None], after: Callable[[_Message], None]
    ) -> None:
        """With gloo: a limited number of messages is in flight."""
        in_flight: deque[tuple[Work, _Message]] = deque()

        def finish_first() -> None:
            work, message = in_flight.popleft()
            work.wait(timedelta(seconds=TRANSFER_TIMEOUT_S))
            after(message)

        try:
            for message in self._messages(block_ids):
                if len(in_flight) == self._num_buffers:
                    finish_first()
                before(message)
                in_flight.append((self._start(message.data), message))
            while in_flight:
                finish_first()
        finally:
            in_flight.clear()  # an error's traceback would keep them

    def _queue_messages(
        self, block_ids: list[int], before: Callable[[_Message], None], after: Callable[[_Message], None]
    ) -> None:
        """With NCCL: the stream orders the messages and the use of the buffer. The host queues messages ahead and waits
        for their ends: a thread that waited for each would leave the device idle for a poll per message."""
        ends: deque[Mark] = deque()
        for message in self._messages(block_ids, self._upload(block_ids)):
            if len(ends) == MESSAGES_AHEAD:
                self._await(ends.popleft(), TRANSFER_TIMEOUT_S)
            before(message)
            self._move_on_stream(message.data)
            after(message)
            ends.append(self._end_of_queue())
        while ends:
            self._await(ends.popleft(), TRANSFER_TIMEOUT_S)

    def _messages(self, block_ids: list[int], ids_on_device: torch.Tensor | None = None) -> Iterator[_Message]:
        """Divides the blocks into messages. A buffer is used again after `_num_buffers` messages."""
        size, is_contiguous = self._blocks_per_message, self._blocks.is_contiguous()
        for index, first in enumerate(range(0, len(block_ids), size)):
            ids = block_ids[first : first + size]
            if is_contiguous and is_run(ids):
                yield _Message(ids, self._blocks[ids[0] : ids[0] + len(ids)], is_staged=False)
            else:
                assert self._buffers is not None
                buffer = self._buffers[index % self._num_buffers, : len(ids)]
                on_device = None if ids_on_device is None else ids_on_device[first : first + size]
                yield _Message(ids, buffer, True, on_device)

    def _upload(self, block_ids: list[int]) -> torch.Tensor | None:
        """Returns the ids on the GPU, if blocks may have to be gathered there.

        The host waits for this copy, so it is made before anything is queued that waits for the peer.
        """
        if not self._is_nccl or (is_run(block_ids) and self._blocks.is_contiguous()):
            return None
        return torch.tensor(block_ids, device=self._blocks.device)

    def _start(self, data: torch.Tensor) -> Work:
        """Begins a message with gloo."""
        group = self._open_group()
        return group.send([data], _RECEIVER, 0) if self._rank == _SENDER else group.recv([data], _SENDER, 0)

    def _move_on_stream(self, data: torch.Tensor) -> None:
        """Queues a message with NCCL in the side stream, as a broadcast to the only other rank.

        Of torch's calls only collectives may run in the caller's stream. `send` and `recv` run in one of torch's pool,
        which groups share.
        """
        options = BroadcastOptions()
        options.rootRank = _SENDER
        options.asyncOp = False  # in the current stream
        self._open_group().broadcast([data], options)

    def _end_of_queue(self) -> Mark:
        assert self._side_stream is not None
        return self._side_stream.mark()

    def _await(self, end: Mark, timeout_s: float) -> None:
        """Blocks until the device has reached `end`. Raises after `timeout_s`, and if the group was dropped."""
        assert self._side_stream is not None
        self._side_stream.wait(end, timeout_s)
        self._open_group()  # a message that was aborted ends like one that has arrived

    def close(self, on_closed: Callable[[], None] = lambda: None) -> None:
        if not self._is_nccl:
            self._thread.close(on_closed)
            return
        with self._lock:
            group, self._group = self._group, None
            was_closed, self._is_closed = self._is_closed, True
            is_connected = self._is_connected
        if was_closed:
            return

        def ended() -> None:
            if self._side_stream is not None:
                self._side_stream.close()
            if is_connected:
                on_closed()

        # A path that was never connected has carried nothing, and NCCL's initialisation may hold its thread for long.
        self._thread.close(ended)
        _abort_apart(group, (lambda: None) if is_connected else on_closed)


class ProcessGroupSender(_ProcessGroupEnd):
    """The prefill end."""

    _rank: ClassVar[int] = _SENDER

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """Does nothing: the receiver writes."""

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        src = list(src_block_ids)
        self._submit(lambda: self._send(src), on_done)

    def _send(self, src: list[int]) -> None:
        def gather(message: _Message) -> None:
            if message.ids_on_device is not None:
                gather_on_device(self._blocks, message.ids_on_device, message.data)
            elif message.is_staged:
                copy_blocks(self._blocks, message.block_ids, message.data, range(len(message.block_ids)))

        self._transfer(src, before=gather, after=lambda message: None)


class ProcessGroupReceiver(_ProcessGroupEnd):
    """The decode end. It alone writes to its pool, so nothing is written once it is closed."""

    _rank: ClassVar[int] = _RECEIVER

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        dst = list(block_ids)
        self._submit(lambda: self._receive(dst), on_done)

    def _receive(self, dst: list[int]) -> None:
        def scatter(message: _Message) -> None:
            if message.ids_on_device is not None:
                scatter_on_device(message.data, self._blocks, message.ids_on_device)
            elif message.is_staged:
                copy_blocks(message.data, range(len(message.block_ids)), self._blocks, message.block_ids)

        self._transfer(dst, before=lambda message: None, after=scatter)


class ProcessGroupConnector:
    """Implements `kv_transfer.connector.KVConnector`. backend: gloo or nccl."""

    crosses_hosts = True
    encrypts = False
    one_sided = False
    meets_in_store = True

    def __init__(self, backend: str, device: str) -> None:
        self._backend = backend
        self.devices = (device,)

    def open_sender(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> KVSender:
        name, open_store = f"ship-{peer.path_id}", partial(connect_store, peer.path_id, peer.params)
        return ProcessGroupSender(name, self._backend, open_store, network.host, blocks, on_ready)

    def open_receiver(
        self, path_id: str, open_store: OpenStore, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone
    ) -> KVReceiver:
        return ProcessGroupReceiver(f"take-{path_id}", self._backend, open_store, network.host, blocks, on_ready)


gloo = ProcessGroupConnector("gloo", "cpu")
nccl = ProcessGroupConnector("nccl", "cuda")
