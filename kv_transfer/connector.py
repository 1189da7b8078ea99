"""The connector interface: the two ends of a data path between a prefill pool and a decode pool.

Transfers are pushed: prefill writes, then notifies decode. Control messages travel separately
(`protocol.messages.transfer`). Each end copies on its own thread, so a slow or dead peer blocks no other pair.
Callbacks run on that thread; callers post them to their event loop. Every `send` and `receive` ends with exactly one
`on_done`, even if the pair is closed in the meantime.

Disaggregated prefill and decode follow Splitwise (Patel et al., ISCA 2024) and DistServe (Zhong et al., OSDI 2024).
Whole blocks of the paged cache move from pool to pool, as in LightLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tandem.protocol.messages.transfer import ConnectorParams
from tandem.protocol.tls_identity import TlsContexts
from tandem.runtime.errors import KVPathRefused, KVTransferFailed

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

OnDone = Callable[[KVTransferFailed | None], None]
OpenStore: TypeAlias = "Callable[[], Store]"
"""Opens the store in which a path's two ends rendezvous. It may block, so never call it on the event loop."""
PeerView: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
"""Selects the heads that a path writes from the peer's whole pool, uint8 [num_blocks, block_bytes]."""


@dataclass(frozen=True)
class DataNetwork:
    """The network on which KV data travels. host: own address. tls: None if the cluster has no keys."""

    host: str
    tls: TlsContexts | None = None


@dataclass(frozen=True)
class Peer:
    """The decode end of a path, as seen from prefill.

    params: as announced by the decode worker; `process_group.connect_store` opens its store.
    view: for connectors that map the peer's pool.
    """

    path_id: str
    params: ConnectorParams
    view: PeerView = lambda pool: pool


def when_all(count: int, on_done: OnDone) -> OnDone:
    """Returns a callback for `count` jobs, callable from any thread; its last call reports the first error, or None.

    A refusal of the kernel or driver comes before other errors, because another attempt would meet it again.
    """
    if count == 1:
        return on_done
    lock = threading.Lock()
    errors: list[KVTransferFailed] = []
    num_left = count

    def done(error: KVTransferFailed | None) -> None:
        nonlocal num_left
        with lock:
            if error is not None:
                errors.append(error)
            num_left -= 1
            is_last = num_left == 0
        if is_last:
            on_done(
                next((error for error in errors if isinstance(error, KVPathRefused)), errors[0] if errors else None)
            )

    return done


class KVSender(Protocol):
    """The prefill end of a path. Jobs run in the order of the calls."""

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """Prepares to write these blocks, which the peer has reserved, while their content is being computed."""

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        """Copies own blocks `src_block_ids` to the peer's `dst_block_ids` (same length)."""

    def close(self, on_closed: Callable[[], None]) -> None:
        """Closes without waiting. Queued jobs fail; the running one ends within its deadline.

        `on_closed` is called on the path's thread once nothing can be written any more.
        """


class KVReceiver(Protocol):
    """The decode end of a path."""

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        """Receives the blocks that the peer announced into own blocks `block_ids`."""

    def close(self) -> None:
        """Closes without waiting, as `KVSender.close`. After the last `on_done` nothing is written any more."""


class KVConnector(Protocol):
    """Creates the two ends of a path from one rank's pool to another's. See `kv_transfer.registry`.

    devices: torch device types it supports; both pools have the same. crosses_hosts: whether it also works between
    hosts. encrypts: whether the network's TLS contexts protect the data. meets_in_store: whether the two ends need a
    store to rendezvous.
    one_sided: whether the sender writes into the receiver's pool by itself. If so, blocks are announced (ShipKV) after
    they were written, and only the sender's message or its exit proves that it has stopped. Otherwise they are
    announced before, because the receiver takes part.

    blocks: own pool, uint8 [num_blocks, ...], whole blocks or some heads of each; both sides have the same shape apart
    from num_blocks. Neither method blocks. `on_ready` is called once, on any thread, when the path is usable or has
    failed.
    """

    @property
    def devices(self) -> Sequence[str]: ...

    @property
    def crosses_hosts(self) -> bool: ...

    @property
    def encrypts(self) -> bool: ...

    @property
    def one_sided(self) -> bool: ...

    @property
    def meets_in_store(self) -> bool: ...

    def open_sender(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> KVSender:
        """Opens the prefill end. Raises KVTransferFailed, e.g. if the peer's memory cannot be mapped."""
        ...

    def open_receiver(
        self, path_id: str, open_store: OpenStore, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone
    ) -> KVReceiver:
        """Opens the decode end. Raises KVTransferFailed. Calls `open_store` only if `meets_in_store`."""
        ...
