"""Selects the attention implementation for a worker's device and dtype."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.engine.attention.interface import NO_WINDOW, StepAttention
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.batch import BatchItem
from tandem.engine.cuda.triton_attention import triton_problem

if TYPE_CHECKING:
    from tandem.engine.kv_cache.kv_pool import KVPool

log = logging.getLogger(__name__)


def uses_triton(pool: KVPool, model_config: Any) -> bool:
    """Whether steps run with `engine.cuda.triton_attention.TritonAttention`: on a GPU where its check passes."""
    if pool.tensor.device.type != "cuda":
        return False
    windows = sorted({NO_WINDOW, getattr(model_config, "sliding_window", None) or NO_WINDOW})
    problem = triton_problem(pool, model_config.num_attention_heads, windows)
    if problem is not None:
        log.warning("using plain attention without CUDA graphs, which is slower; our kernel is not used: %s", problem)
    return problem is None


def attention_maker(pool: KVPool) -> Callable[[Sequence[BatchItem]], StepAttention]:
    """Returns the factory of each step's attention over this pool, where our GPU kernel is not used."""
    if pool.tensor.device.type == "cpu":
        # Imported here because they load a compiler, which GPU workers may lack.
        from tandem.engine.cpu.attention import CPUAttention
        from tandem.engine.cpu.compiler import DTYPES

        if pool.model_dtype in DTYPES:
            return lambda items: CPUAttention(pool, items)
        log.warning("using plain attention, which is slower: the CPU kernel does not support %s", pool.model_dtype)
    return lambda items: PlainAttention(pool, items)
