"""The media process: makes tensors of images and video, one process per proxy (`proxy.reading.media_pool`).

It sees nothing else of a request: readers decode the body, render, tokenise and check grammars. Its loop fetches URLs
and asks the cache; what looks into an item's bytes runs in a sandbox, so an image that ends it, hangs or takes all its
memory costs its own request only. Steps of a job: fetch; read headers and hash; ask the cache; decode, process, write
and commit what is not cached. Each job is answered by one `MediaJobDone` or `MediaJobFailed`. The proxy releases the
leases.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import uvloop

from tandem.media_cache.media_client import MediaCacheClient
from tandem.media_cache.media_segment import offsets_of, write_segment
from tandem.protocol.messages.media import MediaKind
from tandem.protocol.messages.media_cache import CommittedMedia, MediaKey, WantedMedia
from tandem.protocol.sockets import new_context
from tandem.proxy.admission.fair_slots import FairSlots
from tandem.proxy.media.fetch import FetchedMedia, MediaFetcher, is_remote, read_file
from tandem.proxy.media.media_lease import HeldSources, MadeMedia, SourceBytes, read_sources, sources_key
from tandem.proxy.media.processor import MediaProcessor, MediaSize, PreparedMedia
from tandem.proxy.media.source import MediaSource, SentMedia
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.media_messages import (
    EXIT_BAD_CONFIG,
    MEDIA_FD,
    TO_PROCESS,
    CancelMediaJob,
    FromMediaProcess,
    MediaJob,
    MediaJobDone,
    MediaJobFailed,
    MediaProcessAlive,
    MediaRemade,
    PingMediaProcess,
    RemakeMedia,
    ToMediaProcess,
    read_message,
    write_message,
)
from tandem.proxy.reading.sandbox_pool import SandboxPool
from tandem.proxy.text.model_files import find_model
from tandem.proxy.text.prompt import CachedMedia, ContextLengthExceeded, MediaPlaceholder
from tandem.runtime.errors import (
    ConfigError,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestAborted,
    TandemError,
)
from tandem.runtime.garbage_collection import freeze_loaded_objects
from tandem.runtime.logs import setup_logging
from tandem.runtime.processes.forked_process import ForkServer, ForkServerLost, KeptForkServer, read_config
from tandem.runtime.processes.lifetime import die_with_parent, end_process, leave
from tandem.runtime.processes.sandbox import CALLS_FD, Limits, SandboxLost, confine, limit_more_data, serve_calls
from tandem.runtime.tasks import start

log = logging.getLogger(__name__)

T = TypeVar("T")

_NICENESS = 10
"""Niceness of the sandboxes: CPU work on media yields to this process's loop, the proxy and the workers."""
_CLIENTS_AT_ONCE = 16
"""Clients that may have requests in work at the same time, each as many as there are sandboxes."""
_MEMORY_BYTES = 5 << 29
"""Memory beyond what is loaded: for fetched items (1 GiB, `MediaLimits`), for those that are sent to and from
sandboxes, and for stacks of the threads that look up host names (0.5 GiB, `MediaFetcher`)."""
_ITEM_MEMORY_BYTES = 2 << 30
"""Memory for one item that is decoded and processed. The largest that the limits allow took 1.2 GiB."""
_CPU_FACTOR, _DEADLINE_FACTOR = 10, 3
"""An item may take so many times the limit on decoding a video in CPU time, of up to eight threads, and so many times
that in elapsed time, because the machine may be busy."""
_MAX_GROWN_BYTES = 512 << 20
"""Memory by which a sandbox may have grown after an item. A new one takes milliseconds."""
_FORK_TIMEOUT_S = 10.0
"""Deadline of the fork server, which has nothing to load."""
_ENTRY = "item"
_NO_MEMORY = "the memory for images and video is used up; try again later, or send smaller ones"


class MediaProcess:
    """send: sends a message to the proxy. client_pid: of the proxy, which owns the leases."""

    def __init__(
        self,
        config: ProxyConfig,
        reader: MediaReader,
        sandboxes: SandboxPool,
        send: Callable[[FromMediaProcess], None],
        client_pid: int,
    ) -> None:
        self._reader = reader
        self._sandboxes = sandboxes
        self._send = send
        self._thread = ThreadPoolExecutor(1, "media")
        num_sandboxes = config.media_sandboxes + 1
        cpu_s = _CPU_FACTOR * config.media.decode_timeout_s
        self._limits = Limits(cpu_s, _ITEM_MEMORY_BYTES, _DEADLINE_FACTOR * cpu_s)
        self._max_pixels = config.media.max_request_pixels
        self._fetcher = MediaFetcher(config.media)
        self._context = new_context()
        self._cache = MediaCacheClient(self._context, config.media_cache_endpoint, client_pid)
        # A client's requests take turns, so that the first one is done before the last one has begun.
        self._turns = FairSlots(_CLIENTS_AT_ONCE * num_sandboxes, num_sandboxes)
        self._running: dict[str, asyncio.Task[MediaJobDone] | asyncio.Task[MediaRemade]] = {}
        kinds = " and ".join(f"{kind}s" for kind in reader.processor.placeholders)
        log.info("processes %s in %d sandboxes", kinds, num_sandboxes)

    def on_message(self, message: ToMediaProcess) -> None:
        match message:
            case MediaJob():
                reading = start(self._read(message))
                reading.add_done_callback(partial(self._on_end, message.lease_id))
                self._running[message.lease_id] = reading
            case RemakeMedia():
                remaking = start(self._remake(message))
                remaking.add_done_callback(partial(self._on_end, message.lease_id))
                self._running[message.lease_id] = remaking
            case PingMediaProcess():
                self._send(MediaProcessAlive())
            case CancelMediaJob():
                if (running := self._running.get(message.lease_id)) is not None:
                    running.cancel()

    def _on_end(self, lease_id: str, job: asyncio.Task[MediaJobDone] | asyncio.Task[MediaRemade]) -> None:
        """Answers the job. A callback, because a task that is cancelled before it starts runs no code of its own."""
        del self._running[lease_id]
        try:
            self._send(job.result())
        except asyncio.CancelledError:
            failure: TandemError = RequestAborted("the client closed the connection")
        except TandemError as error:  # also MessageTooLarge, from sending
            failure = error
        except MemoryError as error:
            log.error("a request with media failed for lack of memory: %s", error)
            failure = Overloaded(_NO_MEMORY)
        except Exception as error:
            log.error("a request with media failed", exc_info=error)
            failure = InternalError("the request's images or video could not be processed; see the server's log")
        else:
            return
        self._send(MediaJobFailed.of(lease_id, failure))

    async def _read(self, job: MediaJob) -> MediaJobDone:
        with FetchedMedia(self._fetcher, job.client) as fetched:
            await _gather(*(fetched.fetch(item.source) for item in job.items if is_remote(item.source)))
            async with self._turns.slot(job.client):
                return await self._process(job, fetched.data)

    async def _process(self, job: MediaJob, fetched: dict[int, bytes]) -> MediaJobDone:
        """fetched: bytes of remote items, by item number."""
        contents: list[MediaContent] = await _gather(
            *(self._inspect(job, item, fetched.get(item.source.number)) for item in job.items)
        )
        num_pixels = sum({content.key: content.size.num_pixels for content in contents}.values())
        if num_pixels > self._max_pixels:
            raise InvalidRequest(
                f"The images and the sampled video frames of this request have {num_pixels} pixels; the limit is "
                f"{self._max_pixels}. Send fewer or smaller ones.",
                "messages",
            )
        num_tokens = sum(content.size.num_tokens for content in contents)
        if num_tokens >= job.max_model_len:
            raise ContextLengthExceeded(
                f"The images alone have {num_tokens} tokens, but this model's maximum context length is "
                f"{job.max_model_len} tokens for prompt and output together.",
                "messages",
            )
        # The bytes that the client sent are kept, so that pixels can be made again.
        distinct = list({content.key: content for content in contents}.values())
        offsets, num_bytes = offsets_of([len(content.data) for content in distinct])
        wanted = WantedMedia(sources_key([content.key.digest for content in distinct]), num_bytes)
        cached = await self._make(job, distinct, wanted)
        items = [
            SourceBytes(content.source.kind, content.key.digest, offset, len(content.data))
            for content, offset in zip(distinct, offsets, strict=True)
        ]
        sources = HeldSources(cached[wanted.key][0], items)
        media = [self._reader.cached(content, *cached[content.key]) for content in contents]
        return MediaJobDone(job.lease_id, media, self._reader.placeholders, sources)

    async def _inspect(self, job: MediaJob, item: SentMedia, fetched: bytes | None) -> MediaContent:
        source = item.source
        if fetched is not None:
            data = fetched
        elif item.num_bytes is not None:
            data = read_part(job.path, item.offset, item.num_bytes)
        else:
            data = await self._in_turn(job, MediaReader.read_file, b"", source)
        key, size = await self._in_turn(job, MediaReader.inspect, data, source, job.cache_salt)
        return MediaContent(source, data, key, size)

    async def _remake(self, job: RemakeMedia) -> MediaRemade:
        async with self._turns.slot(job.client):
            read = await self._on_thread(read_sources, job.sources)
            contents = await _gather(
                *(
                    self._inspect_again(job, number, *each)
                    for number, each in enumerate(zip(job.sources.items, read, strict=True))
                )
            )
            cached = await self._make(job, contents)
        return MediaRemade(job.lease_id, [self._reader.made(content, *cached[content.key]) for content in contents])

    async def _inspect_again(self, job: RemakeMedia, number: int, item: SourceBytes, data: bytes) -> MediaContent:
        source = MediaSource(number, item.kind, "", "messages")
        size = await self._in_turn(job, MediaReader.size, data, source)
        return MediaContent(source, data, MediaKey(item.digest, "input"), size)

    async def _make(
        self, job: MediaJob | RemakeMedia, contents: list[MediaContent], sources: WantedMedia | None = None
    ) -> dict[MediaKey, tuple[str, bytes]]:
        """Returns segment and description of each item, which are cached under the job's lease from then on.

        contents: distinct ones. sources: a segment with the bytes of all of them.
        """
        wanted = [WantedMedia(content.key, content.size.num_bytes) for content in contents]
        if sources is not None:
            wanted.append(sources)
        granted = await self._cache.acquire(
            job.lease_id,
            wanted,
            timeout_s=None,  # another request may be decoding an item; the proxy cancels at the request's deadline
            client=job.client,
        )
        cached: dict[MediaKey, tuple[str, bytes]] = {}
        missing: dict[MediaKey, str] = {}
        writing = []
        keys = [each.key for each in wanted]
        for number, (key, grant) in enumerate(zip(keys, granted, strict=True)):
            assert grant is not None
            if grant.is_ready:
                cached[key] = grant.segment, grant.description
                continue
            missing[key] = grant.segment
            if number < len(contents):
                content = contents[number]
                writing.append(
                    self._in_turn(job, MediaReader.write, content.data, content.source, content.key, grant.segment)
                )
            else:
                writing.append(self._on_thread(write_sources, [each.data for each in contents], grant.segment, key))
        if missing:
            written = await _gather(*writing)
            await self._cache.commit(job.lease_id, written)
            cached |= {committed.key: (missing[committed.key], committed.description) for committed in written}
        return cached

    async def _in_turn(
        self, job: MediaJob | RemakeMedia, method: Callable[..., T], data: bytes, *arguments: object
    ) -> T:
        """Calls a method of the reader in a sandbox. Each item is a job of its own, so a slow video delays its own
        client only."""
        try:
            return await self._sandboxes.call(job.client, method, data, arguments, self._limits)
        except TimeoutError as error:
            raise Overloaded("an image or video was not read in time, because the machine is busy") from error
        except SandboxLost as lost:
            raise _error_of(lost) from lost

    async def _on_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Copies memory on a thread. Cancelling waits for work that has begun, because it uses the lease's memory."""
        copying = self._thread.submit(work, *arguments)
        future = asyncio.wrap_future(copying)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not copying.cancel():
                await asyncio.wait([future])
            raise

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        self._fetcher.close()
        self._cache.close()
        self._context.destroy(linger=0)


def _error_of(lost: SandboxLost) -> TandemError:
    if lost.is_out_of_memory:
        return Overloaded(_NO_MEMORY)
    if lost.is_over_time or lost.is_fault:
        return InvalidRequest(
            "The process that reads images and video was ended by one of this request "
            f"({signal.Signals(-lost.status).name}). Send it in another format.",
            "messages",
        )
    return Overloaded("two processes that read an image or video were killed; try again")


async def _gather(*work: Any) -> list[Any]:
    """Waits for all of them, then raises the error of the first one that failed."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def serve(config: ProxyConfig, reader: MediaReader, server: KeptForkServer) -> None:
    """Serves until the proxy closes the channel."""
    messages, writer = await asyncio.open_connection(sock=socket.socket(fileno=MEDIA_FD))
    sandboxes = SandboxPool(server, _ENTRY, config.media_sandboxes + 1)
    sandboxes.start()
    process = MediaProcess(config, reader, sandboxes, partial(write_message, writer), os.getppid())
    limit_more_data(_MEMORY_BYTES)
    await _receive(messages, process)
    await process.close()


async def _receive(reader: asyncio.StreamReader, process: MediaProcess) -> None:
    while True:
        try:
            process.on_message(await read_message(reader, TO_PROCESS))
        except (asyncio.IncompleteReadError, ConnectionError):
            return


def main() -> NoReturn:
    """Serves the proxy. Exits with EXIT_BAD_CONFIG if it cannot load the model's processor."""
    die_with_parent(signal.SIGKILL)
    confine()
    config = msgspec.json.decode(read_config(), type=ProxyConfig)
    setup_logging(f"{config.proxy_id}-media", config.logs)
    try:
        reader = MediaReader(config)
        freeze_loaded_objects()
        server = KeptForkServer(_server_lost, _FORK_TIMEOUT_S)
        server.take(ForkServer.fork_here({_ENTRY: partial(_serve_items, reader)}))
        uvloop.run(serve(config, reader, server))
        exit_code = 0
    except (ConfigError, ForkServerLost) as error:  # a model's own code may start threads, which cannot be forked
        print(f"error: {error}", file=sys.stderr)
        exit_code = EXIT_BAD_CONFIG
    except Exception:
        log.exception("the media process fails")
        exit_code = 1
    leave(exit_code)


def _serve_items(reader: MediaReader, _arguments: list[str]) -> None:
    """In a sandbox."""
    os.nice(_NICENESS)
    serve_calls(Connection(CALLS_FD), reader, _MAX_GROWN_BYTES)


def _server_lost() -> NoReturn:
    """This process has threads by now and cannot be forked again. The proxy starts another one."""
    end_process("the fork server of the media process was lost")


class MediaContent(msgspec.Struct, frozen=True):
    """An item with its bytes. size: known from its header."""

    source: MediaSource
    data: bytes
    key: MediaKey
    size: MediaSize


class MediaReader:
    """Loads the processor. Raises ConfigError."""

    def __init__(self, config: ProxyConfig) -> None:
        self._limits = config.media
        self.processor = MediaProcessor(find_model(config.model), config.media, config.trust_remote_code)
        self._description: msgspec.msgpack.Decoder[PreparedMedia] = msgspec.msgpack.Decoder(PreparedMedia)

    @property
    def placeholders(self) -> dict[MediaKind, MediaPlaceholder]:
        processor = self.processor
        return {
            kind: MediaPlaceholder(text, processor.token_ids[kind]) for kind, text in processor.placeholders.items()
        }

    def read_file(self, _data: bytes, source: MediaSource) -> bytes:
        """Reads a file in the allowed folder. Raises InvalidMedia."""
        return read_file(source, self._limits)

    def inspect(self, data: bytes, source: MediaSource, cache_salt: str) -> tuple[MediaKey, MediaSize]:
        """Reads the item's header and hashes its bytes. Raises InvalidMedia."""
        size = self.processor.size(source, data)
        return MediaKey(self.processor.digest(source, data, cache_salt), "input"), size

    def size(self, data: bytes, source: MediaSource) -> MediaSize:
        """Reads the item's header. Raises InvalidMedia."""
        return self.processor.size(source, data)

    def write(self, data: bytes, source: MediaSource, key: MediaKey, segment: str) -> CommittedMedia:
        """Decodes and processes the item, and writes its tensors to the cache's segment. Raises InvalidMedia."""
        prepared, tensors = self.processor.prepare(source, data)
        _, num_bytes = write_segment(segment, key, [tensor.data for tensor in tensors])
        return CommittedMedia(key, num_bytes, msgspec.msgpack.encode(prepared))

    def made(self, content: MediaContent, segment: str, description: bytes) -> MadeMedia:
        return MadeMedia(content.key.digest, segment, self._description.decode(description).tensors)

    def cached(self, content: MediaContent, segment: str, description: bytes) -> CachedMedia:
        """Returns what the prompt needs of an item that is in the cache."""
        prepared = self._description.decode(description)
        kind, digest = content.source.kind, content.key.digest
        return CachedMedia(kind, digest, segment, prepared.tensors, prepared.num_tokens, prepared.replacement)


def read_part(path: str, offset: int, num_bytes: int) -> bytes:
    """Returns bytes of a job's file, which is in memory."""
    with Path(path).open("rb") as file:
        file.seek(offset)
        return file.read(num_bytes)


def write_sources(data: list[bytes], segment: str, key: MediaKey) -> CommittedMedia:
    """Writes the bytes of a request's items to the cache's segment."""
    _, num_bytes = write_segment(segment, key, data)
    return CommittedMedia(key, num_bytes, b"")
