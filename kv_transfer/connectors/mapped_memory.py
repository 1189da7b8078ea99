"""The `ipc` connector: the prefill worker maps the decode worker's pool and copies into it, one-sided.

The pool lies in a memfd that the peer maps through /proc/PID/fd/N, so nothing has a name that could be left behind,
and the memory is gone with its last user. The copies release the GIL.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tandem.kv_transfer.connector import OnDone, PeerView
from tandem.kv_transfer.connectors.block_runs import paired_runs
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.connectors.staging import copy_blocks
from tandem.protocol.messages.transfer import ConnectorParams
from tandem.runtime.errors import KVTransferFailed

_libc = ctypes.CDLL(None, use_errno=True)  # calls let go of the GIL
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23


def map_peer_pool(params: ConnectorParams) -> torch.Tensor:
    """The peer's pool as uint8 [num_blocks, block_bytes], shared. Raises KVTransferFailed when it cannot be mapped."""
    path = f"/proc/{params.pid}/fd/{params.fd}"
    try:
        if Path(path).stat().st_size < params.num_bytes:  # mapping it shared would make the file grow
            raise KVTransferFailed(f"the peer's pool is smaller than the {params.num_bytes} bytes it announced")
        mapped = torch.from_file(path, shared=True, size=params.num_bytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise KVTransferFailed(f"cannot map the peer's KV pool: {error}") from error
    return mapped.view(params.num_blocks, -1)


def same_heads(mapped: torch.Tensor, blocks: torch.Tensor, peer_view: PeerView) -> torch.Tensor:
    """The heads of the peer's pool that `blocks` holds. Raises KVTransferFailed when it has others."""
    try:
        heads = peer_view(mapped)
    except RuntimeError as error:
        raise KVTransferFailed(f"the peer's blocks of {mapped.shape[1]} bytes have other heads: {error}") from error
    if heads.shape[1:] != blocks.shape[1:]:
        raise KVTransferFailed(
            f"blocks of {list(blocks.shape[1:])} bytes do not fit the peer's of {list(heads.shape[1:])}"
        )
    return heads


def take_pages(blocks: torch.Tensor, block_ids: Sequence[int]) -> None:
    """Have the kernel back these blocks with memory, whose content stays. blocks: [num_blocks, ...], some heads or all.

    A kernel older than Linux 5.14 does not know the advice; then a page is taken when it is first written.
    """
    _advise(blocks, block_ids, _MADV_POPULATE_WRITE)


def map_pages(blocks: torch.Tensor, block_ids: Sequence[int]) -> None:
    """Enter pages that a peer has written into our own page table, so that the model's thread need not."""
    _advise(blocks, block_ids, _MADV_POPULATE_READ)


def _advise(blocks: torch.Tensor, block_ids: Sequence[int], advice: int) -> None:
    block_bytes = blocks.stride(0) * blocks.element_size()
    pool = blocks.untyped_storage().data_ptr()  # whole blocks, whichever heads of them these are
    for first, _, count in paired_runs(block_ids, block_ids):
        start = pool + first * block_bytes
        end = start + count * block_bytes
        start -= start % mmap.PAGESIZE
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def _unseen(block_ids: Sequence[int], seen: set[int]) -> list[int]:
    """Those that `seen` has not got yet, and gets now."""
    new = [block_id for block_id in block_ids if block_id not in seen]
    seen.update(new)
    return new


class MappedMemorySender:
    """Prefill side. peer_view: of the mapped pool, the heads that `blocks` has. Raises KVTransferFailed."""

    def __init__(
        self,
        name: str,
        blocks: torch.Tensor,
        params: ConnectorParams,
        peer_view: PeerView,
    ) -> None:
        self._src = blocks
        self._mapped = map_peer_pool(params)
        self._dst = same_heads(self._mapped, blocks, peer_view)
        self._seen: set[int] = set()  # blocks whose pages have been taken
        self._thread = JobThread(name)

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """Take the pages now: a fresh one costs five times what is then written to it."""
        if dst := _unseen(dst_block_ids, self._seen):
            self._thread.submit(lambda: take_pages(self._mapped, dst), lambda error: None)

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        src, dst = list(src_block_ids), list(dst_block_ids)
        self._thread.submit(lambda: self._copy(src, dst), on_done)

    def _copy(self, src: list[int], dst: list[int]) -> None:
        copy_blocks(self._src, src, self._dst, dst)

    def close(self, on_closed: Callable[[], None]) -> None:
        self._thread.close(on_closed)


class MappedMemoryReceiver:
    """Decode side: the peer has written before it tells, so the blocks can be used at once.

    What is left is to map their pages, beside whatever uses them: faults of the model's thread would cost it 0.06 ms a
    MiB. blocks: own pool, on CPU or not.
    """

    def __init__(self, name: str, blocks: torch.Tensor) -> None:
        self._blocks = blocks
        self._seen: set[int] = set()  # blocks that have been mapped before, and stay so
        self._thread = JobThread(name, keeps_going=True) if blocks.device.type == "cpu" else None

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        on_done(None)
        if self._thread is not None and (ids := _unseen(block_ids, self._seen)):
            self._thread.submit(lambda: map_pages(self._blocks, ids), lambda error: None)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
