"""A worker's registration with proxies that disagree about it, refuse it, or move. Real sockets, simulated proxies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import tandem.worker.presence
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    ClusterView,
    FromProxyControl,
    RegisterWorker,
    RegistrationRefused,
    ToProxyControl,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.network import NetworkConfig
from tandem.protocol.proxy_endpoints import write_endpoints
from tandem.protocol.sockets import RouterSocket, SocketContext, new_context
from tandem.runtime.errors import ConfigError
from tandem.worker.presence import ProxyLinks
from tests.support.waiting import until

LIMIT_S = 60


class ProxyByHand:
    """Answers each status as configured: knows the worker's epoch, does not know it, or refuses the worker."""

    def __init__(self, context: SocketContext, name: str, endpoint: str) -> None:
        self.name = name
        self.known: set[str] = set()
        self.accepts = True
        self.registered: list[str] = []  # epochs, in order of arrival
        self.num_statuses = 0
        codec: Codec[ToProxyControl] = Codec(ToProxyControl)
        self.socket: RouterSocket[ToProxyControl] = RouterSocket(context, endpoint, codec, self._on_message)

    def _on_message(self, identity: bytes, message: ToProxyControl) -> None:
        answer: FromProxyControl
        match message:
            case RegisterWorker():
                self.registered.append(message.worker.epoch)
                if self.accepts:
                    self.known.add(message.worker.epoch)
                    answer = ClusterView(self.name, True, 1, 0, [message.worker])
                else:
                    answer = RegistrationRefused("it has a namesake")
            case WorkerStatus():
                self.num_statuses += 1
                answer = ClusterView(self.name, message.epoch in self.known, 1, 1)
            case _:
                raise AssertionError(message)
        self.socket.send(identity, answer)


class WorkerByHand:
    """A registration that records its callbacks."""

    def __init__(self, context: SocketContext, endpoints: list[str], endpoints_file: str = "") -> None:
        self.info = WorkerInfo("decode-0", "e0", "decode", "tcp://127.0.0.1:1", 1)
        self.lost_proxies: list[str] = []
        self.views: list[list[WorkerInfo]] = []
        self.registration = ProxyLinks(
            context,
            self._register(),
            MagicMock(status=self._status, on_view=self.views.append, on_proxy_lost=self.lost_proxies.append),
            endpoints,
            endpoints_file,
        )

    def _status(self) -> WorkerStatus:
        return WorkerStatus(self.info.worker_id, self.info.epoch, self.info.role, WorkerLoad())

    def _register(self) -> RegisterWorker:
        return RegisterWorker(PROTOCOL_VERSION, self.info, 100, 100, "model", 64)


@asynccontextmanager
async def cluster(folder: Path, accepts: bool = True) -> AsyncIterator[tuple[WorkerByHand, list[ProxyByHand]]]:
    context = new_context()
    proxies = [ProxyByHand(context, name, f"ipc://{folder}/{name}") for name in ("a", "b")]
    for proxy in proxies:
        proxy.accepts = accepts
    worker = WorkerByHand(context, [proxy.socket.endpoint for proxy in proxies])
    try:
        yield worker, proxies
    finally:
        worker.registration.close()
        for proxy in proxies:
            proxy.socket.close()
        context.destroy(linger=0)


def test_a_worker_lost_to_one_proxy_still_serves_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as (worker, [a, b]):
            await until(lambda: a.num_statuses > 1 and b.num_statuses > 1)
            a.known.clear()
            await until(lambda: "e0" in a.known)
            assert worker.lost_proxies == [], "the proxy ends its requests itself"
            num_statuses = b.num_statuses
            await until(lambda: b.num_statuses > num_statuses + 2)
            assert b.registered == ["e0"] and worker.lost_proxies == []

    asyncio.run(main())


def test_a_worker_lost_to_every_proxy_registers_again_with_each(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as (worker, [a, b]):
            await until(lambda: a.num_statuses > 1 and b.num_statuses > 1)
            for proxy in (a, b):
                proxy.known.clear()
                proxy.accepts = False
            await until(lambda: len(a.registered) > 2 and len(b.registered) > 2)
            a.accepts = b.accepts = True
            await until(lambda: a.known == b.known == {"e0"})
            assert worker.lost_proxies == []

    asyncio.run(main())


def test_a_refused_worker_exits_unless_it_has_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tandem.worker.presence, "REFUSAL_PATIENCE_S", 0.5)

    async def main() -> None:
        async with cluster(tmp_path, accepts=False) as (worker, [a, _b]):
            with pytest.raises(ConfigError, match="it has a namesake"):
                async with asyncio.timeout(LIMIT_S):
                    while True:
                        worker.registration.raise_if_failed()
                        await asyncio.sleep(0.01)
            assert len(a.registered) >= 2
            lines = [r.message for r in caplog.records if "refused this worker" in r.message]
            assert len(lines) == 2, "one line per proxy, for any number of attempts"
            a.accepts = True
            await until(lambda: bool(a.known) and a.num_statuses > 0)
            num_statuses = a.num_statuses
            await until(lambda: a.num_statuses > num_statuses + 1)
            worker.registration.raise_if_failed()

    asyncio.run(main())


def test_registration_follows_proxies_that_appear_and_disappear(tmp_path: Path) -> None:
    """As proxies move between hosts under Ray: their endpoints are in a file."""

    async def main() -> None:
        context = new_context("worker", NetworkConfig(insecure=True))
        a, b = (ProxyByHand(context, name, "tcp://127.0.0.1:0") for name in ("a", "b"))
        assert not a.socket.endpoint.endswith(":0"), "the endpoint contains the bound port"
        file = tmp_path / "proxies"
        worker = WorkerByHand(context, [], str(file))
        try:
            write_endpoints(file, [a.socket.endpoint])
            await until(lambda: a.num_statuses > 0)
            assert a.registered == ["e0"] and not b.registered
            await until(lambda: worker.views == [[worker.info]])
            write_endpoints(file, [b.socket.endpoint])
            await until(lambda: worker.lost_proxies == ["a"])
            await until(lambda: b.num_statuses > 0)
            assert b.registered == ["e0"]
            assert worker.views == [[worker.info]], "known workers stay known while the proxy moves"
        finally:
            worker.registration.close()
            for proxy in (a, b):
                proxy.socket.close()
            context.destroy(linger=0)

    asyncio.run(main())
