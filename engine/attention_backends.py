"""Selects the attention implementation for a worker's device and dtype."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.engine.attention.interface import NO_WINDOW, StepAttention
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.batch import BatchItem
from tandem.engine.cuda.attention import find_varlen_attn, varlen_attention, varlen_problem
from tandem.engine.cuda.triton_attention import find_kernels, triton_attention, triton_problem

if TYPE_CHECKING:
    from tandem.engine.kv_pool import KVPool

log = logging.getLogger(__name__)


def attention_maker(pool: KVPool, model_config: Any) -> Callable[[Sequence[BatchItem]], StepAttention]:
    """Returns the factory of each step's attention over this pool: the fastest that works here."""
    if pool.tensor.device.type == "cpu":
        # Imported here because they load a compiler, which GPU workers may lack.
        from tandem.engine.cpu.attention import CPUAttention
        from tandem.engine.cpu.compiler import DTYPES

        if pool.tensor.dtype in DTYPES:
            return lambda items: CPUAttention(pool, items)
        log.warning("using plain attention, which is slower: the CPU kernel does not support %s", pool.tensor.dtype)
    elif pool.tensor.device.type == "cuda":
        windows = sorted({NO_WINDOW, getattr(model_config, "sliding_window", None) or NO_WINDOW})
        kernels = find_kernels()
        problem = triton_problem(pool, kernels, model_config.num_attention_heads, windows)
        if problem is None:
            return lambda items: triton_attention(pool, items, kernels)
        log.warning("our attention kernel is not used: %s", problem)
        varlen = find_varlen_attn()
        problem = varlen_problem(pool, varlen, model_config.num_attention_heads, windows)
        if problem is None and varlen is not None:
            return lambda items: varlen_attention(pool, items, varlen)
        log.warning("using plain attention, which is slower; varlen_attn is not used: %s", problem)
    return lambda items: PlainAttention(pool, items)
