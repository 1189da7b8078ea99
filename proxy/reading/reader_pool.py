"""Keeps bodies that take long to read off the event loop: JSON, templates and tokenising, in processes of their own.

Processes and not threads: under the interpreter's lock a thread that decodes a megabyte of JSON holds up the loop for
as long as that takes, and many such threads for a multiple (docs/adr/0007-reader-processes.md). They are forked before
the loop and any thread exists, and so share the tokeniser's memory; packed token ids are all that travels. A process
that is lost takes the pool with it: what was in it fails, and a new one, spawned, takes its place.
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
from typing import TypeVar

from tandem.proxy.api.validation import GenerationRequest
from tandem.proxy.cluster.registry import ModelLimits
from tandem.proxy.reading.body_reader import BodyKind, BodyReader, HasMedia
from tandem.proxy.reading.spooled_body import SpooledBody
from tandem.proxy.text.heap import trim
from tandem.proxy.text.rendering import has_media, has_own_template, has_token_ids
from tandem.runtime.errors import InternalError, Overloaded
from tandem.runtime.lifetime import die_with_parent

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_INLINE_BYTES = 2048
"""Bodies up to that are read on the loop: 0.6 ms at most (measured), where the way to a process and back takes 0.5. Up
to `MAX_UNSPOOLED_BYTES` those whose prompts are token ids are, too: 0.2 ms."""
MAX_PENDING_JOBS = 4096
"""That wait for a process. What generates is bounded before (`proxy.admission.admission`), `/tokenize` by this
alone."""
MAX_INLINE_TOKENS = 1024
"""More are turned into text in a process."""
_NICENESS = 10
"""Of the processes: where cores are short, the loop that wakes beside them waits a third as long (measured)."""


class ReaderPool:
    """make_reader: makes a reader from nothing, in a process that inherits none; so it must pickle."""

    def __init__(self, reader: BodyReader, make_reader: Callable[[], BodyReader], num_processes: int) -> None:
        self._reader = reader
        self._make_reader = make_reader
        self._num_processes = num_processes
        self._num_pending = 0
        self._executor: ProcessPoolExecutor | None = None

    def fork(self, fds: Sequence[int] = ()) -> None:
        """Call it while the process has one thread and no loop; without it, processes are spawned when first needed.

        fds: sockets of this process's, that are not to stay open in the others.
        """
        gc.freeze()  # the children's collector need not touch, and so copy, what they inherit

        def inherit() -> BodyReader:
            for fd in fds:
                os.close(fd)
            return self._reader

        self._executor = self._start(multiprocessing.get_context("fork"), inherit)

    async def read(self, kind: BodyKind, body: bytes | SpooledBody, limits: ModelLimits) -> GenerationRequest:
        """With its prompts tokenised. Raises InvalidRequest, HasMedia, or InternalError when a process was lost."""
        if isinstance(body, SpooledBody):
            return await self._run(_read_spooled, kind, body.path, limits)
        request = self._reader.decode(kind, body)
        if has_media(request.prompt):
            raise HasMedia("the request has images or video")
        is_short = len(body) <= MAX_INLINE_BYTES or has_token_ids(request.prompt)
        # How long templates and grammars take is for the client to say.
        if is_short and not has_own_template(request.prompt) and request.base_sampling.grammar is None:
            return self._reader.render(request, limits)
        return await self._run(_read, kind, body, limits)

    async def tokenize(self, body: bytes | SpooledBody, max_model_len: int | None) -> bytes:
        """The answer to `/tokenize`. Raises InvalidRequest or InternalError."""
        return await self._run(_tokenize, _content(body), max_model_len)

    async def detokenize(self, body: bytes | SpooledBody) -> bytes:
        """The answer to `/detokenize`. Raises InvalidRequest or InternalError."""
        return await self._run(_detokenize, _content(body))

    async def text_of(self, token_ids: list[int]) -> str:
        """What a prompt says, special tokens left out."""
        if len(token_ids) <= MAX_INLINE_TOKENS:
            return self._reader.text_of(token_ids)
        return await self._run(_text_of, token_ids)

    async def _run(self, job: Callable[..., T], *arguments: object) -> T:
        if self._executor is None:
            self._executor = self._start(multiprocessing.get_context("spawn"), self._make_reader)
        executor = self._executor
        if self._num_pending >= MAX_PENDING_JOBS:
            raise Overloaded("too many requests wait to be read; try again later")
        self._num_pending += 1
        try:
            return await asyncio.wrap_future(executor.submit(job, *arguments))
        except BrokenProcessPool as error:
            if self._executor is executor:
                log.error("a tokenising process was lost; starting new ones")
                self._executor = None
                executor.shutdown(wait=False)
            raise InternalError("the process that read the request was lost") from error
        finally:
            self._num_pending -= 1

    def _start(self, context: BaseContext, make_reader: Callable[[], BodyReader]) -> ProcessPoolExecutor:
        executor = ProcessPoolExecutor(self._num_processes, context, _begin, (make_reader,))
        executor.submit(_nothing)  # under fork this starts all of them, now
        return executor

    def close(self) -> None:
        """What has not begun is given up. A process in the middle of a prompt ends with this one."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


# ---- in the processes

_reader: BodyReader


def _begin(make_reader: Callable[[], BodyReader]) -> None:
    global _reader
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    os.nice(_NICENESS)
    _reader = make_reader()


def _nothing() -> None:
    pass


def _read(kind: BodyKind, body: bytes, limits: ModelLimits) -> GenerationRequest:
    return _reader.read(kind, body, limits)


def _read_spooled(kind: BodyKind, path: str, limits: ModelLimits) -> GenerationRequest:
    try:
        return _reader.read(kind, Path(path).read_bytes(), limits)
    finally:
        trim()  # a long prompt takes a hundred times its size while it is tokenised


def _content(body: bytes | SpooledBody) -> bytes | Path:
    return body if isinstance(body, bytes) else Path(body.path)


def _tokenize(body: bytes | Path, max_model_len: int | None) -> bytes:
    try:
        return _reader.tokenize(body if isinstance(body, bytes) else body.read_bytes(), max_model_len)
    finally:
        trim()


def _detokenize(body: bytes | Path) -> bytes:
    try:
        return _reader.detokenize(body if isinstance(body, bytes) else body.read_bytes())
    finally:
        trim()


def _text_of(token_ids: list[int]) -> str:
    return _reader.text_of(token_ids)
