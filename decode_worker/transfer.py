"""One KV transfer on its decode side: who owns its blocks, and when they may be reused.

  waiting -> reserved -> complete
                     \\-> abandoned -> over

The written blocks belong to the transfer while the peer may still write them. That ends when all have arrived, when the
peer has stopped (CloseTransfer, ClosePair), or when its process has exited. A time-out is no proof, because a frozen
process may wake up and write. A block that has arrived is not written again, so the arrived blocks of an abandoned
transfer stay in the prefix cache for the next attempt.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.protocol.messages.dispatch import PromptMessage
from tandem.protocol.messages.transfer import ShipKV
from tandem.runtime.errors import KVTransferFailed

UNCLAIMED_TIMEOUT_S = 10.0
"""How long a reservation waits for its PrepareDecode, which travels on another connection."""
_NUM_REMEMBERED_TRANSFERS = 10_000


@dataclass(eq=False)
class IncomingTransfer:
    """The KV of one prompt that arrives, or will arrive, from a peer.

    The prompt's blocks are the cached ones, shared with the prefix cache, followed by those that the peer writes.
    """

    transfer_id: str
    pair_id: str
    arrived_at: float
    adapter: str = ""
    """Name of the LoRA adapter, see ReserveKV."""
    is_reserved: bool = False
    cached_block_ids: list[int] = field(default_factory=list)
    written_block_ids: list[int] = field(default_factory=list)
    spare_block_ids: list[int] = field(default_factory=list)
    """Blocks for the first tokens after the prompt, and for copies of its last block."""
    num_received_blocks: int = 0
    receives: deque[int] = field(default_factory=deque)
    """Number of blocks of each receive in flight, in order."""
    num_arrived_blocks: int = 0
    """Written blocks that have arrived without a gap."""
    num_kept_blocks: int = 0
    """Arrived blocks that were left to the prefix cache when the request ended."""
    peer_stopped: bool = False
    has_gap: bool = False
    """Whether blocks were corrupted or lost."""
    first_token_ids: list[int] | None = None
    position_offset: int = 0
    """Offset of positions, from FinishTransfer."""

    def reserve(self, cached: list[int], written: list[int], spare: list[int]) -> None:
        self.is_reserved = True
        self.cached_block_ids, self.written_block_ids, self.spare_block_ids = cached, written, spare

    def announce(self, message: ShipKV) -> list[int]:
        """Returns the blocks that are now on the data path. Raises KVTransferFailed if they are not the transfer's next
        ones."""
        if self.pair_id != message.pair_id:
            raise KVTransferFailed(f"blocks arrived for transfer {self.transfer_id}, which belongs to another pair")
        if message.num_blocks < 1:
            raise KVTransferFailed(f"a shipment of {message.num_blocks} blocks")
        first = message.first_block - len(self.cached_block_ids)
        last = first + message.num_blocks
        if first != self.num_received_blocks or last > len(self.written_block_ids):
            raise KVTransferFailed(f"{message.num_blocks} blocks from {message.first_block} on arrived out of order")
        if message.checksums and len(message.checksums) != message.num_blocks:
            raise KVTransferFailed(f"{len(message.checksums)} checksums arrived for {message.num_blocks} blocks")
        self.num_received_blocks = last
        self.receives.append(message.num_blocks)
        return self.written_block_ids[first:last]

    def on_received(self, is_whole: bool) -> None:
        """Handles the end of the oldest receive in flight."""
        num_blocks = self.receives.popleft()
        if not is_whole:
            self.has_gap = True
        elif not self.has_gap:
            self.num_arrived_blocks += num_blocks

    def why_unusable(self, request: PromptMessage) -> KVTransferFailed | None:
        """Returns what is wrong with the end of a complete transfer."""
        num_tokens, num_sequences = len(self.first_token_ids or ()), len(request.attempt_ids)
        if num_tokens != num_sequences:
            return KVTransferFailed(f"the prefill worker sent {num_tokens} first tokens for {num_sequences} sequences")
        if self.position_offset and not request.media:  # it could lie outside of the model's positions
            return KVTransferFailed("the prefill worker sent a position offset for a prompt without media")
        return None

    def keep_arrived(self, num_full_blocks: int) -> list[int]:
        """Called when the request has ended. Returns the arrived blocks that are full blocks of the prompt."""
        self.num_kept_blocks = min(self.num_arrived_blocks, num_full_blocks - len(self.cached_block_ids))
        return self.written_block_ids[: self.num_kept_blocks]

    @property
    def own_block_ids(self) -> list[int]:
        """Written blocks that still belong to the transfer."""
        return self.written_block_ids[self.num_kept_blocks :]

    @property
    def is_complete(self) -> bool:
        return (
            self.is_reserved
            and not self.has_gap
            and self.num_received_blocks == len(self.written_block_ids)
            and not self.receives
            and self.first_token_ids is not None
        )

    @property
    def may_still_be_written(self) -> bool:
        if not self.is_reserved:
            return False
        all_here = self.num_received_blocks == len(self.written_block_ids)
        return bool(self.receives) or not (self.peer_stopped or all_here)


class Transfers:
    """The transfers of one decode worker, and the ids of those that have ended."""

    def __init__(self) -> None:
        self._by_id: dict[str, IncomingTransfer] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, transfer_id: str) -> IncomingTransfer:
        return self._by_id[transfer_id]

    def get(self, transfer_id: str) -> IncomingTransfer | None:
        return self._by_id.get(transfer_id)

    def values(self) -> Iterable[IncomingTransfer]:
        return self._by_id.values()

    def of_pair(self, pair_id: str) -> list[IncomingTransfer]:
        return [transfer for transfer in self._by_id.values() if transfer.pair_id == pair_id]

    def is_closed(self, transfer_id: str) -> bool:
        return transfer_id in self._closed

    def add(self, transfer: IncomingTransfer) -> None:
        self._by_id[transfer.transfer_id] = transfer

    def close(self, transfer_id: str) -> None:
        """Forgets the transfer, if it is open, and refuses messages about it that arrive late."""
        self._by_id.pop(transfer_id, None)
        self._closed[transfer_id] = None
        if len(self._closed) > _NUM_REMEMBERED_TRANSFERS:
            self._closed.popitem(last=False)
