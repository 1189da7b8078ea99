"""One thread that carries out a pair's copies in order, with one `on_done` for each, come what may."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kv_transfer.connector import OnDone
from protocol.errors import KVTransferFailed


class JobThread:
    """keeps_going: jobs do not depend on each other, so that one that fails is the only one."""

    def __init__(self, name: str, keeps_going: bool = False) -> None:
        self._keeps_going = keeps_going
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._closed = False
        self._broken: KVTransferFailed | None = None

    def submit(self, job: Callable[[], None], on_done: OnDone) -> None:
        """Run `job` after those before it. Once one has failed the rest fail with the same error, unrun:
        the peers no longer agree on what is under way, so the pair needs a new epoch."""
        if self._closed:
            on_done(KVTransferFailed("the pair is closed"))
            return
        self._executor.submit(self._run, job).add_done_callback(lambda future: on_done(_outcome(future)))

    def _run(self, job: Callable[[], None]) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise KVTransferFailed("the pair was closed while the transfer waited")
        try:
            job()
        except Exception as error:
            failure = KVTransferFailed(f"the KV transfer broke off: {_first_line(error)}")
            if not self._keeps_going:
                self._broken = failure
            raise failure from error

    def close(self, on_closed: Callable[[], None] = lambda: None) -> None:
        """Jobs that wait fail, unrun; the one under way is left to end; then `on_closed` is called on the thread."""
        if not self._closed:
            self._closed = True
            self._executor.submit(on_closed)
            self._executor.shutdown(wait=False)


def _outcome(future: Future[None]) -> KVTransferFailed | None:
    error = future.exception()
    return error if error is None or isinstance(error, KVTransferFailed) else KVTransferFailed(_first_line(error))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
