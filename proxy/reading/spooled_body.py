"""Large request bodies in a memfd, which another process reads without a copy through this one's heap."""

from __future__ import annotations

import os

from tandem.runtime.files.file_limits import out_of_descriptors

_MEDIA_FIELDS = (b'"image_url"', b'"video_url"', b'"image"')
_TAIL_BYTES = max(map(len, _MEDIA_FIELDS)) - 1
"""Bytes kept from the last piece: a field name may be split between two pieces."""


def mentions_media(body: bytes | SpooledBody) -> bool:
    """Guesses, without decoding, whether a request has images or video. A wrong guess costs a second decoding."""
    return body.mentions_media if isinstance(body, SpooledBody) else _has_media_field(body)


def _has_media_field(data: bytes) -> bool:
    return any(field in data for field in _MEDIA_FIELDS)


class SpooledBody:
    """path: readable by processes of this user until `close`. Raises Overloaded if no descriptors are left."""

    def __init__(self) -> None:
        try:
            self._fd = os.memfd_create("body")
        except OSError as error:
            if (overloaded := out_of_descriptors(error, "large requests")) is not None:
                raise overloaded from error
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.num_bytes = 0
        self.mentions_media = False
        self._tail = b""

    def write(self, piece: bytes) -> None:
        if not self.mentions_media:
            self.mentions_media = _has_media_field(self._tail + piece[:_TAIL_BYTES]) or _has_media_field(piece)
            self._tail = (self._tail + piece[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        self.num_bytes += len(piece)
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def close(self) -> None:
        os.close(self._fd)
