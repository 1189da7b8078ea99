"""Rank 0's end of a follower's KV transfers: sends orders and collects their results."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone
from tandem.kv_transfer.ranks import orders
from tandem.kv_transfer.ranks.orders import Order, OrderDone, PoolReady
from tandem.protocol.codec import Codec
from tandem.protocol.messages.transfer import ConnectorParams
from tandem.protocol.rank_channel import RankChannel
from tandem.runtime.errors import InternalError, KVPathRefused, KVTransferFailed
from tandem.runtime.threads import show_thread_name

log = logging.getLogger(__name__)

MakeOrder = Callable[[int], Order]
"""Makes the order with the given job id."""


class RemoteRank:
    """One follower. No call blocks: orders are sent, and callbacks run, on threads of this object."""

    def __init__(self, connection: Connection) -> None:
        self._channel: RankChannel[PoolReady | OrderDone] = RankChannel(connection, Codec(PoolReady | OrderDone))
        self._job_ids = itertools.count()
        self._pending: dict[int, Callable[[OrderDone], None]] = {}
        self._lock = threading.Lock()
        self._sending = ThreadPoolExecutor(1, "rank-orders", show_thread_name)  # a frozen follower reads nothing
        self._gone = False

    def wait_until_ready(self, timeout_s: float) -> ConnectorParams:
        """Blocks until the follower has allocated its pool. Returns how it is reached. Raises InternalError."""
        message = self._channel.receive() if self._channel.has_message(timeout_s) else None
        if not isinstance(message, PoolReady):
            raise InternalError(f"a rank did not come up within {timeout_s:.0f} s")
        threading.Thread(target=self._listen, name="remote-rank", daemon=True).start()
        return message.params

    def open_sender(self, connector: str, pair_id: str, peers: list[ConnectorParams], on_ready: OnDone) -> KVSender:
        self.order(lambda job_id: orders.OpenRankSender(job_id, pair_id, connector, peers), on_ready)
        return _RemoteSender(self, pair_id)

    def open_receiver(
        self, connector: str, pair_id: str, num_senders: int, store: ConnectorParams, on_ready: OnDone
    ) -> KVReceiver:
        self.order(lambda job_id: orders.OpenRankReceiver(job_id, pair_id, connector, num_senders, store), on_ready)
        return _RemoteReceiver(self, pair_id)

    def checksums(self, block_ids: Sequence[int], on_checksums: Callable[[list[int]], None], on_done: OnDone) -> None:
        """Hashes the follower's heads of each block. `on_checksums` is called before `on_done` on success."""

        def answered(answer: OrderDone) -> None:
            if answer.error is None:
                on_checksums(answer.checksums)
            on_done(_failure(answer))

        self._send(lambda job_id: orders.ComputeChecksums(job_id, list(block_ids)), answered)

    def use_tier(self, make: MakeOrder, on_answer: Callable[[int, str | None], None]) -> None:
        """Sends an order about a tier; `on_answer` is called once with the number of blocks and the error."""
        self._send(make, lambda answer: on_answer(answer.num_blocks, answer.error))

    def order(self, make: MakeOrder, on_done: OnDone) -> None:
        """Sends an order; `on_done` is called once with its result."""
        self._send(make, lambda answer: on_done(_failure(answer)))

    def _send(self, make: MakeOrder, on_answer: Callable[[OrderDone], None]) -> None:
        self._sending.submit(self._send_now, make, on_answer)

    def _send_now(self, make: MakeOrder, on_answer: Callable[[OrderDone], None]) -> None:
        job_id = next(self._job_ids)
        with self._lock:
            gone = self._gone
            self._pending[job_id] = on_answer
        if gone:
            self._finish(OrderDone(job_id, "a rank of this worker is gone"))
            return
        try:
            self._channel.send(make(job_id))
        except OSError as error:
            self._finish(OrderDone(job_id, f"a rank of this worker takes no orders: {error}"))

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            assert isinstance(message, OrderDone)
            self._finish(message)
        with self._lock:
            self._gone = True
            pending = list(self._pending)
        for job_id in pending:
            self._finish(OrderDone(job_id, "a rank of this worker is gone"))

    def _finish(self, answer: OrderDone) -> None:
        with self._lock:
            on_answer = self._pending.pop(answer.job_id, None)
        if on_answer is not None:
            on_answer(answer)


def _failure(answer: OrderDone) -> KVTransferFailed | None:
    if answer.error is None:
        return None
    return (KVPathRefused if answer.is_refused else KVTransferFailed)(answer.error)


class _RemoteSender:
    def __init__(self, rank: RemoteRank, pair_id: str) -> None:
        self._rank = rank
        self._pair_id = pair_id

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        dst = list(dst_block_ids)
        self._rank.order(lambda job_id: orders.PrepareBlocks(job_id, self._pair_id, dst), lambda error: None)

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        src, dst = list(src_block_ids), list(dst_block_ids)
        self._rank.order(lambda job_id: orders.SendBlocks(job_id, self._pair_id, src, dst), on_done)

    def close(self, on_closed: Callable[[], None]) -> None:
        """See `KVSender.close`. Only the follower's answer proves that it writes nothing more.

        A frozen follower takes no orders, but may carry out earlier ones later. The end of a follower ends the worker.
        """

        def closed(error: KVTransferFailed | None) -> None:
            if error is None:
                on_closed()
            else:
                log.error("pair %s cannot be closed: %s", self._pair_id, error)

        self._rank.order(lambda job_id: orders.CloseRankSender(job_id, self._pair_id), closed)


class _RemoteReceiver:
    def __init__(self, rank: RemoteRank, pair_id: str) -> None:
        self._rank = rank
        self._pair_id = pair_id

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        ids = list(block_ids)
        self._rank.order(lambda job_id: orders.ReceiveBlocks(job_id, self._pair_id, ids), on_done)

    def close(self) -> None:
        self._rank.order(lambda job_id: orders.CloseRankReceiver(job_id, self._pair_id), lambda error: None)
