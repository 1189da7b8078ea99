"""A process's connection to its host's media cache. Every call has a deadline; releasing a lease does not wait.

When the connection breaks, all calls in flight raise WorkerLost: the cache process is gone, with all its items. Later
calls go to the next cache process as soon as it is up.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import secrets
from typing import TypeVar

import msgspec

from tandem.protocol.codec import Codec
from tandem.protocol.messages.media_cache import (
    AcquireMedia,
    ClearMedia,
    CommitMedia,
    CommittedMedia,
    FromMediaCache,
    GetMedia,
    GetMediaCacheStatus,
    GrantedMedia,
    MediaBytes,
    MediaCacheStatus,
    MediaCleared,
    MediaCommitted,
    MediaGranted,
    MediaKey,
    MediaPart,
    MediaRefused,
    ReleaseMedia,
    WantedMedia,
)
from tandem.protocol.messaging import Network
from tandem.protocol.network_keys import Part
from tandem.runtime.errors import InternalError, Overloaded, WorkerLost

R = TypeVar("R", bound=msgspec.Struct)

CALL_TIMEOUT_S = 20.0
"""Longer than the launcher takes to kill a stalled cache, which makes its calls fail at once."""
_READ_BYTES = 1 << 20
"""Bytes of an item per message. The cache answers no other call while it sends one."""


class MediaCacheClient:
    """Belongs to the loop on which it is created.

    client_pid: process whose exit ends its leases; this process by default. peer: the part whose keys the cache has,
    for tcp endpoints, which answer only `read`.
    """

    def __init__(self, network: Network, endpoint: str, client_pid: int | None = None, peer: Part = "worker") -> None:
        self._client_pid = os.getpid() if client_pid is None else client_pid
        codec: Codec[FromMediaCache] = Codec(FromMediaCache)
        self._socket = network.dealer(endpoint, codec, self._on_message, peer=peer, on_broken=self._on_broken)
        self._calls: dict[str, asyncio.Future[FromMediaCache]] = {}
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count()

    def new_id(self) -> str:
        """Returns a globally unique id for a lease or a call."""
        return f"{self._prefix}-{next(self._numbers)}"

    async def acquire(
        self, lease_id: str, wanted: list[WantedMedia], timeout_s: float | None = CALL_TIMEOUT_S, client: str = ""
    ) -> list[GrantedMedia | None]:
        """Acquires a lease, see AcquireMedia. The caller must call `release` once, even if this raises.

        timeout_s: None waits as long as other leases take to write, for callers that have a deadline of their own.
        client: whose share of the cache the items count towards.
        Raises Overloaded if there is no space, ClientShareExceeded if the client's share is used up, InvalidRequest for
        items that could never fit, InternalError if the cache does not answer in time, WorkerLost if it is gone.
        """
        message = AcquireMedia(self._client_pid, lease_id, wanted, client)
        return (await self._call(lease_id, message, MediaGranted, timeout_s)).items

    async def commit(self, lease_id: str, items: list[CommittedMedia]) -> None:
        """Commits written items. Raises Overloaded if they have outgrown their space; else like `acquire`."""
        await self._call(lease_id, CommitMedia(lease_id, items), MediaCommitted, CALL_TIMEOUT_S)

    def release(self, lease_ids: list[str], part: MediaPart | None = None) -> None:
        """Ends leases, or releases their items of one part. Returns at once."""
        self._socket.send(ReleaseMedia(lease_ids, part))

    async def read(self, key: MediaKey, offset: int, num_bytes: int, buffer: bytearray | mmap.mmap) -> None:
        """Reads a range of the item's segment over the socket into the start of the buffer, for other hosts.

        Raises WorkerLost if the item is not cached or is shorter, InternalError like `acquire`.
        """
        done = 0
        while done < num_bytes:
            wanted = min(_READ_BYTES, num_bytes - done)
            call_id = self.new_id()
            message = GetMedia(call_id, key, offset + done, wanted)
            answer = await self._call(call_id, message, MediaBytes, CALL_TIMEOUT_S)
            if len(answer.data) != wanted:
                raise WorkerLost("the media cache has evicted an image or video that the request still needs")
            buffer[done : done + wanted] = answer.data
            done += wanted

    async def clear(self) -> tuple[int, int]:
        """Makes the cache forget all items. Returns (num_items, num_bytes) forgotten, see ClearMedia."""
        call_id = self.new_id()
        answer = await self._call(call_id, ClearMedia(call_id), MediaCleared, CALL_TIMEOUT_S)
        return answer.num_items, answer.num_bytes

    async def status(self) -> MediaCacheStatus:
        call_id = self.new_id()
        return await self._call(call_id, GetMediaCacheStatus(call_id), MediaCacheStatus, CALL_TIMEOUT_S)

    async def _call(self, call_id: str, message: msgspec.Struct, kind: type[R], timeout_s: float | None) -> R:
        future: asyncio.Future[FromMediaCache] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            if not self._socket.send(message):
                raise Overloaded("the media cache does not read its messages; try again later")
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError as error:
            raise InternalError(f"the media cache gave no answer within {timeout_s:g} s") from error
        finally:
            self._calls.pop(call_id, None)
        if isinstance(answer, MediaRefused):
            raise answer.error.to_error()
        assert isinstance(answer, kind), f"the media cache answered with {type(answer).__name__}"
        return answer

    def _on_message(self, message: FromMediaCache) -> None:
        future = self._calls.get(message.call_id)
        if future is not None and not future.done():  # else the caller has given up
            future.set_result(message)

    def _on_broken(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(WorkerLost("the media cache exited before it answered"))

    def close(self) -> None:
        self._socket.close()
