"""The `fake` connector: both ends in one process, with delay, loss, corruption and frozen peers on demand.

Nothing happens by itself: whoever holds the network moves the clock that it was made with and calls `step`, `run_due`
or one of `choices`. Only there are `on_ready`, `on_done` and `on_closed` called. The same seed and calls give the same
run.

It keeps the rules of the real connectors. One-sided (as `ipc`): the sender writes and the receiver is not asked, so
what was under way when the pair was given up is still written, as late as the network likes. Two-sided (as `gloo`): a
block moves when both ends have come to its transfer, and an end that sees nothing move for TIMEOUT_S breaks, or whose
peer's process has ended.
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

from tandem.kv_transfer.connector import OnDone, OpenStore, Peer
from tandem.runtime.errors import KVTransferFailed

TIMEOUT_S = 5.0

Side = Literal["sender", "receiver"]
Step = tuple[float, Callable[[], None]]
"""When something is due, and what."""
OnWrite = Callable[[str, int], None]
"""Of a path, and of a block in the pool at its receiving end."""


@dataclass(frozen=True)
class Faults:
    """What befalls transfers that begin from now on.

    delay_s: each block takes up to this long. loss: odds that a transfer stops part-way and goes no further.
    corruption: odds that a block arrives with one byte changed, which nobody is told.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    corruption: float = 0.0


@dataclass(eq=False)
class _Job:
    """One `send` or `receive`, waiting or under way. dst_block_ids: of a send."""

    block_ids: list[int]
    on_done: OnDone
    moved_at: float  # handed in, begun, or had its latest block
    dst_block_ids: list[int] = field(default_factory=list)
    begun: bool = False


class _End:
    """Carries out its jobs in order. After a failure the rest fail as well; so do, once closed, those not begun."""

    def __init__(self, network: FakeNetwork, blocks: torch.Tensor, on_ready: OnDone) -> None:
        self.network = network
        self.blocks = blocks  # uint8 [num_blocks, ...]
        self.jobs: deque[_Job] = deque()
        self.closed = False
        self.error: KVTransferFailed | None = None
        self._on_ready: OnDone | None = on_ready
        self._on_closed: Callable[[], None] | None = None

    @property
    def head(self) -> _Job | None:
        """The job that is under way or may begin."""
        return self.jobs[0] if self.jobs and self._why_not(self.jobs[0]) is None else None

    def _why_not(self, job: _Job) -> KVTransferFailed | None:
        if self.error is None and self.closed and not job.begun:
            return KVTransferFailed("the pair is closed")
        return self.error

    def steps(self, now: float) -> Iterator[Step]:
        """What needs no peer."""
        if self._on_ready is not None:
            yield now, self._tell_ready
        elif self.jobs and (error := self._why_not(self.jobs[0])) is not None:
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
    """Prefill side."""

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        pass

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        self.jobs.append(_Job(list(src_block_ids), on_done, self.network.now(), list(dst_block_ids)))

    def close(self, on_closed: Callable[[], None]) -> None:
        self._close(on_closed)


class FakeReceiver(_End):
    """Decode side."""

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        self.jobs.append(_Job(list(block_ids), on_done, self.network.now()))

    def close(self) -> None:
        self._close(None)


@dataclass(eq=False)
class _Transfer:
    """Blocks under way. jobs: the send, and in a two-sided network the receive. arrivals: of those yet to be written.

    One that is lost has fewer arrivals than blocks.
    """

    jobs: list[_Job]
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
        self.transfer = None  # a connection that breaks at one end carries no more blocks
        end.end_head(KVTransferFailed(f"the KV transfer broke off: {why}"))


class FakeNetwork:
    """All paths of one simulated cluster, and a connector as `kv_transfer.registry` knows them.

    clock: in seconds, moved by the caller. faults: may be changed at any time. on_write: told just before each write. A
    path's two ends find each other by its id; the sender of a one-sided path needs the receiver's pool, so that is
    opened first.
    """

    devices = ("cpu", "cuda")
    crosses_hosts = False
    crosses_devices = True
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

    def open_sender(self, peer: Peer, blocks: torch.Tensor, host: str, on_ready: OnDone) -> FakeSender:
        path = self._paths.setdefault(peer.path_id, _Path(peer.path_id))
        if "receiver" in path.ended:
            raise KVTransferFailed("the peer's process has ended")
        path.sender = FakeSender(self, blocks, on_ready)
        return path.sender

    def open_receiver(
        self, path_id: str, open_store: OpenStore, blocks: torch.Tensor, host: str, on_ready: OnDone
    ) -> FakeReceiver:
        path = self._paths.setdefault(path_id, _Path(path_id))
        path.receiver = FakeReceiver(self, blocks, on_ready)
        return path.receiver

    # ---- faults

    def freeze(self, path_id: str, side: Side = "sender") -> None:
        """Its process stands still: it does nothing and hears nothing, its deadline included.

        Into a receiver that stands still a one-sided peer goes on writing.
        """
        self._paths[path_id].frozen.add(side)

    def thaw(self, path_id: str, side: Side = "sender") -> None:
        """It wakes and goes on where it was, whatever has become of its peer."""
        self._paths[path_id].frozen.discard(side)

    def kill(self, path_id: str, side: Side = "sender") -> None:
        """Its process ends, and with it all that this end would do or be told. Its pool remains, which nobody reads."""
        self._paths[path_id].ended.add(side)

    # ---- time

    def next_due(self) -> float | None:
        """When there will be something to do; None when everything is at rest or frozen."""
        return min((time for time, _ in self._steps()), default=None)

    def choices(self) -> list[Callable[[], None]]:
        """All that is due by now, for a search of races: call one of them, then ask again."""
        return [act for time, act in self._steps() if time <= self.now()]

    def step(self) -> bool:
        """Carry out the one thing that is due first, if it is due by now: a block, a callback, a deadline."""
        step = min(self._steps(), key=lambda step: step[0], default=None)
        if step is None or step[0] > self.now():
            return False
        step[1]()
        return True

    def run_due(self) -> None:
        """Carry out all that is due by now, and all that this brings about."""
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

    def _end_steps(self, path: _Path, end: _End, job: _Job, now: float) -> Iterator[Step]:
        late = partial(path.break_off, end, f"nothing moved for {TIMEOUT_S:.0f} s")
        if not self.one_sided and path.ended:
            yield now, partial(path.break_off, end, "the peer's process has ended")
        elif not self.one_sided:
            yield job.moved_at + TIMEOUT_S, late
        elif end is path.receiver:
            yield now, end.end_head  # all is written before it is announced
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

    def _begin(self, path: _Path, send: _Job, take: _Job | None) -> None:
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
        path.transfer.arrivals.popleft()  # the beginning itself

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
