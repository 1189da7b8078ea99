"""The media process: makes tensors of images and video, one process per proxy (`proxy.reading.media_pool`).

It sees nothing else of a request: readers decode the body, render, tokenise and check grammars. Its loop fetches URLs;
everything else runs on threads. Steps of a job: fetch; read headers and hash; ask the cache; decode, process, write and
commit what is not cached. Each job is answered by one `MediaJobDone` or `MediaJobFailed`. The proxy releases the
leases.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import uvloop

from tandem.media_cache.media_client import MediaCacheClient
from tandem.media_cache.media_segment import offsets_of
from tandem.protocol.messages.media_cache import MediaKey, WantedMedia
from tandem.protocol.sockets import new_context
from tandem.proxy.admission.fair_slots import FairSlots
from tandem.proxy.media.fetch import FetchedMedia, MediaFetcher, is_remote
from tandem.proxy.media.media_source_bytes import HeldSources, SourceBytes, sources_key
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
    MediaSetup,
    PingMediaProcess,
    RemakeMedia,
    ToMediaProcess,
    read_message,
    write_message,
)
from tandem.proxy.reading.media_reader import MediaContent, MediaReader
from tandem.proxy.text.prompt import ContextLengthExceeded
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
from tandem.runtime.processes.command_line import show_command_line
from tandem.runtime.processes.fork_server import limit_more_data
from tandem.runtime.tasks import start

log = logging.getLogger(__name__)

T = TypeVar("T")

_NICENESS = 10
"""Niceness of the threads: CPU work on media yields to this process's loop, the proxy and the workers."""
_LOAD_TIMEOUT_S = 600.0
_CLIENTS_AT_ONCE = 16
"""Clients that may have requests in work at the same time, each as many as there are threads."""
_MEMORY_BYTES = 5 << 29
"""Memory beyond what is loaded: for items of bodies (1 GiB, `proxy.http.bodies`), fetched ones (1 GiB, `MediaLimits`),
and stacks of the threads that look up host names (0.5 GiB, `MediaFetcher`)."""
_MEMORY_PER_THREAD_BYTES = 2 << 30
"""Memory for one item that is decoded and processed. The largest that the limits allow took 1.2 GiB."""


class MediaProcess:
    """send: sends a message to the proxy. client_pid: of the proxy, which owns the leases."""

    def __init__(self, config: ProxyConfig, send: Callable[[FromMediaProcess], None], client_pid: int) -> None:
        self._send = send
        self._num_threads = config.media_threads + 1
        self._max_pixels = config.media.max_request_pixels
        self._threads = ThreadPoolExecutor(self._num_threads, "media")
        self._reader = asyncio.get_running_loop().run_in_executor(self._threads, MediaReader, config)
        self._fetcher = MediaFetcher(config.media)
        self._context = new_context()
        self._cache = MediaCacheClient(self._context, config.media_cache_endpoint, client_pid)
        # A client's requests take turns, so that the first one is done before the last one has begun.
        self._turns = FairSlots(_CLIENTS_AT_ONCE * self._num_threads, self._num_threads)
        # Each item is a job of its own. No client holds the last thread, so a slow video delays its own client only.
        self._jobs = FairSlots(self._num_threads, self._num_threads - 1)
        self._is_loaded = asyncio.Event()
        self._running: dict[str, asyncio.Task[MediaJobDone] | asyncio.Task[MediaRemade]] = {}

    async def load(self, max_memory_bytes: int | None = None) -> None:
        """Loads one processor per thread; jobs wait for the end of it. Raises ConfigError.

        max_memory_bytes: that the whole process may then allocate beyond what it has; None for no limit.
        """
        reader = await self._reader
        all_threads = threading.Barrier(self._num_threads)

        def load() -> None:
            all_threads.wait(_LOAD_TIMEOUT_S)  # keeps one thread from taking two of these calls
            reader.processor.load_for_thread()
            os.nice(_NICENESS)  # on Linux this affects the calling thread only

        await asyncio.gather(*(self._on_thread(load) for _ in range(self._num_threads)))
        freeze_loaded_objects()
        if max_memory_bytes is not None:
            # RLIMIT_AS would also count torch's libraries, the media cache and what malloc reserves for each thread.
            limit_more_data(max_memory_bytes)
        self._is_loaded.set()
        kinds = " and ".join(f"{kind}s" for kind in reader.processor.placeholders)
        log.info("processes %s on %d threads", kinds, self._num_threads)

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
            failure = Overloaded("the memory for images and video is used up; try again later, or send smaller ones")
        except Exception as error:
            log.error("a request with media failed", exc_info=error)
            failure = InternalError("the request's images or video could not be processed; see the server's log")
        else:
            return
        self._send(MediaJobFailed.of(lease_id, failure))

    async def _read(self, job: MediaJob) -> MediaJobDone:
        await self._is_loaded.wait()
        with FetchedMedia(self._fetcher, job.client) as fetched:
            await _gather(*(fetched.fetch(item.source) for item in job.items if is_remote(item.source)))
            async with self._turns.slot(job.client):
                return await self._process(self._reader.result(), job, fetched.data)

    async def _process(self, reader: MediaReader, job: MediaJob, fetched: dict[int, bytes]) -> MediaJobDone:
        """fetched: bytes of remote items, by item number."""
        contents = await _gather(
            *(
                self._in_turn(job, reader.inspect, item, job.path, fetched.get(item.source.number), job.cache_salt)
                for item in job.items
            )
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
        cached = await self._make(reader, job, distinct, wanted)
        items = [
            SourceBytes(content.source.kind, content.key.digest, offset, len(content.data))
            for content, offset in zip(distinct, offsets, strict=True)
        ]
        sources = HeldSources(cached[wanted.key][0], items)
        media = [reader.cached(content, *cached[content.key]) for content in contents]
        return MediaJobDone(job.lease_id, media, reader.placeholders, sources)

    async def _remake(self, job: RemakeMedia) -> MediaRemade:
        await self._is_loaded.wait()
        reader = self._reader.result()
        async with self._turns.slot(job.client):
            contents = await self._in_turn(job, reader.again, job.sources)
            cached = await self._make(reader, job, contents)
        return MediaRemade(job.lease_id, [reader.made(content, *cached[content.key]) for content in contents])

    async def _make(
        self,
        reader: MediaReader,
        job: MediaJob | RemakeMedia,
        contents: list[MediaContent],
        sources: WantedMedia | None = None,
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
                writing.append(self._in_turn(job, reader.write, contents[number], grant.segment))
            else:
                writing.append(self._in_turn(job, reader.write_sources, contents, grant.segment, key))
        if missing:
            written = await _gather(*writing)
            await self._cache.commit(job.lease_id, written)
            cached |= {committed.key: (missing[committed.key], committed.description) for committed in written}
        return cached

    async def _in_turn(self, job: MediaJob | RemakeMedia, work: Callable[..., T], *arguments: object) -> T:
        """Runs work on a thread when it is the turn of the job's client."""
        async with self._jobs.slot(job.client):
            return await self._on_thread(work, *arguments)

    async def _on_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Runs work on a thread. Cancelling waits for work that has begun, because it uses the lease's memory."""
        job = self._threads.submit(work, *arguments)
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not job.cancel():
                await asyncio.wait([future])
            raise

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        self._fetcher.close()
        self._cache.close()
        self._context.destroy(linger=0)


async def _gather(*work: Any) -> list[Any]:
    """Waits for all of them, then raises the error of the first one that failed."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def serve(channel: socket.socket) -> int:
    """Serves until the proxy closes the channel. Returns the exit status."""
    reader, writer = await asyncio.open_connection(sock=channel)
    setup = await read_message(reader, TO_PROCESS)
    assert isinstance(setup, MediaSetup)
    setup_logging(f"{setup.config.proxy_id}-media", setup.config.logs)
    process = MediaProcess(setup.config, partial(write_message, writer), os.getppid())
    loading = start(process.load(_MEMORY_BYTES + (setup.config.media_threads + 1) * _MEMORY_PER_THREAD_BYTES))
    receiving = start(_receive(reader, process))
    await asyncio.wait([loading, receiving], return_when=asyncio.FIRST_COMPLETED)
    if loading.done() and (error := loading.exception()) is not None:
        if not isinstance(error, ConfigError):
            raise error
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    await receiving
    await process.close()
    return 0


async def _receive(reader: asyncio.StreamReader, process: MediaProcess) -> None:
    while True:
        try:
            process.on_message(await read_message(reader, TO_PROCESS))
        except (asyncio.IncompleteReadError, ConnectionError):
            return


def run(_arguments: list[str]) -> None:
    """In a forked process: serves the proxy. Exits with EXIT_BAD_CONFIG if it cannot load the model's processor."""
    show_command_line("tandem.proxy.reading.media_process")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # clients could fill the disk, with images of others in it
    try:
        exit_code = uvloop.run(serve(socket.socket(fileno=MEDIA_FD)))
    except Exception:
        log.exception("the media process fails")
        exit_code = 1
    sys.exit(exit_code)  # at once, by `runtime.processes.fork_server`: nobody waits for threads that are decoding
