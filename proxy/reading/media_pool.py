"""The proxy's side of requests with images and video: hands their bodies to a process, and keeps their leases.

The process (`proxy.reading.media_process`) is apart from those that tokenise, so text never waits behind images, and
it alone
loads torch. It is started with the proxy, and again when a request comes after it was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from dataclasses import replace

import msgspec

from tandem.protocol.media_client import MediaCacheClient
from tandem.proxy.admission.admission import QueueFull
from tandem.proxy.api.validation import GenerationRequest
from tandem.proxy.cluster.registry import ModelLimits
from tandem.proxy.cluster.router import SLOUnreachable
from tandem.proxy.media.lease import MediaLease
from tandem.proxy.media.queue import MediaQueue
from tandem.proxy.reading.body_reader import BodyKind
from tandem.proxy.reading.media_jobs import (
    FROM_PROCESS,
    AreYouThere,
    CancelJob,
    IAmHere,
    JobBegun,
    JobDone,
    JobFailed,
    MediaJob,
    MediaSetup,
    read_message,
    write_message,
)
from tandem.proxy.reading.spooled_body import SpooledBody
from tandem.proxy.text.rendering import RenderedPrompts
from tandem.runtime.errors import InternalError, ProtocolError, TandemError, WorkerLost
from tandem.runtime.file_limits import out_of_descriptors

log = logging.getLogger(__name__)

_EXIT_BAD_CONFIG = 2
_RETRY_AFTER_S = 1
_ASK_INTERVAL_S = 2.0
_SILENCE_S = 20.0
"""Far more than its loop is ever kept waiting, also where loading a model holds the interpreter."""
_PATIENCE_S = 10.0
"""Beside twice the time that decoding may take: for processing one item, in a process that has little of a core."""


class MediaPool:
    """Belongs to the proxy's loop. max_waiting: requests that are read or wait for that; more are refused.

    ttft_slo_s: of first tokens. A request whose turn is predicted to come after half of it is refused at once: the rest
    is for its prompt. One that is not read when it is over is refused then.
    """

    def __init__(
        self, setup: MediaSetup, cache: MediaCacheClient, max_waiting: int, ttft_slo_s: float | None = None
    ) -> None:
        self._setup = setup
        self._cache = cache
        self._max_waiting = max_waiting
        self._ttft_slo_s = ttft_slo_s
        self._queue = MediaQueue()
        self._waiting: dict[str, asyncio.Future[GenerationRequest]] = {}  # by lease, until the job is done
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._watching: asyncio.Task[None] | None = None
        self._sent: set[str] = set()  # those of them that a process has
        self._patience_s = 2 * setup.limits.decode_timeout_s + _PATIENCE_S
        self._heard_at = 0.0  # while it has jobs
        self._starting = asyncio.Lock()
        self._wrong_config: str | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def start(self) -> None:
        async with self._starting:
            if self._writer is not None:
                return
            if self._watching is not None:
                await asyncio.shield(self._watching)  # a request that is cancelled here must not take it along
            ours: socket.socket | None = None
            try:
                ours, theirs = socket.socketpair()
                with theirs:
                    self._process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-m",
                        "tandem.proxy.reading.media_process",
                        str(theirs.fileno()),
                        pass_fds=[theirs.fileno()],
                        stdin=asyncio.subprocess.DEVNULL,
                    )
                reader, self._writer = await asyncio.open_connection(sock=ours)
            except OSError as error:
                if ours is not None:
                    ours.close()
                if (none_left := out_of_descriptors(error, "the process that reads images and video")) is not None:
                    raise none_left from error
                raise InternalError(f"the process that reads images and video cannot be started: {error}") from error
            write_message(self._writer, self._setup)
            self._watching = asyncio.create_task(self._watch(reader, self._process))

    async def read(self, kind: BodyKind, body: bytes | SpooledBody, limits: ModelLimits) -> GenerationRequest:
        """With its prompts tokenised and its media in memory, as long as its `media_lease` is not released.

        Raises InvalidRequest, QueueFull when too many wait already, SLOUnreachable, Overloaded when the cache is full,
        InternalError when the process was lost, WorkerLost when the cache is lost again and again.
        """
        try:
            return await self._read(kind, body, limits)
        except WorkerLost as error:
            log.warning("a request with media is read again: %s", error)
        return await self._read(kind, body, limits)

    async def _read(self, kind: BodyKind, body: bytes | SpooledBody, limits: ModelLimits) -> GenerationRequest:
        slo_s, loop = self._ttft_slo_s, asyncio.get_running_loop()
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull(
                f"{len(self._waiting)} requests with images or video are waiting already; the limit is "
                f"{self._max_waiting}. Try again later.",
                _RETRY_AFTER_S,
            )
        if slo_s is not None and self._queue.wait_s > slo_s / 2:
            raise SLOUnreachable(self._queue.wait_s, slo_s / 2)
        if self._wrong_config is not None:
            raise InternalError(f"images and video are not served: {self._wrong_config}")
        lease_id = self._cache.new_id()
        done: asyncio.Future[GenerationRequest] = loop.create_future()
        done.add_done_callback(_look_at)
        self._waiting[lease_id] = done
        try:
            await self.start()
        except BaseException:
            self._waiting.pop(lease_id, None)
            raise
        assert self._writer is not None
        content, path = (body, "") if isinstance(body, bytes) else (b"", body.path)
        job = MediaJob(lease_id, kind, content, limits, path)
        write_message(self._writer, job)
        self._sent.add(lease_id)
        self._queue.add(lease_id, loop.time())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(slo_s):
                    return await asyncio.shield(done)
        finally:
            if not done.done():
                self._queue.remove(lease_id)
                if self._writer is not None:
                    write_message(self._writer, CancelJob(lease_id))
                    loop.call_later(self._patience_s, self._expect_answer, lease_id)
            del done  # with an error in it, it would keep this frame, and the body
        assert slo_s is not None  # it is over
        raise SLOUnreachable(slo_s, 0.0)  # with no context: a timeout's frames lead to the task that ends with this

    async def _watch(self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process) -> None:
        """Until the process has ended."""
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        asking = asyncio.create_task(self._ask(process))
        try:
            while True:
                message = await read_message(reader, FROM_PROCESS)
                self._heard_at = loop.time()
                match message:
                    case IAmHere():
                        pass
                    case JobBegun():
                        self._queue.begin(message.lease_id, loop.time())
                    case JobDone() | JobFailed():
                        self._on_done(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except ProtocolError as wrong:
            log.error("the media process says what it must not: %s", wrong)
            _end(process)
        finally:
            asking.cancel()
            if self._writer is not None:
                self._writer.close()
            self._writer = None
            code = await process.wait()
            log.error("the media process ended with %d", code)
            if code == _EXIT_BAD_CONFIG:
                self._wrong_config = "the model's processor cannot be loaded; the proxy's log tells why"
            error = InternalError(self._wrong_config or "the process that read the request's images or video was lost")
            for lease_id in list(self._sent):  # what was not sent yet is for the next one
                self._on_done(JobFailed.of(lease_id, error))

    async def _ask(self, process: asyncio.subprocess.Process) -> None:
        """While it has jobs, whether it is there; a process that says nothing stands still, and is ended."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_ASK_INTERVAL_S)
            if not self._sent:
                self._heard_at = loop.time()
            elif loop.time() - self._heard_at > _SILENCE_S:
                log.error("the media process has said nothing for %.0f s; it is ended", _SILENCE_S)
                _end(process)
                return
            elif self._writer is not None:
                write_message(self._writer, AreYouThere())

    def _on_done(self, message: JobDone | JobFailed) -> None:
        self._queue.remove(message.lease_id)
        self._sent.discard(message.lease_id)
        done = self._waiting.pop(message.lease_id, None)
        if done is None:
            return
        lease = MediaLease(self._cache, message.lease_id)
        result = message.result if isinstance(message.result, TandemError) else _held(message.result, lease)
        if isinstance(result, TandemError):
            lease.release()
            done.set_exception(result)
        else:
            done.set_result(result)

    def _expect_answer(self, lease_id: str) -> None:
        """What is given up ends with the work on one item. Later its thread hangs, or the process stands still."""
        if lease_id in self._sent and self._process is not None:
            log.error("the media process has not answered for %.0f s; it is ended", self._patience_s)
            _end(self._process)

    def close(self) -> None:
        if self._process is not None:
            _end(self._process)  # it holds nothing that the proxy's end would not end too


def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _held(request: GenerationRequest, lease: MediaLease) -> GenerationRequest | TandemError:
    """With its media under that lease; or why not, without the frames in which that was found, which lead to it."""
    assert isinstance(request.prompt, RenderedPrompts)
    try:
        prompts = [replace(prompt, media=lease.hold(prompt.media)) for prompt in request.prompt.prompts]
    except TandemError as error:
        return error.with_traceback(None)
    return msgspec.structs.replace(request, prompt=RenderedPrompts(prompts), media_lease=lease)


def _look_at(done: asyncio.Future[GenerationRequest]) -> None:
    """So that an error which nobody waits for is not logged as forgotten."""
    if not done.cancelled():
        done.exception()
