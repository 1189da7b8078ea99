"""Prepares the images and videos of arriving prompts: checks them, looks up shared embeddings, and fetches tensors from
other hosts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tandem.engine.vision.media_tensors import numbered, open_tensors
from tandem.engine.vision.prompt_media import EmbeddingCache, PromptMedia
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.media import MediaItem, check_media
from tandem.protocol.messages.packed import unpack_token_ids
from tandem.protocol.prefix_hash import client_of
from tandem.runtime.errors import ErrorInfo, InternalError, InvalidRequest, TandemError
from tandem.runtime.tasks import start_job
from tandem.worker.remote_media import RemoteMedia
from tandem.worker.shared_embeddings import SharedEmbeddings

if TYPE_CHECKING:
    import torch

    from tandem.engine.vision.models import VisionTower

log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 1.0
"""Usually longer than encoding an image takes. After it the item is encoded here."""


class MediaIntake:
    """Opens the media of arriving prompts.

    vision: None if the model takes text only. unit_tokens: tokens of a video that are encoded at once. shared:
    embeddings of other workers, if they are shared. on_ready: called when a prompt's media have arrived or failed.
    remote: None if no media can lie on other hosts. num_found: items whose embeddings `shared` had.
    """

    def __init__(
        self,
        vision: VisionTower | None,
        cache: EmbeddingCache,
        unit_tokens: int,
        shared: SharedEmbeddings | None,
        on_ready: Callable[[], None],
        remote: RemoteMedia | None = None,
    ) -> None:
        self._vision = vision
        self._cache = cache
        self._unit_tokens = unit_tokens
        self._shared = shared
        self._remote = remote
        self._on_ready = on_ready
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_found = 0

    @property
    def num_encoded(self) -> int:
        return self._cache.num_encoded

    @property
    def num_fetched_bytes(self) -> int:
        return self._remote.num_fetched_bytes if self._remote is not None else 0

    def open(self, message: StartPrefill) -> PromptMedia | None:
        """Returns the prompt's media, or None for a prompt of text only. Their `release` must be called.

        Media that must be looked up or fetched become ready later. Raises like `open_tensors`.
        """
        if not message.media:
            return None
        if self._vision is None:
            raise InvalidRequest("this model takes no images or video here; send text only")
        token_ids = unpack_token_ids(message.token_ids)
        check_media(message.media, len(token_ids))
        media = PromptMedia(token_ids, message.media, self._unit_tokens, self._cache)
        remote = self._remote if message.media_cache else None
        try:
            if remote is None:
                self._set_tensors(media, [_open(number, item) for number, item in enumerate(message.media)])
            missing = list({item.digest for i, item in enumerate(message.media) if media.find(i) is None})
            if remote is None and not (missing and self._shared):
                media.is_ready = True
            else:
                self._prepare_later(media, missing, remote, message)
        except BaseException:
            media.release()
            raise
        return media

    def _prepare_later(
        self, media: PromptMedia, missing: list[bytes], remote: RemoteMedia | None, message: StartPrefill
    ) -> None:
        task = start_job(
            self._prepare(media, missing, remote, message), "preparing media", partial(self._on_failed, media)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        media.on_release(task.cancel)

    def _on_failed(self, media: PromptMedia) -> None:
        media.error = ErrorInfo.of(InternalError("the media could not be prepared; see the worker's log"))
        media.is_ready = True
        self._on_ready()

    def _set_tensors(self, media: PromptMedia, tensors: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """tensors: one mapping for each item. Raises InvalidRequest."""
        assert self._vision is not None
        num_frames = []
        for number, (item, each) in enumerate(zip(media.items, tensors, strict=True)):
            try:
                self._vision.check(item, each)
                num_frames.append(self._vision.num_frames(item.kind, each))
            except InvalidRequest as error:
                raise numbered(number, error) from error
        media.set_tensors(tensors, num_frames)

    async def _prepare(
        self, media: PromptMedia, missing: list[bytes], remote: RemoteMedia | None, message: StartPrefill
    ) -> None:
        if self._shared is not None and missing:
            await self._look_up(media, missing, self._shared)
        if remote is not None:
            try:
                await self._fetch(media, remote, message)
            except TandemError as error:
                media.error = ErrorInfo.of(error)
            except Exception as error:
                log.exception("processed media could not be fetched")
                media.error = ErrorInfo.of(InternalError(f"the media could not be fetched: {error}"))
        media.is_ready = True
        self._on_ready()

    async def _look_up(self, media: PromptMedia, digests: list[bytes], shared: SharedEmbeddings) -> None:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                found = await shared.get(digests)
            self.num_found += len(found)
            self._cache.put(found)
            for number in range(len(media.items)):
                media.find(number)
        except Exception as error:
            # A failing cache costs time but does not fail the request.
            log.warning("media embeddings could not be looked up: %s", str(error) or type(error).__name__)

    async def _fetch(self, media: PromptMedia, remote: RemoteMedia, message: StartPrefill) -> None:
        """Fetches the tensors from another host, without the pixels of items whose embeddings are known."""
        vision = self._vision
        assert vision is not None
        wanted = [vision.needed(item, media.find(i) is not None) for i, item in enumerate(media.items)]
        tensors = await asyncio.gather(
            *(_fetch_item(number, media, remote, message, names) for number, names in enumerate(wanted))
        )
        self._set_tensors(media, tensors)

    def share_encoded(self) -> None:
        """Shares the embeddings that the last step has encoded with the other workers."""
        encoded = self._cache.take_encoded()
        if encoded and self._shared is not None:
            self._shared.set(encoded)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._remote is not None:
            self._remote.close()


async def _fetch_item(
    number: int, media: PromptMedia, remote: RemoteMedia, message: StartPrefill, names: Collection[str]
) -> dict[str, torch.Tensor]:
    try:
        client = client_of(message.cache_salt)
        return await remote.fetch(message.media_cache, media.items[number], names, media.on_release, client)
    except InvalidRequest as error:
        raise numbered(number, error) from error


def _open(number: int, item: MediaItem) -> dict[str, torch.Tensor]:
    try:
        return open_tensors(item)
    except InvalidRequest as error:
        raise numbered(number, error) from error
