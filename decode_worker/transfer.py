"""One KV transfer as its decode side sees it: whose blocks these are, and when they may be used again.

    waiting -> reserved -> complete
                       \\-> abandoned -> over

The written blocks belong to the transfer while the peer may still write them. That ends when every one has arrived,
when the peer says that it has stopped (CloseTransfer, ClosePair), or when the peer's process is proven gone; a
time-out alone is no proof, for a frozen process may wake and write.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class IncomingTransfer:
    """The prompt's blocks are the cached ones, which are shared with the prefix cache, then those the peer writes.

    spare_block_ids: room for the first tokens after the prompt, and for copies of its last block.
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
    num_receives_in_flight: int = 0
    peer_stopped: bool = False
    is_corrupt: bool = False
    first_token_ids: list[int] | None = None
    position_offset: int = 0  # of FinishTransfer

    def reserve(self, cached: list[int], written: list[int], spare: list[int]) -> None:
        self.is_reserved = True
        self.cached_block_ids, self.written_block_ids, self.spare_block_ids = cached, written, spare

    @property
    def is_complete(self) -> bool:
        return (
            self.is_reserved
            and not self.is_corrupt
            and self.num_received_blocks == len(self.written_block_ids)
            and not self.num_receives_in_flight
            and self.first_token_ids is not None
        )

    @property
    def may_still_be_written(self) -> bool:
        if not self.is_reserved:
            return False
        all_here = self.num_received_blocks == len(self.written_block_ids)
        return self.num_receives_in_flight > 0 or not (self.peer_stopped or all_here)
