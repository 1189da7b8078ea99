"""A request's hold on its images and videos, which remain readable even if the media cache dies."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.messages.media import MediaItem
from tandem.runtime.errors import WorkerLost
from tandem.runtime.files.file_limits import out_of_descriptors


class MediaLease:
    """Must be released by the owner of the request."""

    def __init__(self, cache: MediaCacheClient, lease_id: str) -> None:
        self._cache = cache
        self._lease_id = lease_id
        self._is_released = False
        self._fds: dict[str, int] = {}  # by the cache's path

    def hold(self, media: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
        """Opens the items' segments and returns the items with paths of this process.

        Raises WorkerLost if the cache has died, Overloaded if this process has no descriptors left.
        """
        return tuple(msgspec.structs.replace(item, segment=self._open(item.segment)) for item in media)

    def _open(self, segment: str) -> str:
        fd = self._fds.get(segment)
        if fd is None:
            try:
                fd = self._fds[segment] = os.open(segment, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if (overloaded := out_of_descriptors(error, "images and video in the proxy")) is not None:
                    raise overloaded from error
                raise WorkerLost(f"the media cache's memory cannot be opened: {error}") from error
        return f"/proc/{os.getpid()}/fd/{fd}"

    def release(self) -> None:
        """Closes the segments and returns the lease to the cache. Idempotent."""
        if self._is_released:
            return
        self._is_released = True
        self._cache.release([self._lease_id])
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
