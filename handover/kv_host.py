"""What the hand-over's shell needs of an engine's processes: their KV pools and data paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tandem.kv_transfer.checksums import OnChecksums
from tandem.kv_transfer.connector import KVConnector, KVReceiver, KVSender, OnDone
from tandem.protocol.messages.transfer import KVLayout
from tandem.runtime.errors import KVTransferFailed
from tandem.runtime.processes.lifetime import WatchExit


class KVPools(Protocol):
    """The KV pools of all ranks of a worker. Implemented by `kv_transfer.ranks.fan_out.WorkerPools`."""

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
