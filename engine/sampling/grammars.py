"""Grammars on a worker: each is compiled in a process of its own (`engine.sampling.grammar_process`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

import msgspec

from tandem.engine.sampling.grammar import LOST, Grammar, MaskProcess, MaskRequest, copy_of
from tandem.engine.sampling.grammar_messages import (
    ENTRY,
    CompileGrammar,
    FillMasks,
    LoadTokenizer,
    Mask,
    unusable_tokenizer,
)
from tandem.protocol.codec import Codec
from tandem.protocol.rank_channel import RankChannel, open_channel
from tandem.runtime.errors import InternalError, InvalidRequest, Overloaded, ProtocolError, TandemError, first_line
from tandem.runtime.files.tokenizer_files import load_tokenizer
from tandem.runtime.processes.forked_process import ForkedProcess, ForkServer, ForkServerLost, KeptForkServer
from tandem.runtime.processes.sandbox import CALLS_FD
from tandem.runtime.threads import show_thread_name

COMPILE_TIMEOUT_S = 30.0
"""Wait for a compilation, which may take `grammar_process.COMPILE_CPU_S` of a processor that others use too."""
MAX_GRAMMARS = 128
"""Grammars that a worker serves at the same time, each with a process of about 5 MiB."""
MAX_CLIENT_GRAMMARS = MAX_GRAMMARS // 2
"""Of one client, if the API has keys."""
_NUM_CACHED_GRAMMARS = 32
_IDLE_S, _NUM_KEPT = 60.0, 4
"""Processes of cached grammars that are unused for so long are ended, but for those that were used last."""
_NUM_LANES = 2
"""Grammars that are compiled at the same time."""

_TOO_SLOW_TO_COMPILE = InvalidRequest("the grammar is too complex: compiling it took too long, or failed")


class GrammarProcess:
    """A grammar's process, which ends with this object. It is replaced when it has ended. Of one thread at a time."""

    def __init__(self, server: GrammarServer, text: str) -> None:
        self._server = server
        self._text = text
        self._open: OpenGrammar | None = None
        self.number = 0

    def start(self, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        """Starts the process and compiles. Raises InvalidRequest, InternalError."""
        self.close()
        deadline = time.monotonic() + timeout_s
        self._open = self._server.open(timeout_s)
        self._finalizer = weakref.finalize(self, self._open.close)
        self._finalizer.atexit = False  # then it ends with the worker
        with contextlib.suppress(OSError):  # it has ended already, and will not answer
            self._open.channel.send(CompileGrammar(self._text))
        answer = self.receive(deadline - time.monotonic())
        if answer is None or answer.error is not None:
            self.close()
            raise copy_of(_TOO_SLOW_TO_COMPILE) if answer is None else _error_of(answer)
        self.number += 1

    def send(
        self, requests: Sequence[MaskRequest], ended_state_ids: list[int], timeout_s: float, budget_s: float
    ) -> None:
        """Asks for masks, of a new process if there is none. Raises InvalidRequest, InternalError."""
        if self._open is None:
            self.start(timeout_s)
        fills = [request.state.request(request, self.number) for request in requests]
        assert self._open is not None
        try:
            self._open.channel.send(FillMasks(fills, ended_state_ids, budget_s))
        except OSError as error:  # it ended since the last step
            self.close()
            raise copy_of(LOST) from error

    def receive(self, timeout_s: float) -> Mask | None:
        """Returns the next mask; None if the process has ended, or if the time is up."""
        if self._open is None or not self._open.channel.has_message(max(0.0, timeout_s)):
            return None
        try:
            return self._open.channel.receive()
        except ProtocolError:
            return None

    def close(self) -> None:
        """Ends the process."""
        if self._open is not None:
            self._open = None
            self._finalizer()


class Grammars:
    """Compiles grammars and caches the most recently used. Clients take turns.

    model: a folder or a hub id; its tokeniser is loaded in the background. A worker without a usable tokeniser still
    serves, and only requests with a grammar fail. vocab_size: of the logits.
    on_compiled: called on another thread after each compilation. python: interpreter of the processes; "" for our own.
    """

    def __init__(self, model: str, vocab_size: int, on_compiled: Callable[[], object], python: str = "") -> None:
        self._on_compiled = on_compiled
        self._lock = threading.Lock()  # vLLM's engine calls `get` on a thread of its own
        self._cached: OrderedDict[str, Grammar] = OrderedDict()
        self._live: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._queue: CompileQueue[Callable[[], None]] = CompileQueue()
        self._lanes = ThreadPoolExecutor(_NUM_LANES, "grammars", show_thread_name)
        self._server = self._lanes.submit(lambda: GrammarServer(read_tokenizer(model, vocab_size), python))

    def get(self, text: str | None, client: str = "", is_optional: bool = False) -> Grammar | None:
        """Returns the grammar for `SamplingParams.grammar`. Call on one thread. Raises Overloaded.

        client: whose turn it is to compile; different for different API keys. is_optional: returns a failed one instead
        of raising Overloaded.
        """
        if text is None:
            return None
        with self._lock:
            return self._get(text, client, is_optional)

    def _get(self, text: str, client: str, is_optional: bool) -> Grammar:
        grammar = self._cached.get(text)
        if grammar is None or grammar.has_ended:  # then it would be compiled in a step, for which all sequences wait
            self._cached.pop(text, None)
            try:
                self._make_room(client)
            except Overloaded as error:
                if is_optional:
                    return Grammar.failed(error)
                raise
            compiled: Future[MaskProcess] = Future()
            compiled.add_done_callback(lambda _: self._on_compiled())
            grammar = self._cached[text] = Grammar(compiled, client)
            self._live.add(grammar)
            self._queue.push(client, lambda: self._compile(text, compiled))
            self._lanes.submit(self._work)
        self._cached.move_to_end(text)
        grammar.used_at = time.monotonic()
        return grammar

    def end_idle(self) -> None:
        """Forgets cached grammars that are unused for long, whose processes then end. Call from time to time, on any
        thread. A sequence that uses one keeps it."""
        with self._lock:
            by_use = sorted(self._cached, key=lambda text: self._cached[text].used_at)
            idle_since = time.monotonic() - _IDLE_S
            for text in by_use[: max(0, len(by_use) - _NUM_KEPT)]:
                if self._cached[text].used_at < idle_since:
                    del self._cached[text]

    def _make_room(self, client: str) -> None:
        """Forgets cached grammars, and refuses more that are in use. Raises Overloaded."""
        while len(self._cached) >= _NUM_CACHED_GRAMMARS or (self._cached and len(self._live) >= MAX_GRAMMARS):
            self._cached.popitem(last=False)
        num_own = sum(grammar.client == client for grammar in self._live) if client else 0
        if len(self._live) >= MAX_GRAMMARS or num_own >= MAX_CLIENT_GRAMMARS:
            raise Overloaded(
                f"this worker serves {len(self._live)} different grammars, {num_own} of them yours; at most "
                f"{MAX_GRAMMARS} and {MAX_CLIENT_GRAMMARS} at the same time. Try again later, or use fewer grammars"
            )

    def _work(self) -> None:
        """Compiles as long as it is some client's turn. Runs on a lane."""
        while (turn := self._queue.pop()) is not None:
            client, compile_next = turn
            try:
                compile_next()
            finally:
                self._queue.finish(client)

    def _compile(self, text: str, compiled: Future[MaskProcess]) -> None:
        try:
            process = GrammarProcess(self._server.result(), text)
            process.start()
        except TandemError as error:
            compiled.set_exception(copy_of(error))  # without the frames, which refer to the future
        except Exception as error:
            compiled.set_exception(InternalError(f"the grammar could not be compiled: {error}"))
        else:
            compiled.set_result(process)

    def close(self) -> None:
        self._lanes.shutdown(wait=False, cancel_futures=True)
        self._server.add_done_callback(_close)


def _close(loaded: Future[GrammarServer]) -> None:
    if not loaded.cancelled() and loaded.exception() is None:
        loaded.result().close()


def _error_of(mask: Mask) -> TandemError:
    assert mask.error is not None
    return mask.error.to_error()


T = TypeVar("T")


class CompileQueue(Generic[T]):
    """Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        """Jobs by client. The client that was served last is at the end."""
        self._running: set[str] = set()

    def push(self, client: str, job: T) -> None:
        with self._lock:
            self._waiting.setdefault(client, deque()).append(job)

    def pop(self) -> tuple[str, T] | None:
        """Returns the next client whose job may run, and the job. `finish` must follow."""
        with self._lock:
            client = next((each for each in self._waiting if each not in self._running), None)
            if client is None:
                return None
            jobs = self._waiting[client]
            job = jobs.popleft()
            self._waiting.move_to_end(client)
            if not jobs:
                del self._waiting[client]
            self._running.add(client)
            return client, job

    def finish(self, client: str) -> None:
        with self._lock:
            self._running.discard(client)


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
    """Starts the fork server, which then loads. Any thread may use it; each call has an event loop of its own.

    python: its interpreter; "" for our own.
    """

    def __init__(self, tokenizer: LoadTokenizer, python: str = "") -> None:
        self._python = python
        self._config = msgspec.msgpack.encode(tokenizer)
        self._server = KeptForkServer(self._spawn, LOAD_TIMEOUT_S)
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            self._server.spawn()
        except OSError as error:
            log.error("the process for grammars does not start, and is started for the next one: %s", error)

    def _spawn(self) -> ForkServer:
        module = "tandem.engine.sampling.grammar_process"
        return ForkServer.spawn(module, os.environ, python=self._python, config=self._config)

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
