"""The `ipc` connector on GPUs: prefill maps the pool of a decode worker of this host (CUDA IPC) and copies into it.

Both workers may be on one GPU, or on two with peer access. The peer's GPU is never named: each worker sees its own
GPUs only, under numbers of its own, and CUDA maps the memory of a GPU that the process does not see. A driver that
cannot let one GPU reach the other refuses the mapping, and the pair uses the next connector.

Mapping, copies and unmapping happen on the path's thread, because the driver may block. Copies run on a side stream.
A transfer is done when the host has seen its event, so nothing is written after `on_closed`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import msgspec
import torch

from tandem.kv_transfer.connector import OnDone, PeerView
from tandem.kv_transfer.connectors.addresses import read_address
from tandem.kv_transfer.connectors.cuda_stream import SideStream, finish_queued_work
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.connectors.mapped_memory import same_heads
from tandem.kv_transfer.connectors.staging import as_words, paired_runs
from tandem.runtime.errors import KVPathRefused, first_line

log = logging.getLogger(__name__)


class CudaPoolHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How another process on the host maps a pool on a GPU, as given by torch's `UntypedStorage._share_cuda_`.

    handle: exported CUDA memory; the pool is num_bytes at offset_bytes. counter_handle, counter_offset: torch's
    reference count in shared memory.
    """

    handle: bytes
    num_bytes: int
    offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    num_blocks: int


_addresses: dict[int, bytes] = {}
_exporting = threading.Lock()


def pool_address(blocks: torch.Tensor) -> bytes:
    """Returns the address of the pool that `blocks` is a view of. Blocks in its first call.

    It is empty where the driver refuses to export memory (some containers and virtual GPUs), and peers use another
    connector.
    """
    pool = blocks.untyped_storage().data_ptr()
    with _exporting:
        if pool not in _addresses:
            try:
                _addresses[pool] = msgspec.msgpack.encode(export_pool(blocks))
            except RuntimeError as error:
                log.warning("peers cannot map the KV pool on this GPU (CUDA IPC): %s", first_line(error))
                _addresses[pool] = b""
        return _addresses[pool]


def export_pool(blocks: torch.Tensor) -> CudaPoolHandle:
    """Returns the handle with which a peer maps the pool that `blocks` is a view of.

    Call once per pool: torch counts the users of each exported handle. Blocks until the pool has its first content:
    the event that torch exports for this is not documented to work on another GPU.
    """
    finish_queued_work(blocks.device)
    storage = blocks.untyped_storage()
    # The values that torch.multiprocessing.reductions.reduce_tensor pickles: device, these, and two of the event.
    _, handle, num_bytes, offset, counter_handle, counter_offset, _, _ = storage._share_cuda_()  # type: ignore[no-untyped-call]
    return CudaPoolHandle(handle, num_bytes, offset, counter_handle, counter_offset, len(blocks))


def map_peer_pool(address: bytes, device: torch.device) -> torch.Tensor:
    """Maps the peer's pool as uint8 [num_blocks, block_bytes] into the address space of `device`, the own GPU.

    torch takes the memory for the own GPU's, wherever it is; CUDA tells them apart by address. May block. Raises
    KVPathRefused if a driver refuses, and KVTransferFailed for an address that cannot be right.
    """
    if not address:
        raise KVPathRefused("cannot map the peer's KV pool: its driver does not export memory (CUDA IPC)")
    pool = read_address(address, CudaPoolHandle)
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            torch.cuda.current_device() if device.index is None else device.index,
            pool.handle,
            pool.num_bytes,
            pool.offset_bytes,
            pool.counter_handle,
            pool.counter_offset,
            b"",  # no event to wait for
            False,
        )
    except RuntimeError as error:
        raise KVPathRefused(f"cannot map the peer's KV pool: {str(error).splitlines()[0]}") from error
    mapped = torch.empty(0, dtype=torch.uint8, device=device)
    mapped.set_(storage, 0, (pool.num_bytes,), (1,))
    return mapped.view(pool.num_blocks, -1)


class CudaIpcSender:
    """The prefill end. on_ready: see `KVConnector.open_sender`."""

    def __init__(self, name: str, blocks: torch.Tensor, address: bytes, peer_view: PeerView, on_ready: OnDone) -> None:
        self._src = blocks
        self._address = address
        self._peer_view = peer_view
        self._dst: torch.Tensor | None = None
        self._side_stream: SideStream | None = None
        self._thread = JobThread(name)
        self._thread.submit(self._open, on_ready)

    def _open(self) -> None:
        self._side_stream = SideStream(self._src.device)
        self._side_stream.run(self._map)

    def _map(self) -> None:
        self._dst = same_heads(map_peer_pool(self._address, self._src.device), self._src, self._peer_view)

    def _unmap(self) -> None:
        self._dst = None

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
        """Unmaps the peer's pool, because a mapping keeps its memory allocated even after the peer exits.

        torch holds Python's lock meanwhile, and waits for the current stream: on the side stream, which is idle, and
        not on the model's.
        """

        def release() -> None:
            if self._side_stream is not None:
                self._side_stream.run(self._unmap)
                self._side_stream.close()

        self._thread.close(on_closed, release)


def copy_runs(src: torch.Tensor, src_ids: Sequence[int], dst: torch.Tensor, dst_ids: Sequence[int]) -> None:
    """Queues a copy of each run that is adjacent on both sides, on the current stream, without staging memory.

    Whole blocks are plain copies, which between GPUs take no cores from the model. A launch takes about 3 us, a block
    of 8 MiB 20 us over NVLink, so one kernel for all runs would gain nothing there.
    """
    source, destination = as_words(src), as_words(dst)
    for src_start, dst_start, count in paired_runs(src_ids, dst_ids):
        destination[dst_start : dst_start + count].copy_(source[src_start : src_start + count], non_blocking=True)
