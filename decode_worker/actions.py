"""What the decode scheduler asks of its shell."""

from __future__ import annotations

import msgspec

from tandem.protocol.messages.dispatch import AttemptFailed, AttemptPreempted, DecodeReserved, FirstToken, TokenBatch
from tandem.protocol.messages.transfer import KVRefused, KVReserved


class SendToProxy(msgspec.Struct, frozen=True):
    proxy_id: str
    message: FirstToken | DecodeReserved | TokenBatch | AttemptPreempted | AttemptFailed


class SendToPrefill(msgspec.Struct, frozen=True):
    pair_id: str
    message: KVReserved | KVRefused


class Receive(msgspec.Struct, frozen=True):
    """Take announced blocks into own blocks through the pair's connector; `on_received` must follow, once.

    checksums: what the blocks must have then, or none; where they have not, `on_corrupt` takes on_received's place.
    """

    pair_id: str
    transfer_id: str
    block_ids: list[int]
    checksums: list[int] = []


Action = SendToProxy | SendToPrefill | Receive
