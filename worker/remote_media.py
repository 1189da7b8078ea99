"""Processed images and videos of other hosts: their tensors, fetched from those hosts' media caches over tcp.

The caches keep an item while the proxy holds its lease, that is until the prompt is computed. The memory is kept here
while prompts use it; the embeddings computed from it are cached separately (`worker.media_intake`).
"""

from __future__ import annotations

import asyncio
import mmap
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tandem.engine.vision.media_tensors import view_tensor
from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.media_cache import HEADER_BYTES, MediaKey
from tandem.protocol.messaging import Network
from tandem.runtime.client_share import CLIENT_SHARE
from tandem.runtime.errors import ClientShareExceeded, InternalError, InvalidRequest, Overloaded, WorkerLost
from tandem.runtime.tasks import start

if TYPE_CHECKING:
    import torch

FETCH_TIMEOUT_S = 10.0
"""Time to fetch one item."""
_MAX_HOSTS = 64
"""Connections to other hosts' caches. The least recently used one is closed first."""

OnRelease = Callable[[Callable[[], object]], object]
_Range = tuple[bytes, int, int]
"""Digest, first byte and end in the item's segment."""


@dataclass(eq=False)
class _Fetched:
    """One range in local memory, shared by the prompts that show the same image."""

    key: _Range
    client: str
    memory: mmap.mmap
    task: asyncio.Task[None]
    num_users: int = 0


class RemoteMedia:
    """Fetches ranges and accounts for their memory. Belongs to the loop.

    max_held_bytes: limit on the memory of all prompts; a request that would exceed it is refused. num_fetched_bytes:
    total since the start.
    """

    def __init__(self, network: Network, max_held_bytes: int, timeout_s: float = FETCH_TIMEOUT_S) -> None:
        self._network = network
        self._max_held_bytes = max_held_bytes
        self._timeout_s = timeout_s
        self._caches: OrderedDict[str, MediaCacheClient] = OrderedDict()
        self._ranges: dict[_Range, _Fetched] = {}
        self.num_fetched_bytes = 0

    @property
    def held_bytes(self) -> int:
        return sum(end - start for _, start, end in self._ranges)

    async def fetch(
        self, endpoint: str, item: MediaItem, names: Collection[str], on_release: OnRelease, client: str = ""
    ) -> dict[str, torch.Tensor]:
        """Fetches the item's tensors of these names for one prompt. endpoint: address of the cache that has the item.

        on_release: registers what frees them when the prompt has ended. client: of the prompt, see `client_of`; ""
        where clients are not told apart.
        Raises WorkerLost if the cache does not have the item or does not answer in time, Overloaded if there is no
        memory left, ClientShareExceeded if the client holds its share, InvalidRequest for an item that could never fit.
        """
        wanted = [tensor for tensor in item.tensors if tensor.name in names]
        if not wanted:
            return {}
        start = min(tensor.offset for tensor in wanted) // HEADER_BYTES * HEADER_BYTES
        end = max(tensor.offset + tensor.num_bytes for tensor in wanted)
        fetched = self._hold(endpoint, (item.digest, start, end), client)
        on_release(partial(self._give_back, fetched))
        await asyncio.shield(fetched.task)  # other prompts may wait for it too
        return {tensor.name: view_tensor(tensor, fetched.memory, tensor.offset - start) for tensor in wanted}

    def _hold(self, endpoint: str, key: _Range, client: str) -> _Fetched:
        """Returns the range, which is complete when its task is done. Must be followed by one `_give_back`.

        Raises Overloaded, ClientShareExceeded or InvalidRequest, see `fetch`.
        """
        fetched = self._ranges.get(key)
        if fetched is None:
            memory = self._allocate(key[2] - key[1], client)
            fetched = _Fetched(key, client, memory, start(self._fetch(endpoint, key, memory)))
            self._ranges[key] = fetched
            fetched.task.add_done_callback(partial(self._on_fetched, fetched))
        fetched.num_users += 1
        return fetched

    def _give_back(self, fetched: _Fetched) -> None:
        """Frees the range with its last user. Memory under live tensors is unmapped with the last of them."""
        fetched.num_users -= 1
        if not fetched.num_users:
            fetched.task.cancel()
            self._forget(fetched)

    def _on_fetched(self, fetched: _Fetched, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._forget(fetched)
            fetched.memory.close()
        else:
            self.num_fetched_bytes += fetched.key[2] - fetched.key[1]

    def _forget(self, fetched: _Fetched) -> None:
        if self._ranges.get(fetched.key) is fetched:
            del self._ranges[fetched.key]

    def _allocate(self, num_bytes: int, client: str) -> mmap.mmap:
        max_own = int(self._max_held_bytes * CLIENT_SHARE) if client else self._max_held_bytes
        if num_bytes > max_own:
            raise InvalidRequest(
                f"this image or video takes {num_bytes} bytes, more than the {max_own} that this prefill worker "
                "fetches from other hosts at once for one client"
            )
        own_bytes = sum(end - start for (_, start, end), each in self._ranges.items() if each.client == client)
        if client and own_bytes + num_bytes > max_own:
            raise ClientShareExceeded(
                f"your images and videos hold {own_bytes} of the {max_own} bytes that one client may hold on this "
                f"prefill worker, {num_bytes} more are asked for; send fewer at once, and try again later"
            )
        if self.held_bytes + num_bytes > self._max_held_bytes:
            raise Overloaded(
                f"{self.held_bytes} of {self._max_held_bytes} bytes for images and videos from other hosts are in use, "
                f"{num_bytes} more are asked for; try again later"
            )
        return mmap.mmap(-1, max(1, num_bytes))

    async def _fetch(self, endpoint: str, key: _Range, memory: mmap.mmap) -> None:
        digest, start, end = key
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._cache(endpoint).read(MediaKey(digest, "input"), start, end - start, memory)
        except (TimeoutError, InternalError) as error:
            raise WorkerLost(f"the media cache at {endpoint} did not send an image or video in time") from error

    def _cache(self, endpoint: str) -> MediaCacheClient:
        cache = self._caches.get(endpoint)
        if cache is None:
            cache = self._caches[endpoint] = MediaCacheClient(self._network, endpoint, peer="proxy")
            if len(self._caches) > _MAX_HOSTS:
                self._caches.popitem(last=False)[1].close()
        self._caches.move_to_end(endpoint)
        return cache

    def close(self) -> None:
        for fetched in self._ranges.values():
            fetched.task.cancel()
        for cache in self._caches.values():
            cache.close()
