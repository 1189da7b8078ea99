"""The decode end of a one-sided path whose receiver has nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.kv_transfer.connector import OnAddress, OnDone
from tandem.kv_transfer.connectors.job_thread import JobThread


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
