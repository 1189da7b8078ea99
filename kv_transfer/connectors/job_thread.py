"""One thread that carries out a pair's copies in order, with one `on_done` for each, come what may."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tandem.kv_transfer.connector import OnDone
from tandem.runtime.errors import KVTransferFailed
from tandem.runtime.threads import show_thread_name


class JobThread:
    """keeps_going: jobs do not depend on each other, so that one that fails is the only one."""

    def __init__(self, name: str, keeps_going: bool = False) -> None:
        self._keeps_going = keeps_going
        self._executor = ThreadPoolExecutor(1, name, show_thread_name)
        self._executor.submit(lambda: None)  # else the first transfer would wait for the thread to start
        self._closed = False
        self._broken: KVTransferFailed | None = None

    def submit(self, job: Callable[[], None], on_done: OnDone) -> None:
        """Run `job` after those before it. Once one has failed the rest fail with the same error, unrun:
        the peers no longer agree on what is under way, so the pair needs a new epoch."""
        if self._closed:
            on_done(KVTransferFailed("the pair is closed"))
            return
        self._executor.submit(self._run, job).add_done_callback(lambda future: on_done(future.result()))

    def _run(self, job: Callable[[], None]) -> KVTransferFailed | None:
        """What went wrong is given back, not raised: an error that was raised holds the frames that it came through,
        and with them the job's connections, until the garbage collector comes by, which may be never."""
        if self._broken is not None:
            return self._broken
        if self._closed:
            return KVTransferFailed("the pair was closed while the transfer waited")
        try:
            job()
        except Exception as error:
            failure = KVTransferFailed(f"the KV transfer broke off: {_first_line(error)}")
            if not self._keeps_going:
                self._broken = failure
            return failure
        return None

    def close(self, on_closed: Callable[[], None] = lambda: None) -> None:
        """Jobs that wait fail, unrun; the one under way is left to end; then `on_closed` is called on the thread."""
        if not self._closed:
            self._closed = True
            self._executor.submit(on_closed)
            self._executor.shutdown(wait=False)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
