"""One pair's data path made of several: each job goes to all of them, and is done when all have done it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone
from tandem.runtime.errors import KVTransferFailed


def when_all(count: int, on_done: OnDone) -> OnDone:
    """A callback to be called `count` times, from any threads; the last call passes on the first error, or None."""
    lock = threading.Lock()
    errors: list[KVTransferFailed] = []
    left = count

    def done(error: KVTransferFailed | None) -> None:
        nonlocal left
        with lock:
            if error is not None:
                errors.append(error)
            left -= 1
            is_last = left == 0
        if is_last:
            on_done(errors[0] if errors else None)

    return done


class FanOutSender:
    """Prefill side: several senders as one."""

    def __init__(self, senders: Sequence[KVSender]) -> None:
        self._senders = senders

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        for sender in self._senders:
            sender.prepare(dst_block_ids)

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        done = when_all(len(self._senders), on_done)
        for sender in self._senders:
            sender.send(src_block_ids, dst_block_ids, done)

    def close(self, on_closed: Callable[[], None]) -> None:
        closed = when_all(len(self._senders), lambda error: on_closed())
        for sender in self._senders:
            sender.close(lambda: closed(None))


class FanOutReceiver:
    """Decode side: several receivers as one."""

    def __init__(self, receivers: Sequence[KVReceiver]) -> None:
        self._receivers = receivers

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        done = when_all(len(self._receivers), on_done)
        for receiver in self._receivers:
            receiver.receive(block_ids, done)

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
