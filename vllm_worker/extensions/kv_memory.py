"""The memory of vLLM's KV cache as Tandem's connectors see it: uint8 [num_blocks, ...], one row for each block."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from tandem.handover.outgoing import NO_BLOCK

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


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


class Immovable(Exception):
    """Blocks are not rows of bytes at equal distances. The text says why, and how vLLM can be told otherwise."""


def block_rows(config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> torch.Tensor:
    """Returns vLLM's cache as uint8 [num_blocks, num_regions, bytes of a block in a region], a view.

    All groups of layers take blocks from one pool and lie over each other in its memory (`KVCacheTensor`), so a block
    moves in the same way whichever group has it: with its bytes in all regions. A region is a layer of the largest
    group, or one head of it; there is one region where all layers of a block are side by side. kv_caches: by layer; a
    list for one that keeps states. Raises Immovable.
    """
    places = [each for each in config.kv_cache_tensors if not each.host_resident]
    [stride, *others] = {each.block_stride for each in places}
    if others:
        sizes = ", ".join(str(each) for each in sorted([stride, *others]))
        raise Immovable(f"layers have blocks of unequal sizes ({sizes} bytes); try VLLM_KV_CACHE_LAYOUT=BLHNC")
    region_bytes = stride * config.num_blocks
    num_regions = places[0].size // region_bytes
    if num_regions > 1 and any(each.offset % region_bytes or each.layer_stride % region_bytes for each in places):
        raise Immovable("layers do not lie at equal distances")
    first = kv_caches[places[0].layers[0]]
    view = first[0] if isinstance(first, list) else first
    storages = {part.untyped_storage().data_ptr() for each in kv_caches.values() for part in _parts(each)}
    begin = view.storage_offset() * view.element_size() - places[0].offset
    if len(storages) > 1 or begin < 0 or begin + places[0].size > view.untyped_storage().nbytes():
        raise Immovable("vLLM keeps it in several allocations")
    pool = torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())
    return pool.as_strided((config.num_blocks, num_regions, stride), (stride, region_bytes, 1), begin)


def _parts(kv_cache: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return kv_cache if isinstance(kv_cache, list) else [kv_cache]


def described_groups(config: KVCacheConfig) -> str:
    """Names what must be equal in two workers for a block of one to be a block of the other."""
    found = []
    for group in config.transfer_groups:
        spec = group.kv_cache_spec
        kind = type(spec).__name__.removesuffix("Spec")
        window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        mode = getattr(spec, "mamba_cache_mode", "")
        words = [f"{len(group.layer_names)} {kind}", f"blocks of {spec.block_size}"]
        words += [f"window {window}"] if window else []
        words += [f"mode {mode}"] if mode else []
        found.append(", ".join(words))
    return "; ".join(found)


def written_blocks(table: list[int], block_size: int, num_cached: int, num_tokens: int) -> tuple[int, list[int]]:
    """Returns the number of the first block that must be written before a request goes on, and that one and all after.

    table: the request's blocks of one group. num_cached: tokens whose KV is there. num_tokens: those that are needed.
    """
    num_blocks = -(-num_tokens // block_size)
    first = max(num_cached // block_size, next((i for i, each in enumerate(table) if each != NO_BLOCK), num_blocks))
    return min(first, num_blocks), table[first:num_blocks]
