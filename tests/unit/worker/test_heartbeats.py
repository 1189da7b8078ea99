"""Heartbeats that fail end the worker: it would otherwise run on, unknown to every proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import tandem.worker.registration
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
from tandem.worker.registration import Registration
from tests.support.clocked_loop import ClockedLoop

INFO = WorkerInfo("decode-0", "e", "decode", "tcp://127.0.0.1:1", 1)


def test_a_proxy_that_cannot_be_connected_to_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.worker.registration, "HEARTBEAT_INTERVAL_S", 0.01)
    file = tmp_path / "proxies"

    async def run() -> None:
        context = new_context()
        registration = Registration(
            context,
            [],
            RegisterWorker(PROTOCOL_VERSION, INFO, 100, 100, "model", 64),
            lambda: WorkerStatus(INFO.worker_id, INFO.epoch, INFO.role, WorkerLoad()),
            lambda view: None,
            lambda proxy_id: None,
            lambda: None,
            lambda: RegisterWorker(PROTOCOL_VERSION, INFO, 100, 100, "model", 64),
            lambda: None,
            lambda role: None,
            lambda: None,
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

    asyncio.run(run())


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

    def send(self, message: msgspec.Struct) -> bool:
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
        registration = Registration(
            network,
            ["ipc://proxy"],
            register,
            lambda: status,
            lambda view: None,
            lost.append,
            lambda: None,
            lambda: register,
            lambda: None,
            lambda role: None,
            lambda: None,
        )
        socket: Any = registration._links[0].socket
        for _ in range(4):  # the machine stands still; each time the proxy has answered, which is not read yet
            await pass_time(1.0, 4)
            socket.on_message(ClusterView("p", True, [INFO]))
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
