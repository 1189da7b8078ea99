"""Embeddings in the host's media cache: what one worker has encoded, the others on its host find."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from tandem.media_cache.media_client import MediaCacheClient
from tandem.media_cache.media_segment import map_segment, offsets_of, write_segment
from tandem.protocol.messages.media_cache import HEADER_BYTES, CommittedMedia, GrantedMedia, MediaKey, WantedMedia
from tandem.runtime.errors import TandemError
from tandem.runtime.tasks import start_job

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class EmbeddingShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a cached embedding. dtype: torch's name of it."""

    dtype: str
    shape: tuple[int, ...]


class SharedEmbeddings:
    """Copies embeddings out of the cache, so that it holds no lease after a call.

    An embedding is [1 + num_deepstack, num_tokens, hidden_size] in the model's dtype; those found are on the CPU.
    model_id: of the model and the numerics. The cache outlives workers and other workers use it too, so embeddings
    computed with other weights or in another way must not be found.
    """

    def __init__(self, client: MediaCacheClient, model_id: str) -> None:
        self._client = client
        self._model_id = model_id.encode()
        self._tasks: set[asyncio.Task[None]] = set()
        self._shape: msgspec.msgpack.Decoder[EmbeddingShape] = msgspec.msgpack.Decoder(EmbeddingShape)

    async def get(self, digests: Sequence[bytes]) -> dict[bytes, torch.Tensor]:
        """Returns the embeddings that are cached. One round trip. Raises TandemError."""
        keys = [self._key(digest) for digest in digests]
        lease_id = self._client.new_id()
        try:
            granted = await self._client.acquire(lease_id, [WantedMedia(key, 0) for key in keys])
            return {
                digest: self._read(key, item)
                for digest, key, item in zip(digests, keys, granted, strict=True)
                if item is not None
            }
        finally:
            self._client.release([lease_id])

    def set(self, embeddings: Mapping[bytes, torch.Tensor]) -> None:
        """Stores embeddings in the background. Failures are logged."""
        task = start_job(self._share(dict(embeddings)), "sharing embeddings")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _share(self, embeddings: dict[bytes, torch.Tensor]) -> None:
        keys = [self._key(digest) for digest in embeddings]
        parts = await asyncio.to_thread(_bytes_of, list(embeddings.values()))  # waits for the device
        lease_id = self._client.new_id()
        try:
            wanted = [WantedMedia(k, offsets_of([part.nbytes])[1]) for k, part in zip(keys, parts, strict=True)]
            granted = await self._client.acquire(lease_id, wanted)
            done = []
            for key, item, part, embedding in zip(keys, granted, parts, embeddings.values(), strict=True):
                if item is None or item.is_ready:  # cached by another worker meanwhile
                    continue
                # On a thread, because it copies megabytes and releases the GIL.
                _, num_bytes = await asyncio.to_thread(write_segment, item.segment, key, [part])
                shape = EmbeddingShape(str(embedding.dtype).removeprefix("torch."), tuple(embedding.shape))
                done.append(CommittedMedia(key, num_bytes, msgspec.msgpack.encode(shape)))
            if done:
                await self._client.commit(lease_id, done)
        except TandemError as error:
            log.warning("embeddings could not be shared: %s", error)
        finally:
            self._client.release([lease_id])

    def _key(self, digest: bytes) -> MediaKey:
        return MediaKey(sha256(digest + self._model_id).digest(), "embedding")

    def _read(self, key: MediaKey, item: GrantedMedia) -> torch.Tensor:
        import torch

        shape = self._shape.decode(item.description)
        dtype = getattr(torch, shape.dtype)
        mapped = map_segment(item.segment, key)
        try:
            flat = torch.frombuffer(bytearray(mapped[HEADER_BYTES:]), dtype=torch.uint8)
        finally:
            mapped.close()
        return flat[: math.prod(shape.shape) * dtype.itemsize].view(dtype).view(shape.shape)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._client.close()


def _bytes_of(embeddings: Sequence[torch.Tensor]) -> list[memoryview]:
    import torch

    return [embedding.cpu().contiguous().view(torch.uint8).numpy().data for embedding in embeddings]
