"""One connection to each worker, by epoch."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from tandem.protocol.messages.dispatch import AbortAttempt
from tandem.protocol.messages.membership import WorkerInfo
from tandem.proxy.dispatch.dispatcher import WorkerConnections

OLD = WorkerInfo("decode-0", "d1", "decode", "ipc://d", 1)
NEW = WorkerInfo("decode-0", "d2", "decode", "ipc://d", 2)
MESSAGE = AbortAttempt("proxy-0", "a")


class Dealer:
    """accepts: whether its queue has room. discarded: None while it is open."""

    def __init__(self, endpoint: str, on_message: Any, on_broken: Any, identity: bytes) -> None:
        self.endpoint, self.on_message, self.on_broken, self.identity = endpoint, on_message, on_broken, identity
        self.sent: list[msgspec.Struct] = []
        self.accepts = True
        self.discarded: bool | None = None

    def send(self, message: msgspec.Struct) -> bool:
        self.sent.append(message)
        return self.accepts

    def close(self, discard: bool = False) -> None:
        self.discarded = discard


class Dealers:
    """The network, which keeps all connections."""

    def __init__(self) -> None:
        self.all: list[Dealer] = []

    def dealer(self, endpoint: str, codec: object, on_message: Any, identity: bytes, on_broken: Any) -> Dealer:
        self.all.append(Dealer(endpoint, on_message, on_broken, identity))
        return self.all[-1]


def open_one(*workers: WorkerInfo) -> tuple[WorkerConnections, list[Dealer], list[tuple[str, object]]]:
    dealers, heard = Dealers(), list[tuple[str, object]]()
    connections = WorkerConnections(cast(Any, dealers), "proxy-0")
    for worker in workers:
        connections.open(
            worker,
            lambda worker, message: heard.append((worker.epoch, message)),
            lambda worker: heard.append((worker.epoch, "broken")),
        )
    return connections, dealers.all, heard


def test_a_message_goes_to_the_process_that_it_is_meant_for() -> None:
    connections, (old, new), _ = open_one(OLD, NEW)
    assert connections.send(NEW, MESSAGE)
    assert (old.sent, new.sent, new.endpoint, new.identity) == ([], [MESSAGE], "ipc://d", b"proxy-0:0")


def test_a_message_that_cannot_be_sent_is_noticed() -> None:
    connections, [dealer], _ = open_one(OLD)
    assert not connections.send(NEW, MESSAGE), "no such process"
    dealer.accepts = False
    assert not connections.send(OLD, MESSAGE), "it does not read"
    connections.close(OLD)
    dealer.accepts = True
    assert not connections.send(OLD, MESSAGE)


def test_what_is_heard_comes_with_its_worker() -> None:
    _, (old, new), heard = open_one(OLD, NEW)
    new.on_message(MESSAGE)
    old.on_broken()
    assert heard == [("d2", MESSAGE), ("d1", "broken")]


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_waits_for_a_process_that_is_gone_is_discarded(is_gone: bool) -> None:
    connections, (old, new), _ = open_one(OLD, NEW)
    connections.close(OLD, is_gone=is_gone)
    connections.close(OLD, is_gone=is_gone)
    assert (old.discarded, new.discarded) == (is_gone, None)
    connections.close_all()
    assert new.discarded is False and not connections.send(NEW, MESSAGE)
