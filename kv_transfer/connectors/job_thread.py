"""A thread that runs a path's copies in order and reports each one's result exactly once, and the end of a path that
needs no more than such a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tandem.kv_transfer.connector import OnAddress, OnDone
from tandem.runtime.errors import KVPathRefused, KVTransferFailed, first_line
from tandem.runtime.threads import show_thread_name

log = logging.getLogger(__name__)

T = TypeVar("T")


class JobThread:
    """Runs jobs one after another.

    keeps_going: if False, all jobs after a failed one fail with the same error without running: the two peers no
    longer agree on what is in flight, so the pair must be reopened. If True, jobs are independent.
    """

    def __init__(self, name: str, keeps_going: bool = False) -> None:
        self._name = name
        self._keeps_going = keeps_going
        self._executor = ThreadPoolExecutor(1, name, show_thread_name)
        self._executor.submit(lambda: None)  # starts the thread before the first transfer needs it
        self._closed = False
        self._broken: KVTransferFailed | None = None

    def submit(self, job: Callable[[], T], on_done: Callable[[T | KVTransferFailed], None]) -> None:
        """Queues `job`. `on_done` gets its result on the thread, or an error at once if the thread is closed."""
        if self._closed:
            on_done(KVTransferFailed("the pair is closed"))
            return
        self._executor.submit(self._run, job).add_done_callback(lambda future: on_done(future.result()))

    def _run(self, job: Callable[[], T]) -> T | KVTransferFailed:
        if self._broken is not None:
            return self._broken
        if self._closed:
            return KVTransferFailed("the pair was closed while the transfer was queued")
        try:
            return job()
        except Exception as error:
            failure = KVTransferFailed(f"the KV transfer failed: {first_line(error)}")
            if isinstance(error, KVPathRefused):
                failure = error
            if not self._keeps_going:
                self._broken = failure
            return failure

    def close(self, on_closed: Callable[[], None] = lambda: None, release: Callable[[], None] = lambda: None) -> None:
        """Fails queued jobs, lets the running one finish, then calls `release` and `on_closed` on the thread.

        An error of `release` is logged, and `on_closed` is called nevertheless: a pair waits for it to be opened again.
        Does not wait.
        """
        if not self._closed:
            self._closed = True
            self._executor.submit(self._end, release, on_closed)
            self._executor.shutdown(wait=False)

    def _end(self, release: Callable[[], None], on_closed: Callable[[], None]) -> None:
        try:
            release()
        except Exception:
            log.exception("%s could not release everything", self._name)
        try:
            on_closed()
        except Exception:  # the executor would drop it
            log.exception("%s could not report its end", self._name)


class PassiveReceiver:
    """Blocks are usable when they are announced, because the peer announces them after it has written them.

    make_address: returns the pool's address. It may block, so it runs on the path's thread.
    """

    def __init__(self, name: str, make_address: Callable[[], bytes], on_address: OnAddress) -> None:
        self._thread = JobThread(name)
        self._thread.submit(make_address, on_address)

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        on_done(None)

    def close(self) -> None:
        self._thread.close()
