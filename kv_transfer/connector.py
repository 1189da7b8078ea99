"""What a connector is: two ends of one pair's data path. The control messages travel apart
(`protocol.messages.transfer`).

Push, in order: the prefill side writes, the decode side is told. Both ends run their copies on a thread of their own,
one per pair, so a slow or dead peer holds up nobody else. `on_done` callbacks run on that thread: callers post them
to their loop. Every `send` and `receive` ends with exactly one `on_done`, also when the pair is closed meanwhile.

That prefill and decode run apart and hand over KV is from Splitwise (Patel et al., ISCA 2024) and DistServe (Zhong et
al., OSDI 2024); that whole pages of the paged cache travel, from pool to pool, as in LightLLM's NCCL hand-over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch._C._distributed_c10d import Store

from tandem.protocol.messages.transfer import ConnectorParams
from tandem.runtime.errors import KVTransferFailed

OnDone = Callable[[KVTransferFailed | None], None]
OpenStore = Callable[[], Store]
"""Gives a store of the path's own, in which its two ends can find each other; it may block, so not on the loop."""
PeerView = Callable[[torch.Tensor], torch.Tensor]
"""From the peer's whole pool, uint8 [num_blocks, block_bytes], to the heads of it that a path leads to."""


@dataclass(frozen=True)
class Peer:
    """The decode end of a path, as the prefill end finds it.


    params: as its worker has told; `kv_transfer.connectors.process_group.connect_store` opens a store.
    view: for connectors that map its pool.
    """

    path_id: str
    params: ConnectorParams
    view: PeerView = lambda pool: pool


class KVSender(Protocol):
    """The prefill side's end. Jobs are carried out in the order they were handed in."""

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """The peer has set these blocks aside and what goes into them is being computed: do what can be done ahead."""

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        """Move own blocks `src_block_ids` to the peer's blocks `dst_block_ids` (equally many)."""

    def close(self, on_closed: Callable[[], None]) -> None:
        """End the pair without waiting: jobs that have not begun fail, the one under way ends within its deadline.

        `on_closed` is called, on the pair's thread, when nothing can be written any more.
        """


class KVReceiver(Protocol):
    """The decode side's end."""

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        """Take the blocks that the peer announced into own blocks `block_ids`."""

    def close(self) -> None:
        """As for the sender; that nothing writes any more shows in the last `on_done`."""


class KVConnector(Protocol):
    """A way to make the two ends of one path, from one rank's pool to another's: `kv_transfer.registry` finds them all.

    devices: torch device types of the pools that it moves blocks between. crosses_hosts, crosses_devices: whether it
    also joins workers on different hosts, and on different GPUs. one_sided: the sender writes into the receiver's pool
    by itself: then blocks are announced (ShipKV) after they were sent, and only the sender's word or its death shows
    that it has stopped. Else they are announced before, for the receiver must take part. meets_in_store: whether the
    ends need a store to find each other.

    blocks: own pool as uint8 [num_blocks, ...], whole blocks or some heads of each, the same shape but for num_blocks
    on both sides. host: own address on the network of the data path. Neither method blocks; `on_ready` is called once,
    from some thread, when the path can be used or cannot be.
    """

    @property
    def devices(self) -> Sequence[str]: ...

    @property
    def crosses_hosts(self) -> bool: ...

    @property
    def crosses_devices(self) -> bool: ...

    @property
    def one_sided(self) -> bool: ...

    @property
    def meets_in_store(self) -> bool: ...

    def open_sender(self, peer: Peer, blocks: torch.Tensor, host: str, on_ready: OnDone) -> KVSender:
        """The prefill end. Raises KVTransferFailed, for one when the peer's memory cannot be mapped."""
        ...

    def open_receiver(
        self, path_id: str, open_store: OpenStore, blocks: torch.Tensor, host: str, on_ready: OnDone
    ) -> KVReceiver:
        """The decode end. Raises KVTransferFailed. open_store: not to be called where `meets_in_store` is False."""
        ...
