"""What a connector is: two ends of one pair's data path. The control messages travel apart (`protocol.transfer`).

Push, in order: the prefill side writes, the decode side is told. Both ends run their copies on a thread of their own,
one per pair, so a slow or dead peer holds up nobody else. `on_done` callbacks run on that thread: callers post them
to their loop. Every `send` and `receive` ends with exactly one `on_done`, also when the pair is closed meanwhile.

That prefill and decode run apart and hand over KV is from Splitwise (Patel et al., ISCA 2024) and DistServe (Zhong et
al., OSDI 2024); that whole pages of the paged cache travel, from pool to pool, as in LightLLM's NCCL hand-over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch._C._distributed_c10d import Store

from protocol.errors import KVTransferFailed

OnDone = Callable[[KVTransferFailed | None], None]
OpenStore = Callable[[], Store]
"""Gives a store of the path's own, in which its two ends can find each other; it may block, so not on the loop."""


class KVSender(Protocol):
    """The prefill side's end. Jobs are carried out in the order they were handed in."""

    @property
    def announces_first(self) -> bool:
        """True: ShipKV goes out before `send`, for the peer must receive. False: after it, as we write."""
        ...

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

    @property
    def peer_writes(self) -> bool:
        """True: the peer writes into our pool by itself, and only its word or its death shows that it has stopped."""
        ...

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        """Take the blocks that the peer announced into own blocks `block_ids`."""

    def close(self) -> None:
        """As for the sender; that nothing writes any more shows in the last `on_done`."""


class KVConnector(Protocol):
    """A way to make the two ends of one path. `kv_transfer.registry` finds those that other packages bring.

    devices: torch device types of the pools that it moves blocks between. crosses_hosts: whether it also joins workers
    on different hosts. blocks: own pool as uint8 [num_blocks, ...], the same shape but for num_blocks on both sides.
    host: own address on the network of the data path. Neither method blocks; `on_ready` is called once, from some
    thread, when the path can be used or cannot be.
    """

    @property
    def devices(self) -> Sequence[str]: ...

    @property
    def crosses_hosts(self) -> bool: ...

    def open_sender(
        self, path_id: str, open_store: OpenStore, blocks: torch.Tensor, host: str, on_ready: OnDone
    ) -> KVSender:
        """The prefill end. Raises KVTransferFailed."""
        ...

    def open_receiver(
        self, path_id: str, open_store: OpenStore, blocks: torch.Tensor, host: str, on_ready: OnDone
    ) -> KVReceiver:
        """The decode end. Raises KVTransferFailed."""
        ...
