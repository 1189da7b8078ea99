"""Which attention a worker runs: the fastest that works for its device and its type of numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.engine.attention.interface import NO_WINDOW, StepAttention
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.batch import BatchItem
from tandem.engine.cuda.attention import find_varlen_attn, varlen_attention, varlen_problem

if TYPE_CHECKING:
    from tandem.engine.kv_pool import KVPool

log = logging.getLogger(__name__)


def attention_maker(pool: KVPool, model_config: Any) -> Callable[[Sequence[BatchItem]], StepAttention]:
    """What makes the attention of each step over this pool."""
    if pool.tensor.device.type == "cpu":
        # Loads a compiler, which workers with a GPU need not have.
        from tandem.engine.cpu import attention as cpu_attention
        from tandem.engine.cpu import kernels as cpu_kernels

        if pool.tensor.dtype in cpu_kernels.DTYPES:
            return lambda items: cpu_attention.CPUAttention(pool, items)
        log.warning("attention by plain operations, which is slower: no kernel for %s", pool.tensor.dtype)
    if pool.tensor.device.type != "cuda":
        return lambda items: PlainAttention(pool, items)
    varlen = find_varlen_attn()
    windows = {NO_WINDOW, getattr(model_config, "sliding_window", None) or NO_WINDOW}
    problem = varlen_problem(pool, varlen, model_config.num_attention_heads, sorted(windows))
    if problem is not None or varlen is None:
        log.warning("attention by plain operations, which is slower: %s", problem)
        return lambda items: PlainAttention(pool, items)
    return lambda items: varlen_attention(pool, items, varlen)
