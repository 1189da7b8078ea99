"""The worker's side of the fork server that holds the tokeniser and forks a process for each grammar."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from typing import NamedTuple

import msgspec

from tandem.engine.sampling.grammar_messages import ENTRY, LoadTokenizer, Mask, unusable_tokenizer
from tandem.protocol.codec import Codec
from tandem.protocol.rank_channel import RankChannel, open_channel
from tandem.runtime.errors import InternalError, first_line
from tandem.runtime.files.tokenizer_files import load_tokenizer
from tandem.runtime.processes.forked_process import ForkedProcess, ForkServer, ForkServerLost, KeptForkServer
from tandem.runtime.processes.sandbox import CALLS_FD

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0
"""Deadline of loading the tokeniser, which takes about a second."""


class OpenGrammar(NamedTuple):
    """A process and the channel to it."""

    process: ForkedProcess
    channel: RankChannel[Mask]

    def close(self) -> None:
        """Ends the process."""
        self.channel.close()
        self.process.end()


class GrammarServer:
    """Starts the fork server, which then loads. Any thread may use it; each call has an event loop of its own."""

    def __init__(self, tokenizer: LoadTokenizer) -> None:
        self._config = msgspec.msgpack.encode(tokenizer)
        self._server = KeptForkServer(self._spawn, LOAD_TIMEOUT_S)
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            self._server.spawn()
        except OSError as error:
            log.error("the process for grammars does not start, and is started for the next one: %s", error)

    def _spawn(self) -> ForkServer:
        return ForkServer.spawn("tandem.engine.sampling.grammar_process", os.environ, config=self._config)

    def open(self, timeout_s: float) -> OpenGrammar:
        """Returns a new process, of a new server if the last one was lost.

        Raises InternalError, also if another server has not started within timeout_s, or after `close`.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise InternalError("the process for grammars is being started again; try again")
        try:
            channel, other = open_channel()
            with contextlib.closing(other), contextlib.ExitStack() as on_error:
                on_error.callback(channel.close)
                started = asyncio.run(self._fork(other.fileno(), deadline - time.monotonic()))
                if isinstance(started, str):
                    raise self._not_started(started)
                on_error.pop_all()
            return OpenGrammar(started, RankChannel(channel, Codec(Mask)))
        except OSError as error:
            raise self._not_started(first_line(error)) from error
        finally:
            if self._is_closed:
                self._server.close()
            self._lock.release()

    async def _fork(self, fd: int, timeout_s: float) -> ForkedProcess | str:
        """Returns why there is no process, because an error that leaves `asyncio.run` is in a cycle with its task."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._server.start(ENTRY, {CALLS_FD: fd})
        except (ForkServerLost, OSError) as error:  # TimeoutError is one
            return first_line(error)

    def _not_started(self, reason: str) -> InternalError:
        if self._is_closed:
            return InternalError("grammars are no longer compiled, because the worker ends")
        return InternalError(f"the process for grammars does not start: {reason}")

    def close(self) -> None:
        """Ends the fork server. One that is being started ends when it has started."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            self._server.close()
            self._lock.release()


def read_tokenizer(model: str, vocab_size: int) -> LoadTokenizer:
    """Reads the model's tokeniser. Raises InvalidRequest."""
    try:
        backend = load_tokenizer(model)
        return LoadTokenizer(backend.backend_tokenizer.to_str().encode(), vocab_size, backend.eos_token_id)
    except Exception as error:
        raise unusable_tokenizer(error) from error
