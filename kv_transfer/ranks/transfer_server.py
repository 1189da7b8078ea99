"""A follower's end of its KV transfers: carries out rank 0's orders on the threads of its paths."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.connectors.process_group import connect_store
from tandem.kv_transfer.ranks import orders
from tandem.kv_transfer.ranks.orders import Order, OrderDone, PoolReady
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.tiers.rank_tiers import RankTiers
from tandem.kv_transfer.tiers.registry import make_tiers
from tandem.kv_transfer.tiers.tier import TierAnswer
from tandem.protocol.codec import Codec
from tandem.protocol.messages.transfer import ConnectorParams
from tandem.protocol.rank_channel import RankChannel
from tandem.protocol.tls_identity import tls_contexts
from tandem.runtime.errors import KVPathRefused, KVTransferFailed, first_line

log = logging.getLogger(__name__)


class TransferServer:
    """Serves one follower's pool. params: how the pool is reached."""

    def __init__(self, connection: Connection, pool: RankPool, params: ConnectorParams) -> None:
        self._channel: RankChannel[Order] = RankChannel(connection, Codec(Order))
        self._pool = pool
        self._params = pool.located(params)
        self._senders: dict[str, KVSender] = {}
        self._receivers: dict[str, KVReceiver] = {}
        self._checksum_thread = JobThread("checksums", keeps_going=True)
        self._tiers = RankTiers(pool.blocks, [])

    def start(self) -> None:
        """Announces the pool to rank 0, then serves on a thread until rank 0 is gone."""
        self._channel.send(PoolReady(self._params))
        threading.Thread(target=self._serve, name="transfers", daemon=True).start()

    def _serve(self) -> None:
        while (order := self._channel.receive()) is not None:
            done = partial(self._answer, order.job_id)
            try:
                self._carry_out(order, done)
            except KVTransferFailed as error:
                done(error)
            except Exception as error:  # rank 0 waits for the answer to each order
                log.exception("an order about KV transfers failed")
                done(KVTransferFailed(f"a rank of this worker failed: {first_line(error)}"))

    def _carry_out(self, order: Order, done: OnDone) -> None:
        match order:
            case orders.UseKeys():
                network = replace(self._pool.network, tls=tls_contexts(order.keys))
                self._pool = replace(self._pool, network=network)
                done(None)
            case orders.OpenRankSender():
                self._senders[order.pair_id] = self._pool.open_sender(order.connector, order.pair_id, order.peers, done)
            case orders.OpenRankReceiver():
                self._receivers[order.pair_id] = self._pool.open_receiver(
                    order.connector,
                    order.pair_id,
                    order.num_senders,
                    lambda path_id: connect_store(path_id, order.store),
                    done,
                )
            case orders.PrepareBlocks():
                if order.pair_id in self._senders:
                    self._senders[order.pair_id].prepare(order.dst_block_ids)
                done(None)
            case orders.SendBlocks():
                if order.pair_id not in self._senders:
                    raise KVTransferFailed("the pair is closed")
                self._senders[order.pair_id].send(order.src_block_ids, order.dst_block_ids, done)
            case orders.ReceiveBlocks():
                if order.pair_id not in self._receivers:
                    raise KVTransferFailed("the pair is closed")
                self._receivers[order.pair_id].receive(order.block_ids, done)
            case orders.CloseRankSender():
                sender = self._senders.pop(order.pair_id, None)
                if sender is None:  # it could not be opened
                    done(None)
                else:
                    sender.close(lambda: done(None))
            case orders.CloseRankReceiver():
                receiver = self._receivers.pop(order.pair_id, None)
                if receiver is not None:
                    receiver.close()
                done(None)
            case orders.ComputeChecksums():
                checksums: list[int] = []
                self._checksum_thread.submit(
                    lambda: checksums.extend(self._pool.checksums(order.block_ids)),
                    lambda error: self._answer(order.job_id, error, checksums),
                )
            case orders.UseTiers():
                pool = self._pool
                self._tiers = RankTiers(pool.blocks, make_tiers(order.config, pool.layout, pool.rank, pool.blocks))
                done(None)
            case orders.StoreInTier():
                self._tiers.store(order.tier, order.block_ids, order.hashes, partial(self._answer_tier, order.job_id))
            case orders.LoadFromTier():
                self._tiers.load(order.tier, order.block_ids, order.hashes, partial(self._answer_tier, order.job_id))
            case orders.RefreshTier():
                self._tiers.refresh(order.tier, partial(self._answer_tier, order.job_id))
            case orders.ClearTier():
                self._tiers.clear(order.tier, partial(self._answer_tier, order.job_id))

    def _answer_tier(self, job_id: int, answer: TierAnswer) -> None:
        error = None if answer.error is None else KVTransferFailed(answer.error)
        self._answer(job_id, error, num_blocks=answer.num_blocks)

    def _answer(
        self, job_id: int, error: KVTransferFailed | None, checksums: Sequence[int] = (), num_blocks: int = 0
    ) -> None:
        message = None if error is None else error.message
        try:
            self._channel.send(
                OrderDone(job_id, message, list(checksums), isinstance(error, KVPathRefused), num_blocks)
            )
        except OSError:
            log.debug("rank 0 is gone; the result of job %d is dropped", job_id)
