"""Copies blocks within a host or a device: pool to mapped pool, or pool to and from a contiguous staging buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kv_transfer.connectors.block_runs import paired_runs

_WORD_BYTES = 8


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
