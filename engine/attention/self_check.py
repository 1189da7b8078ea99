"""Compares an implementation of attention with plain attention, on a worker's own pool, when the worker starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch

from tandem.engine.attention.interface import AttentionOptions, StepAttention
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.batch import BatchItem
from tandem.runtime.errors import first_line

if TYPE_CHECKING:
    from tandem.engine.kv_cache.kv_pool import KVPool

_MAX_ERROR = 0.05
"""Of values around 1 in bfloat16."""


def attention_problem(
    pool: KVPool,
    make: Callable[[Sequence[BatchItem]], StepAttention],
    num_heads: int,
    windows: Sequence[int],
) -> str | None:
    """Runs a prompt that spans two blocks, and one more token. Returns why the results cannot be used, or None.

    make: creates the attention of a step over this pool. windows: of the model's layers. The pool's content is
    restored.
    """
    layout = pool.layout
    generator = torch.Generator().manual_seed(0)
    saved = pool.tensor[:2].clone()

    def random(heads: int, num_tokens: int) -> torch.Tensor:
        shape = (1, heads, num_tokens, layout.head_dim)
        return torch.randn(shape, generator=generator).to(pool.model_dtype).to(pool.tensor.device)

    try:
        first = layout.block_size + 3
        for window, (start, num_tokens) in product(windows, ((0, first), (first, 1))):
            items = [BatchItem([0] * num_tokens, start, [1, 0])]
            query = random(num_heads, num_tokens)
            key, value = random(layout.num_kv_heads, num_tokens), random(layout.num_kv_heads, num_tokens)
            options = AttentionOptions(layout.head_dim**-0.5, window)
            expected = PlainAttention(pool, items).attend(0, query, key, value, options)
            got = make(items).attend(0, query, key, value, options)
            error = float((got.float() - expected.float()).abs().max())
            if not error < _MAX_ERROR:
                return f"it is off by {error:.3g} from plain attention"
    except Exception as problem:  # compilers, drivers and backends raise various errors
        return f"it does not run on this pool: {first_line(problem)}"
    finally:
        pool.tensor[:2] = saved
    return None
