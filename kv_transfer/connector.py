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
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from tandem.protocol.tls_identity import TlsContexts
from tandem.runtime.errors import KVPathRefused, KVTransferFailed

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
OnDone = Callable[[KVTransferFailed | None], None]
"""Called once when a job has ended: with None, or with why it failed."""
OnAddress = Callable[[bytes | KVTransferFailed], None]
"""Called once with the address of a receiver, or with why there is none."""
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

    address: what the connector's `open_receiver` reported there. It may be forged.
    view: for connectors that map the peer's pool.
    """

    path_id: str
    address: bytes
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


def gather(
    count: int, on_all: Callable[[list[T] | KVTransferFailed], None]
) -> list[Callable[[T | KVTransferFailed], None]]:
    """Returns a callback for each of `count` jobs, callable from any thread.

    The last call reports the results in the order of the jobs, or an error as `when_all` does.
    """
    results: dict[int, T] = {}
    done = when_all(count, lambda error: on_all(error or [results[job] for job in range(count)]))

    def end(job: int, result: T | KVTransferFailed) -> None:
        if isinstance(result, KVTransferFailed):
            done(result)
        else:
            results[job] = result
            done(None)

    return [partial(end, job) for job in range(count)]


class KVSender(Protocol):
    """The prefill end of a path. Jobs run in the order of the calls."""

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """Prepares to write these blocks, which the peer has reserved, while their content is being computed."""

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        """Copies own blocks `src_block_ids` to the peer's `dst_block_ids` (same length).

        A call that raises has taken no job, and has written nothing that goes on afterwards.
        """

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

    Any exception of the three classes fails the job or closes the pair, and is logged
    (`kv_transfer.ranks.contained_path`). A pair that cannot be opened uses the next connector that both sides offer.

    devices: torch device types it supports; both pools have the same. crosses_hosts: whether it also works between
    hosts. encrypts: whether the network's TLS contexts protect the data.
    one_sided: whether the sender writes into the receiver's pool by itself. If so, blocks are announced (ShipKV) after
    they were written, and only the sender's message or its exit proves that it has stopped. Otherwise they are
    announced before, because the receiver takes part.

    blocks: own pool, uint8 [num_blocks, ...], whole blocks or some heads of each; both sides have the same shape apart
    from num_blocks. Neither method blocks.
    """

    @property
    def devices(self) -> Sequence[str]: ...

    @property
    def crosses_hosts(self) -> bool: ...

    @property
    def encrypts(self) -> bool: ...

    @property
    def one_sided(self) -> bool: ...

    def open_receiver(
        self, path_id: str, blocks: torch.Tensor, network: DataNetwork, on_address: OnAddress
    ) -> KVReceiver:
        """Opens the decode end, which comes first. Raises KVTransferFailed or its own exception.

        `on_address` is called once, on any thread, with what the sender needs to connect, in the connector's own form
        and of at most `checks.MAX_ADDRESS_BYTES`. A path that fails later fails its next `receive`.
        """

    def open_sender(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> KVSender:
        """Opens the prefill end. Raises KVTransferFailed or its own exception, e.g. if it cannot map the peer's memory.

        `on_ready` is called on any thread when both ends are connected, or the path has failed. A sender that is still
        connecting may be closed, and need not call it then.
        """
