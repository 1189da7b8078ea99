"""Processes that decode, render and tokenise long bodies, so that the event loop never waits for them.

They are processes and not threads because a thread holds the interpreter's lock while it decodes JSON
(docs/adr/0007-reader-processes.md). A fork server, which is forked before the loop and any thread exists, forks them
and their successors, so that all share the tokeniser's memory. Each has one job at a time. A process is ended when its
job crashes it, exceeds a limit or has no caller any more, and when it has grown; another one takes its place. Clients
take turns, and none holds the last process (`proxy.reading.job_queue`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from tandem.protocol.messages.token_ids import BYTES_PER_TOKEN
from tandem.proxy.admission.admission import ClientLimitExceeded
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyKind, BodyReader, HasMedia, reads_files
from tandem.proxy.reading.job_queue import JobQueue, JobTurn
from tandem.proxy.reading.reader_connection import JobLost, ReaderConnection
from tandem.proxy.reading.reader_process import CONFIG_FD, encode_job, reader_entries, result_decoder
from tandem.proxy.reading.spooled_body import SpooledBody
from tandem.proxy.text.prompt import CompletionPrompt, has_media, has_own_template, has_token_ids
from tandem.runtime.errors import InternalError, InvalidRequest, Overloaded, TandemError
from tandem.runtime.garbage_collection import freeze_loaded_objects
from tandem.runtime.processes.forked_process import ForkServer, ForkServerLost, KeptForkServer
from tandem.runtime.tasks import keep_running

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_INLINE_BYTES = 2048
"""Size up to which text is tokenised on the loop: that takes no longer than a round trip to a process (0.5 ms)."""
MAX_INLINE_PROMPTS = 32
"""Number of prompts up to which a short body is tokenised on the loop (under 1 ms)."""
MAX_INLINE_TOKENS = 1024
"""Prompt tokens up to which an echo is detokenised on the loop (under 1 ms)."""
MAX_PENDING_JOBS = 4096
"""Jobs that may wait for a process, or be in one. Other limits apply earlier (`proxy.admission`)."""
_MAX_CLIENT_SHARE = 0.75
"""Share of MAX_PENDING_JOBS that may wait for one client."""
_TRANSFORM_SHARE = 0.5
"""Share of the processes, and at least one, that work on calls without a worker of one client at the same time."""
_RETRY_AFTER_S = 1
_STOPPING = "the server is stopping"
_STABLE_AFTER_S, _RESTART_DELAY_S = 1.0, 0.05
"""A process that lived shorter than the first is replaced after the second: jobs that crash at once cost few forks."""
_FAILED_START_DELAY_S = 1.0
_LOAD_TIMEOUT_S = 60.0
"""Deadline of a fork server that must load the model's text files first; it takes about 3 s."""


class _PendingJob:
    """A job until it has ended. answer: has been cancelled if the caller is gone."""

    def __init__(self, turn: JobTurn, request: bytes, num_bytes: int) -> None:
        self.turn = turn
        self.request = request
        self.num_bytes = num_bytes
        self.answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self.connection: ReaderConnection | None = None  # of the process that has the job
        self.was_lost = False  # once, with a process that something else ended

    def end(self, answer: msgspec.Raw | TandemError) -> None:
        if self.answer.done():
            return
        if isinstance(answer, TandemError):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


class ReaderPool:
    """config: a fork server loads a reader by it if the one that `fork` makes is lost, or was not made.

    num_processes: at least 2, because one client holds all but one at most.
    """

    def __init__(self, reader: BodyReader, config: ProxyConfig, num_processes: int) -> None:
        self._reader = reader
        self._config = config.without_secrets()
        self._num_processes = num_processes
        self._num_pending = 0
        self._server = KeptForkServer(self._spawn_server, _LOAD_TIMEOUT_S)
        self._queue: JobQueue[_PendingJob] = JobQueue(num_processes, max(1, int(_TRANSFORM_SHARE * num_processes)))
        self._idle: list[asyncio.Future[None]] = []  # of processes without a job; a result wakes one
        self._keeping: list[asyncio.Task[None]] = []
        self._is_closed = False

    def fork(self) -> None:
        """Forks the fork server. Must be called while this process has one thread and no loop.

        Without this call, and if it is refused, one that loads the model's text files is started when first needed.
        """
        freeze_loaded_objects()
        try:
            self._server.take(ForkServer.fork_here(reader_entries(self._reader)))
        except ForkServerLost as error:
            log.error("%s; the readers load the model's text files again", error)

    def start(self) -> None:
        """Starts the processes, now instead of for the first job."""
        if not self._keeping:
            keep = partial(keep_running, self._keep_process, "keeping a reader process", _RESTART_DELAY_S)
            self._keeping = [keep() for _ in range(self._num_processes)]

    async def read(
        self, kind: BodyKind, body: bytes | SpooledBody, limits: ModelLimits, client: str = "", cache_scope: str = ""
    ) -> GenerationRequest:
        """Returns the request with tokenised prompts. client: see `run`. cache_scope: see `BodyReader.decode`.

        Raises InvalidRequest, HasMedia, Overloaded, InternalError."""
        if isinstance(body, bytes) and not reads_files(kind, body):
            request = self._reader.decode(body, kind, cache_scope)
            if has_media(request.prompt):
                raise HasMedia("the request has images or video")
            prompt = request.prompt
            is_short = len(body) <= MAX_INLINE_BYTES or has_token_ids(prompt)
            if isinstance(prompt, CompletionPrompt) and prompt.num_prompts(MAX_INLINE_PROMPTS) > MAX_INLINE_PROMPTS:
                is_short = False
            # The client decides how long its own template or grammar takes.
            if is_short and not has_own_template(request.prompt) and request.output_grammar is None:
                return self._reader.render(request, limits)
        return await self.run(BodyReader.read, body, kind, limits, cache_scope, client=client)

    async def text_of(self, token_ids: bytes, skip_special_tokens: bool = True, client: str = "") -> str:
        """Returns the text of a prompt. token_ids: packed. client: see `run`."""
        if len(token_ids) <= MAX_INLINE_TOKENS * BYTES_PER_TOKEN:
            return self._reader.text_of(token_ids, skip_special_tokens)
        return await self.run(BodyReader.text_of, token_ids, skip_special_tokens, client=client)

    async def transform(
        self, method: Callable[..., bytes], body: bytes | SpooledBody, *arguments: object, client: str = ""
    ) -> bytes:
        """Like `run`, for a call that needs no worker. Such calls have a share of the client's processes."""
        answer = await self._submit(method, body, arguments, JobTurn(client, is_transform=True)).answer
        return result_decoder(method).decode(answer)  # type: ignore[no-any-return]  # of the annotated type

    async def run(self, method: Callable[..., T], data: bytes | SpooledBody, *arguments: object, client: str = "") -> T:
        """Calls a method of a process's reader; a spooled body is passed as the path of its file.

        method: a function of a module or class, annotated with types that msgspec encodes. client: whose job it is;
        clients take turns. Cancelling ends the job, and its process if it has begun. Raises as the method does,
        InvalidRequest if it takes too much CPU time or memory or crashes, Overloaded, ClientLimitExceeded,
        InternalError.
        """
        answer = await self._submit(method, data, arguments, JobTurn(client)).answer
        return result_decoder(method).decode(answer)  # type: ignore[no-any-return]  # of the annotated type

    def _submit(
        self, method: Callable[..., object], data: bytes | SpooledBody, arguments: tuple[object, ...], turn: JobTurn
    ) -> _PendingJob:
        """Raises Overloaded, ClientLimitExceeded, and InternalError once closed."""
        if self._is_closed:
            raise InternalError(_STOPPING)
        if self._num_pending >= MAX_PENDING_JOBS:
            raise Overloaded("too many requests are waiting to be read; try again later")
        if (num_own := self._queue.num_waiting(turn.client)) >= MAX_PENDING_JOBS * _MAX_CLIENT_SHARE:
            raise ClientLimitExceeded(
                f"{num_own} of your requests are waiting to be read already, which is the limit for each client. Try "
                "again later.",
                _RETRY_AFTER_S,
            )
        self.start()
        content = Path(data.path) if isinstance(data, SpooledBody) else data
        num_bytes = data.num_bytes if isinstance(data, SpooledBody) else len(data)
        job = _PendingJob(turn, encode_job(method, content, arguments), num_bytes)
        self._num_pending += 1
        job.answer.add_done_callback(partial(self._on_answer, job))
        self._queue.put(turn, job)
        self._wake()
        return job

    def _on_answer(self, job: _PendingJob, answer: asyncio.Future[msgspec.Raw]) -> None:
        self._num_pending -= 1
        if answer.cancelled() and not self._queue.discard(job.turn, job) and job.connection is not None:
            job.connection.abort()  # the caller is gone, and what the job would still take is for nobody

    def _wake(self) -> None:
        while self._idle:
            if not (idle := self._idle.pop(0)).done():
                _end_wait(idle)
                return

    async def _next_job(self, connection: ReaderConnection) -> _PendingJob | None:
        """Returns None when the process has ended."""
        while not connection.has_ended:
            job = self._queue.take()
            if job is None:
                idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._idle.append(idle)
                connection.on_end = partial(_end_wait, idle)
                await idle
            else:
                return job
        return None

    async def _keep_process(self) -> None:
        """Starts a process again and again, and feeds it with jobs until it has ended."""
        loop = asyncio.get_running_loop()
        held: JobTurn | None = None  # of the job that ended the last process: its client holds this place meanwhile
        while True:
            started_at = loop.time()
            try:
                connection = await ReaderConnection.start(self._server)
            except (ForkServerLost, OSError) as error:
                log.error("cannot start a process that reads requests: %s", error)
                self._fail_waiting("the process that reads requests cannot be started; try again later")
                await asyncio.sleep(_FAILED_START_DELAY_S)
                continue
            if held is not None:
                self._queue.release(held)
                self._wake()
            try:
                held = await self._feed(connection)
            finally:
                connection.close()
            status = await connection.process.wait()
            if connection.ends_in_order:
                log.info("a reader process was ended; starting another")
            else:
                log.error("a reader process ended with status %d; starting another", status)
            if loop.time() - started_at < _STABLE_AFTER_S:
                await asyncio.sleep(_RESTART_DELAY_S)

    def _spawn_server(self) -> ForkServer:
        """Starts a fork server that loads a reader. Raises OSError."""
        config = os.memfd_create("config")
        try:
            with open(config, "wb", closefd=False) as file:
                file.write(msgspec.json.encode(self._config))
            os.lseek(config, 0, os.SEEK_SET)
            return ForkServer.spawn("tandem.proxy.reading.reader_process", os.environ, {CONFIG_FD: config})
        finally:
            os.close(config)

    async def _feed(self, connection: ReaderConnection) -> JobTurn | None:
        """Gives the process jobs until it has ended. Returns the turn of the job that ended it."""
        while (job := await self._next_job(connection)) is not None:
            job.connection = connection
            answer: msgspec.Raw | TandemError | None
            try:
                answer = await connection.call(job.request, job.num_bytes)
            except JobLost as lost:
                answer = lost.error or (_lost_twice(lost.had_read) if job.was_lost else None)
                is_lost = True
            except TandemError as error:
                answer, is_lost = error, False
            except BaseException:
                job.end(InternalError(_STOPPING if self._is_closed else "the request could not be read"))
                self._queue.release(job.turn)
                self._wake()
                raise
            else:
                is_lost = False
            job.connection = None
            if answer is not None:
                job.end(answer)
            elif not job.answer.done():
                job.was_lost = True
                self._queue.put_back(job.turn, job)
                self._wake()
            if is_lost or connection.has_ended:
                return job.turn
            self._queue.release(job.turn)
        return None

    def _fail_waiting(self, reason: str) -> None:
        for job in self._queue.take_all():
            job.end(InternalError(reason))

    def close(self) -> None:
        """Ends the processes, and all jobs with an error."""
        self._is_closed = True
        self._fail_waiting(_STOPPING)
        for task in self._keeping:
            task.cancel()
        self._server.close()


def _end_wait(idle: asyncio.Future[None]) -> None:
    if not idle.done():
        idle.set_result(None)


def _lost_twice(had_read: bool) -> TandemError:
    """Returns the error of a job that lost two processes. had_read: whether the last one had read the job."""
    if not had_read:
        return InternalError("the process that should read the request died; try again")
    return InvalidRequest(
        "Two processes that read this request were killed while they did, probably because it takes too much memory. "
        "Send a smaller or simpler one."
    )
