"""Opens paths by the name of their connector, and contains the connector's faults in them.

A connector may be another package's, and may raise anything, call back twice, or call back with anything. None of this
reaches the worker, and none of it leaves a job or the end of a path unreported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from tandem.kv_transfer.connector import DataNetwork, KVReceiver, KVSender, OnAddress, OnDone, Peer
from tandem.kv_transfer.registry import load_connector
from tandem.protocol.messages.checks import MAX_ADDRESS_BYTES
from tandem.runtime.errors import KVPathRefused, KVTransferFailed, first_line

log = logging.getLogger(__name__)

_MAX_REASON_CHARACTERS = 500
"""A reason travels to the peer and stands in its log."""


def open_sender(connector: str, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> KVSender:
    """See `KVConnector.open_sender`. Raises KVPathRefused, whatever the connector raises."""
    ready = _Once(lambda error: on_ready(_as_failure(connector, error)))
    try:
        made_by = load_connector(connector)
        return _ContainedSender(connector, made_by.one_sided, made_by.open_sender(peer, blocks, network, ready))
    except Exception as error:
        raise _as_refusal(connector, error) from error


def open_receiver(
    connector: str, path_id: str, blocks: torch.Tensor, network: DataNetwork, on_address: OnAddress
) -> KVReceiver:
    """See `KVConnector.open_receiver`. Raises KVPathRefused, whatever the connector raises."""

    def report(address: object) -> None:
        if isinstance(address, bytes) and len(address) > MAX_ADDRESS_BYTES:  # prefill would refuse it
            on_address(_failed(connector, f"it reports an address of {len(address)} bytes, over {MAX_ADDRESS_BYTES}"))
        elif isinstance(address, bytes):
            on_address(address)
        else:
            on_address(_as_failure(connector, address) or _failed(connector, "it reports no address"))

    try:
        receiver = load_connector(connector).open_receiver(path_id, blocks, network, _Once(report))
    except Exception as error:
        raise _as_refusal(connector, error) from error
    return _ContainedReceiver(connector, receiver)


class _Once:
    """A callback of which only the first call counts. Any thread may call it."""

    def __init__(self, callback: Callable[[object], None]) -> None:
        self._callback: Callable[[object], None] | None = callback
        self._lock = threading.Lock()

    def __call__(self, result: object = None) -> None:
        with self._lock:
            callback, self._callback = self._callback, None
        if callback is not None:
            callback(result)


class _ContainedSender:
    """Implements `KVSender`."""

    def __init__(self, connector: str, one_sided: bool, sender: KVSender) -> None:
        self._connector = connector
        self._one_sided = one_sided
        self._sender = sender
        self._broken: KVTransferFailed | None = None  # by `prepare`, which reports nothing
        self._lock = threading.Lock()  # of the next
        self._num_unproven = 0  # jobs that have not ended, or have failed, so that they may still write

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        try:
            self._sender.prepare(dst_block_ids)
        except Exception as error:
            self._broken = _as_failure(self._connector, error)

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        if self._broken is not None:
            on_done(self._broken)
            return

        was_taken = True

        def end(error: object) -> None:
            if error is None or not was_taken:
                self._add_unproven(-1)
            on_done(_as_failure(self._connector, error))

        done = _Once(end)
        self._add_unproven(1)
        try:
            self._sender.send(src_block_ids, dst_block_ids, done)
        except Exception as error:
            was_taken = False
            done(error)

    def close(self, on_closed: Callable[[], None]) -> None:
        """See `KVSender.close`. If it raises, a path counts as closed unless its sender may still be writing."""
        closed = _Once(lambda _: on_closed())
        try:
            self._sender.close(closed)
        except Exception as error:
            failure = _as_failure(self._connector, error)
            if self._one_sided and self._num_unproven > 0:
                log.error(
                    "%s. Blocks of the peer stay reserved until this worker ends, because it may still write to them",
                    failure,
                )
            else:
                closed()

    def _add_unproven(self, number: int) -> None:
        with self._lock:
            self._num_unproven += number


class _ContainedReceiver:
    """Implements `KVReceiver`."""

    def __init__(self, connector: str, receiver: KVReceiver) -> None:
        self._connector = connector
        self._receiver = receiver

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        done = _Once(lambda error: on_done(_as_failure(self._connector, error)))
        try:
            self._receiver.receive(block_ids, done)
        except Exception as error:
            done(error)

    def close(self) -> None:
        try:
            self._receiver.close()
        except Exception as error:
            _as_failure(self._connector, error)


def _as_failure(connector: str, result: object) -> KVTransferFailed | None:
    """Returns a job's error, or None if it has none. One that a connector should not have is logged with its origin."""
    if result is None or isinstance(result, KVTransferFailed):
        return result
    if isinstance(result, BaseException):
        log.error("connector %r failed", connector, exc_info=result)
        reason = f"{type(result).__name__}: {first_line(result)}"
    else:
        reason = f"it reports {result!r}"
    return _failed(connector, reason)


def _as_refusal(connector: str, error: Exception) -> KVPathRefused:
    if isinstance(error, KVPathRefused):
        return error
    failure = _as_failure(connector, error)
    assert failure is not None
    return KVPathRefused(failure.message)


def _failed(connector: str, reason: str) -> KVTransferFailed:
    return KVTransferFailed(f"connector {connector!r} failed: {reason}"[:_MAX_REASON_CHARACTERS])
