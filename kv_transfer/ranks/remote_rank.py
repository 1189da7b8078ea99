"""The KV transfers of a follower's pool, ordered by rank 0: each order is answered by one JobDone, come what may."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection

import msgspec

from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.connectors.process_group import connect_store
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.protocol.codec import Codec
from tandem.protocol.messages.transfer import ConnectorParams
from tandem.protocol.rank_channel import RankChannel
from tandem.runtime.errors import InternalError, KVTransferFailed

log = logging.getLogger(__name__)


class OpenSender(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to follower: done when the path can be used."""

    job_id: int
    pair_id: str
    connector: str
    peers: list[ConnectorParams]


class OpenReceiver(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to follower: done when the path can be used. store: where the pair's ranks meet."""

    job_id: int
    pair_id: str
    connector: str
    num_senders: int
    store: ConnectorParams


class SendBlocks(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to follower: see `kv_transfer.connector.KVSender.send`."""

    job_id: int
    pair_id: str
    src_block_ids: list[int]
    dst_block_ids: list[int]


class PrepareBlocks(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to follower: see `kv_transfer.connector.KVSender.prepare`; done at once."""

    job_id: int
    pair_id: str
    dst_block_ids: list[int]


class ReceiveBlocks(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to follower: see `kv_transfer.connector.KVReceiver.receive`."""

    job_id: int
    pair_id: str
    block_ids: list[int]


class CloseSender(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to follower: done when nothing can be written any more."""

    job_id: int
    pair_id: str


class CloseReceiver(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to follower."""

    job_id: int
    pair_id: str


class TakeChecksums(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to follower: see `kv_transfer.ranks.rank_pool.RankPool.checksums`."""

    job_id: int
    block_ids: list[int]


class PoolReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Follower to rank 0, once: where its pool lies."""

    params: ConnectorParams


class JobDone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Follower to rank 0: error is None when all went well. checksums: the answer to TakeChecksums."""

    job_id: int
    error: str | None
    checksums: list[int] = []


Order = (
    OpenSender | OpenReceiver | PrepareBlocks | SendBlocks | ReceiveBlocks | CloseSender | CloseReceiver | TakeChecksums
)


class RemoteRank:
    """Rank 0's end. `on_done` callbacks run on a thread of its own."""

    def __init__(self, connection: Connection) -> None:
        self._channel: RankChannel[PoolReady | JobDone] = RankChannel(connection, Codec(PoolReady | JobDone))
        self._job_ids = itertools.count()
        self._pending: dict[int, OnDone] = {}
        self._takers: dict[int, Callable[[list[int]], None]] = {}  # by job id, of those that wait for checksums
        self._lock = threading.Lock()
        self._gone = False

    def wait_until_ready(self, timeout_s: float) -> ConnectorParams:
        """Where the follower's pool lies. Raises InternalError when it does not say so in time."""
        message = self._channel.receive() if self._channel.has_message(timeout_s) else None
        if not isinstance(message, PoolReady):
            raise InternalError(f"a rank did not come up within {timeout_s:.0f} s")
        threading.Thread(target=self._listen, name="remote-rank", daemon=True).start()
        return message.params

    def order(self, make: Callable[[int], Order], on_done: OnDone) -> None:
        """`make` gets the order's job id."""
        job_id = next(self._job_ids)
        with self._lock:
            gone = self._gone
            if not gone:
                self._pending[job_id] = on_done
        if gone:
            on_done(KVTransferFailed("a rank of this worker is gone"))
            return
        try:
            self._channel.send(make(job_id))
        except OSError as error:
            self._finish(job_id, f"a rank of this worker takes no orders: {error}")

    def open_sender(self, connector: str, pair_id: str, peers: list[ConnectorParams], on_ready: OnDone) -> KVSender:
        self.order(lambda job_id: OpenSender(job_id, pair_id, connector, peers), on_ready)
        return _RemoteSender(self, pair_id)

    def open_receiver(
        self, connector: str, pair_id: str, num_senders: int, store: ConnectorParams, on_ready: OnDone
    ) -> KVReceiver:
        self.order(lambda job_id: OpenReceiver(job_id, pair_id, connector, num_senders, store), on_ready)
        return _RemoteReceiver(self, pair_id)

    def checksums(self, block_ids: Sequence[int], take: Callable[[list[int]], None], on_done: OnDone) -> None:
        """`take` is called before `on_done` when all goes well."""
        ids = list(block_ids)

        def make(job_id: int) -> Order:
            self._takers[job_id] = take
            return TakeChecksums(job_id, ids)

        self.order(make, on_done)

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            assert isinstance(message, JobDone)
            take = self._takers.pop(message.job_id, None)
            if take is not None and message.error is None:
                take(message.checksums)
            self._finish(message.job_id, message.error)
        with self._lock:
            self._gone = True
        for job_id in list(self._pending):
            self._finish(job_id, "a rank of this worker is gone")

    def _finish(self, job_id: int, error: str | None) -> None:
        with self._lock:
            on_done = self._pending.pop(job_id, None)
        if on_done is not None:
            on_done(None if error is None else KVTransferFailed(error))


class _RemoteSender:
    def __init__(self, rank: RemoteRank, pair_id: str) -> None:
        self._rank = rank
        self._pair_id = pair_id

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        dst = list(dst_block_ids)
        self._rank.order(lambda job_id: PrepareBlocks(job_id, self._pair_id, dst), lambda error: None)

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        src, dst = list(src_block_ids), list(dst_block_ids)
        self._rank.order(lambda job_id: SendBlocks(job_id, self._pair_id, src, dst), on_done)

    def close(self, on_closed: Callable[[], None]) -> None:
        self._rank.order(lambda job_id: CloseSender(job_id, self._pair_id), lambda error: on_closed())


class _RemoteReceiver:
    def __init__(self, rank: RemoteRank, pair_id: str) -> None:
        self._rank = rank
        self._pair_id = pair_id

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        ids = list(block_ids)
        self._rank.order(lambda job_id: ReceiveBlocks(job_id, self._pair_id, ids), on_done)

    def close(self) -> None:
        self._rank.order(lambda job_id: CloseReceiver(job_id, self._pair_id), lambda error: None)


class TransferServer:
    """A follower's end: carries out orders on the threads of its paths."""

    def __init__(self, connection: Connection, pool: RankPool, params: ConnectorParams) -> None:
        self._channel: RankChannel[Order] = RankChannel(connection, Codec(Order))
        self._pool = pool
        self._params = pool.located(params)
        self._senders: dict[str, KVSender] = {}
        self._receivers: dict[str, KVReceiver] = {}
        self._checksum_thread = JobThread("checksums", keeps_going=True)

    def start(self) -> None:
        """Tell rank 0 where the pool lies, and serve on a thread until rank 0 is gone."""
        self._channel.send(PoolReady(self._params))
        threading.Thread(target=self._serve, name="transfers", daemon=True).start()

    def _serve(self) -> None:
        while (order := self._channel.receive()) is not None:
            done = partial(self._answer, order.job_id)
            try:
                self._carry_out(order, done)
            except KVTransferFailed as error:
                done(error)

    def _carry_out(self, order: Order, done: OnDone) -> None:
        match order:
            case OpenSender():
                self._senders[order.pair_id] = self._pool.open_sender(order.connector, order.pair_id, order.peers, done)
            case OpenReceiver():
                self._receivers[order.pair_id] = self._pool.open_receiver(
                    order.connector,
                    order.pair_id,
                    order.num_senders,
                    lambda path_id: connect_store(path_id, order.store),
                    done,
                )
            case PrepareBlocks():
                if order.pair_id in self._senders:
                    self._senders[order.pair_id].prepare(order.dst_block_ids)
                done(None)
            case SendBlocks():
                if order.pair_id not in self._senders:
                    raise KVTransferFailed("the pair is closed")
                self._senders[order.pair_id].send(order.src_block_ids, order.dst_block_ids, done)
            case ReceiveBlocks():
                if order.pair_id not in self._receivers:
                    raise KVTransferFailed("the pair is closed")
                self._receivers[order.pair_id].receive(order.block_ids, done)
            case CloseSender():
                sender = self._senders.pop(order.pair_id, None)
                if sender is None:  # it could not be opened
                    done(None)
                else:
                    sender.close(lambda: done(None))
            case CloseReceiver():
                receiver = self._receivers.pop(order.pair_id, None)
                if receiver is not None:
                    receiver.close()
                done(None)
            case TakeChecksums():
                self._take_checksums(order)

    def _take_checksums(self, order: TakeChecksums) -> None:
        checksums: list[int] = []
        self._checksum_thread.submit(
            lambda: checksums.extend(self._pool.checksums(order.block_ids)),
            lambda error: self._answer(order.job_id, error, checksums),
        )

    def _answer(self, job_id: int, error: KVTransferFailed | None, checksums: Sequence[int] = ()) -> None:
        try:
            self._channel.send(JobDone(job_id, None if error is None else error.message, list(checksums)))
        except OSError:
            log.debug("rank 0 is gone; its order %d has no answer", job_id)
