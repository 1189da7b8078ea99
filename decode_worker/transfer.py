"""One KV transfer as its decode side sees it: whose blocks these are, and when they may be used again.

    waiting -> reserved -> complete
                       \\-> abandoned -> over

The blocks belong to the transfer while the peer may still write them. That ends when every block has arrived, when
the peer says that it has stopped (CloseTransfer, ClosePair), or when the peer's process is proven gone; a time-out
alone is no proof, for a frozen process may wake and write.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class IncomingTransfer:
    """block_ids: all blocks set aside; the first `num_prompt_blocks` of them are written by the peer."""

    transfer_id: str
    pair_id: str
    num_prompt_tokens: int
    arrived_at: float
    num_prompt_blocks: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_received_blocks: int = 0
    num_receives_in_flight: int = 0
    peer_stopped: bool = False
    first_token_id: int | None = None

    @property
    def is_reserved(self) -> bool:
        return bool(self.block_ids)

    @property
    def is_complete(self) -> bool:
        return (
            self.is_reserved
            and self.num_received_blocks == self.num_prompt_blocks
            and not self.num_receives_in_flight
            and self.first_token_id is not None
        )

    @property
    def may_still_be_written(self) -> bool:
        if not self.is_reserved:
            return False
        all_here = self.num_received_blocks == self.num_prompt_blocks
        return self.num_receives_in_flight > 0 or not (self.peer_stopped or all_here)
