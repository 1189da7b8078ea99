"""Paged attention on CUDA where our kernel does not run: torch's `varlen_attn`, which reads the pool by block table.

It needs torch 2.13 or newer and a backend that supports our block size (cuDNN 9.24: powers of two; Flash Attention 3:
any; Flash Attention 2: multiples of 256). The worker tries it once at startup (`varlen_problem`). Where it does not
work, and for layers with soft caps or sinks, `engine.attention.plain.PlainAttention` is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from tandem.engine.attention.interface import NO_WINDOW, AttentionOptions
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.attention.self_check import attention_problem
from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import BatchItem

if TYPE_CHECKING:
    from tandem.engine.kv_pool import KVPool

log = logging.getLogger(__name__)

VarlenFunction = Callable[..., torch.Tensor]
"""Has the signature of `torch.nn.attention.varlen.varlen_attn`."""


def find_varlen_attn() -> VarlenFunction | None:
    """Return torch's `varlen_attn`, or None if this torch has none that takes a `block_table`."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    function = cast(VarlenFunction, varlen.varlen_attn)
    return function if "block_table" in function.__code__.co_varnames else None


@dataclass(frozen=True)
class StepTensors:
    """A `StepIndex` on the device. flat: int32, the one buffer that holds all the other tensors, in order."""

    flat: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    cu_seqlens: torch.Tensor
    num_context: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_context_len: int

    @classmethod
    def of(cls, index: StepIndex, device: torch.device, max_context_len: int | None = None) -> StepTensors:
        """Copy the arrays to the device at once. max_context_len: by default the longest context of the step."""
        flat = flat_on_host(index, device).to(device, non_blocking=True)
        sizes = [array.size for array in index]
        token_ids, positions, blocks, offsets, cu_seqlens, num_context, table = torch.split(flat, sizes)
        return cls(
            flat, token_ids, positions, blocks, offsets, cu_seqlens, num_context, table.view(index.block_table.shape),
            int(index.query_lens.max()), max_context_len or int(index.num_context.max()),
        )  # fmt: skip


def flat_on_host(index: StepIndex, device: torch.device) -> torch.Tensor:
    """Concatenate the arrays of `index`, in the order of its fields; pinned if `device` is a GPU."""
    host = torch.from_numpy(np.concatenate([array.reshape(-1) for array in index]))
    return host.pin_memory() if device.type == "cuda" else host


class VarlenAttention:
    """Implements `engine.attention.interface.StepAttention` with `varlen_attn`.

    plain: creates the attention for layers with soft caps or sinks; called when first needed.
    """

    def __init__(
        self, pool: KVPool, step: StepTensors, varlen: VarlenFunction, plain: Callable[[], PlainAttention]
    ) -> None:
        self._pool = pool
        self._step = step
        self._varlen = varlen
        self._make_plain = plain
        self._plain: PlainAttention | None = None
        self._slots = step.blocks.long(), step.offsets.long()

    def at(self, step: StepTensors) -> VarlenAttention:
        """Returns the attention of another step, for capture in a graph."""
        return VarlenAttention(self._pool, step, self._varlen, _no_plain)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if options.softcap or options.sinks is not None:
            self._plain = self._plain or self._make_plain()
            return self._plain.attend(layer, query, key, value, options)
        blocks, offsets = self._slots
        layer_pool = self._pool.tensor[:, layer]  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        for cache, new in ((layer_pool[:, 0], key), (layer_pool[:, 1], value)):
            cache[blocks, :, offsets] = new[0].transpose(0, 1)
        step = self._step
        window = (-1, 0) if options.window == NO_WINDOW else (options.window - 1, 0)
        return self._varlen(
            query[0].transpose(0, 1),
            layer_pool[:, 0].transpose(1, 2),  # [num_blocks, block_size, num_kv_heads, head_dim], a view
            layer_pool[:, 1].transpose(1, 2),
            step.cu_seqlens,
            None,
            step.max_query_len,
            step.max_context_len,
            scale=options.scale,
            window_size=window,
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=step.num_context,
            block_table=step.block_table,
        )


def _no_plain() -> PlainAttention:
    raise RuntimeError("layers with soft caps or sinks cannot be captured")


def varlen_problem(pool: KVPool, varlen: VarlenFunction | None, num_heads: int, windows: Sequence[int]) -> str | None:
    """See `engine.attention.self_check.attention_problem`."""
    if varlen is None:
        return f"torch {torch.__version__} has no varlen_attn with block tables"
    return attention_problem(pool, lambda items: varlen_attention(pool, items, varlen), num_heads, windows)


def varlen_attention(pool: KVPool, items: Sequence[BatchItem], varlen: VarlenFunction) -> VarlenAttention:
    """Create the attention of one step."""
    step = StepTensors.of(StepIndex.of(items, pool.layout.block_size), pool.tensor.device)
    return VarlenAttention(pool, step, varlen, lambda: PlainAttention(pool, items))
