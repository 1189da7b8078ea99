"""A request's hold on its images and videos, which remain readable even if the media cache dies.

    pixels and sources held -> (all encoded) sources held -> (migrated) pixels made again, both held -> ...

Pixels are held until they are encoded, so that a long answer does not keep them from others. The bytes that the client
sent (`HeldSources`), which are a small part of them, are held to the end, in one segment of the media cache. A request
that migrates later has its pixels made again from them, so it also finds those of a URL that has changed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256

import msgspec

from tandem.media_cache.media_client import MediaCacheClient
from tandem.media_cache.media_segment import map_segment
from tandem.protocol.messages.media import MediaItem, MediaKind, MediaTensor
from tandem.protocol.messages.media_cache import MediaKey
from tandem.proxy.admission.budgets import DescriptorBudget
from tandem.runtime.errors import InternalError, WorkerLost
from tandem.runtime.files.file_limits import out_of_descriptors


class SourceBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item of the segment. digest: of its tensors, see `MediaItem`."""

    kind: MediaKind
    digest: bytes
    offset: int
    num_bytes: int


class HeldSources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """segment: path of the file."""

    segment: str
    items: list[SourceBytes]


def sources_key(digests: Sequence[bytes]) -> MediaKey:
    """Returns the key of the segment of a request with these items, in order."""
    return MediaKey(sha256(b"".join(digests)).digest(), "source")


def read_sources(sources: HeldSources) -> list[bytes]:
    """Returns the bytes of each item. Blocks on memory only.

    Raises WorkerLost if the request has ended meanwhile: the path may then lead to another client's file.
    """
    with map_segment(sources.segment, sources_key([item.digest for item in sources.items])) as mapped:
        return [mapped[item.offset : item.offset + item.num_bytes] for item in sources.items]


class MadeMedia(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pixels of an item that were made again."""

    digest: bytes
    segment: str
    tensors: tuple[MediaTensor, ...]


class MediaLease:
    """Must be released by the owner of the request.

    descriptors: each open segment counts as the client's. make_again: returns the id of a new lease and the pixels.
    """

    def __init__(
        self,
        cache: MediaCacheClient,
        lease_id: str,
        descriptors: DescriptorBudget | None = None,
        client: str = "",
        make_again: Callable[[HeldSources, str], Awaitable[tuple[str, list[MadeMedia]]]] | None = None,
    ) -> None:
        self._cache = cache
        self._lease_id = lease_id
        self._descriptors = descriptors or DescriptorBudget()
        self._client = client
        self._make_again = make_again
        self._is_released = False
        self._sources: HeldSources | None = None
        self._sources_fd: int | None = None
        self._pixels_id: str | None = lease_id
        """The lease that holds the pixels: the first one, or one for those that were made again."""
        self._fds: dict[str, int] = {}  # of pixels, by the cache's path
        self._made: dict[bytes, MadeMedia] = {}  # by digest
        self._making = asyncio.Lock()

    @property
    def has_first_pixels(self) -> bool:
        """Whether the pixels have never been released, so that the items that `hold` has returned can be read."""
        return self._pixels_id == self._lease_id

    def hold(self, media: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
        """Opens the items' segments and returns the items with paths of this process.

        Raises WorkerLost if the cache has died, Overloaded or ClientShareExceeded if there are no descriptors left for
        them.
        """
        return tuple(msgspec.structs.replace(item, segment=self._open_pixels(item.segment)) for item in media)

    def hold_sources(self, sources: HeldSources) -> None:
        """Opens the segment of the sources. Raises like `hold`."""
        self._sources_fd = self._open(sources.segment)
        self._sources = msgspec.structs.replace(sources, segment=_path_of(self._sources_fd))

    def release_pixels(self) -> None:
        """Returns the pixels, once they are encoded, to the cache. Without sources they are kept. Idempotent.

        The first lease goes on with the sources; one for pixels that were made again ends.
        """
        if self._pixels_id is None or self._sources is None or self._make_again is None:
            return
        self._cache.release([self._pixels_id], "input" if self._pixels_id == self._lease_id else None)
        self._pixels_id = None
        self._close_pixels()

    async def with_pixels(self, media: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
        """Returns the items of a prompt for another attempt; their pixels are made again if they were released.

        Raises WorkerLost if the cache has died, Overloaded or ClientShareExceeded if it has no room now, InternalError.
        """
        async with self._making:
            if self._pixels_id is None:
                await self._make_pixels()
        made = self._made
        return tuple(
            item
            if (again := made.get(item.digest)) is None
            else msgspec.structs.replace(item, segment=again.segment, tensors=again.tensors)
            for item in media
        )

    async def _make_pixels(self) -> None:
        assert self._make_again is not None and self._sources is not None
        if self._is_released:
            raise InternalError("the request has ended")
        lease_id, made = await self._make_again(self._sources, self._client)
        if self._is_released:  # meanwhile
            self._cache.release([lease_id])
            raise InternalError("the request has ended")
        self._pixels_id = lease_id
        try:
            self._made = {
                each.digest: msgspec.structs.replace(each, segment=self._open_pixels(each.segment)) for each in made
            }
        except BaseException:
            self.release_pixels()
            raise

    def _open_pixels(self, segment: str) -> str:
        fd = self._fds.get(segment)
        if fd is None:
            fd = self._fds[segment] = self._open(segment)
        return _path_of(fd)

    def _open(self, segment: str) -> int:
        self._descriptors.take(self._client)
        try:
            return os.open(segment, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._descriptors.give_back(self._client)
            if (overloaded := out_of_descriptors(error, "images and video in the proxy")) is not None:
                raise overloaded from error
            raise WorkerLost(f"the media cache's memory cannot be opened: {error}") from error

    def _close_pixels(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._descriptors.give_back(self._client, len(self._fds))
        self._fds.clear()

    def release(self) -> None:
        """Closes the segments and returns all leases to the cache. Idempotent."""
        if self._is_released:
            return
        self._is_released = True
        again = [self._pixels_id] if self._pixels_id is not None and self._pixels_id != self._lease_id else []
        self._cache.release([self._lease_id, *again])
        self._pixels_id = None
        self._close_pixels()
        if self._sources_fd is not None:
            os.close(self._sources_fd)
            self._descriptors.give_back(self._client)
            self._sources_fd = None


def _path_of(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"
