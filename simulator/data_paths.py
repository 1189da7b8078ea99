"""Pools of workers that reach each other, and data paths between them that are slow, break, and write late.

A one-sided path is as mapped memory: the sender's thread writes block by block, also after the receiver has given up.
A two-sided one is as a connection: blocks flow while both ends run, reach each other, and have both asked for them.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tandem.kv_transfer.checksums import OnChecksums
from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone, gather, when_all
from tandem.kv_transfer.ranks.fan_out import FanOutReceiver, FanOutSender, OnAddresses, WorkerPools
from tandem.kv_transfer.ranks.head_slices import HeadRoute, head_routes
from tandem.protocol.messages.transfer import KVLayout
from tandem.runtime.errors import KVTransferFailed
from tandem.simulator.engine import Pool
from tandem.simulator.timeline import ProcessLoop

RESEND_S = 0.05
TRANSFER_TIMEOUT_S = 5.0
"""A two-sided path whose other end takes no part for so long breaks, as those of `kv_transfer.connectors` do."""


@dataclass(frozen=True)
class SimulatedConnector:
    """What workers ask of a `kv_transfer.connector.KVConnector`."""

    one_sided: bool
    crosses_hosts: bool


CONNECTORS = {"ipc": SimulatedConnector(True, False), "gloo": SimulatedConnector(False, True)}
"""By the names of real ones that behave as they do."""


@dataclass(frozen=True)
class Wires:
    """What joins the pools of all processes, and what goes wrong on the paths between them."""

    block_s: Callable[[], float]
    """Returns the seconds to write a block."""
    breaks: Callable[[], bool]
    """Returns whether a path breaks now."""
    corrupts: Callable[[], bool]
    """Returns whether the block that is written now changes on its way."""
    reach: Callable[[str, str], bool] = lambda one, two: True
    """Returns whether two processes reach each other over the network."""
    pools: dict[int, list[Pool]] = field(default_factory=dict)
    """Of the heads of a rank, by its process id; they outlive their process while others map them."""
    paths: dict[str, _Connection] = field(default_factory=dict)

    def on_killed(self, loop: ProcessLoop) -> None:
        """The kernel closes the connections of a process that has ended."""
        for path in list(self.paths.values()):
            if loop in path.loops:
                path.fail("the peer is gone")

    def copy(self, source: Sequence[Pool], src: int, target: Sequence[Pool], dst: int) -> None:
        """Copies a block of some heads. Those of other heads than the target's make no sense there."""
        target[0].on_write(dst)
        for one, other in zip(source, target, strict=True):
            other.blocks[dst] = list(one.blocks[src])
            if self.corrupts() or one.head != other.head:
                other.blocks[dst][0] = (7, 7)


@dataclass
class SimulatedRank:
    """Implements `kv_transfer.ranks.fan_out.WorkerRank`. heads: pools of this rank's heads, in order.

    An address is the process id of its rank.
    """

    rank: int
    pid: int
    loop: ProcessLoop
    heads: list[Pool]
    layout: KVLayout
    wires: Wires
    checksums_at: float = 0.0
    """When the checksums that were asked for last are there."""

    def open_sender(self, connector: str, pair_id: str, addresses: list[list[bytes]], on_ready: OnDone) -> KVSender:
        routes = head_routes(self.layout.total_kv_heads, self.layout.tensor_parallel_size, len(addresses))
        by_route = [address for rank in addresses for address in rank]
        own = [each for each in zip(routes, by_route, strict=True) if each[0].src_rank == self.rank]
        ready = when_all(len(own), on_ready)

        def open_path(route: HeadRoute, address: bytes) -> KVSender:
            source = self.heads[route.src.start : route.src.stop]
            if CONNECTORS[connector].one_sided:
                error = KVTransferFailed("the path cannot be opened") if self.wires.breaks() else None
                self.loop.call_later(self.wires.block_s(), ready, error)
                target = self.wires.pools[int(address)][route.dst.start : route.dst.stop]
                return _OneSidedSender(self.loop, source, target, self.wires)
            path = self.wires.paths.get(f"{pair_id}/{route.src_rank}-{route.dst_rank}")
            if path is None or str(path.receiver_pid).encode() != address:
                raise KVTransferFailed("the peer has closed the path")
            path.connect(self.loop, source, ready)
            return path.sender

        return FanOutSender.open(partial(open_path, *each) for each in own)

    def open_receiver(self, connector: str, pair_id: str, num_senders: int, on_addresses: OnAddresses) -> KVReceiver:
        routes = head_routes(self.layout.total_kv_heads, num_senders, self.layout.tensor_parallel_size)
        routes = [route for route in routes if route.dst_rank == self.rank]

        def open_path(route: HeadRoute, listening: Callable[[bytes], None]) -> KVReceiver:
            address = str(self.pid).encode()
            if self.layout.tensor_parallel_size == 1:
                self.loop.call_soon(listening, address)
            else:  # the ranks answer in any order
                self.loop.call_later(self.wires.block_s() / 10, listening, address)
            if CONNECTORS[connector].one_sided:
                return _OneSidedReceiver(self.loop)
            target = self.heads[route.dst.start : route.dst.stop]
            path = _Connection(self.loop, self.pid, target, self.wires)
            self.wires.paths[f"{pair_id}/{route.src_rank}-{self.rank}"] = path
            return path.receiver

        listening = zip(routes, gather(len(routes), on_addresses), strict=True)
        return FanOutReceiver.open(partial(open_path, *each) for each in listening)

    def checksums(self, block_ids: Sequence[int], on_checksums: OnChecksums) -> None:
        first = self.rank * self.layout.num_kv_heads
        found = [0] * len(block_ids)
        for number, pool in enumerate(self.heads, first):
            for each, block in enumerate(block_ids):
                found[each] ^= zlib.crc32(f"{number} {pool.blocks[block]}".encode())
        self.checksums_at = max(self.loop.time() + self.wires.block_s(), self.checksums_at)
        self.loop.call_at(self.checksums_at, on_checksums, found)  # results arrive in the order of the calls


class SimulatedPools(WorkerPools):
    """The pools of a worker, with simulated ranks. pools: of all heads, in order."""

    tiers: Any

    def __init__(
        self, loops: list[ProcessLoop], pids: list[int], layout: KVLayout, pools: list[Pool], wires: Wires, tiers: Any
    ) -> None:  # fmt: skip
        num = layout.num_kv_heads
        self.ranks = [
            SimulatedRank(rank, pid, loop, pools[rank * num : (rank + 1) * num], layout, wires)
            for rank, (pid, loop) in enumerate(zip(pids, loops, strict=True))
        ]
        wires.pools.update({each.pid: each.heads for each in self.ranks})
        super().__init__(layout, self.ranks, tiers)


class _OneSidedSender:
    """Implements `kv_transfer.connector.KVSender`."""

    def __init__(self, loop: ProcessLoop, source: list[Pool], target: list[Pool], wires: Wires) -> None:
        self._loop = loop
        self._source, self._target = source, target
        self._wires = wires
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
            self._loop.call_later(self._wires.block_s(), self._write, *self._jobs.popleft(), 0)

    def _write(self, src: Sequence[int], dst: Sequence[int], on_done: OnDone, number: int) -> None:
        self._wires.copy(self._source, src[number], self._target, dst[number])
        if self._wires.breaks():
            self._end(on_done, KVTransferFailed("the path broke"))
        elif number + 1 < len(src):
            self._loop.call_later(self._wires.block_s(), self._write, src, dst, on_done, number + 1)
        else:
            self._end(on_done, None)

    def _end(self, on_done: OnDone, error: KVTransferFailed | None) -> None:
        self._is_busy = False
        on_done(error)
        self._next()


class _OneSidedReceiver:
    """Implements `kv_transfer.connector.KVReceiver`. What is announced has been written."""

    def __init__(self, loop: ProcessLoop) -> None:
        self._loop = loop

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        self._loop.call_soon(on_done, None)

    def close(self) -> None:
        pass


class _Connection:
    """A two-sided path. The sender's jobs meet the receiver's in order."""

    def __init__(self, loop: ProcessLoop, pid: int, target: list[Pool], wires: Wires) -> None:
        self.receiver_pid = pid
        self.receiver, self.sender = _End(self, loop, target), _End(self, None, None)
        self._wires = wires
        self._error: KVTransferFailed | None = None
        self._is_busy = False

    @property
    def loops(self) -> list[ProcessLoop | None]:
        return [self.receiver.loop, self.sender.loop]

    def connect(self, loop: ProcessLoop, source: list[Pool], on_ready: OnDone) -> None:
        """Connects the sender, which learns of it once the receiver's process runs."""
        self.sender.loop, self.sender.pools, self.sender.on_ready = loop, source, on_ready
        if self._error is not None:
            loop.call_soon(on_ready, self._error)
        self.receiver.call(self._wires.block_s(), self._accept)

    def _accept(self) -> None:
        if self._error is None:
            self.sender.be_ready(None)

    def advance(self) -> None:
        if self._is_busy or self._error is not None:
            return
        if self.sender.jobs and self.receiver.jobs:
            self._is_busy = True
            self.sender.call(self._wires.block_s(), self._send, 0)
            return
        for end in (self.sender, self.receiver):
            if end.jobs:
                end.call(TRANSFER_TIMEOUT_S, self._check, end.jobs[0])

    def _check(self, job: Any) -> None:
        if not self._is_busy and any(end.jobs and end.jobs[0] is job for end in (self.sender, self.receiver)):
            self.fail("the peer takes no part")

    def _send(self, number: int, unheard_s: float = 0.0) -> None:
        ends = [loop.name.split(" ")[0] for loop in self.loops if loop is not None]  # without the rank
        if self._wires.reach(ends[0], ends[1]):
            self.receiver.call(0.0, self._arrive, number)
        elif unheard_s < TRANSFER_TIMEOUT_S:
            self.sender.call(RESEND_S, self._send, number, unheard_s + RESEND_S)
        else:
            self.fail("the peer cannot be reached")

    def _arrive(self, number: int) -> None:
        if self._error is not None:
            return
        src, dst = self.sender.jobs[0][0], self.receiver.jobs[0][0]
        assert len(src) == len(dst) and self.sender.pools is not None and self.receiver.pools is not None
        self._wires.copy(self.sender.pools, src[number], self.receiver.pools, dst[number])
        if self._wires.breaks():
            self.fail("the path broke")
        elif number + 1 < len(src):
            self.sender.call(self._wires.block_s(), self._send, number + 1)
        else:
            self._is_busy = False
            for end in (self.sender, self.receiver):
                end.call(0.0, end.jobs.popleft()[1], None)
            self.advance()

    def fail(self, reason: str) -> None:
        """Breaks the path. All jobs of both ends fail, and no block is written any more."""
        if self._error is not None:
            return
        self._error = KVTransferFailed(reason)
        for end in (self.sender, self.receiver):
            end.be_ready(self._error)
            while end.jobs:
                end.call(0.0, end.jobs.popleft()[1], self._error)

    def add(self, end: _End, block_ids: Sequence[int], on_done: OnDone) -> None:
        if self._error is not None:
            end.call(0.0, on_done, self._error)
        else:
            end.jobs.append((block_ids, on_done))
            self.advance()


class _End:
    """One end of a two-sided path: a `KVSender` and a `KVReceiver`."""

    def __init__(self, path: _Connection, loop: ProcessLoop | None, pools: list[Pool] | None) -> None:
        self.loop, self.pools = loop, pools
        self.on_ready: OnDone | None = None
        self.jobs: deque[tuple[Sequence[int], OnDone]] = deque()
        self._path = path

    def call(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        if self.loop is not None:
            self.loop.call_later(seconds, callback, *args)

    def be_ready(self, error: KVTransferFailed | None) -> None:
        on_ready, self.on_ready = self.on_ready, None
        if on_ready is not None:
            self.call(0.0, on_ready, error)

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        pass

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        self._path.add(self, src_block_ids, on_done)

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        self._path.add(self, block_ids, on_done)

    def close(self, on_closed: Callable[[], None] = lambda: None) -> None:
        self._path.fail("the path is closed")
        self.call(0.0, on_closed)
