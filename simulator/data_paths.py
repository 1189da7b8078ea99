"""Pools of workers that reach each other, and data paths between them that are slow, fail, and write late.

A path is one-sided, as mapped memory: the sender's thread writes block by block, also after the receiver has given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tandem.kv_transfer.connector import OnDone
from tandem.protocol.messages.transfer import ConnectorParams, KVLayout
from tandem.runtime.errors import KVTransferFailed
from tandem.simulator.engine import Pool
from tandem.simulator.timeline import ProcessLoop


class SimulatedPools:
    """Takes the place of `kv_transfer.ranks.worker_pools.WorkerPools`. pools: of all processes, by process id.

    block_s: seconds to write one block. failure_share: of the paths that cannot be opened.
    """

    host = "127.0.0.1"
    has_keys = False

    def __init__(
        self,
        loop: ProcessLoop,
        layout: KVLayout,
        pid: int,
        pools: dict[int, Pool],
        block_s: Callable[[], float],
        fails: Callable[[], bool],
    ) -> None:
        self.layout = layout
        self.params = [ConnectorParams(pid=pid)]
        self.tiers: Any = SimpleNamespace(names=[], close=lambda: None)
        self._loop = loop
        self._own = pools[pid]
        self._pools = pools
        self._block_s = block_s
        self._fails = fails

    def open_sender(self, connector: str, pair_id: str, peers: list[ConnectorParams], on_ready: OnDone) -> Sender:
        error = KVTransferFailed("the path cannot be opened") if self._fails() else None
        self._loop.call_later(self._block_s(), on_ready, error)
        return Sender(self._loop, self._own, self._pools[peers[0].pid], self._block_s, self._fails)

    def open_receiver(
        self, connector: str, pair_id: str, num_senders: int, open_store: Any, store: ConnectorParams, on_ready: OnDone
    ) -> Receiver:
        self._loop.call_soon(on_ready, None)
        return Receiver(self._loop)

    def checksums(self, block_ids: Sequence[int], on_done: Any) -> None:
        raise NotImplementedError("checksums are not simulated")


class Sender:
    """Implements `kv_transfer.connector.KVSender`."""

    def __init__(
        self, loop: ProcessLoop, source: Pool, target: Pool, block_s: Callable[[], float], fails: Callable[[], bool]
    ) -> None:
        self._loop = loop
        self._source, self._target = source, target
        self._block_s = block_s
        self._fails = fails
        self._jobs: deque[tuple[Sequence[int], Sequence[int], OnDone]] = deque()
        self._is_busy = False
        self._on_closed: Callable[[], None] | None = None

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        pass

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        self._jobs.append((src_block_ids, dst_block_ids, on_done))
        self._next()

    def close(self, on_closed: Callable[[], None]) -> None:
        self._on_closed = on_closed
        self._next()

    def _next(self) -> None:
        if self._is_busy:
            return
        if self._on_closed is not None:
            while self._jobs:
                self._jobs.popleft()[2](KVTransferFailed("the path is closed"))
            self._loop.call_soon(self._on_closed)
        elif self._jobs:
            self._is_busy = True
            self._loop.call_later(self._block_s(), self._write, *self._jobs.popleft(), 0)

    def _write(self, src: Sequence[int], dst: Sequence[int], on_done: OnDone, number: int) -> None:
        self._target.blocks[dst[number]] = list(self._source.blocks[src[number]])
        if self._fails():
            self._end(on_done, KVTransferFailed("the path broke"))
        elif number + 1 < len(src):
            self._loop.call_later(self._block_s(), self._write, src, dst, on_done, number + 1)
        else:
            self._end(on_done, None)

    def _end(self, on_done: OnDone, error: KVTransferFailed | None) -> None:
        self._is_busy = False
        on_done(error)
        self._next()


class Receiver:
    """Implements `kv_transfer.connector.KVReceiver`. What is announced has been written."""

    def __init__(self, loop: ProcessLoop) -> None:
        self._loop = loop

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        self._loop.call_soon(on_done, None)

    def close(self) -> None:
        pass
