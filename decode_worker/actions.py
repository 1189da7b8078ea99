"""Actions that the decode scheduler asks of its shell."""

from __future__ import annotations

import msgspec

from tandem.protocol.messages.transfer import KVRefused, KVReserved
from tandem.worker.actions import SendToProxy


class SendToPrefill(msgspec.Struct, frozen=True):
    pair_id: str
    message: KVReserved | KVRefused


class Receive(msgspec.Struct, frozen=True):
    """Receive announced blocks through the pair's connector. `on_received` must follow exactly once.

    checksums: expected checksums of the blocks, or empty. If they differ, `on_corrupt` follows instead.
    """

    pair_id: str
    transfer_id: str
    block_ids: list[int]
    checksums: list[int] = []


Action = SendToProxy | SendToPrefill | Receive
