"""Runs the batches that no other proxy runs. Each line is a request to this proxy's own routes, at lowest priority.

The proxy that holds the lock of a batch runs it. When that proxy ends, another one takes the batch over and runs the
lines that have no result yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from tandem.proxy.admission.api_key import ApiKey
from tandem.proxy.admission.fair_slots import FairSlots
from tandem.proxy.batches.batch import LineError
from tandem.proxy.batches.batch_lines import CheckedLines
from tandem.proxy.batches.batch_run import MAX_CONCURRENT, MAX_CONCURRENT_PER_CLIENT, BatchRun, finish_on_thread
from tandem.proxy.batches.batch_store import BatchFiles, BatchStore, NoRoomForResults
from tandem.proxy.batches.file_store import FileNotFound, client_folder
from tandem.proxy.batches.json_files import StorageFull
from tandem.proxy.batches.line_check import check_file
from tandem.runtime.files.private_folder import close_to_others
from tandem.runtime.tasks import start_job
from tandem.runtime.threads import Threads

log = logging.getLogger("proxy")

MAX_RUNNING, MAX_RUNNING_PER_CLIENT = 128, 8
"""Batches that one proxy runs at the same time, in all and of one client. Each has two open files."""
MAX_CHECKS, MAX_CHECKS_PER_CLIENT = 2, 1
"""Input files that are checked at the same time."""
NUM_THREADS = 4
"""Threads for the files of batches, and as many for the routes of files and batches."""
POLL_INTERVAL_S = 5.0
"""Time between two searches for batches that other proxies have left."""
_CLEAN_INTERVAL_S = 600.0
"""Time between two searches for what killed processes have left."""
_RETRY_AFTER_FAILURE_S = 10.0


class BatchRunner:
    """The batches of all clients. threads: for the files of clients."""

    def __init__(
        self,
        folder: Path,
        key_of: Callable[[str], ApiKey | None] | None,
        max_running: int = MAX_RUNNING,
        new_threads: Callable[[str, int], Threads] = Threads,
    ) -> None:
        """folder: holds the files of all clients. key_of: returns the key of a client, or None if that was removed;
        None if the server has no keys. max_running: at most MAX_RUNNING; fewer where descriptors are few. new_threads:
        called with their name and number."""
        self._max_running = min(max_running, MAX_RUNNING)
        self.threads = new_threads("files", NUM_THREADS)
        self._folder = folder
        self._key_of = key_of
        self._wake = asyncio.Event()
        self._slots = FairSlots(MAX_CONCURRENT, MAX_CONCURRENT_PER_CLIENT)
        self._checks = FairSlots(MAX_CHECKS, MAX_CHECKS_PER_CLIENT)
        self._check_threads = new_threads("batch-check", MAX_CHECKS)
        self._run_threads = new_threads("batches", NUM_THREADS)
        self._running: set[asyncio.Task[None]] = set()
        self._num_running: Counter[Path] = Counter()  # by client's folder
        self._clean_at = 0.0

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
                for folder, held in await finish_on_thread(self._run_threads, self._hold):
                    task = start_job(self._run(app, held), f"batch {held.batch.id}")
                    self._running.add(task)
                    self._num_running[folder] += 1
                    task.add_done_callback(partial(self._on_end, folder, held))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_INTERVAL_S):
                        await self._wake.wait()
        finally:
            running = list(self._running)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def close(self) -> None:
        for threads in (self.threads, self._check_threads, self._run_threads):
            threads.close()

    def _on_end(self, folder: Path, held: BatchFiles, task: asyncio.Task[None]) -> None:
        held.close()
        self._running.discard(task)
        self._num_running[folder] -= 1
        self.wake()  # another batch of the client may wait for its turn

    def _hold(self) -> list[tuple[Path, BatchFiles]]:
        """Locks batches to run, as far as this proxy and their clients may have more. Cleans up from time to time."""
        found: list[tuple[Path, BatchFiles]] = []
        num_running = Counter(self._num_running)
        may_clean = time.monotonic() >= self._clean_at
        folders = (files.parent for files in self._folder.glob("*/files"))  # batches of a client need its files
        for folder in sorted(folders, key=lambda folder: num_running[folder]):
            store = BatchStore(folder)
            try:
                if may_clean:
                    for each in (folder, *folder.iterdir()):
                        close_to_others(each)
                    store.remove_orphans()
                num_more = min(MAX_RUNNING_PER_CLIENT - num_running[folder], self._max_running - num_running.total())
                for held in store.hold_unfinished(num_more):
                    found.append((folder, held))
                    num_running[folder] += 1
            except Exception:  # e.g. a folder that may not be read; other clients' batches go on
                log.exception("files and batches in %s cannot be read", folder)
        if may_clean:
            self._clean_at = time.monotonic() + _CLEAN_INTERVAL_S
        return found

    async def _run(self, app: ASGIApp, held: BatchFiles) -> None:
        try:
            # A batch in progress has no index if that was lost with its host.
            has_index = await finish_on_thread(self._run_threads, held.index.exists)
            if held.batch.status == "validating" or (held.batch.status == "in_progress" and not has_index):
                await self._check(held)
            ended_by: LineError | None = None
            if held.batch.status == "in_progress":
                try:
                    await BatchRun(app, held, self._slots, self._run_threads, partial(self._key, held)).run()
                except (FileNotFound, NoRoomForResults) as error:  # the client deleted the input, or is at its limit
                    ended_by = LineError(error.code, error.for_client)
            if held.batch.status != "failed":
                await finish_on_thread(self._run_threads, partial(held.finalize, ended_by))
            log.info("batch %s: %s", held.batch.id, held.batch.status)
        except Exception as error:
            if isinstance(error, StorageFull):
                log.error("batch %s waits: %s", held.batch.id, error)
            else:
                log.exception("batch %s failed and is tried again", held.batch.id)
            await asyncio.sleep(_RETRY_AFTER_FAILURE_S)

    async def _check(self, held: BatchFiles) -> None:
        async with self._checks.slot(held.owner.client or held.owner.host):
            on_thread = partial(finish_on_thread, self._check_threads)
            try:
                input_file = await on_thread(held.input_file)
                checked = await check_file(input_file, held.batch.endpoint, held.index, on_thread)
            except (FileNotFound, FileNotFoundError):
                checked = CheckedLines(0, [LineError(FileNotFound.code, "The input file was deleted.")])
            except OSError:  # e.g. a full disk; until the batch expires it is tried again
                if time.time() < held.batch.expires_at:
                    raise
                return
            await finish_on_thread(self._run_threads, partial(held.save_check, checked))

    def _key(self, held: BatchFiles) -> ApiKey | None:
        """Raises KeyError if the client's key was removed."""
        if self._key_of is None:
            return None
        if (key := self._key_of(held.owner.client)) is None:
            raise KeyError
        return key
