"""Runs the lines of one batch: which is next, when a refused one is tried again, and what a dead proxy means.

A line is a request to the application in this process, without a connection (`call`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.types import ASGIApp, Message

from tandem.proxy.admission.api_key import ApiKey
from tandem.proxy.admission.fair_slots import FairSlots
from tandem.proxy.batches.batch import Failure, LineResponse, LineResult
from tandem.proxy.batches.batch_lines import IndexedLine, request_body
from tandem.proxy.batches.batch_store import BatchFiles, NoRoomForResults
from tandem.proxy.batches.json_files import new_id
from tandem.runtime.errors import InternalError
from tandem.runtime.tasks import start
from tandem.runtime.threads import Threads

log = logging.getLogger("proxy")

T = TypeVar("T")

MAX_CONCURRENT, MAX_CONCURRENT_PER_CLIENT = 16, 12
"""Lines that one proxy runs at the same time, for all its batches and for those of one client."""
MAX_DEATHS = 3
"""Proxies that may die while a line runs; then the line fails. From the first one on it runs alone."""
ALONE_S = 60.0
"""How long a line that may kill the proxy runs alone. A longer one goes on beside others."""
_WATCH_INTERVAL_S = 1.0
_RETRY_STATUSES = (429, 503, 504)
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0
"""Wait before a refused line is tried again. It begins with the answer's Retry-After and doubles each time."""
MAX_TIMEOUTS = 3
"""Answers after which a line fails that say that it took too long, or would take too long even if nothing else ran."""


class BatchRun:
    """One run of a batch that is in progress, until its lines have results, it is cancelled or its time is over."""

    def __init__(
        self, app: ASGIApp, held: BatchFiles, slots: FairSlots, threads: Threads, key_of: Callable[[], ApiKey | None]
    ) -> None:
        """key_of: returns the key of the batch's client. Raises KeyError if that was removed."""
        self._app, self._held, self._slots, self._threads, self._key_of = app, held, slots, threads, key_of
        self._client = held.owner.client or held.owner.host
        self._turn = asyncio.Lock()  # one thread at a time reads lines or writes results
        self._finished: set[str] = set()
        self._deaths: Counter[int] = Counter()  # by number of the line
        self._lines: Iterator[IndexedLine] = iter(())
        self._no_room: NoRoomForResults | None = None

    async def run(self) -> None:
        """Raises NoRoomForResults, FileNotFound if the client has deleted the input, StorageFull, OSError."""
        suspects = await self._on_thread(self._begin)
        watcher = start(self._watch())
        working = start(self._work_all(suspects))
        try:
            done, _ = await asyncio.wait({watcher, working}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (watcher, working):
                task.cancel()
            await asyncio.gather(watcher, working, return_exceptions=True)
            await self._on_thread(self._held.journal.end_all)
        if self._no_room is not None:
            raise self._no_room

    def _begin(self) -> list[IndexedLine]:
        """Reads what is done. Returns the lines that were running when a proxy died."""
        self._finished = self._held.finished()
        self._deaths = self._held.journal.deaths()
        self._lines = self._held.lines()
        if not self._deaths:
            return []
        return [line for line in self._held.lines() if line.number in self._deaths and not self._is_finished(line)]

    async def _work_all(self, suspects: list[IndexedLine]) -> None:
        for line in suspects:
            await self._work(partial(_same, line), partial(self._slots.slot_alone, alone_s=ALONE_S))
        num_left = self._held.batch.request_counts.total - len(self._finished)
        workers = [start(self._work_on()) for _ in range(min(MAX_CONCURRENT_PER_CLIENT, num_left))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work_on(self) -> None:
        while await self._work(self._next, self._slots.slot):
            pass

    async def _work(
        self,
        take: Callable[[], IndexedLine | None],
        slot: Callable[[str], AbstractAsyncContextManager[None]],
    ) -> bool:
        """Runs one line until it has a result. Returns False if none is left or its result would have no room.

        A refused line waits without a slot and without its body, which is read again.
        """
        num_refusals = num_timeouts = 0
        while True:
            ran = await self._try(take, slot, may_be_late=num_timeouts < MAX_TIMEOUTS - 1)
            if ran is None:
                return False
            line, answer = ran
            if not isinstance(answer, _Refused):
                return True
            wait_s = min(MAX_RETRY_S, max(MIN_RETRY_S, answer.retry_after_s) * 2 ** min(num_refusals, 8))
            num_refusals += 1
            num_timeouts += answer.is_late
            take = partial(_same, line)
            await asyncio.sleep(max(0.0, min(wait_s, self._held.batch.expires_at - time.time())))

    async def _try(
        self,
        take: Callable[[], IndexedLine | None],
        slot: Callable[[str], AbstractAsyncContextManager[None]],
        may_be_late: bool,
    ) -> tuple[IndexedLine, LineResult | _Refused] | None:
        """Runs one line once. may_be_late: whether it is tried again if it is too late. Returns None as `_work` returns
        False."""
        async with slot(self._client):  # before the line is read, so that few lines are in memory
            async with self._turn:
                try:
                    taken = await self._on_thread(partial(self._start_line, take))
                except NoRoomForResults as error:
                    self._no_room = error
                    return None
            if taken is None:
                return None
            line, body = taken
            answer = await self._ask(line, body)
            if isinstance(answer, _Refused) and answer.is_late and not may_be_late:
                answer = _timed_out(answer.result)
            async with self._turn:
                await self._on_thread(partial(self._end_line, line, answer))
            return line, answer

    # ---- on a thread

    def _start_line(self, take: Callable[[], IndexedLine | None]) -> tuple[IndexedLine, bytes] | None:
        self._held.check_room()
        if (line := take()) is None:
            return None
        body = request_body(self._held.read(line))
        self._held.journal.begin(line.number)
        return line, body

    def _end_line(self, line: IndexedLine, answer: LineResult | _Refused) -> None:
        if isinstance(answer, LineResult):
            self._held.append(answer)
        self._held.journal.end(line.number)

    def _next(self) -> IndexedLine | None:
        """Returns the next line without a result that was not running when a proxy died."""
        for line in self._lines:
            if not self._is_finished(line) and line.number not in self._deaths:
                return line
        return None

    def _is_finished(self, line: IndexedLine) -> bool:
        return line.custom_id in self._finished

    # ---- on the loop

    async def _ask(self, line: IndexedLine, body: bytes) -> LineResult | _Refused:
        held = self._held
        if self._deaths[line.number] >= MAX_DEATHS:
            message = f"The server ended {MAX_DEATHS} times while it ran this request; it is not run again."
            return _not_run(line, "server_ended", message)
        try:
            key = self._key_of()
        except KeyError:
            return _not_run(line, "invalid_api_key", "The API key of this batch is not valid any more.")
        left_s = held.batch.expires_at - time.time()
        if left_s <= 0:
            return _expired(line)
        try:
            async with asyncio.timeout(left_s):
                status, headers, content = await call(self._app, held.batch.endpoint, body, held.owner.host, key)
        except TimeoutError:
            return _expired(line)
        except InternalError as error:
            return _not_run(line, error.code, f"{error.for_client}; send the request again.")
        response = LineResponse(status, headers.get("x-request-id", ""), msgspec.Raw(content))
        result = LineResult(new_id("batch_req_"), line.custom_id, response)
        if status not in _RETRY_STATUSES:
            return result
        given = headers.get("retry-after", "")
        is_late = status == 504 or headers.get("x-should-retry") == "false"
        return _Refused(is_late, float(given) if given.isdecimal() else 0.0, result)

    async def _watch(self) -> None:
        """Saves the counts, and returns once the batch is to be cancelled."""
        held = self._held
        saved = held.batch
        while not await self._on_thread(lambda: held.is_cancelled):
            await asyncio.sleep(_WATCH_INTERVAL_S)
            async with self._turn:
                if held.batch is not saved:
                    saved = held.batch
                    await self._on_thread(partial(held.save, saved, durable=False))

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await finish_on_thread(self._threads, work)


class _Refused(msgspec.Struct, frozen=True):
    """An answer after which the line is tried again.

    is_late: the line took too long, or the server says that it always will. result: of a line that is not tried again.
    """

    is_late: bool
    retry_after_s: float
    result: LineResult


async def finish_on_thread(threads: Threads, work: Callable[[], T]) -> T:
    """Runs work on a thread. Cancelling waits for its end, because it writes files of a batch that is held."""
    running = start(threads.run(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():  # also if it is cancelled again meanwhile
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        raise


def _same(line: IndexedLine) -> IndexedLine:
    return line


def _not_run(line: IndexedLine, code: str, message: str) -> LineResult:
    return LineResult(new_id("batch_req_"), line.custom_id, None, Failure(code, message))


def _timed_out(result: LineResult) -> LineResult:
    """Returns the result of a line that is not tried again: OpenAI's code beside the last answer."""
    message = f"The request was not answered in time, {MAX_TIMEOUTS} times. Its last answer has the reason."
    return msgspec.structs.replace(result, error=Failure("request_timeout", message))


def _expired(line: IndexedLine) -> LineResult:
    return _not_run(line, "batch_expired", "The request was not run within the batch's completion window.")


async def call(
    app: ASGIApp, path: str, body: bytes, host: str, key: ApiKey | None
) -> tuple[int, dict[str, str], bytes]:
    """Sends a POST request to the application. Returns status, headers and body of the answer.

    Raises InternalError if the application ends before its answer is complete.
    """
    sent: list[Message] = []
    given = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not given:
            await asyncio.Event().wait()  # this client does not disconnect
        return given.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": (host, 0),
        "server": ("batch", 0),
        "state": {} if key is None else {"api_key": key},
    }
    await app(scope, receive, send)
    if len(sent) < 2 or sent[-1].get("more_body", False):
        raise InternalError("the server failed while it wrote the answer")
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])
