"""Messages between clients of a host's media cache (DEALER) and the cache (ROUTER). Item data is in shared memory.

A lease belongs to a request: its items stay cached until the lease is released or its client's process exits. A call
takes any number of items: a request whose items are all cached costs one round trip (AcquireMedia), others two
(CommitMedia too). A lease that is granted an item which is not ready writes its segment once and commits it.

A segment is a memfd of the cache process: it has no name and is freed with its last user. It begins with a header that
names the item, because descriptor numbers are reused.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem.runtime.errors import ErrorInfo

HEADER_BYTES = 64
"""Size of a segment's header: the item's digest and part. Later parts are aligned to this size."""
MAX_ITEMS = 4096
"""Items per call."""
MAX_DESCRIPTION_BYTES = 64 * 1024

MediaPart = Literal["input", "embedding", "source"]
"""Which data of an image or video: the processor's output, or the vision tower's. Or the bytes that the client sent for
all items of a request, from which the processor's output can be made again."""


class MediaKey(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, cache_hash=True):
    """digest: as in MediaItem; 32 bytes."""

    digest: bytes
    part: MediaPart


class WantedMedia(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """num_bytes: space to allocate if the item is not cached, header included; 0 acquires it only if it is cached."""

    key: MediaKey
    num_bytes: int


class GrantedMedia(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One item of a lease."""

    segment: str
    """Path of the file."""
    is_ready: bool
    """If False, the lease that receives this grant writes and commits the item."""
    description: bytes = b""
    """Bytes that were committed with the item."""


class CommittedMedia(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """num_bytes: bytes written. description: opaque to the cache; given to later leases."""

    key: MediaKey
    num_bytes: int
    description: bytes


class AcquireMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Pins cached items and allocates space for the others, all or none. Answered once, under the lease's id."""

    client_pid: int
    """Process whose exit ends the lease. Those of other hosts hold none; `GetMedia` serves them."""
    lease_id: str
    """Globally unique."""
    items: list[WantedMedia]
    client: str = ""
    """Whose share of the cache the items count towards; empty for workers, which hold items for moments."""


class MediaGranted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One entry for each requested item, in order; None if the item is not cached and no space was asked for.

    Sent once all items that other leases were writing are ready. call_id, here and below: the id of the lease.
    """

    call_id: str
    items: list[GrantedMedia | None]


class MediaRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answer to AcquireMedia: there is no lease; to CommitMedia: nothing was committed."""

    call_id: str
    error: ErrorInfo


class CommitMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The segments of these items are written. All of them must be the lease's to write."""

    lease_id: str
    items: list[CommittedMedia]


class MediaCommitted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    call_id: str


class ReleaseMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ends leases. Items that they have not committed are dropped. No answer.

    part: releases only the items of this part, and the leases go on with the others.
    """

    lease_ids: list[str]
    part: MediaPart | None = None


class GetMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Reads a range of one item's bytes, header included, for a client that cannot map the cache's memory.

    The caller ensures that some lease holds the item. Held items are found even after `ClearMedia`.
    """

    call_id: str
    key: MediaKey
    offset: int
    max_bytes: int


class MediaBytes(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """data: empty if the item is not cached, shorter than requested at its end."""

    call_id: str
    data: bytes


class ClearMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """`tandem cache clear` to the cache: forget all items. Requests that hold items keep them until they release them;
    items being written are not kept; later requests compute anew. Answered by MediaCleared."""

    call_id: str


class MediaCleared(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Number and size of the forgotten items, including those that are still held or being written."""

    call_id: str
    num_items: int
    num_bytes: int


class GetMediaCacheStatus(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    call_id: str


class MediaCacheStatus(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """State of the media cache; counts are totals since its start."""

    call_id: str
    num_items: int
    used_bytes: int
    """Size of all items."""
    pinned_bytes: int
    """Size of held items."""
    num_leases: int
    num_hits: int
    """Acquired items that were cached."""
    num_misses: int
    """Acquired items that were not."""


FromOtherHosts = GetMedia
"""The only message that the cache's tcp endpoint accepts."""
ToMediaCache = AcquireMedia | CommitMedia | ReleaseMedia | GetMedia | ClearMedia | GetMediaCacheStatus
FromMediaCache = MediaGranted | MediaRefused | MediaCommitted | MediaBytes | MediaCleared | MediaCacheStatus


def header_of(key: MediaKey) -> bytes:
    """Returns the first HEADER_BYTES bytes of the key's segment."""
    return (key.digest + key.part.encode()).ljust(HEADER_BYTES, b"\0")
