"""Images and videos as a request names them, and the bytes of those that are part of their URL. Pure."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote, unquote_to_bytes

import msgspec

from tandem.protocol.messages.media import MediaKind
from tandem.proxy.media.media_limits import MediaLimits
from tandem.runtime.errors import InvalidRequest, client_reason

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


_MAX_SHOWN = 100
_STANDARD_ALPHABET = str.maketrans("-_", "+/")


def is_data_url(source: MediaSource) -> bool:
    return source.url[:5].lower() == "data:"


def decode_data_url(source: MediaSource, limits: MediaLimits) -> bytes:
    """Returns the bytes in a data URL. Raises InvalidMedia."""
    head, comma, data = source.url.partition(",")
    if not comma:
        raise source.refused("its data URL has no comma; it must look like data:image/png;base64,AAAA")
    media_type = head[5:].partition(";")[0].strip().lower()
    is_known = media_type == "" or media_type.endswith("/octet-stream")  # of any file: the bytes tell what they are
    if not is_known and media_type.partition("/")[0] != source.kind:
        raise source.refused(f"its data URL is of type {media_type[:_MAX_SHOWN]}, not {source.kind}")
    is_base64 = "".join(head.lower().split()).endswith(";base64")
    if is_base64:
        data = _plain_base64(data)
    check_num_bytes(source, int(len(data) * (3 / 4 if is_base64 else 1 / 3)) - 3, limits)  # before decoding
    try:
        decoded = base64.b64decode(data, validate=True) if is_base64 else unquote_to_bytes(data)
    except (binascii.Error, ValueError) as error:
        raise source.refused(f"its data URL is not valid base64: {client_reason(error)}") from error
    check_num_bytes(source, len(decoded), limits)
    return decoded


def _plain_base64(data: str) -> str:
    """Returns base64 in the standard alphabet on one line with its padding.

    Clients send it in lines, with the alphabet for URLs, percent-encoded and without padding.
    """
    if "%" in data:
        data = unquote(data)
    data = "".join(data.split()).translate(_STANDARD_ALPHABET).rstrip("=")
    return data + "=" * (-len(data) % 4)


def check_num_bytes(source: MediaSource, num_bytes: int, limits: MediaLimits) -> None:
    """Raises InvalidMedia for an item with more bytes than one may have."""
    if num_bytes > limits.max_bytes:
        raise source.refused(f"it has more than {limits.max_bytes} bytes")
