"""A group of two ranks over gloo, for CPU pools. A number of messages is in flight at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import cast

import torch
from torch._C._distributed_c10d import ProcessGroup, Store, Work

from tandem.kv_transfer.connectors.block_messages import Message
from tandem.kv_transfer.connectors.group_store import CONNECT_TIMEOUT_S
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.runtime.errors import KVTransferFailed

TRANSFER_TIMEOUT_S = 5.0
"""Deadline of one message, after which the peer counts as dead."""


class GlooGroup:
    """Implements `process_group.PathGroup`. host: own address."""

    def __init__(self, rank: int, host: str, max_in_flight: int) -> None:
        self._rank = rank
        self._host = host
        self._max_in_flight = max_in_flight
        self._group: ProcessGroup | None = None

    def run(self, job: Callable[[], None]) -> None:
        job()

    def connect(self, store: Store) -> None:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]  # by default it resolves the host name
        self._group = cast(ProcessGroup, ProcessGroupGloo(store, self._rank, 2, options))
        self._start(torch.zeros(1, dtype=torch.uint8)).wait(timedelta(seconds=CONNECT_TIMEOUT_S))

    def move(
        self, messages: Iterable[Message], before: Callable[[Message], None], after: Callable[[Message], None]
    ) -> None:
        """See `PathGroup.move`. gloo cancels a receive when its work is dropped."""
        in_flight: deque[tuple[Work, Message]] = deque()

        def finish_first() -> None:
            work, message = in_flight.popleft()
            work.wait(timedelta(seconds=TRANSFER_TIMEOUT_S))
            after(message)

        try:
            for message in messages:
                if len(in_flight) == self._max_in_flight:
                    finish_first()
                before(message)
                in_flight.append((self._start(message.data), message))
            while in_flight:
                finish_first()
        except Exception:
            self._group = None
            raise
        finally:
            in_flight.clear()  # an error's traceback would keep them

    def _start(self, data: torch.Tensor) -> Work:
        if self._group is None:
            raise KVTransferFailed("the pair was closed")
        peer = 1 - self._rank
        return self._group.send([data], peer, 0) if self._rank == 0 else self._group.recv([data], peer, 0)

    def close(self, thread: JobThread, on_closed: Callable[[], None]) -> None:
        thread.close(on_closed)
