"""The `gloo` and `nccl` connectors: one process group of two ranks per path.

The prefill end is rank 0, the decode end rank 1. They meet in a store of the decode end, whose port is the path's
address. Groups are independent of each other, so a frozen peer cannot take down healthy pairs when it times out. A wait
that times out breaks the path for good; prefill then opens a pair with a new id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol, cast

import msgspec
import torch
from torch._C._distributed_c10d import ProcessGroup, Store, TCPStore, Work

from tandem.kv_transfer.connector import DataNetwork, KVReceiver, KVSender, OnAddress, OnDone, Peer
from tandem.kv_transfer.connectors.addresses import CONNECT_TIMEOUT_S, SocketAddress, read_address
from tandem.kv_transfer.connectors.block_messages import BlockMessages, Message
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.connectors.nccl_group import NcclGroup
from tandem.protocol.sockets import listen_on_free_port
from tandem.runtime.errors import KVTransferFailed

_SENDER, _RECEIVER = 0, 1

TRANSFER_TIMEOUT_S = 5.0
"""Deadline of one message, after which the peer counts as dead."""


class PathGroup(Protocol):
    """One rank of a path's group. All calls but `close` are made on the path's thread."""

    def run(self, job: Callable[[], None]) -> None:
        """Runs `job`, which calls the other methods. The copies that it makes are done when this returns."""

    def connect(self, store: Store) -> None:
        """Makes the group and moves a byte, because groups connect lazily: a path is ready once it has carried data."""

    def move(
        self, messages: Iterable[Message], before: Callable[[Message], None], after: Callable[[Message], None]
    ) -> None:
        """Moves the messages. Calls `before` and `after` for each. After an error nothing more is written once `run`
        has returned."""

    def close(self, thread: JobThread, on_closed: Callable[[], None]) -> None:
        """Ends the path and its thread, as `KVSender.close`."""


class GlooGroup:
    """A group over gloo, for CPU pools: a number of messages is in flight at once. host: own address."""

    def __init__(self, rank: int, host: str, max_in_flight: int) -> None:
        self._rank = rank
        self._host = host
        self._max_in_flight = max_in_flight
        self._group: ProcessGroup | None = None

    def run(self, job: Callable[[], None]) -> None:
        job()

    def connect(self, store: Store) -> None:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]  # by default it resolves the host name
        self._group = cast(ProcessGroup, ProcessGroupGloo(store, self._rank, 2, options))
        self._start(torch.zeros(1, dtype=torch.uint8)).wait(timedelta(seconds=CONNECT_TIMEOUT_S))

    def move(
        self, messages: Iterable[Message], before: Callable[[Message], None], after: Callable[[Message], None]
    ) -> None:
        """See `PathGroup.move`. gloo cancels a receive when its work is dropped."""
        in_flight: deque[tuple[Work, Message]] = deque()

        def finish_first() -> None:
            work, message = in_flight.popleft()
            work.wait(timedelta(seconds=TRANSFER_TIMEOUT_S))
            after(message)

        try:
            for message in messages:
                if len(in_flight) == self._max_in_flight:
                    finish_first()
                before(message)
                in_flight.append((self._start(message.data), message))
            while in_flight:
                finish_first()
        except Exception:
            self._group = None
            raise
        finally:
            in_flight.clear()  # an error's traceback would keep them

    def _start(self, data: torch.Tensor) -> Work:
        if self._group is None:
            raise KVTransferFailed("the pair was closed")
        peer = 1 - self._rank
        return self._group.send([data], peer, 0) if self._rank == 0 else self._group.recv([data], peer, 0)

    def close(self, thread: JobThread, on_closed: Callable[[], None]) -> None:
        thread.close(on_closed)


def serve_store(host: str) -> tuple[Store, bytes]:
    """Returns a TCPStore for one path, on a free port of `host` only, and its address."""
    fd, port = listen_on_free_port(host)  # the store closes the descriptor
    store = TCPStore(host, port, None, True, timedelta(seconds=CONNECT_TIMEOUT_S), False, master_listen_fd=fd)
    return store, msgspec.msgpack.encode(SocketAddress(host, port))


def connect_store(address: bytes) -> Store:
    """Connects to the decode end's store. Blocks for up to CONNECT_TIMEOUT_S."""
    server = read_address(address, SocketAddress)
    return TCPStore(server.host, server.port, None, False, timedelta(seconds=CONNECT_TIMEOUT_S), False)


class _ProcessGroupEnd:
    """Base class of both ends. The group is made on the path's thread; jobs queue behind that."""

    def __init__(self, name: str, backend: str, rank: int, host: str, blocks: torch.Tensor) -> None:
        self._messages = BlockMessages(backend, blocks)
        self._group: PathGroup = (
            NcclGroup(rank, blocks.device) if backend == "nccl" else GlooGroup(rank, host, self._messages.num_buffers)
        )
        self._thread = JobThread(name)

    def _submit(self, job: Callable[[], None], on_done: OnDone) -> None:
        self._thread.submit(lambda: self._group.run(job), on_done)

    def _connect(self, open_store: Callable[[], Store]) -> None:
        self._messages.prepare()
        self._group.connect(open_store())

    def close(self, on_closed: Callable[[], None] = lambda: None) -> None:
        self._group.close(self._thread, on_closed)


class ProcessGroupSender(_ProcessGroupEnd):
    """The prefill end."""

    def __init__(
        self,
        name: str,
        backend: str,
        open_store: Callable[[], Store],
        host: str,
        blocks: torch.Tensor,
        on_ready: OnDone,
    ) -> None:
        super().__init__(name, backend, _SENDER, host, blocks)
        self._submit(partial(self._connect, open_store), on_ready)

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """Does nothing: the receiver writes."""

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        src = list(src_block_ids)
        self._submit(lambda: self._group.move(self._messages.of(src), self._messages.gather, _do_nothing), on_done)


class ProcessGroupReceiver(_ProcessGroupEnd):
    """The decode end. It alone writes to its pool, so nothing is written once it is closed."""

    def __init__(
        self,
        name: str,
        backend: str,
        serve: Callable[[], tuple[Store, bytes]],
        host: str,
        blocks: torch.Tensor,
        on_address: OnAddress,
    ) -> None:
        """serve: see `serve_store`."""
        super().__init__(name, backend, _RECEIVER, host, blocks)
        stores: list[Store] = []

        def announce() -> bytes:
            store, address = serve()
            stores.append(store)
            return address

        self._thread.submit(announce, on_address)
        self._submit(lambda: self._connect(stores.pop), lambda error: None)

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        dst = list(block_ids)
        self._submit(lambda: self._group.move(self._messages.of(dst), _do_nothing, self._messages.scatter), on_done)


def _do_nothing(message: Message) -> None:
    pass


class ProcessGroupConnector:
    """Implements `kv_transfer.connector.KVConnector`. backend: gloo or nccl."""

    crosses_hosts = True
    encrypts = False
    one_sided = False

    def __init__(self, backend: str, device: str) -> None:
        self._backend = backend
        self.devices = (device,)

    def open_sender(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> KVSender:
        name, open_store = f"ship-{peer.path_id}", partial(connect_store, peer.address)
        return ProcessGroupSender(name, self._backend, open_store, network.host, blocks, on_ready)

    def open_receiver(
        self, path_id: str, blocks: torch.Tensor, network: DataNetwork, on_address: OnAddress
    ) -> KVReceiver:
        name, serve = f"take-{path_id}", partial(serve_store, network.host)
        return ProcessGroupReceiver(name, self._backend, serve, network.host, blocks, on_address)


gloo = ProcessGroupConnector("gloo", "cpu")

nccl = ProcessGroupConnector("nccl", "cuda")
