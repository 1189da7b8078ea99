"""Runs batches: each line is a request to this proxy's own routes, at the lowest priority.

The proxy that holds the lock of a batch runs it. When that proxy ends, another one takes the batch over and runs the
lines that have no result yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.types import ASGIApp, Message

from tandem.proxy.admission.api_key import ApiKey
from tandem.proxy.batches.batch import Failure, Line, LineError, LineResponse, LineResult, parse_line, request_body
from tandem.proxy.batches.batch_store import BatchFiles, BatchStore
from tandem.proxy.batches.file_store import FileNotFound, StorageFull, client_folder, new_id
from tandem.runtime.tasks import start, start_job

log = logging.getLogger("proxy")

T = TypeVar("T")

MAX_CONCURRENT = 16
"""Requests that one proxy runs at the same time, for all its batches."""
POLL_INTERVAL_S = 5.0
"""Time between two searches for batches that other proxies have left."""
_WATCH_INTERVAL_S = 1.0
_RETRY_AFTER_FAILURE_S = 10.0
_RETRY_STATUSES = (429, 503)
_MAX_RETRY_AFTER_S = 30.0
_MAX_TIMEOUTS = 3


class BatchRunner:
    """folder: holds the files of all clients. key_of: returns the key of a client, or None if that was removed; None
    if the server has no keys."""

    def __init__(self, folder: Path, key_of: Callable[[str], ApiKey | None] | None) -> None:
        self._folder = folder
        self._key_of = key_of
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._running: set[asyncio.Task[None]] = set()

    def store(self, scope: str) -> BatchStore:
        """Returns the batches of a client. scope: of its API key."""
        return BatchStore(client_folder(self._folder, scope))

    def wake(self) -> None:
        """Makes `run` look for new batches now."""
        self._wake.set()

    async def run(self, app: ASGIApp) -> None:
        """Runs until it is cancelled. app: answers the requests, and asks for no API key."""
        try:
            while True:
                self._wake.clear()
                for held in await asyncio.to_thread(self._hold):
                    task = start_job(self._run(app, held), f"batch {held.batch.id}")
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_INTERVAL_S):
                        await self._wake.wait()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _hold(self) -> list[BatchFiles]:
        held: list[BatchFiles] = []
        for folder in self._folder.glob("*/batches"):
            try:
                for files in BatchStore(folder.parent).hold_unfinished():
                    held.append(files)
            except Exception:  # e.g. a damaged file; other clients' batches go on
                log.exception("batches in %s cannot be read", folder)
        return held

    async def _run(self, app: ASGIApp, held: BatchFiles) -> None:
        try:
            if held.batch.status == "validating":
                await _on_thread(lambda: held.save(held.check()))
            missing: LineError | None = None
            if held.batch.status == "in_progress":
                try:
                    await self._run_lines(app, held)
                except FileNotFound as error:  # the client has deleted the input
                    missing = LineError(error.code, error.message)
            if held.batch.status != "failed":
                await _on_thread(partial(held.finalize, missing))
            log.info("batch %s: %s", held.batch.id, held.batch.status)
        except Exception as error:
            if isinstance(error, StorageFull):
                log.error("batch %s waits: %s", held.batch.id, error)
            else:
                log.exception("batch %s failed and is tried again", held.batch.id)
            await asyncio.sleep(_RETRY_AFTER_FAILURE_S)
        finally:
            held.close()

    async def _run_lines(self, app: ASGIApp, held: BatchFiles) -> None:
        """Runs the requests without a result, until all have one, the batch is cancelled or its time is over."""
        finished = await _on_thread(held.finished)
        lines = held.lines()
        turn = asyncio.Lock()  # one thread at a time reads lines or writes results

        async def work() -> None:
            while True:
                async with self._slots:  # before the line is read, so that few lines are in memory
                    async with turn:
                        line = await asyncio.to_thread(_next, lines, finished, held.batch.endpoint)
                    if line is None:
                        return
                    result = await self._result(app, held, line)
                async with turn:
                    await _on_thread(partial(held.append, result))

        async def watch() -> None:
            saved = held.batch
            while not await asyncio.to_thread(lambda: held.is_cancelled):
                await asyncio.sleep(_WATCH_INTERVAL_S)
                async with turn:
                    if held.batch is not saved:
                        saved = held.batch
                        await _on_thread(partial(held.save, saved))

        watcher = start(watch())
        num_left = held.batch.request_counts.total - len(finished)
        workers = [start(work()) for _ in range(min(MAX_CONCURRENT, num_left))]
        try:
            pending = set(workers)
            while pending:
                done, _ = await asyncio.wait({watcher, *pending}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if watcher in done:
                    return
                pending -= done
        finally:
            for task in (watcher, *workers):
                task.cancel()
            await asyncio.gather(watcher, *workers, return_exceptions=True)

    async def _result(self, app: ASGIApp, held: BatchFiles, line: Line) -> LineResult:
        owner = held.owner
        key = self._key_of(owner.client) if self._key_of is not None else None
        if self._key_of is not None and key is None:
            return _not_run(line, "invalid_api_key", "The API key of this batch is not valid any more.")
        body = request_body(line)
        left_s = held.batch.expires_at - time.time()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    return await _ask(app, line, body, owner.host, key)
        return _not_run(line, "batch_expired", "The request was not run within the batch's completion window.")


async def _on_thread(work: Callable[[], T]) -> T:
    """Runs work on a thread. Cancelling waits for its end, because it writes files of a batch that is held."""
    thread = start(asyncio.to_thread(work))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread])
        raise


async def _ask(app: ASGIApp, line: Line, body: bytes, host: str, key: ApiKey | None) -> LineResult:
    """Asks until the answer is final: an overloaded cluster is asked again."""
    num_timeouts = 0
    while True:
        status, headers, content = await call(app, line.url, body, host, key)
        num_timeouts += status == 504
        if status in _RETRY_STATUSES or (status == 504 and num_timeouts < _MAX_TIMEOUTS):
            given = headers.get("retry-after", "1")
            await asyncio.sleep(min(float(given) if given.isdecimal() else 1.0, _MAX_RETRY_AFTER_S))
            continue
        response = LineResponse(status, headers.get("x-request-id", ""), msgspec.Raw(content))
        return LineResult(new_id("batch_req_"), line.custom_id, response)


async def call(
    app: ASGIApp, path: str, body: bytes, host: str, key: ApiKey | None
) -> tuple[int, dict[str, str], bytes]:
    """Sends a POST request to an application in this process. Returns status, headers and body of the answer."""
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
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])


def _next(lines: Iterator[bytes], finished: set[str], endpoint: str) -> Line | None:
    """Returns the next request without a result."""
    for data in lines:
        if data.strip():
            line = parse_line(data, 0, endpoint)
            if line.custom_id not in finished:
                return line
    return None


def _not_run(line: Line, code: str, message: str) -> LineResult:
    return LineResult(new_id("batch_req_"), line.custom_id, None, Failure(code, message))
