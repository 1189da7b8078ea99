"""The bytes that a client sent for the images and videos of a request, in one segment of the media cache.

A request holds its pixels only until they are encoded, and these bytes, which are a small part of them, until its end.
A request that migrates later has its pixels made again from them, so it also finds those of a URL that has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import msgspec

from tandem.media_cache.media_segment import map_segment
from tandem.protocol.messages.media import MediaKind
from tandem.protocol.messages.media_cache import MediaKey


class SourceBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item of the segment. digest: of its tensors, see `MediaItem`."""

    kind: MediaKind
    digest: bytes
    offset: int
    num_bytes: int


class HeldSources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """segment: path of the file."""

    segment: str
    items: list[SourceBytes]


def sources_key(digests: Sequence[bytes]) -> MediaKey:
    """Returns the key of the segment of a request with these items, in order."""
    return MediaKey(sha256(b"".join(digests)).digest(), "source")


def read_sources(sources: HeldSources) -> list[bytes]:
    """Returns the bytes of each item. Blocks on memory only.

    Raises WorkerLost if the request has ended meanwhile: the path may then lead to another client's file.
    """
    with map_segment(sources.segment, sources_key([item.digest for item in sources.items])) as mapped:
        return [mapped[item.offset : item.offset + item.num_bytes] for item in sources.items]
