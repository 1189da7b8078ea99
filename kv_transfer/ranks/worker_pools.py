"""All ranks' KV pools of one worker as one: what rank 0 orders, every rank does on its own heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from torch._C._distributed_c10d import Store

from tandem.kv_transfer.checksums import OnChecksums, combine
from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.ranks.fan_out import FanOutReceiver, FanOutSender, when_all
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.ranks.remote_rank import RemoteRank
from tandem.protocol.messages.transfer import ConnectorParams
from tandem.runtime.errors import KVTransferFailed

READY_TIMEOUT_S = 60.0


class WorkerPools:
    """own: rank 0's pool, which lies at `params`. followers: connections to the other ranks, in order."""

    def __init__(self, own: RankPool, params: ConnectorParams, followers: Sequence[Connection] = ()) -> None:
        self._own = own
        self._followers = [RemoteRank(connection) for connection in followers]
        self._checksum_thread = JobThread("checksums", keeps_going=True)
        self.layout = own.layout
        self.host = own.host
        self.params = [own.located(params)]
        """Where each rank's pool lies; complete after `wait_until_ready`."""

    @property
    def device_ids(self) -> list[str]:
        """Of each rank's GPU; see ConnectorParams."""
        return [params.device_id for params in self.params]

    def wait_until_ready(self) -> None:
        """Blocks until every follower has its pool. Raises InternalError when one does not say so."""
        self.params += [follower.wait_until_ready(READY_TIMEOUT_S) for follower in self._followers]

    def open_sender(self, connector: str, pair_id: str, peers: list[ConnectorParams], on_ready: OnDone) -> KVSender:
        """From all our ranks to all of the decode worker's, one ConnectorParams each. Raises KVTransferFailed."""
        ready = when_all(1 + len(self._followers), on_ready)
        own = self._own.open_sender(connector, pair_id, peers, ready)
        others = [follower.open_sender(connector, pair_id, peers, ready) for follower in self._followers]
        return FanOutSender([own, *others])

    def checksums(self, block_ids: Sequence[int], on_done: OnChecksums) -> None:
        """Of whole blocks, all ranks' heads together. Answers come in the order of the calls."""
        of_ranks: list[list[int]] = []

        def done(error: KVTransferFailed | None) -> None:
            on_done(error or combine(of_ranks))

        part_done = when_all(1 + len(self._followers), done)
        self._checksum_thread.submit(lambda: of_ranks.append(self._own.checksums(block_ids)), part_done)
        for follower in self._followers:
            follower.checksums(block_ids, of_ranks.append, part_done)

    def open_receiver(
        self,
        connector: str,
        pair_id: str,
        num_senders: int,
        open_store: Callable[[str], Store],
        store: ConnectorParams,
        on_ready: OnDone,
    ) -> KVReceiver:
        """From all `num_senders` ranks of a prefill worker. Rank 0 holds the store, the others find it by `store`.

        Raises KVTransferFailed.
        """
        ready = when_all(1 + len(self._followers), on_ready)
        own = self._own.open_receiver(connector, pair_id, num_senders, open_store, ready)
        others = [follower.open_receiver(connector, pair_id, num_senders, store, ready) for follower in self._followers]
        return FanOutReceiver([own, *others])
