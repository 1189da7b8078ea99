"""Processes that decode, render and tokenise long bodies, so that the event loop never waits for them.

They are processes and not threads because a thread holds the interpreter's lock while it decodes JSON
(docs/adr/0007-reader-processes.md). They are forked before the loop and any thread exists, and thereby share the
tokeniser's memory. If one process dies, all running jobs fail and a new pool is spawned.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TypeVar

from tandem.protocol.messages.token_ids import BYTES_PER_TOKEN
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.worker_table import ModelLimits
from tandem.proxy.reading.body_reader import BodyKind, BodyReader, HasMedia, reads_files
from tandem.proxy.reading.spooled_body import SpooledBody
from tandem.proxy.text.prompt import CompletionPrompt, has_media, has_own_template, has_token_ids
from tandem.runtime.errors import InternalError, Overloaded
from tandem.runtime.garbage_collection import freeze_loaded_objects
from tandem.runtime.lifetime import die_with_parent

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_INLINE_BYTES = 2048
"""Size up to which text is tokenised on the loop: that takes no longer than a round trip to a process (0.5 ms)."""
MAX_INLINE_PROMPTS = 32
"""Number of prompts up to which a short body is tokenised on the loop (under 1 ms)."""
MAX_INLINE_TOKENS = 1024
"""Prompt tokens up to which an echo is detokenised on the loop (under 1 ms)."""
MAX_PENDING_JOBS = 4096
"""Jobs that may wait for a process. Other limits apply earlier (`proxy.admission`)."""
_TRANSFORM_SHARE = 0.5
"""Share of the processes, and at least one, that work on calls of `/tokenize` and `/detokenize` at the same time."""


class ReaderPool:
    """make_reader: creates a reader in a spawned process; must be picklable."""

    def __init__(self, reader: BodyReader, make_reader: Callable[[], BodyReader], num_processes: int) -> None:
        self._reader = reader
        self._make_reader = make_reader
        self._num_processes = num_processes
        self._num_pending = 0
        self._transform_turns = asyncio.Semaphore(max(1, int(_TRANSFORM_SHARE * num_processes)))
        self._executor: ProcessPoolExecutor | None = None

    def fork(self, fds: Sequence[int] = ()) -> None:
        """Starts the processes. Must be called while this process has one thread and no loop.

        Without this call, processes are spawned when first needed. fds: sockets that the processes close.
        """
        freeze_loaded_objects()

        def inherit() -> BodyReader:
            for fd in fds:
                os.close(fd)
            return self._reader

        self._executor = self._start(multiprocessing.get_context("fork"), inherit)

    async def read(
        self, kind: BodyKind, body: bytes | SpooledBody, limits: ModelLimits, cache_scope: str = ""
    ) -> GenerationRequest:
        """Returns the request with tokenised prompts. cache_scope: see `BodyReader.decode`.

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
            if is_short and not has_own_template(request.prompt) and request.base_sampling.grammar is None:
                return self._reader.render(request, limits)
        return await self.run(BodyReader.read, body, kind, limits, cache_scope)

    async def text_of(self, token_ids: bytes, skip_special_tokens: bool = True) -> str:
        """Returns the text of a prompt. token_ids: packed."""
        if len(token_ids) <= MAX_INLINE_TOKENS * BYTES_PER_TOKEN:
            return self._reader.text_of(token_ids, skip_special_tokens)
        return await self.run(BodyReader.text_of, token_ids, skip_special_tokens)

    async def transform(self, method: Callable[..., bytes], body: bytes | SpooledBody, *arguments: object) -> bytes:
        """Like `run`, for a call that needs no worker. It waits while others like it have their share of the processes.

        A call whose client has disconnected keeps its turn until the process is done with it.
        """
        await self._transform_turns.acquire()
        release = partial(asyncio.get_running_loop().call_soon_threadsafe, self._transform_turns.release)
        try:
            job = self._submit(method, body, *arguments)
        except BaseException:
            self._transform_turns.release()
            raise
        job.add_done_callback(lambda _: release())
        return await self._result(job)

    async def run(self, method: Callable[..., T], data: bytes | SpooledBody, *arguments: object) -> T:
        """Calls a method of a process's reader; a spooled body is passed as the path of its file.

        Raises as the method does, Overloaded, InternalError.
        """
        return await self._result(self._submit(method, data, *arguments))

    def _submit(self, method: Callable[..., T], data: bytes | SpooledBody, *arguments: object) -> Future[T]:
        """Raises Overloaded, InternalError."""
        if self._num_pending >= MAX_PENDING_JOBS:
            raise Overloaded("too many requests are waiting to be read; try again later")
        if self._executor is None:
            self._executor = self._start(multiprocessing.get_context("spawn"), self._make_reader)
        content = Path(data.path) if isinstance(data, SpooledBody) else data
        try:
            return self._executor.submit(_call, method, content, *arguments)
        except BrokenProcessPool as error:
            raise self._replace(self._executor) from error

    async def _result(self, job: Future[T]) -> T:
        executor = self._executor
        assert executor is not None
        self._num_pending += 1
        try:
            return await asyncio.wrap_future(job)
        except BrokenProcessPool as error:
            raise self._replace(executor) from error
        finally:
            self._num_pending -= 1

    def _replace(self, broken: ProcessPoolExecutor) -> InternalError:
        """Lets the next job start new processes, and returns the error of one that the broken pool had."""
        if self._executor is broken:
            log.error("a reader process died; starting new ones")
            self._executor = None
            broken.shutdown(wait=False)
        return InternalError("the process that read the request died; try again")

    def _start(self, context: BaseContext, make_reader: Callable[[], BodyReader]) -> ProcessPoolExecutor:
        executor = ProcessPoolExecutor(self._num_processes, context, _initialize, (make_reader,))
        executor.submit(int)  # makes a fork start all processes now
        return executor

    def close(self) -> None:
        """Cancels waiting jobs. A process that is busy ends together with this one."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


# ---- in the processes

_reader: BodyReader


def _initialize(make_reader: Callable[[], BodyReader]) -> None:
    global _reader
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    _reader = make_reader()


def _call(method: Callable[..., Any], content: bytes | Path, *arguments: object) -> Any:
    return method(_reader, content.read_bytes() if isinstance(content, Path) else content, *arguments)
