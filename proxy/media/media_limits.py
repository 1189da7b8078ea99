"""Limits on the images and videos of requests. Those that are settings are the operator's."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.runtime.settings import setting


class MediaLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits per image or video, unless stated otherwise."""

    # fmt: off
    max_media_items: Annotated[int, setting("media", ge=1, le=1024, description=
        "Maximum number of images and videos per request.")] = 32
    max_bytes: Annotated[int, Meta(ge=1)] = 64 << 20
    """Size as sent or fetched."""
    max_pixels: Annotated[int, Meta(ge=1)] = 32 << 20
    """Pixels of an image, checked before it is decoded."""
    max_video_frame_pixels: Annotated[int, Meta(ge=1)] = 16 << 20
    """Pixels of a video frame, checked before it is decoded (4096 x 4096)."""
    max_video_frames: Annotated[int, Meta(ge=1, le=4096)] = 32
    """Frames that are sampled from a video."""
    max_video_pixels: Annotated[int, Meta(ge=1)] = 4 << 30
    """Pixels of all frames of a video, sampled or not."""
    max_sampled_pixels: Annotated[int, Meta(ge=4096)] = 64 << 20
    """Pixels of the sampled frames of a video (32 frames of 1920 x 1080); larger ones are decoded at a lower size."""
    max_pixels_per_item: Annotated[int, Meta(ge=1)] = 16 << 20
    """Times the number of items, and at least 32: pixels of all images and sampled frames of a request."""
    max_fetched_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
    """Bytes that are fetched and not processed yet, for all requests together."""
    max_waiting_media: Annotated[int, Meta(ge=1)] = 512
    """Requests with media that are fetched, processed or waiting for it."""
    fetch_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Time for a whole download."""
    decode_timeout_s: Annotated[float, Meta(gt=0)] = 20.0
    """Time for decoding a video's frames."""
    allowed_media_path: Annotated[str, setting("media", description=
        "Folder whose files clients may name by file: URLs; empty allows none.")] = ""
    allow_private_media: Annotated[bool, setting("media", description=
        "Fetch media from private and loopback addresses too, and from ports other than 80 and 443.")] = False
    allowed_media_domains: Annotated[str, setting("media", pattern="^[^/:@]*$", description=
        "Hosts that media may be fetched from, separated by commas; *.DOMAIN stands for all hosts below a domain. "
        "Empty allows every public host.")] = ""
    # fmt: on

    @property
    def max_request_pixels(self) -> int:
        return max(self.max_media_items, 32) * self.max_pixels_per_item

    @property
    def domains(self) -> list[str]:
        """The allowed domains; empty if all are."""
        return [domain.strip() for domain in self.allowed_media_domains.split(",") if domain.strip()]
