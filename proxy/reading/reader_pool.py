"""Processes that decode, render and tokenise long bodies, so that the event loop never waits for them.

They are processes and not threads because a thread holds the interpreter's lock while it decodes JSON
(docs/adr/0007-reader-processes.md). They are forked before the loop and any thread exists, and thereby share the
tokeniser's memory. If one process dies, all running jobs fail and a new pool is spawned.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TypeVar

from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.worker_table import ModelLimits
from tandem.proxy.reading.body_reader import BodyKind, BodyReader, HasMedia
from tandem.proxy.reading.spooled_body import SpooledBody
from tandem.proxy.text.prompt import has_media, has_own_template, has_token_ids
from tandem.runtime.errors import InternalError, Overloaded
from tandem.runtime.lifetime import die_with_parent

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_INLINE_BYTES = 2048
"""Size up to which text is tokenised on the loop: that takes no longer than a round trip to a process (0.5 ms)."""
MAX_INLINE_TOKENS = 1024
"""Prompt tokens up to which an echo is detokenised on the loop (under 1 ms)."""
MAX_PENDING_JOBS = 4096
"""Jobs that may wait for a process. Admission limits generation earlier; `/tokenize` is limited only here."""


class ReaderPool:
    """make_reader: creates a reader in a spawned process; must be picklable."""

    def __init__(self, reader: BodyReader, make_reader: Callable[[], BodyReader], num_processes: int) -> None:
        self._reader = reader
        self._make_reader = make_reader
        self._num_processes = num_processes
        self._num_pending = 0
        self._executor: ProcessPoolExecutor | None = None

    def fork(self, fds: Sequence[int] = ()) -> None:
        """Starts the processes. Must be called while this process has one thread and no loop.

        Without this call, processes are spawned when first needed. fds: sockets that the processes close.
        """
        gc.freeze()  # keeps the children's collector from touching, and so copying, inherited memory

        def inherit() -> BodyReader:
            for fd in fds:
                os.close(fd)
            return self._reader

        self._executor = self._start(multiprocessing.get_context("fork"), inherit)

    async def read(self, kind: BodyKind, body: bytes | SpooledBody, limits: ModelLimits) -> GenerationRequest:
        """Returns the request with tokenised prompts. Raises InvalidRequest, HasMedia, Overloaded, InternalError."""
        if isinstance(body, bytes):
            request = self._reader.decode(body, kind)
            if has_media(request.prompt):
                raise HasMedia("the request has images or video")
            is_short = len(body) <= MAX_INLINE_BYTES or has_token_ids(request.prompt)
            # The client decides how long its own template or grammar takes.
            if is_short and not has_own_template(request.prompt) and request.base_sampling.grammar is None:
                return self._reader.render(request, limits)
        return await self.run(BodyReader.read, body, kind, limits)

    async def text_of(self, token_ids: list[int]) -> str:
        """Returns the text of a prompt without special tokens."""
        if len(token_ids) <= MAX_INLINE_TOKENS:
            return self._reader.text_of(token_ids)
        return await self.run(BodyReader.text_of, token_ids)

    async def run(self, method: Callable[..., T], data: bytes | SpooledBody | list[int], *arguments: object) -> T:
        """Calls a method of a process's reader; a spooled body is passed as the path of its file.

        Raises as the method does, Overloaded, InternalError.
        """
        if self._num_pending >= MAX_PENDING_JOBS:
            raise Overloaded("too many requests are waiting to be read; try again later")
        if self._executor is None:
            self._executor = self._start(multiprocessing.get_context("spawn"), self._make_reader)
        executor = self._executor
        content = Path(data.path) if isinstance(data, SpooledBody) else data
        self._num_pending += 1
        try:
            return await asyncio.wrap_future(executor.submit(_call, method, content, *arguments))
        except BrokenProcessPool as error:
            if self._executor is executor:
                log.error("a reader process died; starting new ones")
                self._executor = None
                executor.shutdown(wait=False)
            raise InternalError("the process that read the request died; try again") from error
        finally:
            self._num_pending -= 1

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


def _call(method: Callable[..., Any], content: bytes | Path | list[int], *arguments: object) -> Any:
    return method(_reader, content.read_bytes() if isinstance(content, Path) else content, *arguments)
