"""A request's hold on its images and videos in the media cache, which outlasts the cache's process."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from tandem.protocol.media_client import MediaCacheClient
from tandem.protocol.messages.media import MediaItem
from tandem.runtime.errors import WorkerLost
from tandem.runtime.file_limits import out_of_descriptors


class MediaLease:
    """Whoever has the request releases it; at the latest it ends with the request itself."""

    def __init__(self, cache: MediaCacheClient, lease_id: str) -> None:
        self._cache: MediaCacheClient | None = cache
        self._lease_id = lease_id
        self._fds: dict[str, int] = {}  # by the cache's path

    def hold(self, media: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
        """The items with their segments at paths of this process: workers can read them also when the cache is gone.

        Raises WorkerLost when it is gone already, Overloaded when this process has no descriptors left.
        """
        return tuple(msgspec.structs.replace(item, segment=self._held(item.segment)) for item in media)

    def _held(self, segment: str) -> str:
        fd = self._fds.get(segment)
        if fd is None:
            try:
                fd = self._fds[segment] = os.open(segment, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if (none_left := out_of_descriptors(error, "images and video in the proxy")) is not None:
                    raise none_left from error
                raise WorkerLost(f"the media cache's memory cannot be opened: {error}") from error
        return f"/proc/{os.getpid()}/fd/{fd}"

    def release(self) -> None:
        """Idempotent."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.release([self._lease_id])
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def __del__(self) -> None:
        self.release()
