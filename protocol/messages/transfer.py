"""Messages between a prefill worker (DEALER) and a decode worker (ROUTER): pairing, reservation, transfer control.

The bytes of the KV cache do not travel here but through the pair's connector (`kv_transfer`).
"""

from __future__ import annotations

import msgspec

from tandem.runtime.errors import ErrorInfo


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of one KV block: [num_layers, 2, num_kv_heads, block_size, head_dim] of `dtype`, contiguous.

    num_kv_heads: those of one rank; each of the worker's tensor_parallel_size ranks has as many.
    """

    model_id: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    tensor_parallel_size: int = 1

    @property
    def total_kv_heads(self) -> int:
        """The whole model's."""
        return self.num_kv_heads * self.tensor_parallel_size

    def first_difference(self, other: KVLayout) -> tuple[str, str, str] | None:
        """(field, own value, other's value) of the first that differs, or None when blocks can be moved between them.

        The number of ranks may differ, for heads are moved one by one; then it is the model's heads that must agree.
        """
        for field in ("model_id", "dtype", "num_layers", "total_kv_heads", "head_dim", "block_size"):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return field, str(ours), str(theirs)
        return None


class CudaPoolHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How another process maps a pool on the same GPU: what torch's `UntypedStorage._share_cuda_` gives.

    handle: the memory's, as CUDA exports it; the pool is num_bytes from offset_bytes on. counter: torch's count of
    users, in a file of shared memory. event: behind it the memory is ready.
    """

    handle: bytes
    num_bytes: int
    offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class ConnectorParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one rank of a decode worker is reached: its pool's file or GPU memory (ipc) or the store's address (others).

    device_id: the GPU's UUID, or "" on CPU.
    """

    pid: int = 0
    fd: int = 0
    num_bytes: int = 0
    num_blocks: int = 0
    device_id: str = ""
    cuda: CudaPoolHandle | None = None
    store_host: str = ""
    store_port: int = 0


class OpenPair(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode. connectors: by preference. host_id: equal on processes that can map each other's memory.

    prefill_pids: of all its ranks, each of which may write to the decode worker's pools. checksums: whether this side
    wants every block to be compared. lease_s: for so long it keeps a transfer's blocks after each RenewLeases.
    device_ids: of each rank, as in ConnectorParams. number: of this epoch's pairs; a later one replaces those before.
    """

    version: int
    prefill_worker_id: str
    prefill_epoch: str
    prefill_pids: list[int]
    pair_id: str
    layout: KVLayout
    host_id: str
    device: str
    connectors: list[str]
    checksums: bool = False
    lease_s: float = 10.0
    device_ids: list[str] = []
    number: int = 0


class PairAccepted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill: connect by `connector` now; the pair may be used once both sides are connected.

    params: one for each of the decode worker's ranks, in order. checksums: ShipKV must carry them, for one side or the
    other wants them.
    """

    pair_id: str
    decode_epoch: str
    connector: str
    params: list[ConnectorParams]
    checksums: bool = False


class PairRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill: these two cannot work together, for this reason."""

    pair_id: str
    reason: str


class ClosePair(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Either way: this side has dropped the pair and will not write through it again."""

    pair_id: str
    reason: str


class ReserveKV(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode, when the prompt's first chunk begins."""

    pair_id: str
    transfer_id: str
    num_prompt_tokens: int


class KVReserved(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill: write the prompt's blocks, in order, to `block_ids` of the decode worker's pool.

    num_cached_blocks: so many of the prompt's first blocks decode has already; block_ids begins after them.
    """

    transfer_id: str
    num_cached_blocks: int
    block_ids: list[int]


class KVRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill: stop; nothing may be written for this transfer. Answered by CloseTransfer."""

    transfer_id: str
    error: ErrorInfo


class RenewLeases(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to prefill, a few times in each OpenPair.lease_s: these transfers of the pair are still wanted.

    Prefill gives up those that are not renewed, one by one, and answers with CloseTransfer.
    """

    pair_id: str
    transfer_ids: list[str]


class ShipKV(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode: blocks number `first_block` to `first_block + num_blocks` of the prompt are on the data path.

    For connectors that write by themselves (ipc) it is sent once they are written; for those that need a receiver
    (gloo, nccl) it is sent just before, and the receiver takes them in the order of these messages.
    number: counts the pair's ShipKVs from 0, so that both sides know when one was lost on the way, or came twice.
    checksums: of each block (`kv_transfer.checksums`) where the pair has agreed on them, else none.
    """

    pair_id: str
    number: int
    transfer_id: str
    first_block: int
    num_blocks: int
    checksums: list[int] = []


class FinishTransfer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode: the prompt is computed and its last blocks are on their way; their ShipKV may follow.

    Decoding goes on from these tokens, one for each of the attempt_ids, when every block is here.
    position_offset: what to add to a token's number to have its position; not 0 after images and video in models that
    lay positions over them in space and time (M-RoPE).
    """

    transfer_id: str
    num_prompt_tokens: int
    first_token_ids: list[int]
    position_offset: int = 0


class CloseTransfer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to decode: given up; nothing will be written from now on, so the blocks may be used again."""

    transfer_id: str


ToDecodePeer = OpenPair | ReserveKV | ShipKV | FinishTransfer | CloseTransfer | ClosePair
ToPrefillPeer = PairAccepted | PairRefused | KVReserved | KVRefused | RenewLeases | ClosePair
