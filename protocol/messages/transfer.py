"""Messages between a prefill worker (DEALER) and a decode worker (ROUTER): pairing, reservation, transfer control.

KV data does not travel here but through the pair's connector (`kv_transfer`).
"""

from __future__ import annotations

import msgspec

from tandem.protocol.messages.numerics import Numerics
from tandem.runtime.errors import ErrorInfo


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of one KV block: [num_layers, 2, num_kv_heads, block_size, head_dim] of `dtype`, contiguous.

    model_id: what keys and values depend on, with the model's own dtype where the cache has another. dtype: of the
    cache, as torch names it. num_kv_heads: heads of one of the worker's tensor_parallel_size ranks.
    """

    model_id: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    tensor_parallel_size: int = 1
    engine: str = ""
    """What defines the layout beside the other fields: "tandem", or the name and version of another engine, and how it
    arranges a block."""
    immovable: str = ""
    """Why the worker's blocks cannot move to others; empty if they can. Then it has no pairs, and decodes what it has
    computed."""
    numerics: Numerics = Numerics()
    """How keys and values are computed. Workers that differ in it can pair; see `kv_transfer.handshake`."""

    @property
    def total_kv_heads(self) -> int:
        """Heads of all ranks."""
        return self.num_kv_heads * self.tensor_parallel_size

    def first_difference(self, other: KVLayout) -> tuple[str, str, str] | None:
        """Returns (field, own value, other's value) of the first difference that prevents transfers, or None.

        The number of ranks may differ, because heads are moved individually; the total number of heads must agree. Of
        other numerics a block is as good where answers need not be exact.
        """
        for field in ("engine", "dtype", "model_id", "num_layers", "total_kv_heads", "head_dim", "block_size"):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return field, str(ours), str(theirs)
        return None


class OpenPair(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode: open a pair."""

    version: int
    prefill_worker_id: str
    prefill_epoch: str
    prefill_pids: list[int]
    """Processes of all ranks, each of which may write to the decode worker's pools."""
    decode_epoch: str
    """Epoch of the worker that the pair is meant for; after a restart, another process may answer at its address."""
    pair_id: str
    layout: KVLayout
    host_id: str
    """See `runtime.host`."""
    device: str
    connectors: list[str]
    """Names in order of preference."""
    checksums: bool = False
    """Whether this side wants all blocks verified."""
    lease_s: float = 10.0
    """Time for which this side keeps a transfer's blocks after each RenewLeases."""
    number: int = 0
    """Number of the pair in this epoch; a later one replaces earlier ones."""
    exact: bool = False
    """Whether this side pairs with workers of equal numerics only."""
    closed_pair_ids: list[str] = []
    """Earlier pairs of this process with the decode worker that have stopped; their ClosePair may have been lost."""


class PairAccepted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill: connect by `connector` now. The pair is usable once both sides are connected.

    addresses: for each of the decode worker's ranks, in order, those of its paths from the prefill ranks that share
    heads with it, in order (`KVConnector.open_receiver`). checksums: whether ShipKV must carry them, because either
    side wants them.
    """

    pair_id: str
    connector: str
    addresses: list[list[bytes]]
    checksums: bool = False


class PairRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill: these two workers are incompatible, for this reason."""

    pair_id: str
    reason: str


class ClosePair(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Either direction: this side has dropped the pair and will not write through it again."""

    pair_id: str
    reason: str


class ReserveKV(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode, when the prompt's first chunk is scheduled.

    adapter: digest of the LoRA adapter with which the KV is computed; "" for the base model. Decode compares it.
    """

    pair_id: str
    transfer_id: str
    num_prompt_tokens: int
    adapter: str = ""


class ReservedBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of the decode worker's pool for one group of a prompt's blocks."""

    first_block: int
    """Number of the first of them among the group's blocks of the prompt. Decode needs none before it: it has them
    cached, or no later token attends to them."""
    block_ids: list[int]
    """For that block and all after it, in order."""


class KVReserved(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill: write the prompt's blocks here."""

    transfer_id: str
    groups: list[ReservedBlocks]
    """One for each group of blocks that the model has: those of a group hold the same layers."""


class KVRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill: stop; nothing may be written for this transfer. Answered by CloseTransfer."""

    transfer_id: str
    error: ErrorInfo


class RenewLeases(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill, three times per OpenPair.lease_s: these transfers of the pair are still wanted.

    Prefill ends transfers that are not renewed, and sends CloseTransfer for each.
    """

    pair_id: str
    transfer_ids: list[str]


class ShipKV(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode: blocks `first_block` to `first_block + num_blocks` of the prompt are on the data path.

    One-sided connectors (ipc) send it once the blocks are written. Others (gloo, nccl) send it just before, and the
    receiver takes blocks in the order of these messages. number: counts the pair's ShipKVs from 0, which reveals lost
    and duplicate messages. checksums: one for each block (`kv_transfer.checksums`) if the pair uses them, else empty.
    """

    pair_id: str
    number: int
    transfer_id: str
    first_block: int
    num_blocks: int
    checksums: list[int] = []
    group: int = 0
    """Number of the blocks' group; `first_block` counts within it."""


class FinishTransfer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode: the prompt is computed and its last blocks are on their way; their ShipKV may follow.

    first_token_ids: the token that each attempt continues from. position_offset: difference between a token's position
    and its number; not 0 after images and videos in models with three-dimensional positions (M-RoPE).
    """

    transfer_id: str
    num_prompt_tokens: int
    first_token_ids: list[int]
    position_offset: int = 0


class CloseTransfer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode: the transfer has ended early and nothing more will be written; its blocks may be reused."""

    transfer_id: str


ToDecodePeer = OpenPair | ReserveKV | ShipKV | FinishTransfer | CloseTransfer | ClosePair
ToPrefillPeer = PairAccepted | PairRefused | KVReserved | KVRefused | RenewLeases | ClosePair
