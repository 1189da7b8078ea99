"""Heartbeats that fail end the worker: it would otherwise run on, unknown to every proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

import tandem.worker.presence
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    ClusterView,
    FromProxyControl,
    RegisterWorker,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import ConfigError
from tandem.worker.presence import HEARTBEAT_INTERVAL_S, ProxyLinks
from tests.support.clocked_loop import ClockedLoop, run_in_no_time

INFO = WorkerInfo("decode-0", "e", "decode", "tcp://127.0.0.1:1", 1)


async def test_a_proxy_that_cannot_be_connected_to_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tandem.worker.presence, "HEARTBEAT_INTERVAL_S", 0.01)
    file = tmp_path / "proxies"
    context = new_context()
    registration = ProxyLinks(
        context,
        RegisterWorker(PROTOCOL_VERSION, INFO, 100, 100, "model", 64),
        MagicMock(status=lambda: WorkerStatus(INFO.worker_id, INFO.epoch, INFO.role, WorkerLoad())),
        [],
        str(file),
    )
    await asyncio.sleep(0.05)
    registration.raise_if_failed()
    file.write_text("tcp://127.0.0.1:1\n")
    with pytest.raises(ConfigError, match="is not protected"):
        async with asyncio.timeout(30):
            while True:
                await asyncio.sleep(0.01)
                registration.raise_if_failed()
    registration.close()
    context.destroy(linger=0)


class FakeSocket:
    """Sends nothing, and hands messages to the registration when the test says so."""

    def __init__(
        self,
        endpoint: str,
        codec: Any,
        on_message: Callable[[FromProxyControl], None],
        *args: Any,
        **options: Any,
    ) -> None:
        self.endpoint, self.on_message = endpoint, on_message
        self.sent: list[msgspec.Struct | bytes] = []

    def send(self, message: msgspec.Struct | bytes) -> bool:
        self.sent.append(message)
        return True

    def close(self) -> None:
        pass


def test_a_worker_that_was_late_itself_gives_up_no_proxy() -> None:
    network: Any = SimpleNamespace(dealer=FakeSocket)
    loop, lost = ClockedLoop(), list[str]()

    async def pass_time(seconds: float, steps: int) -> None:
        for _ in range(steps):
            loop.now += seconds / steps
            for _ in range(5):
                await asyncio.sleep(0)

    async def run() -> None:
        register = RegisterWorker(PROTOCOL_VERSION, INFO, 100, 100, "model", 64)
        status = WorkerStatus(INFO.worker_id, INFO.epoch, INFO.role, WorkerLoad())
        registration = ProxyLinks(
            network, register, MagicMock(status=lambda: status, on_proxy_lost=lost.append), ["ipc://proxy"]
        )
        socket: Any = registration._links[0].socket
        for _ in range(4):  # the machine stands still; each time the proxy has answered, which is not read yet
            await pass_time(1.0, 4)
            socket.on_message(ClusterView("p", True, 1, 0, [INFO]))
            await pass_time(4.9, 1)
            await pass_time(0.5, 2)
            assert lost == []
        await pass_time(30.0, 1)
        assert lost == []
        await pass_time(8.0, 9)  # both are slow: this process gets a turn every 0.9 s
        assert lost == []
        await pass_time(4.0, 16)
        assert lost == ["p"], "it is silent while this process is in time"
        registration.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def peer(number: int) -> WorkerInfo:
    return msgspec.structs.replace(INFO, worker_id=f"prefill-{number:04}", epoch=f"p{number}", role="prefill")


def test_workers_are_those_that_any_proxy_knows_and_a_missed_change_is_asked_for() -> None:
    views: list[list[str]] = []

    async def run() -> None:
        register = RegisterWorker(PROTOCOL_VERSION, INFO, 100, 100, "model", 64)
        status = WorkerStatus(INFO.worker_id, INFO.epoch, INFO.role, WorkerLoad())
        network: Any = SimpleNamespace(dealer=FakeSocket)
        registration = ProxyLinks(
            network,
            register,
            MagicMock(status=lambda: status, on_view=lambda view: views.append([worker.epoch for worker in view])),
            ["ipc://a", "ipc://b"],
        )
        a: Any
        b: Any
        a, b = (link.socket for link in registration._links)
        a.on_message(ClusterView("a", True, 1, 0, [INFO, peer(1)]))
        b.on_message(ClusterView("b", True, 4, 0, [INFO, peer(1)]))
        loop.now += 3.0  # longer than PROXY_SETTLE_S
        for number, socket in enumerate((a, b)):
            socket.on_message(ClusterView("ab"[number], True, (1, 4)[number], (1, 4)[number]))
        a.on_message(ClusterView("a", True, 2, 1, [peer(2)], ["p1"]))
        assert views.pop() == ["e", "p1", "p2"], "the other proxy still knows it"
        b.on_message(ClusterView("b", True, 5, 4, [peer(2)], ["p1"]))
        assert views.pop() == ["e", "p2"]
        a.sent.clear(), b.sent.clear()
        a.on_message(ClusterView("a", True, 2, 2))
        assert not a.sent
        a.on_message(ClusterView("a", True, 4, 3, [peer(4)]))
        a.on_message(ClusterView("a", True, 4, 4))
        assert a.sent == [register] and not b.sent and views[-1] == ["e", "p1"], "asked once per heartbeat"
        loop.now += HEARTBEAT_INTERVAL_S
        a.on_message(ClusterView("a", True, 4, 4))
        assert a.sent == [register] * 2 and not b.sent
        a.on_message(ClusterView("a", True, 4, 0, [INFO, peer(2), peer(3), peer(4)]))
        assert views.pop() == ["e", "p2", "p3", "p4"]
        b.on_message(ClusterView("restarted", True, 5, 4, [], ["p2"]))
        assert b.sent[-1] == register, "the numbers of another process mean nothing"
        registration.close()

    loop = ClockedLoop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def test_a_report_is_made_and_encoded_once_for_all_proxies() -> None:
    num_made = 0

    def status() -> WorkerStatus:
        nonlocal num_made
        num_made += 1
        return WorkerStatus(INFO.worker_id, INFO.epoch, INFO.role, WorkerLoad())

    async def run() -> None:
        register = RegisterWorker(PROTOCOL_VERSION, INFO, 100, 100, "model", 64)
        network: Any = SimpleNamespace(dealer=FakeSocket)
        registration = ProxyLinks(network, register, MagicMock(status=status), ["ipc://a", "ipc://b"])
        a: Any
        b: Any
        a, b = (link.socket for link in registration._links)
        a.sent.clear(), b.sent.clear()
        await asyncio.sleep(3.1)
        assert len(a.sent) == num_made == 12
        assert all(one is other for one, other in zip(a.sent, b.sent, strict=True))
        registration.close()

    run_in_no_time(run())


@pytest.mark.parametrize("proxies", ["a", "ab"])
def test_what_a_proxy_has_sent_since_it_declared_this_worker_lost_is_kept(proxies: str) -> None:
    """Prompts come by another connection, and may overtake the answer that says so. Found by `tandem simulate`."""
    lost: list[str] = []

    async def run() -> None:
        register = RegisterWorker(PROTOCOL_VERSION, INFO, 100, 100, "model", 64)
        status = WorkerStatus(INFO.worker_id, INFO.epoch, INFO.role, WorkerLoad())
        network: Any = SimpleNamespace(dealer=FakeSocket)
        registration = ProxyLinks(
            network,
            register,
            MagicMock(status=lambda: status, on_proxy_lost=lost.append),
            [f"ipc://{name}" for name in proxies],
        )
        sockets: list[Any] = [link.socket for link in registration._links]
        for name, socket in zip(proxies, sockets, strict=True):
            socket.on_message(ClusterView(name, True, 1, 0, [INFO]))
        await asyncio.sleep(1.5 * HEARTBEAT_INTERVAL_S)
        a = sockets[0]
        a.sent.clear()
        for _ in range(5):  # answers to the heartbeats that waited for it
            a.on_message(ClusterView("a", False, 1, 1))
        assert a.sent == [register] and lost == []
        registration.close()

    run_in_no_time(run())
