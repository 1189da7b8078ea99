"""The media cache process: answers calls from the store, keeps the segments, and ends the leases of clients that
exit."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tandem.media_cache.media_cache_config import MediaCacheConfig
from tandem.media_cache.store import Action, Drop, Entry, MediaStore
from tandem.protocol.codec import MAX_MESSAGE_BYTES, Codec
from tandem.protocol.messages.media import DIGEST_BYTES
from tandem.protocol.messages.media_cache import (
    MAX_DESCRIPTION_BYTES,
    MAX_ITEMS,
    AcquireMedia,
    ClearMedia,
    CommitMedia,
    FromOtherHosts,
    GetMedia,
    GetMediaCacheStatus,
    GrantedMedia,
    MediaBytes,
    MediaCacheStatus,
    MediaCleared,
    MediaCommitted,
    MediaGranted,
    MediaRefused,
    ReleaseMedia,
    ToMediaCache,
)
from tandem.protocol.sockets import RouterSocket, new_context
from tandem.runtime.errors import ConfigError, ErrorInfo, InvalidRequest, TandemError
from tandem.runtime.files.file_limits import take_all_descriptors
from tandem.runtime.files.whole_file import write_whole

log = logging.getLogger(__name__)

M = TypeVar("M")

_MAX_REPLY_BYTES = MAX_MESSAGE_BYTES // 2

_OTHER_FDS = 256
"""Descriptors reserved for sockets and clients."""


def max_segments() -> int:
    """Raises this process's descriptor limit and returns the number of segments that fit under it."""
    return max(16, take_all_descriptors() - _OTHER_FDS)


class Segments:
    """The memory of cached items: a memfd each, by entry number, open while the item is cached. A reader that has
    mapped a segment keeps its memory when it is dropped here."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._prefix = f"/proc/{os.getpid()}/fd/"

    def path_of(self, number: int) -> str:
        """Returns the path of the segment and creates it on first use."""
        fd = self._fds.get(number)
        if fd is None:
            fd = self._fds[number] = os.memfd_create("media")
        return f"{self._prefix}{fd}"

    def read(self, number: int, offset: int, max_bytes: int) -> bytes:
        return os.pread(self._fds[number], max_bytes, offset)

    def drop(self, number: int) -> None:
        fd = self._fds.pop(number, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for number in list(self._fds):
            self.drop(number)


class MediaCacheServer:
    """Created on the loop. Raises ConfigError if an endpoint cannot be bound."""

    def __init__(self, config: MediaCacheConfig) -> None:
        self._store = MediaStore(config.capacity_bytes, max_segments())
        self._segments = Segments()
        self._callers: dict[str, bytes] = {}  # by waiting lease, the identity to answer
        self._clients: dict[int, int] = {}  # pidfd by client's pid
        self._stopped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # Without a tcp endpoint no keys are needed, and a host of workers does not have the proxy's.
        self._context = new_context("proxy", config.network) if config.tcp_endpoint else new_context()
        self._bound: list[RouterSocket[Any]] = []
        self._socket: RouterSocket[ToMediaCache] = self._bind(config.endpoint, Codec(ToMediaCache), self._on_message)
        self._remote: RouterSocket[FromOtherHosts] | None = None
        if config.tcp_endpoint:
            self._remote = self._bind(config.tcp_endpoint, Codec(FromOtherHosts), self._on_remote)
            if config.tcp_endpoint_file:
                write_whole(Path(config.tcp_endpoint_file), self._remote.endpoint)

    def _bind(self, endpoint: str, codec: Codec[M], on_message: Callable[[bytes, M], None]) -> RouterSocket[M]:
        try:
            bound = self._context.router(endpoint, codec, on_message)
        except Exception as error:  # zmq's error class is not imported here
            self._close_sockets()  # uvloop aborts if a watched descriptor is closed
            self._context.destroy(linger=0)
            if isinstance(error, ConfigError):
                raise
            hint = "; choose another --cluster-port" if endpoint.startswith("tcp:") else ""
            raise ConfigError(f"cannot bind the media cache's endpoint {endpoint}: {error}{hint}") from error
        self._bound.append(bound)
        return bound

    def _close_sockets(self) -> None:
        for bound in self._bound:
            bound.close()

    async def run(self) -> None:
        log.info("ready: %d MiB for at most %d items", self._store.capacity_bytes >> 20, max_segments())
        await self._stopped.wait()
        self._close_sockets()
        for pidfd in self._clients.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._segments.close()
        self._context.destroy(linger=100)

    def stop(self) -> None:
        self._stopped.set()

    def drain(self) -> bool:
        return False

    # ---- calls

    def _on_message(self, caller: bytes, message: ToMediaCache) -> None:
        match message:
            case AcquireMedia():
                self._answer_errors(caller, message.lease_id, lambda: self._acquire(caller, message))
            case CommitMedia():
                self._answer_errors(caller, message.lease_id, lambda: self._commit(caller, message))
            case ReleaseMedia():
                if message.part is not None:
                    self._perform(self._store.release_part(message.lease_ids, message.part))
                    return
                for lease_id in message.lease_ids:
                    self._callers.pop(lease_id, None)
                self._perform(self._store.release(message.lease_ids))
            case GetMedia():
                self._socket.send(caller, self._get(message))
            case ClearMedia():
                num_items, num_bytes, actions = self._store.clear()
                self._perform(actions)
                self._socket.send(caller, MediaCleared(message.call_id, num_items, num_bytes))
                log.info("cleared %d items of %d bytes", num_items, num_bytes)
            case GetMediaCacheStatus():
                self._socket.send(caller, self._status(message.call_id))

    def _on_remote(self, caller: bytes, message: FromOtherHosts) -> None:
        assert self._remote is not None
        self._remote.send(caller, self._get(message))

    def _answer_errors(self, caller: bytes, lease_id: str, call: Callable[[], None]) -> None:
        try:
            call()
        except TandemError as error:
            self._socket.send(caller, MediaRefused(lease_id, ErrorInfo.of(error)))

    def _acquire(self, caller: bytes, message: AcquireMedia) -> None:
        if len(message.items) > MAX_ITEMS or any(
            len(item.key.digest) != DIGEST_BYTES or item.num_bytes < 0 for item in message.items
        ):
            raise InvalidRequest(f"a call takes at most {MAX_ITEMS} items, with digests of {DIGEST_BYTES} bytes")
        self._watch(message.client_pid)
        actions = self._store.acquire(message.client_pid, message.lease_id, message.items, message.client)
        self._callers[message.lease_id] = caller
        self._perform(actions)

    def _commit(self, caller: bytes, message: CommitMedia) -> None:
        if any(len(item.description) > MAX_DESCRIPTION_BYTES for item in message.items):
            raise InvalidRequest(f"an item's description has more than {MAX_DESCRIPTION_BYTES} bytes")
        actions = self._store.commit(message.lease_id, message.items)
        self._socket.send(caller, MediaCommitted(message.lease_id))
        self._perform(actions)

    def _get(self, message: GetMedia) -> MediaBytes:
        entry = self._store.held_or_ready(message.key)
        if entry is None:
            return MediaBytes(message.call_id, b"")
        num_bytes = max(0, min(message.max_bytes, _MAX_REPLY_BYTES))
        data = self._segments.read(entry.number, max(0, message.offset), num_bytes)
        return MediaBytes(message.call_id, data)

    def _status(self, call_id: str) -> MediaCacheStatus:
        store = self._store
        return MediaCacheStatus(
            call_id,
            store.num_items,
            store.used_bytes,
            store.pinned_bytes,
            store.num_leases,
            store.num_hits,
            store.num_misses,
        )

    # ---- actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Drop):
                self._segments.drop(action.number)
            elif (caller := self._callers.pop(action.lease_id, None)) is not None:
                granted = [None if entry is None else self._granted(entry) for entry in action.entries]
                self._socket.send(caller, MediaGranted(action.lease_id, granted))

    def _granted(self, entry: Entry) -> GrantedMedia:
        return GrantedMedia(self._segments.path_of(entry.number), entry.is_ready, entry.description)

    # ---- clients

    def _watch(self, pid: int) -> None:
        """Watches a client's process. Raises InvalidRequest if it does not exist."""
        if pid in self._clients:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise InvalidRequest(f"the client's process {pid} does not exist: {error.strerror}") from error
        self._clients[pid] = pidfd
        self._loop.add_reader(pidfd, self._on_gone, pid)

    def _on_gone(self, pid: int) -> None:
        pidfd = self._clients.pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        log.info("client %d has exited; its leases end", pid)
        self._perform(self._store.client_lost(pid))
