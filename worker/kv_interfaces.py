"""What `worker.kv_traffic` needs of an engine: its KV pools, and who decides about transfers in both roles.

A transfer moves the blocks of one prompt. Methods that return actions get the results of those actions later, as the
actions say (`decode_worker.actions`). All of them are called on the worker's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from tandem.kv_transfer.checksums import OnChecksums
from tandem.kv_transfer.connector import KVConnector, KVReceiver, KVSender, OnDone
from tandem.protocol.messages.transfer import FinishTransfer, KVLayout, KVReserved, RenewLeases, ReserveKV, ShipKV
from tandem.runtime.errors import ErrorInfo, KVTransferFailed
from tandem.runtime.processes.exits import WatchExit

A = TypeVar("A")
"""Actions of a worker: those of `decode_worker.actions`, and more for another engine."""


class KVPools(Protocol):
    """The KV pools of all ranks of a worker. `kv_transfer.ranks.worker_pools` has those of Tandem's own engine."""

    @property
    def layout(self) -> KVLayout: ...

    def open_sender(self, connector: str, pair_id: str, addresses: list[list[bytes]], on_ready: OnDone) -> KVSender:
        """Opens all paths to a decode worker. addresses: see `PairAccepted`. Raises KVPathRefused."""

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

    def checksums(self, block_ids: Sequence[int], on_checksums: OnChecksums) -> None:
        """Hashes whole blocks. Results arrive on any thread, in the order of the calls."""


class KVHost(Protocol):
    """The processes and pools of one worker."""

    @property
    def pids(self) -> list[int]:
        """Processes of all ranks, in order, which write to the pools of peers."""

    @property
    def pools(self) -> KVPools: ...

    @property
    def block_bytes(self) -> int:
        """Size of one block, summed over all ranks."""

    @property
    def connectors(self) -> Mapping[str, KVConnector]:
        """Those that the worker offers its peers, in order of preference."""

    @property
    def device(self) -> str:
        """Torch's name of the kind of device that holds the pools."""

    @property
    def host_id(self) -> str:
        """See `runtime.host.host_id`."""

    @property
    def watch_exit(self) -> WatchExit:
        """Reports the exits of peers' processes on this host."""


class PrefillTransfers(Protocol[A]):
    """The transfers of prompts that this worker computes for others."""

    def on_reserved(self, message: KVReserved) -> list[A]: ...

    def on_refused(self, transfer_id: str, error: ErrorInfo) -> list[A]: ...

    def on_renewed(self, now: float, message: RenewLeases) -> None: ...

    def on_shipped(self, transfer_id: str, error: KVTransferFailed | None) -> list[A]:
        """Handles the end of one `Ship`."""

    def on_pair_lost(self, pair_id: str, reason: str) -> list[A]: ...


class DecodeTransfers(Protocol[A]):
    """The transfers of prompts that other workers compute for this one."""

    def wanted_transfers(self, pair_id: str) -> list[str]:
        """Returns the transfers of a pair whose leases must be renewed."""

    def on_reserve(self, now: float, message: ReserveKV) -> list[A]: ...

    def on_ship(self, message: ShipKV) -> list[A]: ...

    def on_finish_transfer(self, message: FinishTransfer) -> list[A]: ...

    def on_close_transfer(self, transfer_id: str) -> list[A]: ...

    def on_received(self, transfer_id: str, error: KVTransferFailed | None) -> list[A]:
        """Handles the end of one `Receive`."""

    def on_corrupt(self, transfer_id: str, error: KVTransferFailed) -> list[A]:
        """Handles a `Receive` whose blocks differ from what was sent."""

    def on_pair_lost(self, pair_id: str, reason: str, peer_stopped: bool) -> list[A]:
        """peer_stopped: the peer will write nothing more; otherwise its blocks may still change."""

    def on_prefill_lost(self, prefill_epoch: str) -> list[A]: ...
