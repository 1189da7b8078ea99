"""Copies of blocks within a machine: from pool to mapped pool, or to and from a buffer where they lie side by side.

On CPU by numpy rather than torch: it is memcpy per run of blocks, on the calling thread alone and without the GIL.
Torch's copy is slower from 16 MiB on (no stores that pass by the cache), and starts a team of threads in each pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kv_transfer.connectors.block_runs import paired_runs


def copy_blocks(src: torch.Tensor, src_ids: Sequence[int], dst: torch.Tensor, dst_ids: Sequence[int]) -> None:
    """Blocks `src_ids` of `src` to `dst_ids` of `dst`: uint8 [num_blocks, ...] on one device, strided or not."""
    if src.device.type == "cpu":
        source, destination = src.numpy(), dst.numpy()
        for src_start, dst_start, count in paired_runs(src_ids, dst_ids):
            destination[dst_start : dst_start + count] = source[src_start : src_start + count]
    else:
        taken = src.index_select(0, torch.tensor(src_ids, device=src.device))
        dst.index_copy_(0, torch.tensor(dst_ids, device=dst.device), taken)
