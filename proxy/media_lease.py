"""A request's hold on its images and videos in the media cache."""

from __future__ import annotations

from protocol.media_client import MediaCacheClient


class MediaLease:
    """Whoever has the request releases it; at the latest it ends with the request itself."""

    def __init__(self, cache: MediaCacheClient, lease_id: str) -> None:
        self._cache: MediaCacheClient | None = cache
        self._lease_id = lease_id

    def release(self) -> None:
        """Idempotent."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.release([self._lease_id])

    def __del__(self) -> None:
        self.release()
