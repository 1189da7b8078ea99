"""Actions that the prefill scheduler asks of its shell."""

from __future__ import annotations

import msgspec

from tandem.protocol.messages.transfer import CloseTransfer, FinishTransfer, ReserveKV
from tandem.worker.actions import SendToProxy


class SendToDecode(msgspec.Struct, frozen=True):
    """Send over the pair's control connection, in order."""

    pair_id: str
    message: ReserveKV | FinishTransfer | CloseTransfer


class Ship(msgspec.Struct, frozen=True):
    """Move blocks through the pair's connector and announce them. `on_shipped` must follow exactly once."""

    pair_id: str
    transfer_id: str
    first_block: int
    src_block_ids: list[int]
    dst_block_ids: list[int]


Action = SendToProxy | SendToDecode | Ship
