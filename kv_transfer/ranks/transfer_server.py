"""A follower's end of its KV transfers: carries out rank 0's orders on the threads of its paths."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from tandem.kv_transfer.connector import KVReceiver, KVSender
from tandem.kv_transfer.ranks.orders import Order, OrderDone, PoolReady
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.tiers.tier import TiersConfig
from tandem.kv_transfer.tiers.tier_thread import TierThread
from tandem.protocol.codec import Codec
from tandem.protocol.network_keys import NetworkKeys
from tandem.protocol.rank_channel import RankChannel
from tandem.protocol.tls_identity import tls_contexts
from tandem.runtime.errors import KVPathRefused, KVTransferFailed, first_line

log = logging.getLogger(__name__)

Done = Callable[[Any], None]
"""Gets an order's result, or a KVTransferFailed. Called once, on any thread."""


class TransferServer:
    """Serves one follower's pool."""

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
