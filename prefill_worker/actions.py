"""What the prefill scheduler asks of its shell."""

from __future__ import annotations

import msgspec

from tandem.protocol.messages.dispatch import AttemptFailed, FirstToken
from tandem.protocol.messages.transfer import CloseTransfer, FinishTransfer, ReserveKV


class SendToProxy(msgspec.Struct, frozen=True):
    proxy_id: str
    message: FirstToken | AttemptFailed


class SendToDecode(msgspec.Struct, frozen=True):
    """Over the pair's control connection, in order."""

    pair_id: str
    message: ReserveKV | FinishTransfer | CloseTransfer


class Ship(msgspec.Struct, frozen=True):
    """Move these blocks through the pair's connector and announce them; `on_shipped` must follow, once."""

    pair_id: str
    transfer_id: str
    first_block: int
    src_block_ids: list[int]
    dst_block_ids: list[int]


Action = SendToProxy | SendToDecode | Ship
