"""The `ipc` connector on CPU: prefill maps the decode worker's pool and copies into it, one-sided.

The pool lies in a memfd, which the peer maps through /proc/PID/fd/N. It has no name that could be left behind, and the
kernel frees it with its last user. Copies release the GIL.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from tandem.kv_transfer.connector import OnAddress, OnDone, PeerView
from tandem.kv_transfer.connectors.addresses import read_address
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.connectors.staging import copy_blocks, paired_runs
from tandem.runtime.errors import KVTransferFailed

_libc = ctypes.CDLL(None, use_errno=True)  # calls release the GIL
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; on older kernels pages fault in on first use
_FILE = re.compile(r"/proc/\d{1,10}/fd/\d{1,10}")


class MappedPool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How another process on the host maps a pool. file: /proc/PID/fd/N."""

    file: str
    num_bytes: int
    num_blocks: int


def pool_address(blocks: torch.Tensor) -> bytes:
    """Returns the address of the pool that `blocks` is a view of, which torch has mapped from a file."""
    pool = blocks.untyped_storage()
    return msgspec.msgpack.encode(MappedPool(str(pool.filename), pool.nbytes(), len(blocks)))


def map_peer_pool(address: bytes) -> torch.Tensor:
    """Maps the peer's pool as uint8 [num_blocks, block_bytes], shared. Raises KVTransferFailed."""
    pool = read_address(address, MappedPool)
    if not _FILE.fullmatch(pool.file):
        raise KVTransferFailed(f"the peer's KV pool cannot be {pool.file}")
    try:
        if Path(pool.file).stat().st_size < pool.num_bytes:  # torch would grow the file
            raise KVTransferFailed(f"the peer's pool is smaller than the {pool.num_bytes} bytes it announced")
        mapped = torch.from_file(pool.file, shared=True, size=pool.num_bytes, dtype=torch.uint8)
        return mapped.view(pool.num_blocks, -1)
    except (OSError, RuntimeError) as error:
        raise KVTransferFailed(f"cannot map the peer's KV pool: {error}") from error


def same_heads(mapped: torch.Tensor, blocks: torch.Tensor, peer_view: PeerView) -> torch.Tensor:
    """Returns the heads of the peer's pool that `blocks` holds. Raises KVTransferFailed if the shapes differ."""
    try:
        heads = peer_view(mapped)
    except RuntimeError as error:
        raise KVTransferFailed(f"the peer's blocks of {mapped.shape[1]} bytes have other heads: {error}") from error
    if heads.shape[1:] != blocks.shape[1:]:
        raise KVTransferFailed(
            f"blocks of {list(blocks.shape[1:])} bytes do not fit the peer's of {list(heads.shape[1:])}"
        )
    return heads


def populate_pages(blocks: torch.Tensor, block_ids: Sequence[int], for_writing: bool) -> None:
    """Faults in the pages of these blocks before they are used. Their content stays. blocks: [num_blocks, ...].

    for_writing: allocates missing pages. Otherwise only maps the pages that a peer has written.
    """
    advice = _MADV_POPULATE_WRITE if for_writing else _MADV_POPULATE_READ
    block_bytes = blocks.stride(0) * blocks.element_size()
    pool = blocks.untyped_storage().data_ptr()  # whole blocks, even if `blocks` holds only some heads
    for first, _, count in paired_runs(block_ids, block_ids):
        start = pool + first * block_bytes
        end = start + count * block_bytes
        start -= start % mmap.PAGESIZE
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def _take_new(block_ids: Sequence[int], seen: set[int]) -> list[int]:
    """Returns the ids that are not in `seen`, and adds them to it."""
    new = [block_id for block_id in block_ids if block_id not in seen]
    seen.update(new)
    return new


class MappedMemorySender:
    """The prefill end. peer_view: selects the heads of `blocks` in the mapped pool. Raises KVTransferFailed."""

    def __init__(self, name: str, blocks: torch.Tensor, address: bytes, peer_view: PeerView) -> None:
        self._src = blocks
        self._dst: torch.Tensor | None = same_heads(map_peer_pool(address), blocks, peer_view)
        self._populated: set[int] = set()
        self._thread = JobThread(name)

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """Allocates the pages while the prompt computes: a page fault costs several times the copy into the page."""
        if new := _take_new(dst_block_ids, self._populated):
            self._thread.submit(lambda: self._populate(new), lambda error: None)

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        src, dst = list(src_block_ids), list(dst_block_ids)
        self._thread.submit(lambda: self._copy(src, dst), on_done)

    def _populate(self, block_ids: list[int]) -> None:
        assert self._dst is not None
        populate_pages(self._dst, block_ids, for_writing=True)

    def _copy(self, src: list[int], dst: list[int]) -> None:
        assert self._dst is not None
        copy_blocks(self._src, src, self._dst, dst)

    def close(self, on_closed: Callable[[], None]) -> None:
        def unmap() -> None:
            self._dst = None

        self._thread.close(on_closed, unmap)


class MappedMemoryReceiver:
    """The decode end. Blocks are usable when announced, because the peer announces them after it has written them.

    blocks: own pool. A thread maps the arrived pages, so that the engine thread does not fault on them.
    """

    def __init__(self, name: str, blocks: torch.Tensor, on_address: OnAddress) -> None:
        self._blocks = blocks
        self._populated: set[int] = set()
        self._thread = JobThread(name, keeps_going=True)
        on_address(pool_address(blocks))

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        on_done(None)
        if new := _take_new(block_ids, self._populated):
            self._thread.submit(lambda: populate_pages(self._blocks, new, for_writing=False), lambda error: None)

    def close(self) -> None:
        self._thread.close()
