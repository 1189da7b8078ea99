"""Combines several paths into one sender or receiver: every job runs on all paths and is done when all are done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone, when_all


class FanOutSender:
    """The prefill end of several paths."""

    def __init__(self, senders: Sequence[KVSender]) -> None:
        self._senders = senders

    @classmethod
    def open(cls, paths: Iterable[Callable[[], KVSender]]) -> FanOutSender:
        """Opens paths. If one of them raises, closes those that are open, which have sent nothing, and raises that."""
        senders: list[KVSender] = []
        try:
            for open_path in paths:
                senders.append(open_path())
        except Exception:
            cls(senders).close(lambda: None)
            raise
        return cls(senders)

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
    """The decode end of several paths."""

    def __init__(self, receivers: Sequence[KVReceiver]) -> None:
        self._receivers = receivers

    @classmethod
    def open(cls, paths: Iterable[Callable[[], KVReceiver]]) -> FanOutReceiver:
        """Opens paths. If one of them raises, closes those that are open, and raises that."""
        receivers: list[KVReceiver] = []
        try:
            for open_path in paths:
                receivers.append(open_path())
        except Exception:
            cls(receivers).close()
            raise
        return cls(receivers)

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        done = when_all(len(self._receivers), on_done)
        for receiver in self._receivers:
            receiver.receive(block_ids, done)

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
