"""Takes the images and videos of arriving prompts in: refuses what cannot be, and asks others for their embeddings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.embedding_cache import EmbeddingCache
from engine.media_tensors import open_tensors
from engine.prompt_media import PromptMedia
from protocol.dispatch import StartPrefill
from protocol.errors import InvalidRequest
from protocol.media import check_media
from protocol.token_ids import unpack_token_ids

if TYPE_CHECKING:
    import torch

    from engine.vision_language import VisionTower

log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 1.0
"""Longer than encoding an image takes, as a rule; then it is encoded here."""


class MediaEmbeddings(Protocol):
    """Embeddings that workers share: what another has encoded is not encoded again.

    An embedding is [1 + num_deepstack, num_tokens, hidden_size] in the model's dtype, contiguous, on the CPU.
    """

    async def get(self, digests: Sequence[bytes]) -> dict[bytes, torch.Tensor]:
        """Those that are there, of items with these digests."""
        ...

    def set(self, embeddings: Mapping[bytes, torch.Tensor]) -> None:
        """Returns at once; what cannot be kept is not."""
        ...


class MediaIntake:
    """vision: None where the model takes text alone. unit_tokens: of a video that are encoded at once.

    shared: where there is a cache beside the worker's own. on_looked_up: a prompt may be scheduled now.
    """

    def __init__(
        self,
        vision: VisionTower | None,
        cache: EmbeddingCache,
        unit_tokens: int,
        shared: MediaEmbeddings | None,
        on_looked_up: Callable[[], None],
    ) -> None:
        self._vision = vision
        self._cache = cache
        self._unit_tokens = unit_tokens
        self._shared = shared
        self._on_looked_up = on_looked_up
        self._lookups: set[asyncio.Task[None]] = set()

    def open(self, message: StartPrefill) -> PromptMedia | None:
        """None for a prompt of text alone. Raises InvalidRequest."""
        if not message.media:
            return None
        if self._vision is None:
            raise InvalidRequest("this model takes no images or video here; send text alone")
        token_ids = unpack_token_ids(message.token_ids)
        check_media(message.media, len(token_ids))
        tensors, num_frames = [], []
        for number, item in enumerate(message.media):
            try:
                opened = open_tensors(item)
                self._vision.check(item, opened)
                num_frames.append(self._vision.num_frames(item.kind, opened))
            except InvalidRequest as error:
                raise InvalidRequest(f"media item {number}: {error}") from error
            tensors.append(opened)
        media = PromptMedia(token_ids, message.media, tensors, num_frames, self._unit_tokens, self._cache)
        missing = list({item.digest for i, item in enumerate(message.media) if media.find(i) is None})
        if self._shared is not None and missing:
            media.is_looked_up = False
            task = asyncio.get_running_loop().create_task(self._look_up(media, missing, self._shared))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)
        return media

    async def _look_up(self, media: PromptMedia, digests: list[bytes], shared: MediaEmbeddings) -> None:
        try:
            found = await asyncio.wait_for(shared.get(digests), LOOKUP_TIMEOUT_S)
            self._cache.put(found)
            for number in range(len(media.items)):
                media.find(number)
        except Exception as error:
            # A cache that fails costs time, not the request.
            log.warning("media embeddings could not be looked up: %s", error or type(error).__name__)
        media.is_looked_up = True
        self._on_looked_up()

    def share_encoded(self) -> None:
        """After a step: tell the others what it has encoded."""
        encoded = self._cache.take_encoded()
        if encoded and self._shared is not None:
            self._shared.set({digest: embedding.cpu() for digest, embedding in encoded.items()})

    def close(self) -> None:
        for task in self._lookups:
            task.cancel()
