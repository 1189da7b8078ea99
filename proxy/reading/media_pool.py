"""The proxy's side of requests with images and video: has them read, and owns their leases.

A reader process finds the images and videos in the body, the media process (`proxy.reading.media_process`) makes
tensors of them, and a reader renders and tokenises the prompt, which depends on their sizes. The media process is
separate, so text never waits for images, and only it and its sandboxes load torch. It is started again when a request
arrives after it was lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import msgspec

from tandem.media_cache.media_client import MediaCacheClient
from tandem.proxy.admission.admission import ClientLimitExceeded, QueueFull
from tandem.proxy.admission.budgets import ByteBudget, ClientBudget, DescriptorBudget
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.router import SLOUnreachable
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.media.media_lease import HeldSources, MadeMedia, MediaLease
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyKind, BodyReader
from tandem.proxy.reading.media_messages import (
    CONFIG_FD,
    EXIT_BAD_CONFIG,
    FROM_PROCESS,
    MEDIA_FD,
    CancelMediaJob,
    MediaJob,
    MediaJobDone,
    MediaJobFailed,
    MediaProcessAlive,
    MediaRemade,
    PingMediaProcess,
    RemakeMedia,
    read_message,
    write_message,
)
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.reading.spooled_body import SpooledBody
from tandem.proxy.text.prompt import RenderedPrompts
from tandem.runtime.client_share import CLIENT_SHARE
from tandem.runtime.errors import InternalError, Overloaded, ProtocolError, TandemError, WorkerLost
from tandem.runtime.files.file_limits import out_of_descriptors
from tandem.runtime.processes.forked_process import ForkedProcess, in_memory, spawn_module
from tandem.runtime.processes.sandbox import start_connected
from tandem.runtime.tasks import start_job

log = logging.getLogger(__name__)

_MODULE = "tandem.proxy.reading.media_program"
_STOPPING = "the server is stopping"
_RETRY_AFTER_S = 1
_PING_INTERVAL_S = 2.0
_MAX_UNANSWERED_PINGS = 10
"""Loading a model blocks the process's loop for less than these 20 s."""
_MAX_LOST = 3
"""Media processes that may end with a request in them, until it is refused."""
_MAX_ITEM_BYTES = 1 << 30
"""Images and videos in data URLs of all requests that are being read."""


_Answer = MediaJobDone | MediaRemade


class _MediaProcessLost(Overloaded):
    """The media process ended with the request in it, for a reason of others: images are decoded in sandboxes."""


class _Job(NamedTuple):
    done: asyncio.Future[_Answer]
    held: ExitStack
    """What the request holds until the process has answered: its place and its items' file."""


class _Places(ClientBudget):
    """Requests that wait for the process or are in it."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def check(self, client: str, number: int) -> None:
        """Raises QueueFull, ClientLimitExceeded."""
        if self.num_held + number > self._limit:
            raise QueueFull(
                f"{self.num_held} requests with images or video are waiting already; the limit is {self._limit}. Try "
                "again later.",
                _RETRY_AFTER_S,
            )
        max_own = math.ceil(self._limit * CLIENT_SHARE)
        if self._by_client[client] + number > max_own:
            raise ClientLimitExceeded(
                f"{max_own} of your requests with images or video are waiting already, which is the limit for each "
                "client. Try again later.",
                _RETRY_AFTER_S,
            )


class MediaPool:
    """Belongs to the proxy's loop, and owns `cache`, its connection to the media cache.

    descriptors: a running request has its images and videos open.

    At most `max_waiting_media` requests wait or are read at the same time, CLIENT_SHARE of them from one client;
    others are refused. So is one that is not read within ttft_slo_s.
    """

    def __init__(
        self,
        config: ProxyConfig,
        cache: MediaCacheClient,
        readers: ReaderPool,
        ttft_slo_s: float | None = None,
        descriptors: DescriptorBudget | None = None,
    ) -> None:
        self._descriptors = descriptors or DescriptorBudget()
        # The media process decodes untrusted files, so it gets no secrets.
        self._config = config.without_secrets()
        self._cache = cache
        self._readers = readers
        self._ttft_slo_s = ttft_slo_s
        self._jobs: dict[str, _Job] = {}  # by lease, until the process has answered
        self._places = _Places(config.media.max_waiting_media)
        self._starting = asyncio.Lock()
        self._bytes = ByteBudget(_MAX_ITEM_BYTES)
        self._process: ForkedProcess | None = None
        self._writer: asyncio.StreamWriter | None = None  # None while no process runs
        self._watching: asyncio.Task[None] | None = None
        self._unanswered_pings: int | None = None  # None until the process has sent a message
        self._config_error: str | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Starts the process if it is not running. Raises Overloaded without descriptors, InternalError."""
        async with self._starting:
            if self._is_closed:
                raise InternalError(_STOPPING)
            if self._writer is not None:
                return
            if self._watching is not None:
                await asyncio.wait([self._watching])  # until the previous process is gone
            try:
                process, reader, writer = await start_connected(self._spawn)
                if self._is_closed:  # meanwhile; nothing else would end the process
                    writer.close()
                    process.end()
                    raise InternalError(_STOPPING)
            except OSError as error:
                if (overloaded := out_of_descriptors(error, "the media process")) is not None:
                    raise overloaded from error
                raise InternalError(f"the media process cannot be started: {error}") from error
            self._process, self._writer = process, writer
            self._watching = start_job(self._watch(reader, writer, process), "watching the media process")

    async def _spawn(self, fd: int) -> ForkedProcess:
        with in_memory(msgspec.json.encode(self._config)) as config:
            return spawn_module(_MODULE, os.environ, {MEDIA_FD: fd, CONFIG_FD: config})

    async def read(
        self, kind: BodyKind, body: bytes | SpooledBody, limits: ModelLimits, client: str = "", cache_scope: str = ""
    ) -> GenerationRequest:
        """Returns the request with tokenised prompts. The caller must call its `release_media`.

        client, cache_scope: see `ReaderPool.read`. Raises InvalidRequest, QueueFull, ClientLimitExceeded,
        SLOUnreachable, ClientShareExceeded or Overloaded if there is no room or the process dies again and again,
        WorkerLost if the cache died twice.
        """
        try:
            async with asyncio.timeout(self._ttft_slo_s) as limit:
                return await self._read_again_if_lost(kind, body, limits, client, cache_scope)
        except TimeoutError as error:
            if self._ttft_slo_s is None or not limit.expired():
                raise
            # Also if nothing else was read: the process may have been starting or stopped, so trying again may help.
            raise SLOUnreachable(self._ttft_slo_s, 0.0) from error

    async def _read_again_if_lost(
        self, kind: BodyKind, body: bytes | SpooledBody, limits: ModelLimits, client: str, cache_scope: str
    ) -> GenerationRequest:
        """Reads a request again whose process was lost, a few times."""
        num_lost, is_cache_lost = 0, False
        while True:
            try:
                return await self._read(kind, body, limits, client, cache_scope)
            except _MediaProcessLost:
                num_lost += 1
                if num_lost == _MAX_LOST:
                    raise
            except WorkerLost as error:
                if is_cache_lost:
                    raise
                is_cache_lost = True
                log.warning("reading a request with media again: %s", error)

    async def _read(
        self, kind: BodyKind, body: bytes | SpooledBody, limits: ModelLimits, client: str, cache_scope: str
    ) -> GenerationRequest:
        with ExitStack() as held:
            if self._config_error is not None:
                raise InternalError(self._config_error)
            held.enter_context(self._places.hold(client))
            held.enter_context(self._descriptors.hold(client))
            items = SpooledBody()
            held.callback(items.close)
            find = BodyReader.find_media
            found = await self._readers.run(find, body, kind, cache_scope, items.path, client=client)
            if found.items:
                held.enter_context(self._bytes.hold(client, sum(item.num_bytes or 0 for item in found.items)))
                await self.start()
                new_id, max_len = self._cache.new_id(), limits.max_model_len
                job = MediaJob(new_id, found.items, items.path, found.cache_salt, max_len, client)
                done = await self._run(job, held.pop_all())
        if not found.items:  # the body only looks as if it had media
            return await self._readers.read(kind, body, limits, client, cache_scope)
        assert isinstance(done, MediaJobDone)
        lease = MediaLease(self._cache, job.lease_id, self._descriptors, client, self._make_again)
        try:
            arguments = kind, limits, cache_scope, done.media, done.placeholders
            request = await self._readers.run(BodyReader.read_with_media, body, *arguments, client=client)
            return _with_lease(request, done.sources, lease)
        except BaseException:
            lease.release()
            raise

    async def _make_again(self, sources: HeldSources, client: str) -> tuple[str, list[MadeMedia]]:
        """Makes the pixels of a running request again. Returns the id of their lease, and the pixels.

        Raises Overloaded or ClientShareExceeded if the cache has no room now, or the process was lost, after which the
        caller tries again as long as the request is wanted; InvalidRequest, WorkerLost, InternalError.
        """
        await self.start()
        job = RemakeMedia(self._cache.new_id(), sources, client)
        done = await self._run(job, ExitStack())
        assert isinstance(done, MediaRemade)
        return job.lease_id, done.items

    async def _run(self, job: MediaJob | RemakeMedia, held: ExitStack) -> _Answer:
        """Returns the process's answer, whose lease the caller must release. It is released if this raises.

        held: is closed when the process has answered, also if the caller is gone.
        """
        assert self._writer is not None
        done: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        with ExitStack() as on_error:
            on_error.callback(held.close)
            write_message(self._writer, job)  # raises if it is too large
            on_error.pop_all()
        self._jobs[job.lease_id] = _Job(done, held)
        try:
            return await done
        except BaseException:
            if done.cancelled():
                if self._writer is not None:
                    write_message(self._writer, CancelMediaJob(job.lease_id))
            elif done.exception() is None:  # answered at the moment of the time-out or cancellation
                self._cache.release([job.lease_id])
            raise

    async def _watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: ForkedProcess) -> None:
        """Handles the messages of one process until it has ended, then fails its jobs."""
        self._unanswered_pings = None
        pinging = start_job(self._ping(writer, process), "asking the media process", process.kill)
        try:
            while True:
                message = await read_message(reader, FROM_PROCESS)
                self._unanswered_pings = 0
                if not isinstance(message, MediaProcessAlive):
                    self._on_answer(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except ProtocolError as error:
            log.error("the media process sent an invalid message; killing it: %s", error)
            process.kill()
        finally:
            pinging.cancel()
            writer.close()
            self._writer = None
            code = await process.wait()
            if not self._is_closed:
                log.error("the media process ended with status %d", code)
            if code == EXIT_BAD_CONFIG:
                self._config_error = "images and video are not served: see the proxy's log for the model's processor"
            self._on_lost()

    def _on_lost(self) -> None:
        """Fails the jobs of the process."""
        for lease_id in list(self._jobs):
            lost: TandemError = _MediaProcessLost("the process that reads images and video was lost; try again")
            if self._config_error is not None or self._is_closed:
                lost = InternalError(self._config_error or _STOPPING)
            self._end(lease_id, lost)

    async def _ping(self, writer: asyncio.StreamWriter, process: ForkedProcess) -> None:
        """Kills a process that has started and then leaves pings unanswered."""
        while True:
            await asyncio.sleep(_PING_INTERVAL_S)
            if self._unanswered_pings is not None:
                self._unanswered_pings += 1
                if self._unanswered_pings > _MAX_UNANSWERED_PINGS:
                    log.error("the media process does not answer; killing it")
                    process.kill()
                    return
            write_message(writer, PingMediaProcess())

    def _on_answer(self, message: _Answer | MediaJobFailed) -> None:
        self._end(message.lease_id, message.error if isinstance(message, MediaJobFailed) else message)

    def _end(self, lease_id: str, answer: _Answer | TandemError) -> None:
        job = self._jobs.pop(lease_id, None)
        if job is None:
            return
        job.held.close()
        if not isinstance(answer, TandemError) and not job.done.done():
            job.done.set_result(answer)
            return
        self._cache.release([lease_id])
        if isinstance(answer, TandemError) and not job.done.done():
            job.done.set_exception(answer)

    def close(self) -> None:
        """Ends the process, whose jobs end with an error, and starts no other."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
        self._cache.close()


def _with_lease(request: GenerationRequest, sources: HeldSources, lease: MediaLease) -> GenerationRequest:
    """Opens the request's media in this process; then the request owns the lease.

    Raises WorkerLost, Overloaded, ClientShareExceeded."""
    assert isinstance(request.prompt, RenderedPrompts)
    lease.hold_sources(sources)
    prompts = [replace(prompt, media=lease.hold(prompt.media)) for prompt in request.prompt.prompts]
    return msgspec.structs.replace(request, prompt=RenderedPrompts(prompts), media_lease=lease)
