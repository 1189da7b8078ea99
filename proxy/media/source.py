"""Images and videos as a request names them, and the limits that apply to them. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.protocol.messages.media import MediaKind
from tandem.runtime.errors import InvalidRequest

MAX_CLIENT_SHARE = 0.75
"""Share of the waiting requests with media, of the downloads and of their bytes that one client may have. A client is
an API key or, without keys, an address."""


class MediaLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits per item, unless stated otherwise.

    Size:
      max_items: images and videos per request. max_bytes: size as sent or fetched.
      max_pixels: of an image. max_video_frame_pixels: of a video frame (4096 x 4096). Both are checked before decoding.
      max_video_frames: frames sampled from a video. max_video_pixels: of all frames of a video, sampled or not.
      max_sampled_pixels: of the sampled frames of a video together (32 frames of 1920 x 1080); larger frames are scaled
      down while decoding. max_request_pixels: of all images and sampled frames of a request.
      max_fetched_bytes: fetched and not processed yet, for all requests together.
    Time:
      fetch_timeout_s: for the whole download. decode_timeout_s: for decoding a video's frames.
    Sources:
      allowed_path: folder that file URLs may read from; "" refuses file URLs.
      allow_private: URLs may lead to private and loopback addresses, and to any port.
      allowed_domains: hosts that URLs may name, `*.DOMAIN` for all below a domain; empty allows every host.
    """

    max_items: Annotated[int, Meta(ge=1, le=1024)] = 32
    max_bytes: Annotated[int, Meta(ge=1)] = 64 << 20
    max_pixels: Annotated[int, Meta(ge=1)] = 32 << 20
    max_video_frame_pixels: Annotated[int, Meta(ge=1)] = 16 << 20
    max_video_frames: Annotated[int, Meta(ge=1, le=4096)] = 32
    max_video_pixels: Annotated[int, Meta(ge=1)] = 4 << 30
    max_sampled_pixels: Annotated[int, Meta(ge=4096)] = 64 << 20
    max_request_pixels: Annotated[int, Meta(ge=1)] = 512 << 20
    max_fetched_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
    fetch_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    decode_timeout_s: Annotated[float, Meta(gt=0)] = 20.0
    allowed_path: str = ""
    allow_private: bool = False
    allowed_domains: list[str] = []


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
