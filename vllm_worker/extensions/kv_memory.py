"""The memory of vLLM's KV cache as Tandem's connectors see it: uint8 [num_blocks, ...], one row for each block."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from tandem.runtime.errors import InternalError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _Mapped(TorchFunctionMode):
    """Lets `torch.zeros` allocate in a memfd, which peers on this host can map and which leaves no file behind."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.zeros:
            return func(*args, **(kwargs or {}))
        [num_bytes] = args
        fd = os.memfd_create("tandem-kv")
        os.truncate(fd, num_bytes)
        # The descriptor stays open: peers map the file through it (`kv_transfer.connectors.mapped_memory`).
        return torch.from_file(f"/proc/{os.getpid()}/fd/{fd}", shared=True, size=num_bytes, dtype=torch.int8)


def block_order(config: VllmConfig) -> str:
    """Returns how vLLM orders layers, blocks, heads and tokens in memory, and on CPUs the instructions for which its
    attention packs the numbers of a block: those of a CPU with AMX are packed otherwise."""
    model, cache = config.model_config, config.cache_config
    order = str(cache.get_resolved_kv_cache_layout().name)
    if config.device_config.device_type != "cpu":
        return order
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    packing = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return f"{order} {packing}"


@contextmanager
def mapped_allocation() -> Iterator[None]:
    """vLLM's KV cache on the CPU is mapped memory if it is allocated in this context."""
    with _Mapped():
        yield


def block_rows(kv_caches: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns all layers' KV as uint8 [num_blocks, num_layers, bytes of a block in a layer], a view.

    kv_caches: one for each layer, [num_blocks, ...], in one allocation and at equal distances. A block is contiguous in
    each layer. Raises InternalError for another layout.
    """
    layers = list(kv_caches)
    first, num_blocks = layers[0], layers[0].shape[0]
    size = first.element_size()
    places = [layer.storage_offset() * size for layer in layers]
    distance = places[1] - places[0] if len(places) > 1 else 0
    block_stride, block_bytes = first.stride(0) * size, first[0].numel() * size
    is_regular = all(
        layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and layer.shape == first.shape
        and layer.stride() == first.stride()
        and place == places[0] + number * distance
        for number, (layer, place) in enumerate(zip(layers, places, strict=True))
    )
    span = 1 + sum((length - 1) * stride for length, stride in zip(first.shape[1:], first.stride()[1:], strict=True))
    if not is_regular or span != first[0].numel():
        raise InternalError("vLLM keeps the KV of this model in a layout that cannot be moved block by block")
    pool = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    return pool.as_strided((num_blocks, len(layers), block_bytes), (block_stride, distance, 1), places[0])
