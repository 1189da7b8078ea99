"""The `ipc` connector on GPUs: prefill maps the pool of a decode worker on the same GPU (CUDA IPC) and copies into it.

Mapping, copies and unmapping happen on the path's thread, because the driver may block. Copies run on a side stream.
A transfer is done when the host has seen its event, so nothing is written after `on_closed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tandem.kv_transfer.connector import OnDone, PeerView
from tandem.kv_transfer.connectors.block_runs import paired_runs
from tandem.kv_transfer.connectors.cuda_stream import SideStream
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.connectors.mapped_memory import same_heads
from tandem.protocol.messages.transfer import ConnectorParams, CudaPoolHandle
from tandem.runtime.errors import KVPathRefused, KVTransferFailed


def device_id(device: torch.device) -> str:
    """The GPU's UUID, which does not depend on CUDA_VISIBLE_DEVICES; "" on CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def export_pool(blocks: torch.Tensor) -> CudaPoolHandle:
    """Returns the handle with which a peer maps this pool. blocks: uint8 [num_blocks, block_bytes], a whole storage.

    Call once per pool: torch counts the users of each exported handle.
    """
    storage = blocks.untyped_storage()
    # The same seven values that torch.multiprocessing.reductions.reduce_tensor pickles.
    _, handle, num_bytes, offset, counter_handle, counter_offset, event_handle, waits = storage._share_cuda_()  # type: ignore[no-untyped-call]
    return CudaPoolHandle(handle, num_bytes, offset, counter_handle, counter_offset, event_handle, waits)


def map_peer_pool(params: ConnectorParams, device: torch.device) -> torch.Tensor:
    """Maps the peer's pool as uint8 [num_blocks, block_bytes] on `device`.

    May block. Raises KVPathRefused if the driver refuses, and KVTransferFailed for parameters that cannot be right.
    """
    pool = params.cuda
    if pool is None:
        raise KVTransferFailed("the peer's KV pool is not on a GPU")
    if pool.num_bytes < params.num_bytes:
        raise KVTransferFailed(f"the peer's pool is smaller than the {params.num_bytes} bytes it announced")
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            torch.cuda.current_device() if device.index is None else device.index,
            pool.handle,
            pool.num_bytes,
            pool.offset_bytes,
            pool.counter_handle,
            pool.counter_offset,
            pool.event_handle,
            pool.event_sync_required,
        )
    except RuntimeError as error:
        raise KVPathRefused(f"cannot map the peer's KV pool: {str(error).splitlines()[0]}") from error
    mapped = torch.empty(0, dtype=torch.uint8, device=device)
    mapped.set_(storage, 0, (params.num_bytes,), (1,))
    return mapped.view(params.num_blocks, -1)


class CudaIpcSender:
    """The prefill end. The peer's pool must be on the GPU of `blocks`. on_ready: see `KVConnector.open_sender`."""

    def __init__(
        self, name: str, blocks: torch.Tensor, params: ConnectorParams, peer_view: PeerView, on_ready: OnDone
    ) -> None:
        self._src = blocks
        self._params = params
        self._peer_view = peer_view
        self._dst: torch.Tensor | None = None
        self._side_stream: SideStream | None = None
        self._thread = JobThread(name)
        self._thread.submit(self._open, on_ready)

    def _open(self) -> None:
        self._dst = same_heads(map_peer_pool(self._params, self._src.device), self._src, self._peer_view)
        self._side_stream = SideStream(self._src.device)

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """Does nothing: GPU memory is allocated from the start."""

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        src, dst = list(src_block_ids), list(dst_block_ids)
        self._thread.submit(lambda: self._copy(src, dst), on_done)

    def _copy(self, src: list[int], dst: list[int]) -> None:
        mapped, side_stream = self._dst, self._side_stream
        assert mapped is not None and side_stream is not None
        side_stream.run(lambda: copy_runs(self._src, src, mapped, dst))

    def close(self, on_closed: Callable[[], None]) -> None:
        def closed() -> None:
            self._dst = None  # unmaps; a mapping keeps the peer's memory allocated even after the peer exits
            on_closed()

        self._thread.close(closed)


def copy_runs(src: torch.Tensor, src_ids: Sequence[int], dst: torch.Tensor, dst_ids: Sequence[int]) -> None:
    """Copies each run that is adjacent on both sides, on the current stream, without staging memory."""
    for src_start, dst_start, count in paired_runs(src_ids, dst_ids):
        dst[dst_start : dst_start + count].copy_(src[src_start : src_start + count], non_blocking=True)
