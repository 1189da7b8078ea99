"""Processed images and videos that lie on other hosts: their tensors, fetched from those hosts' media caches over tcp.

The caches keep an item as long as the proxy holds its lease, that is until the request has ended. Nothing is kept here
beyond the prompts that use it: what the vision tower makes of it is (`prefill_worker.media`).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import weakref
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING

from tandem.engine.vision.media_tensors import view_tensor
from tandem.protocol.media_client import MediaCacheClient
from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.media_cache import HEADER_BYTES, MediaKey
from tandem.protocol.network import Context
from tandem.runtime.errors import InternalError, InvalidRequest, Overloaded, WorkerLost

if TYPE_CHECKING:
    import torch

FETCH_TIMEOUT_S = 10.0
"""For one item, whole."""
_MAX_HOSTS = 64
"""Whose caches are connected; those that were used least recently are let go of."""

_Range = tuple[bytes, int, int]
"""Digest, first byte and end in the item's segment."""


class RemoteMedia:
    """Belongs to the loop. max_held_bytes: of all that prompts use or wait for; the request that is over it is refused.

    num_fetched_bytes: since the start.
    """

    def __init__(self, context: Context, max_held_bytes: int, timeout_s: float = FETCH_TIMEOUT_S) -> None:
        self._context = context
        self._max_held_bytes = max_held_bytes
        self._timeout_s = timeout_s
        self._caches: OrderedDict[str, MediaCacheClient] = OrderedDict()
        self._in_use: weakref.WeakValueDictionary[_Range, mmap.mmap] = weakref.WeakValueDictionary()
        self._fetching: dict[_Range, asyncio.Task[mmap.mmap]] = {}
        self.held_bytes = 0
        self.num_fetched_bytes = 0

    async def fetch(self, endpoint: str, item: MediaItem, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The item's tensors of these names, which `check_media` has accepted. endpoint: of the cache that has it.

        Raises WorkerLost when the cache does not have it or does not answer in time, Overloaded for want of room,
        InvalidRequest for what could never fit.
        """
        wanted = [tensor for tensor in item.tensors if tensor.name in names]
        if not wanted:
            return {}
        start = min(tensor.offset for tensor in wanted) // HEADER_BYTES * HEADER_BYTES
        end = max(tensor.offset + tensor.num_bytes for tensor in wanted)
        memory = await self._range(endpoint, (item.digest, start, end))
        return {tensor.name: view_tensor(tensor, memory, tensor.offset - start) for tensor in wanted}

    async def _range(self, endpoint: str, wanted: _Range) -> mmap.mmap:
        """Prompts that show the same image share it."""
        if (memory := self._in_use.get(wanted)) is not None:
            return memory
        task = self._fetching.get(wanted)
        if task is None:
            memory = self._room(wanted[2] - wanted[1])
            task = self._fetching[wanted] = asyncio.create_task(self._fetch(endpoint, wanted, memory))
            task.add_done_callback(lambda _: self._fetching.pop(wanted))
        try:
            return await asyncio.shield(task)  # of whoever waits for it beside this one
        finally:
            del task  # with an error in it, it would keep this frame and all that call it, and they it

    def _room(self, num_bytes: int) -> mmap.mmap:
        """Given back when nobody uses the memory any more."""
        if num_bytes > self._max_held_bytes:
            raise InvalidRequest(
                f"this image or video takes {num_bytes} bytes, more than the {self._max_held_bytes} that this prefill "
                "worker fetches from other hosts at once"
            )
        if self.held_bytes + num_bytes > self._max_held_bytes:
            raise Overloaded(
                f"{self.held_bytes} of {self._max_held_bytes} bytes for images and videos from other hosts are in use, "
                f"{num_bytes} more are asked for; try again later"
            )
        memory = mmap.mmap(-1, max(1, num_bytes))
        self.held_bytes += num_bytes
        weakref.finalize(memory, self._give_back, num_bytes)
        return memory

    def _give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes

    async def _fetch(self, endpoint: str, wanted: _Range, memory: mmap.mmap) -> mmap.mmap:
        digest, start, end = wanted
        with contextlib.suppress(TimeoutError, InternalError):
            async with asyncio.timeout(self._timeout_s):
                await self._cache(endpoint).read(MediaKey(digest, "input"), start, end - start, memory)
            self._in_use[wanted] = memory
            self.num_fetched_bytes += end - start
            return memory
        # Here, where it has no context: a TimeoutError's frames lead to this task, which would keep it and the memory.
        raise WorkerLost(f"the media cache at {endpoint} did not send an image or video in time")

    def _cache(self, endpoint: str) -> MediaCacheClient:
        cache = self._caches.get(endpoint)
        if cache is None:
            cache = self._caches[endpoint] = MediaCacheClient(self._context, endpoint, peer="proxy")
            if len(self._caches) > _MAX_HOSTS:
                self._caches.popitem(last=False)[1].close()
        self._caches.move_to_end(endpoint)
        return cache

    def close(self) -> None:
        for task in self._fetching.values():
            task.cancel()
        for cache in self._caches.values():
            cache.close()
