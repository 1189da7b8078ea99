"""Copies blocks within a host: pool to mapped pool, or pool to and from a contiguous staging buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kv_transfer.connectors.block_runs import paired_runs


def copy_blocks(src: torch.Tensor, src_ids: Sequence[int], dst: torch.Tensor, dst_ids: Sequence[int]) -> None:
    """Copies blocks `src_ids` of `src` to `dst_ids` of `dst`: uint8 [num_blocks, ...] on one device, strided or not.

    On CPU this uses numpy: one memcpy per run on the calling thread, without the GIL. torch's copy would start an
    OpenMP team in each path's thread.
    """
    if src.device.type == "cpu":
        source, destination = src.numpy(), dst.numpy()
        for src_start, dst_start, count in paired_runs(src_ids, dst_ids):
            destination[dst_start : dst_start + count] = source[src_start : src_start + count]
    else:
        copy_on_device(src, src_ids, dst, dst_ids)


def copy_on_device(src: torch.Tensor, src_ids: Sequence[int], dst: torch.Tensor, dst_ids: Sequence[int]) -> None:
    """Queue the copy on the current stream."""
    gathered = src.index_select(0, torch.tensor(src_ids, device=src.device))
    dst.index_copy_(0, torch.tensor(dst_ids, device=dst.device), gathered)
