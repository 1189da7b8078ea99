"""The images and videos of a request: what is asked for, and what this server takes. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.protocol.messages.media import MediaKind
from tandem.runtime.errors import InvalidRequest


class MediaLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What requests may bring. Sizes and times are of one item, max_items is of one request.

    max_bytes: as it is sent or fetched. max_pixels: of an image or a frame, before anything is decoded.
    max_video_frames: sampled from a video. max_video_pixels: of all frames that must be decoded to sample these.
    max_fetched_bytes: of all requests together that were fetched from URLs and are not processed yet.
    fetch_timeout_s: for a URL to be fetched whole. decode_timeout_s: for a video's frames to be decoded.
    allowed_path: file URLs may name what lies in it; "" allows none. allow_private: URLs may lead to private, loopback
    and link-local addresses.
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
    """An image or a video of the request cannot be served; the message says which and why."""

    code = "invalid_media"


class MediaSource(msgspec.Struct, frozen=True):
    """One item as the request names it. number: among the request's items, from 0. param: where it stands in the body.

    url: data, http, https or file.
    """

    number: int
    kind: MediaKind
    url: str
    param: str

    def refused(self, reason: str) -> InvalidMedia:
        return InvalidMedia(f"{self.kind} {self.number} ({self.param}): {reason}", self.param)
