"""Images and videos as a request names them. Pure."""

from __future__ import annotations

import msgspec

from tandem.protocol.messages.media import MediaKind
from tandem.runtime.errors import InvalidRequest

MAX_URL_CHARACTERS = 8192
"""Of a URL that is not a data URL."""


class InvalidMedia(InvalidRequest):
    """An image or video cannot be served; the message says which one and why."""

    code = "invalid_media"


class MediaSource(msgspec.Struct, frozen=True):
    """An image or video as a request names it."""

    number: int
    """Index of the item in the request."""
    kind: MediaKind
    url: str
    """data, http, https or file."""
    param: str
    """Its position in the body."""

    def refused(self, reason: str) -> InvalidMedia:
        return InvalidMedia(f"{self.kind} {self.number} ({self.param}): {reason}", self.param)


class SentMedia(msgspec.Struct, frozen=True):
    """An item as the media process gets it."""

    source: MediaSource
    """Without its URL if that contained the bytes."""
    offset: int = 0
    """Place of the bytes in the job's file."""
    num_bytes: int | None = None
    """Number of the bytes in the job's file; None if they are to be read from the URL."""


class FoundMedia(msgspec.Struct, frozen=True):
    """The images and videos of a request, in order."""

    items: list[SentMedia]
    cache_salt: str
