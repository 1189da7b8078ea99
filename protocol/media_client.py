"""A process's connection to the media cache of its host. Every call has a deadline; releasing waits for nobody.

When the connection breaks, all calls under way raise WorkerLost: the cache that was asked is gone, and what it had with
it. Later calls go to the next one, as soon as it is there.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import secrets
from typing import TypeVar

import msgspec

from tandem.protocol.codec import MAX_MESSAGE_BYTES, Codec
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
    MediaRefused,
    MediaStored,
    ReleaseMedia,
    SetMedia,
    WantedMedia,
)
from tandem.protocol.network import Context
from tandem.protocol.network_keys import Part
from tandem.protocol.sockets import DealerSocket
from tandem.runtime.errors import InternalError, InvalidRequest, Overloaded, WorkerLost

R = TypeVar("R", bound=msgspec.Struct)

CALL_TIMEOUT_S = 20.0
"""Longer than it takes until a cache that stands still is ended, for then the call fails at once."""
MAX_SET_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
_GET_BYTES = 1 << 20
"""Of an item at once, over the socket: so long the cache answers nobody else."""


class MediaCacheClient:
    """Belongs to the loop that it is made on. client_pid: whose end ends its leases; by default this process's.

    peer: whose keys the cache has, where the endpoint is tcp; there only `read` is answered.
    """

    def __init__(self, context: Context, endpoint: str, client_pid: int | None = None, peer: Part = "worker") -> None:
        self._client_pid = os.getpid() if client_pid is None else client_pid
        codec: Codec[FromMediaCache] = Codec(FromMediaCache)
        self._socket: DealerSocket[FromMediaCache] = DealerSocket(
            context, endpoint, codec, self._on_message, peer=peer, on_broken=self._on_broken
        )
        self._waiting: dict[str, asyncio.Future[FromMediaCache]] = {}
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count()

    def new_id(self) -> str:
        """Of a lease or a call: unique for all time."""
        return f"{self._prefix}-{next(self._numbers)}"

    async def acquire(
        self, lease_id: str, wanted: list[WantedMedia], timeout_s: float | None = CALL_TIMEOUT_S
    ) -> list[GrantedMedia | None]:
        """See AcquireMedia. The caller owes one `release`, also when this raises.

        timeout_s: None waits as long as others take to write what they have acquired, for callers who are themselves
        cancelled when it is too late.

        Raises Overloaded when there is no room, InvalidRequest for what could never fit, InternalError when the cache
        does not answer in time, WorkerLost when it is gone.
        """
        message = AcquireMedia(self._client_pid, lease_id, wanted)
        return (await self._call(lease_id, message, MediaGranted, timeout_s)).items

    async def commit(self, lease_id: str, items: list[CommittedMedia]) -> None:
        """See CommitMedia. Raises Overloaded when the items have grown and there is no room; else as `acquire` does."""
        await self._call(lease_id, CommitMedia(lease_id, items), MediaCommitted, CALL_TIMEOUT_S)

    def release(self, lease_ids: list[str]) -> None:
        self._socket.send(ReleaseMedia(lease_ids))

    async def get(self, key: MediaKey) -> tuple[bytes, bytes] | None:
        """(the whole segment, its description) over the socket; None where it is not cached."""
        told = await self._get(key, 0, 0)
        if told.total_bytes < 0:
            return None
        data = bytearray(told.total_bytes)
        await self.read(key, 0, len(data), data)
        return bytes(data), told.description

    async def read(self, key: MediaKey, offset: int, num_bytes: int, buffer: bytearray | mmap.mmap) -> None:
        """A part of the item's segment, over the socket, to the beginning of the buffer: for another host.

        Raises WorkerLost when the item is not cached (any more), or is shorter; InternalError as `acquire` does.
        """
        done = 0
        while done < num_bytes:
            wanted = min(_GET_BYTES, num_bytes - done)
            answer = await self._get(key, offset + done, wanted)
            if len(answer.data) != wanted:
                raise WorkerLost("the media cache has let an image or video go that the request still needs")
            buffer[done : done + wanted] = answer.data
            done += wanted

    async def _get(self, key: MediaKey, offset: int, max_bytes: int) -> MediaBytes:
        call_id = self.new_id()
        return await self._call(call_id, GetMedia(call_id, key, offset, max_bytes), MediaBytes, CALL_TIMEOUT_S)

    async def set(self, key: MediaKey, data: bytes, description: bytes) -> None:
        """The other way. Raises Overloaded and InvalidRequest as `acquire` does, and for more than MAX_SET_BYTES."""
        if len(data) > MAX_SET_BYTES:
            raise InvalidRequest(f"an item of {len(data)} bytes is too large for the socket: at most {MAX_SET_BYTES}")
        call_id = self.new_id()
        answer = await self._call(call_id, SetMedia(call_id, key, description, data), MediaStored, CALL_TIMEOUT_S)
        if answer.error is not None:
            raise answer.error.to_error()

    async def clear(self) -> int:
        """How many items were forgotten."""
        call_id = self.new_id()
        return (await self._call(call_id, ClearMedia(call_id), MediaCleared, CALL_TIMEOUT_S)).num_items

    async def status(self) -> MediaCacheStatus:
        call_id = self.new_id()
        return await self._call(call_id, GetMediaCacheStatus(call_id), MediaCacheStatus, CALL_TIMEOUT_S)

    async def _call(self, call_id: str, message: msgspec.Struct, kind: type[R], timeout_s: float | None) -> R:
        answer: asyncio.Future[FromMediaCache] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer
        try:
            if not self._socket.send(message):
                raise Overloaded("the media cache does not read its messages; try again later")
            async with asyncio.timeout(timeout_s):
                told = await answer
        except TimeoutError:
            raise InternalError(f"the media cache gave no answer within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(call_id, None)
            del answer  # with an error in it, it would keep this frame and all that call it, and they it
        if isinstance(told, MediaRefused):
            raise told.error.to_error()
        assert isinstance(told, kind), f"the media cache answered with {type(told).__name__}"
        return told

    def _on_message(self, message: FromMediaCache) -> None:
        match message:
            case MediaGranted() | MediaCommitted() | MediaRefused():
                call_id = message.lease_id
            case _:
                call_id = message.call_id
        answer = self._waiting.get(call_id)
        if answer is not None and not answer.done():  # else nobody waits for it any more
            answer.set_result(message)

    def _on_broken(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(WorkerLost("the media cache ended before it gave an answer"))

    def close(self) -> None:
        self._socket.close()
