"""The process that reads requests with images and video: one for each proxy, started by `proxy.reading.media_pool`.

Fetching waits on this loop; everything that takes time is done on threads, each with a processor of its own. A request
goes through: decode the body; fetch; hash, and look at headers; ask the cache; decode and process what is missing;
write and commit it; render the chat, and tokenise. It ends with one `JobDone`. The lease is the proxy's to release.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from tandem.protocol.media_client import MediaCacheClient
from tandem.protocol.media_segment import write_segment
from tandem.protocol.messages.media import MediaKind
from tandem.protocol.messages.media_cache import CommittedMedia, GrantedMedia, MediaKey, WantedMedia
from tandem.protocol.sockets import new_context
from tandem.proxy.api.validation import GenerationRequest
from tandem.proxy.cluster.registry import ModelLimits
from tandem.proxy.media.fetch import Fetched, MediaFetcher, is_remote, read_local
from tandem.proxy.media.processor import MediaProcessor, MediaSize, PreparedMedia
from tandem.proxy.media.source import MediaSource
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.reading.media_jobs import (
    TO_PROCESS,
    AreYouThere,
    CancelJob,
    FromMediaProcess,
    IAmHere,
    JobBegun,
    JobDone,
    JobFailed,
    MediaJob,
    MediaSetup,
    ToMediaProcess,
    read_message,
    write_message,
)
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.rendering import CachedMedia, ChatPrompt, ContextLengthExceeded, MediaPrompt
from tandem.runtime.errors import ConfigError, InternalError, RequestAborted, TandemError
from tandem.runtime.lifetime import die_with_parent
from tandem.runtime.logs import setup_logging

log = logging.getLogger(__name__)

T = TypeVar("T")

_NICENESS = 19
"""Of the threads, nicer than the workers: who processes media leaves text and tokens their part."""
EXIT_BAD_CONFIG = 2


class _Item(msgspec.Struct, frozen=True):
    """A source with its bytes at hand."""

    source: MediaSource
    data: bytes
    key: MediaKey
    size: MediaSize


class MediaReader:
    """What is done on threads. Loads the processor; raises ConfigError."""

    def __init__(self, setup: MediaSetup) -> None:
        text = ModelText(setup.model)
        self._limits = setup.limits
        self._bodies = BodyReader.of(
            text, setup.served_model_name, setup.trust_chat_template, setup.tool_call_parser, setup.limits.max_items
        )
        self.processor = MediaProcessor(text.folder, setup.limits, setup.trust_remote_code)
        self._description: msgspec.msgpack.Decoder[PreparedMedia] = msgspec.msgpack.Decoder(PreparedMedia)

    def decode(self, job: MediaJob) -> GenerationRequest:
        body = Path(job.path).read_bytes() if job.path else job.body
        return self._bodies.decode(job.kind, body)

    def look_at(self, source: MediaSource, fetched: bytes | None) -> _Item:
        """By header and hash. Raises InvalidMedia."""
        data = read_local(source, self._limits) if fetched is None else fetched
        size = self.processor.size(source, data)
        return _Item(source, data, MediaKey(self.processor.digest(source, data), "input"), size)

    def write(self, item: _Item, segment: str) -> CommittedMedia:
        """Decode and process it, and put the tensors in their place. Raises InvalidMedia."""
        prepared, parts = self.processor.prepare(item.source, item.data)
        _, num_bytes = write_segment(segment, item.key, [part.data for part in parts])
        return CommittedMedia(item.key, num_bytes, msgspec.msgpack.encode(prepared))

    def render(
        self,
        request: GenerationRequest,
        limits: ModelLimits,
        items: list[_Item],
        cached: dict[MediaKey, tuple[str, bytes]],
    ) -> GenerationRequest:
        """cached: segment and description of each item. Raises InvalidRequest."""
        assert isinstance(request.prompt, ChatPrompt)
        replacements: dict[MediaKind, list[str]] = {}
        media = []
        for item in items:
            segment, description = cached[item.key]
            prepared = self._description.decode(description)
            kind = item.source.kind
            replacements.setdefault(kind, []).append(prepared.replacement)
            media.append(CachedMedia(kind, item.key.digest, segment, prepared.tensors, prepared.num_tokens))
        text = self.processor.expand(self._bodies.chat_text(request), replacements)
        prompt = MediaPrompt(text, media, self.processor.token_ids, request.prompt.add_special_tokens)
        return self._bodies.render_media(request, limits, prompt)


class MediaProcess:
    """tell: called with one JobDone or JobFailed for each job, before which there may be a JobBegun.

    client_pid: of the proxy, whose the leases are: they outlive this process.
    """

    def __init__(self, setup: MediaSetup, tell: Callable[[FromMediaProcess], None], client_pid: int) -> None:
        self._tell = tell
        self._threads = ThreadPoolExecutor(setup.num_threads, "media")
        self._reader = asyncio.get_running_loop().run_in_executor(self._threads, MediaReader, setup)
        self._num_threads = setup.num_threads
        self._fetcher = MediaFetcher(setup.limits)
        self._context = new_context()
        self._cache = MediaCacheClient(self._context, setup.cache_endpoint, client_pid)
        # So many requests are worked on at once: the first is to be done before the last has begun.
        self._turns = asyncio.Semaphore(setup.num_threads)
        self._running: dict[str, asyncio.Task[GenerationRequest]] = {}

    async def load(self) -> None:
        """Raises ConfigError."""
        reader = await self._reader
        barrier = threading.Barrier(self._num_threads)  # so that each thread takes one

        def warm() -> None:
            barrier.wait(600)
            reader.processor.warm()
            os.nice(_NICENESS)  # of this thread alone, and not before it has loaded

        await asyncio.gather(*(self._on_thread(warm) for _ in range(self._num_threads)))
        gc.freeze()  # what is loaded stays; the collector need not look at it again
        log.info(
            "takes %s, on %d threads", " and ".join(f"{k}s" for k in reader.processor.placeholders), self._num_threads
        )

    def on_message(self, message: ToMediaProcess) -> None:
        match message:
            case MediaJob():
                reading = asyncio.create_task(self._read(message))
                reading.add_done_callback(partial(self._on_read, message))
                self._running[message.lease_id] = reading
            case AreYouThere():
                self._tell(IAmHere())
            case CancelJob():
                if (running := self._running.get(message.lease_id)) is not None:
                    running.cancel()

    def _on_read(self, job: MediaJob, reading: asyncio.Task[GenerationRequest]) -> None:
        """However it ended: a task that is cancelled before it begins runs nothing of its own."""
        del self._running[job.lease_id]
        if reading.cancelled():
            gone = RequestAborted("nobody waits for the request any more")
            self._tell(JobFailed.of(job.lease_id, gone))
        elif (error := reading.exception()) is None:
            self._tell(JobDone(job.lease_id, reading.result()))
        else:
            self._tell(JobFailed.of(job.lease_id, _told(error)))

    async def _read(self, job: MediaJob) -> GenerationRequest:
        reader = await asyncio.shield(self._reader)
        async with self._turns:
            self._tell(JobBegun(job.lease_id))
            request = await self._on_thread(reader.decode, job)
            assert isinstance(request.prompt, ChatPrompt)
            sources = request.prompt.media
            remote = [source for source in sources if is_remote(source)]
            if not remote:
                return await self._finish(reader, job, request, {})
        fetched = Fetched(self._fetcher)
        try:
            async with asyncio.TaskGroup() as group:
                fetching = [group.create_task(_alone(self._fetcher.fetch(source, fetched))) for source in remote]
            for task in fetching:
                if (error := task.result()) is not None:
                    raise error
            async with self._turns:
                return await self._finish(reader, job, request, fetched.data)
        finally:
            fetched.close()

    async def _finish(
        self, reader: MediaReader, job: MediaJob, request: GenerationRequest, fetched: dict[int, bytes]
    ) -> GenerationRequest:
        """fetched: bytes of remote items, by number."""
        assert isinstance(request.prompt, ChatPrompt)
        items = await self._on_threads(
            [(reader.look_at, (source, fetched.get(source.number))) for source in request.prompt.media]
        )
        num_tokens = sum(item.size.num_tokens for item in items)
        if num_tokens >= job.limits.max_model_len:
            raise ContextLengthExceeded(
                f"The images alone have {num_tokens} tokens, but this model's limit is {job.limits.max_model_len} "
                "tokens for prompt and output together.",
                "messages",
            )
        granted = await self._cache.acquire(
            job.lease_id,
            [WantedMedia(item.key, item.size.num_bytes) for item in items],
            timeout_s=None,  # another request may be decoding one of them; the proxy cancels when this one is over
        )
        missing: dict[MediaKey, tuple[_Item, GrantedMedia]] = {}
        cached: dict[MediaKey, tuple[str, bytes]] = {}
        for item, grant in zip(items, granted, strict=True):
            assert grant is not None
            if grant.is_ready:
                cached[item.key] = grant.segment, grant.description
            else:
                missing.setdefault(item.key, (item, grant))
        if missing:
            written = await self._on_threads([(reader.write, (item, g.segment)) for item, g in missing.values()])
            await self._cache.commit(job.lease_id, written)
            for done in written:
                cached[done.key] = missing[done.key][1].segment, done.description
        return await self._on_thread(reader.render, request, job.limits, items, cached)

    async def _on_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """When the request is cancelled, what has begun is waited for: it uses the lease. The rest never begins."""
        job = self._threads.submit(work, *arguments)
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not job.cancel():
                await asyncio.wait([future])
            raise
        finally:
            del future, job  # with an error in them, they would keep this frame and its arguments

    async def _on_threads(self, calls: list[tuple[Callable[..., T], tuple[Any, ...]]]) -> list[T]:
        """All of them, side by side; the first error of the first item comes out when all have ended."""
        outcomes = await asyncio.gather(
            *(self._on_thread(work, *arguments) for work, arguments in calls), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes  # type: ignore[return-value]  # no exceptions are left

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await self._fetcher.close()
        self._cache.close()
        self._context.destroy(linger=0)


def _told(error: BaseException) -> TandemError:
    if isinstance(error, TandemError):
        return error
    log.error("a request with media failed", exc_info=error)
    return InternalError("the request's images or video could not be processed; the server's log tells more")


async def _alone(fetching: Coroutine[Any, Any, None]) -> TandemError | None:
    """An error as a value: those that fetch beside it go on, so that the first item's error is the one told."""
    try:
        await fetching
    except TandemError as error:
        return error
    return None


async def serve(channel: socket.socket) -> int:
    """The exit code, when the proxy is gone or the model cannot be served."""
    reader, writer = await asyncio.open_connection(sock=channel)
    setup = await read_message(reader, TO_PROCESS)
    assert isinstance(setup, MediaSetup)
    setup_logging(setup.name, setup.log_level)
    process = MediaProcess(setup, lambda message: write_message(writer, message), os.getppid())
    loading = asyncio.create_task(process.load())
    listening = asyncio.create_task(_listen(reader, process))
    await asyncio.wait([loading, listening], return_when=asyncio.FIRST_COMPLETED)
    if loading.done() and (error := loading.exception()) is not None:
        if not isinstance(error, ConfigError):
            raise error
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    await listening
    await process.close()
    return 0


async def _listen(reader: asyncio.StreamReader, process: MediaProcess) -> None:
    while True:
        try:
            process.on_message(await read_message(reader, TO_PROCESS))
        except (asyncio.IncompleteReadError, ConnectionError):
            return


def main(channel_fd: int) -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    try:
        return uvloop.run(serve(socket.socket(fileno=channel_fd)))
    except Exception:
        logging.getLogger("media").exception("the media process fails")
        return 1


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # a thread in the middle of a video must not hold up the end
