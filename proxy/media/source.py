"""Images and videos as a request names them, and the limits that apply to them. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.protocol.messages.media import MediaKind
from tandem.runtime.errors import InvalidRequest


class MediaLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits per item, unless stated otherwise.

    max_items: images and videos per request. max_bytes: size as sent or fetched. max_pixels: of an image or a video
    frame, checked before decoding. max_video_frames: frames sampled from a video. max_video_pixels: of all frames of a
    video. max_fetched_bytes: fetched and not processed yet, for all requests together.
    fetch_timeout_s: for the whole download. decode_timeout_s: for decoding a video's frames.
    allowed_path: folder that file URLs may read from; "" refuses file URLs. allow_private: URLs may lead to private,
    loopback and link-local addresses.
    """

    max_items: Annotated[int, Meta(ge=1, le=1024)] = 32
    max_bytes: Annotated[int, Meta(ge=1)] = 64 << 20
    max_pixels: Annotated[int, Meta(ge=1)] = 33_554_432
    max_video_frames: Annotated[int, Meta(ge=1, le=4096)] = 32
    max_video_pixels: Annotated[int, Meta(ge=1)] = 4 << 30
    max_fetched_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
    fetch_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    decode_timeout_s: Annotated[float, Meta(gt=0)] = 20.0
    allowed_path: str = ""
    allow_private: bool = False


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
