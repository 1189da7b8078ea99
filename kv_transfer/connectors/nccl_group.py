"""A group of two ranks over NCCL, for pools on GPUs. Its work runs in its own stream, one message after another."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import cast

import torch
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroup, Store  # typed here only

from tandem.kv_transfer.connectors.addresses import CONNECT_TIMEOUT_S
from tandem.kv_transfer.connectors.block_messages import Message
from tandem.kv_transfer.connectors.cuda_stream import Mark, SideStream
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.runtime.errors import KVTransferFailed

log = logging.getLogger(__name__)

TRANSFER_TIMEOUT_S = 5.0
"""Deadline of one message, after which the peer counts as dead."""
NCCL_GROUP_TIMEOUT = timedelta(days=365)
"""Of NCCL's watchdog, which would end the process. The deadlines above end a group instead."""
NCCL_MAX_CTAS = 4
"""Multiprocessors that a message occupies at most, until its peer's has run. More move no more over a network: each of
them moves about 20 GB/s. NCCL's buffers grow with their number."""
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
"""What a pair's group must find in the environment: its fault neither ends the process nor reaches another group."""
MESSAGES_AHEAD = 16
"""Messages that the host queues on a GPU before it waits for the oldest. NVLink takes 0.6 ms or more for 256 MiB, which
is longer than a poll, so polls cost no bandwidth. A stream takes about a thousand launches before it blocks the host,
which would be a wait without a deadline."""


def disable_nccl_watchdog() -> None:
    """Turns torch's watchdog off for all NCCL groups that this process makes from now on.

    Call it once, at the start: the groups of tensor parallelism have been made, and keep a watchdog that ends all
    ranks; and no thread reads the environment, which it would do while the environment moves.
    """
    os.environ.update(NCCL_ENVIRONMENT)


def _new_group(store: Store, rank: int) -> ProcessGroup:
    from torch.distributed import ProcessGroupNCCL  # torch may be built without it

    if any(os.environ.get(name) != value for name, value in NCCL_ENVIRONMENT.items()):
        raise KVTransferFailed("NCCL's watchdog is on, and would end this process with its peer")
    options = ProcessGroupNCCL.Options()
    options._timeout = NCCL_GROUP_TIMEOUT
    options.config.max_ctas = NCCL_MAX_CTAS
    return cast(ProcessGroup, ProcessGroupNCCL(store, rank, 2, options))


def _abort_apart(group: ProcessGroup | None, then: Callable[[], None]) -> None:
    """Aborts and drops a group on a thread of its own, as both may block for seconds. Then calls `then`."""

    def abort() -> None:
        nonlocal group
        try:
            if group is not None:
                group.abort()
            group = None
        except Exception:
            log.exception("a group could not be aborted")
        finally:
            then()

    threading.Thread(target=abort, name="abort-group", daemon=True).start()


class NcclGroup:
    """Implements `process_group.PathGroup`. device: of the pool."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._lock = threading.Lock()  # of the next three
        self._group: ProcessGroup | None = None
        self._is_connected = self._is_closed = False
        self._side_stream: SideStream | None = None

    def run(self, job: Callable[[], None]) -> None:
        if self._side_stream is None:
            self._side_stream = SideStream(self._device)
        self._side_stream.run(job)

    def connect(self, store: Store) -> None:
        """See `PathGroup.connect`. NCCL has no deadline for it."""
        group = _new_group(store, self._rank)
        with self._lock:
            if not self._is_closed:
                self._group = group
        if self._group is None:
            _abort_apart(group, _do_nothing)
        try:
            self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device))
            self._await(self._end_of_queue(), CONNECT_TIMEOUT_S)
        except Exception:
            broken, self._group = self._group, None
            if broken is not None:
                _abort_apart(broken, _do_nothing)
            raise
        with self._lock:
            self._open_group()
            self._is_connected = True

    def move(
        self, messages: Iterable[Message], before: Callable[[Message], None], after: Callable[[Message], None]
    ) -> None:
        """See `PathGroup.move`. Until `run` has returned, messages that an abort has ended are still scattered."""
        try:
            self._queue(messages, before, after)
        except Exception:
            group, self._group = self._group, None
            if group is not None:
                group.abort()
            raise

    def _queue(
        self, messages: Iterable[Message], before: Callable[[Message], None], after: Callable[[Message], None]
    ) -> None:
        """The stream orders the messages and the use of the buffer. The host queues messages ahead and waits for their
        ends: a thread that waited for each would leave the device idle for a poll per message."""
        ends: deque[Mark] = deque()
        for message in messages:
            if len(ends) == MESSAGES_AHEAD:
                self._await(ends.popleft(), TRANSFER_TIMEOUT_S)
            before(message)
            self._broadcast(message.data)
            after(message)
            ends.append(self._end_of_queue())
        while ends:
            self._await(ends.popleft(), TRANSFER_TIMEOUT_S)

    def _broadcast(self, data: torch.Tensor) -> None:
        """Queues a message in the side stream, as a broadcast from rank 0 to the only other rank.

        Of torch's calls only collectives may run in the caller's stream. `send` and `recv` run in one of torch's pool,
        which groups share.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = False  # in the current stream
        self._open_group().broadcast([data], options)

    def _open_group(self) -> ProcessGroup:
        """Returns the group. Raises KVTransferFailed once it has been dropped."""
        group = self._group
        if group is None:
            raise KVTransferFailed("the pair was closed")
        return group

    def _end_of_queue(self) -> Mark:
        assert self._side_stream is not None
        return self._side_stream.mark()

    def _await(self, end: Mark, timeout_s: float) -> None:
        """Blocks until the device has reached `end`. Raises after `timeout_s`, and if the group was dropped."""
        assert self._side_stream is not None
        self._side_stream.wait(end, timeout_s)
        self._open_group()  # a message that was aborted ends like one that has arrived

    def close(self, thread: JobThread, on_closed: Callable[[], None]) -> None:
        with self._lock:
            group, self._group = self._group, None
            was_closed, self._is_closed = self._is_closed, True
            is_connected = self._is_connected
        if was_closed:
            return

        def release() -> None:
            if self._side_stream is not None:
                self._side_stream.close()

        # A path that was never connected has carried nothing, and NCCL's initialisation may hold its thread for long.
        thread.close(on_closed if is_connected else _do_nothing, release)
        _abort_apart(group, _do_nothing if is_connected else on_closed)


def _do_nothing() -> None:
    pass
