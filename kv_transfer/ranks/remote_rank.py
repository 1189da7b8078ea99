"""A worker's end of a follower's KV transfers: sends orders and collects their results."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from tandem.kv_transfer.checksums import OnChecksums
from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone
from tandem.kv_transfer.ranks.orders import Order, OrderDone, PoolReady
from tandem.kv_transfer.ranks.rank_pool import OnAddresses
from tandem.protocol.codec import Codec
from tandem.protocol.network_keys import NetworkKeys
from tandem.protocol.rank_channel import RankChannel
from tandem.runtime.errors import InternalError, KVPathRefused, KVTransferFailed, first_line
from tandem.runtime.threads import show_thread_name

log = logging.getLogger(__name__)


class RemoteRank:
    """One follower. No call blocks: orders are sent, and callbacks run, on threads of this object."""

    def __init__(self, connection: Connection) -> None:
        self._channel: RankChannel[PoolReady | OrderDone] = RankChannel(connection, Codec(PoolReady | OrderDone))
        self._job_ids = itertools.count()
        self._pending: dict[int, Callable[[Any], None]] = {}
        self._lock = threading.Lock()
        self._sending = ThreadPoolExecutor(1, "rank-orders", show_thread_name)  # a frozen follower reads nothing
        self._gone = False

    def wait_until_ready(self, timeout_s: float, keys: NetworkKeys | None = None) -> None:
        """Blocks until the follower has allocated its pool. Raises InternalError.

        keys: of the cluster, by which the follower protects its paths.
        """
        message = self._channel.receive() if self._channel.has_message(timeout_s) else None
        if not isinstance(message, PoolReady):
            raise InternalError(f"a rank did not come up within {timeout_s:.0f} s")
        threading.Thread(target=self._listen, name="remote-rank", daemon=True).start()
        if keys is not None:
            self.order("use_keys", keys)

    def open_sender(self, connector: str, pair_id: str, addresses: list[list[bytes]], on_ready: OnDone) -> KVSender:
        self.order("open_sender", connector, pair_id, addresses, on_done=on_ready)
        return _RemoteSender(self, pair_id)

    def open_receiver(self, connector: str, pair_id: str, num_senders: int, on_addresses: OnAddresses) -> KVReceiver:
        self.order("open_receiver", connector, pair_id, num_senders, on_done=on_addresses)
        return _RemoteReceiver(self, pair_id)

    def checksums(self, block_ids: Sequence[int], on_checksums: OnChecksums) -> None:
        self.order("checksums", list(block_ids), on_done=on_checksums)

    def order(self, name: str, *args: Any, on_done: Callable[[Any], None] = lambda result: None) -> None:
        """Sends an order (`TransferServer`). `on_done` gets its result, or a KVTransferFailed, once."""
        self._sending.submit(self._send, name, args, on_done)

    def _send(self, name: str, args: tuple[Any, ...], on_done: Callable[[Any], None]) -> None:
        job_id = next(self._job_ids)
        with self._lock:
            gone = self._gone
            self._pending[job_id] = on_done
        if gone:
            self._finish(OrderDone(job_id, error="a rank of this worker is gone"))
            return
        try:
            self._channel.send(Order(job_id, name, list(args)))
        except OSError as error:
            self._finish(OrderDone(job_id, error=f"a rank of this worker takes no orders: {error}"))
        except Exception as error:  # an order that is too large; its caller waits for the answer
            log.exception("an order to a rank of this worker cannot be sent")
            self._finish(OrderDone(job_id, error=f"an order to a rank cannot be sent: {first_line(error)}"))

    def _listen(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                assert isinstance(message, OrderDone)
                self._finish(message)
        except Exception:  # not a message: nothing more can be read
            log.exception("a rank of this worker cannot be understood")
        with self._lock:
            self._gone = True
            pending = list(self._pending)
        for job_id in pending:
            self._finish(OrderDone(job_id, error="a rank of this worker is gone"))

    def _finish(self, answer: OrderDone) -> None:
        with self._lock:
            on_done = self._pending.pop(answer.job_id, None)
        if on_done is None:
            return
        result = answer.result
        if answer.error is not None:
            result = (KVPathRefused if answer.is_refused else KVTransferFailed)(answer.error)
        try:
            on_done(result)
        except Exception:  # the answers to other orders follow
            log.exception("the answer of a rank could not be handled")


class _RemoteSender:
    def __init__(self, rank: RemoteRank, pair_id: str) -> None:
        self._rank = rank
        self._pair_id = pair_id

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        self._rank.order("prepare", self._pair_id, list(dst_block_ids))

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        self._rank.order("send", self._pair_id, list(src_block_ids), list(dst_block_ids), on_done=on_done)

    def close(self, on_closed: Callable[[], None]) -> None:
        """See `KVSender.close`. Only the follower's answer proves that it writes nothing more.

        A frozen follower takes no orders, but may carry out earlier ones later. The end of a follower ends the worker.
        """

        def closed(error: KVTransferFailed | None) -> None:
            if error is None:
                on_closed()
            else:
                log.error("pair %s cannot be closed: %s", self._pair_id, error)

        self._rank.order("close_sender", self._pair_id, on_done=closed)


class _RemoteReceiver:
    def __init__(self, rank: RemoteRank, pair_id: str) -> None:
        self._rank = rank
        self._pair_id = pair_id

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        self._rank.order("receive", self._pair_id, list(block_ids), on_done=on_done)

    def close(self) -> None:
        self._rank.order("close_receiver", self._pair_id)
