"""Combines the pools of several ranks into one, and several paths into one sender or receiver: every job runs on all of
them and is done when all are done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tandem.kv_transfer.checksums import OnChecksums, combine
from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone, gather, when_all
from tandem.protocol.messages.transfer import KVLayout
from tandem.runtime.errors import KVTransferFailed

if TYPE_CHECKING:
    from tandem.kv_transfer.ranks.rank_pool import RankPool
    from tandem.kv_transfer.ranks.remote_rank import RemoteRank


class FanOutSender:
    """The prefill end of several paths."""

    def __init__(self, senders: Sequence[KVSender]) -> None:
        self._senders = senders

    @classmethod
    def open(cls, paths: Iterable[Callable[[], KVSender]]) -> FanOutSender:
        """Opens paths. If one of them raises, closes those that are open, which have sent nothing, and raises that."""
        senders: list[KVSender] = []
        try:
            for open_path in paths:
                senders.append(open_path())
        except Exception:
            cls(senders).close(lambda: None)
            raise
        return cls(senders)

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
    def open(cls, paths: Iterable[Callable[[], KVReceiver]]) -> FanOutReceiver:
        """Opens paths. If one of them raises, closes those that are open, and raises that."""
        receivers: list[KVReceiver] = []
        try:
            for open_path in paths:
                receivers.append(open_path())
        except Exception:
            cls(receivers).close()
            raise
        return cls(receivers)

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        done = when_all(len(self._receivers), on_done)
        for receiver in self._receivers:
            receiver.receive(block_ids, done)

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()


class FanOutPools:
    """The pools of several ranks as one. ranks: in order."""

    def __init__(self, layout: KVLayout, ranks: Sequence[RankPool | RemoteRank]) -> None:
        self.layout = layout
        self._ranks = ranks

    def open_sender(self, connector: str, pair_id: str, addresses: list[list[bytes]], on_ready: OnDone) -> KVSender:
        """Opens all paths to a decode worker. addresses: see `PairAccepted`. Raises KVPathRefused."""
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
        """Opens all paths from a prefill worker of `num_senders` ranks. Raises KVPathRefused.

        `on_addresses` is called once, on any thread, with the addresses for `PairAccepted`.
        """
        listening = zip(self._ranks, gather(len(self._ranks), on_addresses), strict=True)
        return FanOutReceiver.open(
            partial(rank.open_receiver, connector, pair_id, num_senders, done) for rank, done in listening
        )

    def checksums(self, block_ids: Sequence[int], on_checksums: OnChecksums) -> None:
        """Hashes whole blocks, over all ranks' heads. Results arrive in the order of the calls."""

        def merge(by_rank: list[list[int]] | KVTransferFailed) -> None:
            on_checksums(by_rank if isinstance(by_rank, KVTransferFailed) else combine(by_rank))

        for rank, done in zip(self._ranks, gather(len(self._ranks), merge), strict=True):
            rank.checksums(block_ids, done)
