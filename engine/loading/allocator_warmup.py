"""Gives each weight on a GPU memory of its own, which goes back to the device when the weight has been merged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import modeling_utils


@contextmanager
def no_allocator_warmup() -> Iterator[None]:
    """Keeps transformers from reserving the memory of all weights in one piece before it loads them.

    That saves a few hundred calls of cudaMalloc. But holes in such a piece stay reserved, and each merged weight
    (`engine.layers.fusing`) leaves holes that the next one does not fit into: 15 % of Llama-3.1-8B.
    """

    def skip(*_: Any) -> None:
        pass

    name = "caching_allocator_warmup"
    original = getattr(modeling_utils, name)
    setattr(modeling_utils, name, skip)
    try:
        yield
    finally:
        setattr(modeling_utils, name, original)
