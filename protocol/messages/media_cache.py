"""Messages between the users of a host's media cache (DEALER) and the cache (ROUTER). Bytes are in shared memory.

A lease is what a request holds: the items that it uses stay until it is released, or until its client's process is
gone. A call takes any number of items: a request whose items are all cached costs one round trip (AcquireMedia), others
two (CommitMedia too). Whoever is granted an item that is not ready writes its segment, once, and commits it.

A segment is a memfd of the cache's process: it has no name, and is gone with its last user. It begins with a header, by
which a reader knows that what it opened is the item that was meant, for descriptors are used again.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem.protocol.messages.media import SEGMENT_HEADER_BYTES
from tandem.runtime.errors import ErrorInfo

HEADER_BYTES = SEGMENT_HEADER_BYTES
"""Of a segment: the item's digest and part. What follows lies at a multiple of that."""
MAX_ITEMS = 4096
"""Of one call."""
MAX_DESCRIPTION_BYTES = 64 * 1024

# Calls have hundreds of the structs with gc=False: none can be part of a cycle, so the collector need not look at them.

MediaPart = Literal["input", "embedding"]
"""What is kept of an image or video: what the processor makes of it, or what the vision tower does."""


class MediaKey(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, cache_hash=True, gc=False):
    """digest: as MediaItem's; 32 bytes."""

    digest: bytes
    part: MediaPart


class WantedMedia(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """num_bytes: room to set aside when it has to be written, header included; 0 takes it only if it is there."""

    key: MediaKey
    num_bytes: int


class GrantedMedia(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """segment: path of the file. is_ready: else the lease that is granted it writes and commits it.

    description: what was committed with it.
    """

    segment: str
    is_ready: bool
    description: bytes = b""


class CommittedMedia(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """num_bytes: that were written. description: for those who are granted it later; the cache does not read it."""

    key: MediaKey
    num_bytes: int
    description: bytes


class AcquireMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Pin what is cached, set room aside for the rest: all of it, or nothing. Answered once, under the lease's id.

    client_pid: of the process whose end ends the lease. Those on other hosts hold none; `GetMedia` serves them.
    lease_id: unique for all time.
    """

    client_pid: int
    lease_id: str
    items: list[WantedMedia]


class MediaGranted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One for each of the items asked for, in order; None where there is none and no room was asked for.

    It comes when those that another lease was writing are ready.
    """

    lease_id: str
    items: list[GrantedMedia | None]


class MediaRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To AcquireMedia: there is no lease. To CommitMedia: nothing was committed."""

    lease_id: str
    error: ErrorInfo


class CommitMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The segments are written. All of the items are the lease's to write."""

    lease_id: str
    items: list[CommittedMedia]


class MediaCommitted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    lease_id: str


class ReleaseMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The leases end; what they were to write and have not committed is dropped. No answer."""

    lease_ids: list[str]


class GetMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """For a client that cannot map the cache's memory: a part of one item's bytes, header included.

    Whoever asks sees to it that somebody holds the item. One that `ClearMedia` has forgotten is found while it is held.
    """

    call_id: str
    key: MediaKey
    offset: int
    max_bytes: int


class MediaBytes(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """total_bytes: of the item; -1 where it is not cached. data: less than was asked for where the item ends."""

    call_id: str
    total_bytes: int
    data: bytes
    description: bytes = b""


class SetMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The same the other way: cache these bytes (header left out). Answered by MediaStored."""

    call_id: str
    key: MediaKey
    description: bytes
    data: bytes


class MediaStored(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """error: None where it is cached now, by this call or another."""

    call_id: str
    error: ErrorInfo | None = None


class ClearMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Forget all items. Requests that hold some go on with them; what is acquired from now on is made anew."""

    call_id: str


class MediaCleared(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """num_items: that were forgotten, those among them that are still held included."""

    call_id: str
    num_items: int


class GetMediaCacheStatus(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    call_id: str


class MediaCacheStatus(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """used_bytes: of all items; pinned_bytes: of those that some lease holds. num_hits, num_misses: items acquired."""

    call_id: str
    num_items: int
    used_bytes: int
    pinned_bytes: int
    capacity_bytes: int
    num_leases: int
    num_hits: int
    num_misses: int
    num_evicted: int


FromOtherHosts = GetMedia
"""All that is answered on the cache's tcp endpoint."""
ToMediaCache = AcquireMedia | CommitMedia | ReleaseMedia | GetMedia | SetMedia | ClearMedia | GetMediaCacheStatus
FromMediaCache = (
    MediaGranted | MediaRefused | MediaCommitted | MediaBytes | MediaStored | MediaCleared | MediaCacheStatus
)


def header_of(key: MediaKey) -> bytes:
    """What the key's segment begins with."""
    return (key.digest + key.part.encode()).ljust(HEADER_BYTES, b"\0")
