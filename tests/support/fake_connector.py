"""The `fake` connector: both ends in one process, with simulated delay, loss, corruption and frozen peers.

It is deterministic. The test moves the clock and calls `step`, `run_due` or one of `choices`; only these call
`on_ready`, `on_done` and `on_closed`. The same seed and calls give the same run.

It follows the rules of the real connectors. One-sided (like `ipc`): the sender writes without the receiver, so blocks
in flight when the pair is given up may still be written arbitrarily late. Two-sided (like `gloo`): a block moves when
both ends have reached its transfer. An end fails if nothing moves for TIMEOUT_S, or if its peer's process has exited.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Literal

import torch

from tandem.kv_transfer.connector import DataNetwork, OnDone, OpenStore, Peer
from tandem.runtime.errors import KVTransferFailed

TIMEOUT_S = 5.0

Side = Literal["sender", "receiver"]
Step = tuple[float, Callable[[], None]]
"""A due time and the action."""
OnWrite = Callable[[str, int], None]
"""Called with a path id and a block id of the receiving pool."""


@dataclass(frozen=True)
class Faults:
    """Faults of transfers that start from now on.

    delay_s: maximum time per block. loss: probability that a transfer stops part-way. corruption: probability that a
    block arrives with one byte changed.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    corruption: float = 0.0


@dataclass(eq=False)
class _Copy:
    """One `send` or `receive`, queued or in flight. dst_block_ids: of a send."""

    block_ids: list[int]
    on_done: OnDone
    moved_at: float  # when it was submitted, started, or last moved a block
    dst_block_ids: list[int] = field(default_factory=list)
    begun: bool = False


class _End:
    """Runs its jobs in order. After a failure all later jobs fail; after `close` all jobs that have not started."""

    def __init__(self, network: FakeNetwork, blocks: torch.Tensor, on_ready: OnDone) -> None:
        self.network = network
        self.blocks = blocks  # uint8 [num_blocks, ...]
        self.jobs: deque[_Copy] = deque()
        self.closed = False
        self.error: KVTransferFailed | None = None
        self._on_ready: OnDone | None = on_ready
        self._on_closed: Callable[[], None] | None = None

    @property
    def head(self) -> _Copy | None:
        """The job that is running or may start."""
        return self.jobs[0] if self.jobs and self._failure(self.jobs[0]) is None else None

    def _failure(self, job: _Copy) -> KVTransferFailed | None:
        if self.error is None and self.closed and not job.begun:
            return KVTransferFailed("the pair is closed")
        return self.error

    def steps(self, now: float) -> Iterator[Step]:
        """Yield the steps that do not involve the peer."""
        if self._on_ready is not None:
            yield now, self._tell_ready
        elif self.jobs and (error := self._failure(self.jobs[0])) is not None:
            yield now, partial(self.end_head, error)
        elif self.closed and not self.jobs and self._on_closed is not None:
            yield now, self._tell_closed

    def end_head(self, error: KVTransferFailed | None = None) -> None:
        self.error = self.error or error
        done = self.jobs.popleft()
        if self.jobs:
            self.jobs[0].moved_at = self.network.now()
        done.on_done(error)

    def _tell_ready(self) -> None:
        on_ready, self._on_ready = self._on_ready, None
        assert on_ready is not None
        on_ready(None)

    def _tell_closed(self) -> None:
        on_closed, self._on_closed = self._on_closed, None
        assert on_closed is not None
        on_closed()

    def _close(self, on_closed: Callable[[], None] | None) -> None:
        if not self.closed:
            self.closed, self._on_closed = True, on_closed


class FakeSender(_End):
    """The prefill end."""

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        pass

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        self.jobs.append(_Copy(list(src_block_ids), on_done, self.network.now(), list(dst_block_ids)))

    def close(self, on_closed: Callable[[], None]) -> None:
        self._close(on_closed)


class FakeReceiver(_End):
    """The decode end."""

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        self.jobs.append(_Copy(list(block_ids), on_done, self.network.now()))

    def close(self) -> None:
        self._close(None)


@dataclass(eq=False)
class _Transfer:
    """Blocks in flight. jobs: the send and, if two-sided, the receive. arrivals: due times of unwritten blocks.

    A lost transfer has fewer arrivals than blocks.
    """

    jobs: list[_Copy]
    dst_block_ids: list[int]
    arrivals: deque[float]
    num_written: int = 0


@dataclass(eq=False)
class _Path:
    path_id: str
    sender: FakeSender | None = None
    receiver: FakeReceiver | None = None
    transfer: _Transfer | None = None
    frozen: set[Side] = field(default_factory=set)
    ended: set[Side] = field(default_factory=set)

    def ends_awake(self) -> list[_End]:
        ends: dict[Side, _End | None] = {"receiver": self.receiver, "sender": self.sender}
        return [end for side, end in ends.items() if end is not None and side not in self.frozen | self.ended]

    def break_off(self, end: _End, why: str) -> None:
        self.transfer = None  # a connection that breaks at one end moves no more blocks
        end.end_head(KVTransferFailed(f"the KV transfer failed: {why}"))


class FakeNetwork:
    """All paths of one simulated cluster; implements `kv_transfer.connector.KVConnector`.

    clock: returns seconds, moved by the caller. faults: may be changed at any time. on_write: called before each write.
    A path's two ends find each other by path id. Open the receiver of a one-sided path first.
    """

    devices = ("cpu", "cuda")
    crosses_hosts = False
    encrypts = False
    meets_in_store = False

    def __init__(
        self,
        clock: Callable[[], float],
        seed: int = 0,
        one_sided: bool = True,
        faults: Faults | None = None,
        on_write: OnWrite | None = None,
    ) -> None:
        self.now = clock
        self.one_sided = one_sided
        self.faults = faults or Faults()
        self.num_corrupted_blocks = 0
        self.num_lost_transfers = 0
        self._on_write = on_write or (lambda path_id, block_id: None)
        self._random = random.Random(seed)
        self._paths: dict[str, _Path] = {}

    def open_sender(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> FakeSender:
        path = self._paths.setdefault(peer.path_id, _Path(peer.path_id))
        if "receiver" in path.ended:
            raise KVTransferFailed("the peer's process has ended")
        path.sender = FakeSender(self, blocks, on_ready)
        return path.sender

    def open_receiver(
        self, path_id: str, open_store: OpenStore, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone
    ) -> FakeReceiver:
        path = self._paths.setdefault(path_id, _Path(path_id))
        path.receiver = FakeReceiver(self, blocks, on_ready)
        return path.receiver

    # ---- faults

    def freeze(self, path_id: str, side: Side = "sender") -> None:
        """Stop an end's process, including its deadlines. A one-sided sender still writes into a frozen receiver."""
        self._paths[path_id].frozen.add(side)

    def thaw(self, path_id: str, side: Side = "sender") -> None:
        """Resume an end where it stopped."""
        self._paths[path_id].frozen.discard(side)

    def kill(self, path_id: str, side: Side = "sender") -> None:
        """End an end's process: it does nothing more and gets no callbacks. Its pool remains, unread."""
        self._paths[path_id].ended.add(side)

    # ---- time

    def next_due(self) -> float | None:
        """Return the time of the next step, or None if everything is idle or frozen."""
        return min((time for time, _ in self._steps()), default=None)

    def choices(self) -> list[Callable[[], None]]:
        """Return all due steps, to search for races: call one of them, then call `choices` again."""
        return [act for time, act in self._steps() if time <= self.now()]

    def step(self) -> bool:
        """Run the earliest step (a block, a callback or a deadline) if it is due; return whether one ran."""
        step = min(self._steps(), key=lambda step: step[0], default=None)
        if step is None or step[0] > self.now():
            return False
        step[1]()
        return True

    def run_due(self) -> None:
        """Run all due steps, including those that they cause."""
        while self.step():
            pass

    def _steps(self) -> Iterator[Step]:
        now = self.now()
        for path in list(self._paths.values()):
            for end in path.ends_awake():
                yield from end.steps(now)
                if end.head is not None:
                    yield from self._end_steps(path, end, end.head, now)
            writers: set[Side] = {"sender"} if self.one_sided else {"sender", "receiver"}
            if not (path.frozen | path.ended) & writers and path.sender is not None and path.receiver is not None:
                yield from self._transfer_steps(path, path.sender, path.receiver, now)

    def _end_steps(self, path: _Path, end: _End, job: _Copy, now: float) -> Iterator[Step]:
        late = partial(path.break_off, end, f"no data moved for {TIMEOUT_S:.0f} s")
        if not self.one_sided and path.ended:
            yield now, partial(path.break_off, end, "the peer's process has ended")
        elif not self.one_sided:
            yield job.moved_at + TIMEOUT_S, late
        elif end is path.receiver:
            yield now, end.end_head  # blocks are written before they are announced
        elif path.transfer is not None and not path.transfer.arrivals:
            yield job.moved_at + TIMEOUT_S, late

    def _transfer_steps(self, path: _Path, sender: FakeSender, receiver: FakeReceiver, now: float) -> Iterator[Step]:
        transfer = path.transfer
        if transfer is None:
            send, take = sender.head, None if self.one_sided else receiver.head
            if send is not None and not send.begun and (self.one_sided or (take is not None and not take.begun)):
                yield now, partial(self._begin, path, send, take)
        elif transfer.arrivals:
            yield transfer.arrivals[0], partial(self._write, path, transfer, sender.blocks, receiver.blocks)
        elif transfer.num_written == len(transfer.dst_block_ids):
            yield now, partial(self._finish, path, sender, receiver)

    def _begin(self, path: _Path, send: _Copy, take: _Copy | None) -> None:
        jobs = [send] if take is None else [send, take]
        for job in jobs:
            job.begun, job.moved_at = True, self.now()
        num_blocks = len(send.block_ids)
        if num_blocks and self._random.random() < self.faults.loss:
            self.num_lost_transfers += 1
            num_blocks = self._random.randrange(num_blocks)
        delays = [self._random.uniform(0.0, self.faults.delay_s) for _ in range(num_blocks)]
        dst = send.dst_block_ids if take is None else take.block_ids
        path.transfer = _Transfer(jobs, dst, deque(accumulate(delays, initial=self.now())))
        path.transfer.arrivals.popleft()  # the start itself

    def _write(self, path: _Path, transfer: _Transfer, src: torch.Tensor, dst: torch.Tensor) -> None:
        send, block_id = transfer.jobs[0], transfer.dst_block_ids[transfer.num_written]
        self._on_write(path.path_id, block_id)
        target = dst[block_id]
        target.copy_(src[send.block_ids[transfer.num_written]])
        if self._random.random() < self.faults.corruption:
            self.num_corrupted_blocks += 1
            target.view(-1)[self._random.randrange(target.numel())] ^= self._random.randrange(1, 256)
        transfer.num_written += 1
        transfer.arrivals.popleft()
        for job in transfer.jobs:
            job.moved_at = self.now()

    def _finish(self, path: _Path, sender: FakeSender, receiver: FakeReceiver) -> None:
        path.transfer = None
        sender.end_head()
        if not self.one_sided:
            receiver.end_head()
