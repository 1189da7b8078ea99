"""A model of CUDA's caching allocator in torch, and a GPU whose tensors have sizes but no memory.

The rules are those of torch's `CUDACachingAllocator.cpp` with its default settings, on one stream: sizes are rounded to
512 bytes; a request takes the smallest free block that is large enough and leaves the rest free; without one, a new
segment is reserved, which only goes back to the device when all of it is free.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from tandem.engine.cuda import streams

MIB = 1 << 20
CUDA = torch.device("cuda", 0)
_ROUND = 512
_SMALL_REQUEST = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB
"""Requests of at least this size get a segment of their own, if no block is free."""


@dataclass(eq=False)
class MemoryBlock:
    """A part of a segment. address: in an address space in which segments do not touch each other."""

    segment: MemorySegment
    address: int
    size: int


@dataclass(eq=False)
class MemorySegment:
    """Memory that was reserved by one call. free: its free blocks by address."""

    size: int
    is_small: bool
    free: dict[int, MemoryBlock]


class CachingAllocator:
    """used, reserved: bytes. segments: that are reserved."""

    def __init__(self) -> None:
        self.used = self.reserved = 0
        self.segments: list[MemorySegment] = []
        self._free: dict[bool, list[tuple[int, int, MemoryBlock]]] = {True: [], False: []}  # by size, then address
        self._next_address = 0

    def allocate(self, num_bytes: int) -> MemoryBlock:
        size = max(_ROUND, -(-num_bytes // _ROUND) * _ROUND)
        is_small = size <= _SMALL_REQUEST
        free = self._free[is_small]
        found = bisect.bisect_left(free, (size, -1))
        block = free[found][2] if found < len(free) else self._reserve(size, is_small)
        self._take(block)
        rest = block.size - size
        if rest >= _ROUND if is_small else rest > _SMALL_REQUEST:
            block.size = size
            self._put(MemoryBlock(block.segment, block.address + size, rest))
        self.used += block.size
        return block

    def release(self, block: MemoryBlock) -> None:
        self.used -= block.size
        free = block.segment.free
        before = next((each for each in free.values() if each.address + each.size == block.address), None)
        after = free.get(block.address + block.size)
        for neighbour in (before, after):
            if neighbour is not None:
                self._take(neighbour)
                block.address = min(block.address, neighbour.address)
                block.size += neighbour.size
        self._put(block)

    def empty_cache(self) -> None:
        for segment in list(self.segments):
            block = next(iter(segment.free.values()), None)
            if block is not None and block.size == segment.size:
                self._take(block)
                self.segments.remove(segment)
                self.reserved -= segment.size

    def _reserve(self, size: int, is_small: bool) -> MemoryBlock:
        own = -(-size // (2 * MIB)) * 2 * MIB
        reserved = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT if size < _OWN_SEGMENT else own
        segment = MemorySegment(reserved, is_small, {})
        self.segments.append(segment)
        self.reserved += reserved
        block = MemoryBlock(segment, self._next_address, reserved)
        self._next_address += reserved + 1
        self._put(block)
        return block

    def _put(self, block: MemoryBlock) -> None:
        block.segment.free[block.address] = block
        bisect.insort(self._free[block.segment.is_small], (block.size, block.address, block))

    def _take(self, block: MemoryBlock) -> None:
        del block.segment.free[block.address]
        free = self._free[block.segment.is_small]
        del free[bisect.bisect_left(free, (block.size, block.address))]


_TRUTHS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"}


class SizedGPU(TorchDispatchMode):
    """Puts the sizes of tensors on "cuda" into `allocator`. They are on "meta" in truth. All comparisons hold."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()
        self.allocator = allocator
        self.is_named = False  # by the call that is running
        self._blocks: dict[int, tuple[StorageWeakRef, MemoryBlock]] = {}

    def release_dead(self) -> None:
        """Releases the memory of tensors that no longer exist."""
        for key, (storage, block) in list(self._blocks.items()):
            if storage.expired():
                del self._blocks[key]
                self.allocator.release(block)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _TRUTHS:
            return True
        given = {_storage(each) for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        if self.is_named or given & self._blocks.keys():
            for each in tree_iter(result):
                if isinstance(each, torch.Tensor) and each.device.type == "meta" and _storage(each) not in given:
                    self._allocate(each)
        return result

    def _allocate(self, tensor: torch.Tensor) -> None:
        self.release_dead()
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in self._blocks:
            block = self.allocator.allocate(storage.nbytes())
            self._blocks[storage._cdata] = StorageWeakRef(storage), block


class _CudaIsMeta(TorchFunctionMode):
    """Replaces the device "cuda" in the arguments of torch's functions, before they look for a driver."""

    def __init__(self, gpu: SizedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        before = self._gpu.is_named
        devices = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.device)]
        self._gpu.is_named = before or any(each.type == "cuda" for each in devices)
        try:
            return func(*tree_map_only(torch.device, _on_meta, args), **tree_map_only(torch.device, _on_meta, kwargs))
        finally:
            self._gpu.is_named = before


def _on_meta(device: torch.device) -> torch.device:
    return torch.device("meta") if device.type == "cuda" else device


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def sized_gpu(total: int, patch: pytest.MonkeyPatch) -> Iterator[CachingAllocator]:
    """Puts a GPU of `total` bytes behind torch.cuda."""
    allocator = CachingAllocator()
    gpu = SizedGPU(allocator)

    def empty_cache() -> None:
        gpu.release_dead()
        allocator.empty_cache()

    patch.setattr(torch.cuda, "empty_cache", empty_cache)
    patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total - allocator.reserved, total))
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    properties = SimpleNamespace(name="a GPU", multi_processor_count=132)
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    patch.setattr(torch.cuda, "memory_reserved", lambda device=None: allocator.reserved)
    patch.setattr(torch.cuda, "memory_allocated", lambda device=None: allocator.used)
    patch.setattr(
        streams, "_copy_to_device", lambda host, device: torch.empty(len(host), dtype=torch.uint8, device=CUDA)
    )
    with gpu, _CudaIsMeta(gpu):
        yield allocator
        empty_cache()
