"""One KV transfer as its decode side sees it: whose blocks these are, and when they may be used again.

    waiting -> reserved -> complete
                       \\-> abandoned -> over

The written blocks belong to the transfer while the peer may still write them. That ends when every one has arrived,
when the peer says that it has stopped (CloseTransfer, ClosePair), or when the peer's process is proven gone; a
time-out alone is no proof, for a frozen process may wake and write. A block that has arrived is written no more, so
those of an abandoned transfer stay in the prefix cache, where the next attempt at the prompt finds them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tandem.protocol.messages.transfer import ShipKV
from tandem.runtime.errors import KVTransferFailed


@dataclass(eq=False)
class IncomingTransfer:
    """The prompt's blocks are the cached ones, which are shared with the prefix cache, then those the peer writes.

    spare_block_ids: room for the first tokens after the prompt, and for copies of its last block. receives: blocks of
    each receive under way, in order. num_arrived_blocks: of the written ones, in order and without a gap.
    num_kept_blocks: of those, given to the prefix cache when the request ended.
    """

    transfer_id: str
    pair_id: str
    num_prompt_tokens: int
    arrived_at: float
    is_reserved: bool = False
    cached_block_ids: list[int] = field(default_factory=list)
    written_block_ids: list[int] = field(default_factory=list)
    spare_block_ids: list[int] = field(default_factory=list)
    num_received_blocks: int = 0
    receives: deque[int] = field(default_factory=deque)
    num_arrived_blocks: int = 0
    num_kept_blocks: int = 0
    peer_stopped: bool = False
    has_gap: bool = False  # blocks came that are not what was sent, or did not come
    first_token_ids: list[int] | None = None
    position_offset: int = 0  # of FinishTransfer

    def reserve(self, cached: list[int], written: list[int], spare: list[int]) -> None:
        self.is_reserved = True
        self.cached_block_ids, self.written_block_ids, self.spare_block_ids = cached, written, spare

    def announce(self, message: ShipKV) -> list[int]:
        """Blocks now on the data path. Raises KVTransferFailed where they cannot be the transfer's next."""
        if self.pair_id != message.pair_id:
            raise KVTransferFailed(f"blocks came for transfer {self.transfer_id}, which is another pair's")
        if message.num_blocks < 1:
            raise KVTransferFailed(f"{message.num_blocks} blocks are none")
        first = message.first_block - len(self.cached_block_ids)
        last = first + message.num_blocks
        if first != self.num_received_blocks or last > len(self.written_block_ids):
            raise KVTransferFailed(f"{message.num_blocks} blocks from {message.first_block} on came out of order")
        if message.checksums and len(message.checksums) != message.num_blocks:
            raise KVTransferFailed(f"{len(message.checksums)} checksums came for {message.num_blocks} blocks")
        self.num_received_blocks = last
        self.receives.append(message.num_blocks)
        return self.written_block_ids[first:last]

    def on_received(self, is_whole: bool) -> None:
        """The earliest receive under way has ended."""
        num_blocks = self.receives.popleft()
        if not is_whole:
            self.has_gap = True
        elif not self.has_gap:
            self.num_arrived_blocks += num_blocks

    def keep_arrived(self, num_full_blocks: int) -> list[int]:
        """The request has ended: its blocks that are here for good, of those of the prompt that are full."""
        self.num_kept_blocks = min(self.num_arrived_blocks, num_full_blocks - len(self.cached_block_ids))
        return self.written_block_ids[: self.num_kept_blocks]

    @property
    def own_block_ids(self) -> list[int]:
        """Of the written ones, those that are still the transfer's."""
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
