"""The `gloo` and `nccl` connectors: one process group of two ranks per path.

The prefill end is rank 0, the decode end rank 1. They meet in a store of the decode end, whose port is the path's
address. Groups are independent of each other, so a frozen peer cannot take down healthy pairs when it times out. A wait
that times out breaks the path for good; prefill then opens a pair with a new id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch._C._distributed_c10d import Store

from tandem.kv_transfer.connector import DataNetwork, KVReceiver, KVSender, OnAddress, OnDone, Peer
from tandem.kv_transfer.connectors.block_messages import BlockMessages, Message
from tandem.kv_transfer.connectors.gloo_group import GlooGroup
from tandem.kv_transfer.connectors.group_store import connect_store, serve_store
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.connectors.nccl_group import NcclGroup

_SENDER, _RECEIVER = 0, 1


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
        """serve: see `group_store.serve_store`."""
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
