"""Combines several paths into one sender or receiver, and the pools of all ranks into one: every job runs on all of
them and is done when all are done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from tandem.kv_transfer.checksums import OnChecksums, combine
from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone, gather, when_all
from tandem.kv_transfer.ranks.worker_tiers import WorkerTiers
from tandem.protocol.messages.transfer import KVLayout
from tandem.runtime.errors import KVTransferFailed

P = TypeVar("P")

OnAddresses = Callable[[list[bytes] | KVTransferFailed], None]
"""Gets the addresses of one decode rank's paths, in the order of the prefill ranks."""


def _open_all(paths: Iterable[Callable[[], P]], close: Callable[[P], object]) -> list[P]:
    """Opens paths. If one of them raises, closes those that are open, which have moved nothing, and raises that."""
    opened: list[P] = []
    try:
        for open_path in paths:
            opened.append(open_path())
    except Exception:
        for each in opened:
            close(each)
        raise
    return opened


class FanOutSender:
    """The prefill end of several paths."""

    def __init__(self, senders: Sequence[KVSender]) -> None:
        self._senders = senders

    @classmethod
    def open(cls, paths: Iterable[Callable[[], KVSender]]) -> KVSender:
        """Opens paths, all or none. A path that is alone needs nothing around it: that of most workers."""
        senders = _open_all(paths, lambda sender: sender.close(lambda: None))
        return senders[0] if len(senders) == 1 else cls(senders)

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        for sender in self._senders:
            sender.prepare(dst_block_ids)

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        done = when_all(len(self._senders), on_done)
        for sender in self._senders:
            sender.send(src_block_ids, dst_block_ids, done)

    def close(self, on_closed: Callable[[], None]) -> None:
        closed = when_all(len(self._senders), lambda error: on_closed())
        for sender in self._senders:
            sender.close(lambda: closed(None))


class FanOutReceiver:
    """The decode end of several paths."""

    def __init__(self, receivers: Sequence[KVReceiver]) -> None:
        self._receivers = receivers

    @classmethod
    def open(cls, paths: Iterable[Callable[[], KVReceiver]]) -> KVReceiver:
        """See `FanOutSender.open`."""
        receivers = _open_all(paths, lambda receiver: receiver.close())
        return receivers[0] if len(receivers) == 1 else cls(receivers)

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        done = when_all(len(self._receivers), on_done)
        for receiver in self._receivers:
            receiver.receive(block_ids, done)

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()


class WorkerRank(Protocol):
    """The KV pool of one rank: `rank_pool.RankPool`, or `remote_rank.RemoteRank` if it is another process's."""

    def open_sender(self, connector: str, pair_id: str, addresses: list[list[bytes]], on_ready: OnDone) -> KVSender:
        """Opens the paths to the decode worker's ranks. addresses: see `PairAccepted`. Raises KVPathRefused."""

    def open_receiver(self, connector: str, pair_id: str, num_senders: int, on_addresses: OnAddresses) -> KVReceiver:
        """Opens the paths from the prefill worker's `num_senders` ranks. Raises KVPathRefused."""

    def checksums(self, block_ids: Sequence[int], on_checksums: OnChecksums) -> None:
        """Hashes this rank's heads of each block. Results arrive on any thread, in the order of the calls."""


class WorkerPools:
    """The KV pools of all ranks of a worker, as one. ranks: in order. tiers: below these pools; None for none.

    Implements `handover.kv_host.KVPools`, which says what the methods do.
    """

    def __init__(self, layout: KVLayout, ranks: Sequence[WorkerRank], tiers: WorkerTiers | None = None) -> None:
        assert len(ranks) == layout.tensor_parallel_size
        self.layout = layout
        self.tiers = tiers if tiers is not None else WorkerTiers({})
        self._ranks = ranks

    def open_sender(self, connector: str, pair_id: str, addresses: list[list[bytes]], on_ready: OnDone) -> KVSender:
        ready = when_all(len(self._ranks), on_ready)
        return FanOutSender.open(
            partial(rank.open_sender, connector, pair_id, addresses, ready) for rank in self._ranks
        )

    def open_receiver(
        self,
        connector: str,
        pair_id: str,
        num_senders: int,
        on_addresses: Callable[[list[list[bytes]] | KVTransferFailed], None],
    ) -> KVReceiver:
        listening = zip(self._ranks, gather(len(self._ranks), on_addresses), strict=True)
        return FanOutReceiver.open(
            partial(rank.open_receiver, connector, pair_id, num_senders, done) for rank, done in listening
        )

    def checksums(self, block_ids: Sequence[int], on_checksums: OnChecksums) -> None:

        def merge(by_rank: list[list[int]] | KVTransferFailed) -> None:
            on_checksums(by_rank if isinstance(by_rank, KVTransferFailed) else combine(by_rank))

        for rank, done in zip(self._ranks, gather(len(self._ranks), merge), strict=True):
            rank.checksums(block_ids, done)
