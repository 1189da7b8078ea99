"""Takes the images and videos of arriving prompts in: refuses what cannot be, asks others for their embeddings, and
fetches what lies on other hosts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from tandem.engine.vision.embedding_cache import EmbeddingCache
from tandem.engine.vision.media_tensors import open_tensors
from tandem.engine.vision.prompt_media import PromptMedia
from tandem.prefill_worker.remote_media import RemoteMedia
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.media import MediaItem, check_media
from tandem.protocol.messages.token_ids import unpack_token_ids
from tandem.runtime.errors import ErrorInfo, InternalError, InvalidRequest, TandemError

if TYPE_CHECKING:
    import torch

    from tandem.engine.vision.models import VisionTower

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

    shared: where there is a cache beside the worker's own. remote: where media may lie on other hosts. on_ready: a
    prompt whose media were waited for may be scheduled now, or has an error. num_found: items whose embeddings `shared`
    had.
    """

    def __init__(
        self,
        vision: VisionTower | None,
        cache: EmbeddingCache,
        unit_tokens: int,
        shared: MediaEmbeddings | None,
        on_ready: Callable[[], None],
        remote: RemoteMedia | None = None,
    ) -> None:
        self._vision = vision
        self._cache = cache
        self._unit_tokens = unit_tokens
        self._shared = shared
        self._remote = remote
        self._on_ready = on_ready
        self._waited_for: set[asyncio.Task[None]] = set()
        self.num_found = 0

    @property
    def num_encoded(self) -> int:
        return self._cache.num_encoded

    @property
    def num_fetched_bytes(self) -> int:
        return self._remote.num_fetched_bytes if self._remote is not None else 0

    def open(self, message: StartPrefill) -> PromptMedia | None:
        """None for a prompt of text alone. Raises InvalidRequest. What has to be waited for makes it ready later."""
        if not message.media:
            return None
        if self._vision is None:
            raise InvalidRequest("this model takes no images or video here; send text alone")
        token_ids = unpack_token_ids(message.token_ids)
        check_media(message.media, len(token_ids))
        media = PromptMedia(token_ids, message.media, self._unit_tokens, self._cache)
        remote = self._remote if message.media_cache else None
        if remote is None:
            self._take(media, [_open(number, item) for number, item in enumerate(message.media)])
        missing = list({item.digest for i, item in enumerate(message.media) if media.find(i) is None})
        if remote is None and not (missing and self._shared):
            media.is_ready = True
            return media
        task = asyncio.get_running_loop().create_task(self._wait_for(media, missing, remote, message.media_cache))
        self._waited_for.add(task)
        task.add_done_callback(self._waited_for.discard)
        return media

    def _take(self, media: PromptMedia, tensors: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """tensors: of each item. Raises InvalidRequest."""
        assert self._vision is not None
        num_frames = []
        for number, (item, each) in enumerate(zip(media.items, tensors, strict=True)):
            try:
                self._vision.check(item, each)
                num_frames.append(self._vision.num_frames(item.kind, each))
            except InvalidRequest as error:
                raise _numbered(number, error) from error
        media.set_tensors(tensors, num_frames)

    async def _wait_for(
        self, media: PromptMedia, missing: list[bytes], remote: RemoteMedia | None, endpoint: str
    ) -> None:
        if self._shared is not None and missing:
            await self._look_up(media, missing, self._shared)
        if remote is not None:
            try:
                await self._fetch(media, remote, endpoint)
            except TandemError as error:
                media.error = ErrorInfo.of(error)
            except Exception as error:
                log.exception("processed media could not be fetched")
                media.error = ErrorInfo.of(InternalError(f"the media could not be fetched: {error}"))
        media.is_ready = True
        self._on_ready()

    async def _look_up(self, media: PromptMedia, digests: list[bytes], shared: MediaEmbeddings) -> None:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                found = await shared.get(digests)
            self.num_found += len(found)
            self._cache.put(found)
            for number in range(len(media.items)):
                media.find(number)
        except Exception as error:
            # A cache that fails costs time, not the request.
            log.warning("media embeddings could not be looked up: %s", str(error) or type(error).__name__)

    async def _fetch(self, media: PromptMedia, remote: RemoteMedia, endpoint: str) -> None:
        """From another host. Not the pixels of what is encoded already, which are nearly all of it."""
        vision = self._vision
        assert vision is not None
        wanted = [vision.needed(item, media.find(i) is not None) for i, item in enumerate(media.items)]
        # Without return_exceptions: a list of errors that have been raised here would keep this frame, and they it.
        tensors = await asyncio.gather(
            *(self._fetch_item(number, media, remote, endpoint, names) for number, names in enumerate(wanted))
        )
        self._take(media, tensors)

    async def _fetch_item(
        self, number: int, media: PromptMedia, remote: RemoteMedia, endpoint: str, names: Collection[str]
    ) -> dict[str, torch.Tensor]:
        try:
            return await remote.fetch(endpoint, media.items[number], names)
        except InvalidRequest as error:
            raise _numbered(number, error) from error

    def share_encoded(self) -> None:
        """After a step: tell the others what it has encoded."""
        encoded = self._cache.take_encoded()
        if encoded and self._shared is not None:
            self._shared.set({digest: embedding.cpu() for digest, embedding in encoded.items()})

    def close(self) -> None:
        for task in self._waited_for:
            task.cancel()
        if self._remote is not None:
            self._remote.close()


def _numbered(number: int, error: InvalidRequest) -> InvalidRequest:
    """Whoever sent several items is told which of them is wrong."""
    return InvalidRequest(f"media item {number}: {error}")


def _open(number: int, item: MediaItem) -> dict[str, torch.Tensor]:
    try:
        return open_tensors(item)
    except InvalidRequest as error:
        raise _numbered(number, error) from error
