"""The KV transfers of a rank that has a process of its own: rank 0's end, which sends orders and collects their
results, and the follower's, which carries them out on the threads of its paths."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from tandem.kv_transfer.checksums import OnChecksums
from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone
from tandem.kv_transfer.ranks.fan_out import OnAddresses
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.tiers.tier import TiersConfig
from tandem.kv_transfer.tiers.tier_thread import TierThread
from tandem.protocol.codec import Codec
from tandem.protocol.network_keys import NetworkKeys
from tandem.protocol.rank_channel import RankChannel
from tandem.protocol.tls_identity import tls_contexts
from tandem.runtime.errors import InternalError, KVPathRefused, KVTransferFailed, first_line
from tandem.runtime.threads import show_thread_name

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0


class PoolReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Follower to rank 0, once: its pool is allocated."""


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank 0 to follower. name: in the table of `TransferServer`. Answered by one OrderDone."""

    job_id: int
    name: str
    args: list[Any]


class OrderDone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Follower to rank 0. error: None on success. is_refused: the error is a KVPathRefused."""

    job_id: int
    result: Any = None
    error: str | None = None
    is_refused: bool = False


Done = Callable[[Any], None]
"""Gets an order's result, or a KVTransferFailed. Called once, on any thread."""


class RemoteRank:
    """Rank 0's end of one follower. No call blocks: orders are sent, and callbacks run, on threads of this object."""

    def __init__(self, connection: Connection) -> None:
        self._channel: RankChannel[PoolReady | OrderDone] = RankChannel(connection, Codec(PoolReady | OrderDone))
        self._job_ids = itertools.count()
        self._pending: dict[int, Callable[[Any], None]] = {}
        self._lock = threading.Lock()
        self._sending = ThreadPoolExecutor(1, "rank-orders", show_thread_name)  # a frozen follower reads nothing
        self._gone = False

    def wait_until_ready(self, keys: NetworkKeys | None = None) -> None:
        """Blocks until the follower has allocated its pool. Raises InternalError after READY_TIMEOUT_S.

        keys: of the cluster, by which the follower protects its paths.
        """
        message = self._channel.receive() if self._channel.has_message(READY_TIMEOUT_S) else None
        if not isinstance(message, PoolReady):
            raise InternalError(f"a rank did not come up within {READY_TIMEOUT_S:.0f} s")
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


class TransferServer:
    """A follower's end: serves its pool."""

    def __init__(self, connection: Connection, pool: RankPool) -> None:
        self._channel: RankChannel[Order] = RankChannel(connection, Codec(Order))
        self._pool = pool
        self._senders: dict[str, KVSender] = {}
        self._receivers: dict[str, KVReceiver] = {}
        self._tiers: dict[str, TierThread] = {}
        self._orders: dict[str, Callable[..., None]] = {
            "use_keys": self._use_keys,
            "use_tiers": self._use_tiers,
            "open_sender": self._open_sender,
            "open_receiver": self._open_receiver,
            "prepare": self._prepare,
            "send": self._send,
            "receive": self._receive,
            "close_sender": self._close_sender,
            "close_receiver": self._close_receiver,
            "checksums": lambda done, block_ids: self._pool.checksums(block_ids, done),
            "store": partial(self._tier_job, TierThread.store),
            "load": partial(self._tier_job, TierThread.load),
            "refresh": partial(self._tier_job, TierThread.refresh),
            "clear": partial(self._tier_job, TierThread.clear),
        }
        """By name. Each gets its `Done` and the order's arguments."""

    def start(self) -> None:
        """Tells rank 0 that the pool is there, then serves on a thread until rank 0 is gone."""
        self._channel.send(PoolReady())
        threading.Thread(target=self._serve, name="transfers", daemon=True).start()

    def _serve(self) -> None:
        try:
            while (order := self._channel.receive()) is not None:
                self._carry_out(order)
        except Exception:  # not a message: nothing more can be read
            log.exception("rank 0 cannot be understood")
        finally:
            self._channel.close()  # rank 0 waits for no more answers then

    def _carry_out(self, order: Order) -> None:
        done = partial(self._answer, order.job_id)
        try:
            self._orders[order.name](done, *order.args)
        except KVTransferFailed as error:
            done(error)
        except Exception as error:  # rank 0 waits for the answer to each order
            log.exception("an order about KV transfers failed")
            done(KVTransferFailed(f"a rank of this worker failed: {first_line(error)}"))

    def _answer(self, job_id: int, result: Any) -> None:
        answer = OrderDone(job_id, result)
        if isinstance(result, KVTransferFailed):
            answer = OrderDone(job_id, None, result.message, isinstance(result, KVPathRefused))
        try:
            self._channel.send(answer)
        except OSError:
            log.debug("rank 0 is gone; the result of job %d is dropped", job_id)
        except Exception as error:  # a result that cannot be sent
            log.exception("the result of job %d cannot be sent", job_id)
            self._channel.send(OrderDone(job_id, error=f"a rank of this worker failed: {first_line(error)}"))

    # ---- orders

    def _use_keys(self, done: Done, keys: Any) -> None:
        """Protects the paths that are opened from now on by the cluster's keys."""
        network = replace(self._pool.network, tls=tls_contexts(msgspec.convert(keys, NetworkKeys)))
        self._pool = replace(self._pool, network=network)
        done(None)

    def _use_tiers(self, done: Done, config: Any) -> None:
        """Keeps blocks in these tiers."""
        self._tiers = self._pool.tiers(msgspec.convert(config, TiersConfig))
        done(None)

    def _open_sender(self, done: Done, connector: str, pair_id: str, addresses: list[list[bytes]]) -> None:
        self._senders[pair_id] = self._pool.open_sender(connector, pair_id, addresses, done)

    def _open_receiver(self, done: Done, connector: str, pair_id: str, num_senders: int) -> None:
        self._receivers[pair_id] = self._pool.open_receiver(connector, pair_id, num_senders, done)

    def _prepare(self, done: Done, pair_id: str, dst_block_ids: list[int]) -> None:
        if pair_id in self._senders:
            self._senders[pair_id].prepare(dst_block_ids)
        done(None)

    def _send(self, done: Done, pair_id: str, src_block_ids: list[int], dst_block_ids: list[int]) -> None:
        if pair_id not in self._senders:
            raise KVTransferFailed("the pair is closed")
        self._senders[pair_id].send(src_block_ids, dst_block_ids, done)

    def _receive(self, done: Done, pair_id: str, block_ids: list[int]) -> None:
        if pair_id not in self._receivers:
            raise KVTransferFailed("the pair is closed")
        self._receivers[pair_id].receive(block_ids, done)

    def _close_sender(self, done: Done, pair_id: str) -> None:
        """Done when nothing can be written any more."""
        sender = self._senders.pop(pair_id, None)
        if sender is None:  # it could not be opened
            done(None)
        else:
            sender.close(lambda: done(None))

    def _close_receiver(self, done: Done, pair_id: str) -> None:
        receiver = self._receivers.pop(pair_id, None)
        if receiver is not None:
            receiver.close()
        done(None)

    def _tier_job(self, do: Callable[..., None], done: Done, name: str, *job: Any) -> None:
        """Has a result also if the tier fails: the blocks before."""
        do(self._tiers[name], *job, lambda answer: done([answer.num_blocks, answer.error]))
