"""Images and videos as a request names them. Pure."""

from __future__ import annotations

import msgspec

from tandem.protocol.messages.media import MediaKind
from tandem.runtime.errors import InvalidRequest

MAX_CLIENT_SHARE = 0.75
"""Share of the waiting requests with media, of the downloads and of their bytes that one client may have. A client is
an API key or, without keys, an address."""


class InvalidMedia(InvalidRequest):
    """An image or video cannot be served; the message says which one and why."""

    code = "invalid_media"


class MediaSource(msgspec.Struct, frozen=True):
    """number: index of the item in the request. url: data, http, https or file. param: its position in the body."""

    number: int
    kind: MediaKind
    url: str
    param: str

    def refused(self, reason: str) -> InvalidMedia:
        return InvalidMedia(f"{self.kind} {self.number} ({self.param}): {reason}", self.param)
