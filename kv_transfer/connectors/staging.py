"""Copies blocks within a host or a device: pool to mapped pool, or pool to and from a contiguous staging buffer.

Adjacent blocks are copied together, so that copies are few and large.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

_WORD_BYTES = 8


def is_run(block_ids: Sequence[int]) -> bool:
    """Whether the ids are consecutive, so that the blocks are one contiguous range of the pool."""
    return all(b == a + 1 for a, b in itertools.pairwise(block_ids))


def paired_runs(src: Sequence[int], dst: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (src start, dst start, count) for each maximal run that is consecutive on both sides."""
    assert len(src) == len(dst)
    start = 0
    for i in range(1, len(src) + 1):
        if i == len(src) or src[i] != src[i - 1] + 1 or dst[i] != dst[i - 1] + 1:
            yield src[start], dst[start], i - start
            start = i


def copy_blocks(src: torch.Tensor, src_ids: Sequence[int], dst: torch.Tensor, dst_ids: Sequence[int]) -> None:
    """Copies blocks `src_ids` of `src` to `dst_ids` of `dst`: uint8 [num_blocks, ...] on the CPU, strided or not.

    Uses numpy: one memcpy per run on the calling thread, without the GIL. torch's copy would start an OpenMP team in
    each path's thread.
    """
    source, destination = src.numpy(), dst.numpy()
    for src_start, dst_start, count in paired_runs(src_ids, dst_ids):
        destination[dst_start : dst_start + count] = source[src_start : src_start + count]


def as_words(blocks: torch.Tensor) -> torch.Tensor:
    """Views bytes [num_blocks, ...] as 8-byte words if the last dimension allows: kernels copy by element."""
    return blocks.view(torch.int64) if blocks.shape[-1] % _WORD_BYTES == 0 else blocks


def gather_on_device(blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Queues one kernel that copies blocks of a pool to the rows of `buffer`. block_ids: int64, on the device."""
    torch.index_select(as_words(blocks), 0, block_ids, out=as_words(buffer))


def scatter_on_device(buffer: torch.Tensor, blocks: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Queues one kernel that copies the rows of `buffer` to blocks of a pool. block_ids: int64, on the device."""
    as_words(blocks).index_copy_(0, block_ids, as_words(buffer))
