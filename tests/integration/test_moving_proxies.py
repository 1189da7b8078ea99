"""A worker's registration follows the proxy endpoints in a file, as proxies move between hosts under Ray."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    ClusterView,
    RegisterWorker,
    ToProxyControl,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.network import NetworkConfig
from tandem.protocol.proxy_endpoints import write_endpoints
from tandem.protocol.sockets import RouterSocket, new_context
from tandem.worker.presence import ProxyLinks
from tests.support.waiting import until

LIMIT_S = 60


def test_registration_follows_proxies_that_appear_and_disappear(tmp_path: Path) -> None:
    async def main() -> None:
        context = new_context("worker", NetworkConfig(insecure=True))
        worker = WorkerInfo("prefill-0", "epoch", "prefill", "tcp://127.0.0.1:1", 1)
        received: dict[str, list[ToProxyControl]] = {"a": [], "b": []}
        proxies: dict[str, RouterSocket[ToProxyControl]] = {}

        def on_message(name: str, identity: bytes, message: ToProxyControl) -> None:
            received[name].append(message)
            proxies[name].send(identity, ClusterView(name, True, 1, 0, [worker]))

        codec: Codec[ToProxyControl] = Codec(ToProxyControl)
        for name in received:
            proxies[name] = RouterSocket(context, "tcp://127.0.0.1:0", codec, partial(on_message, name))
        assert not proxies["a"].endpoint.endswith(":0"), "the endpoint contains the bound port"

        lost: list[str] = []
        views: list[list[WorkerInfo]] = []
        file = tmp_path / "proxies"
        registration = ProxyLinks(
            context,
            RegisterWorker(PROTOCOL_VERSION, worker, 100, 100, "model", 64),
            MagicMock(
                status=lambda: WorkerStatus(worker.worker_id, worker.epoch, worker.role, WorkerLoad()),
                on_view=views.append,
                on_proxy_lost=lost.append,
            ),
            [],
            str(file),
        )
        try:
            write_endpoints(file, [proxies["a"].endpoint])
            await until(lambda: any(isinstance(message, WorkerStatus) for message in received["a"]))
            assert isinstance(received["a"][0], RegisterWorker) and not received["b"]
            await until(lambda: views == [[worker]])

            write_endpoints(file, [proxies["b"].endpoint])
            await until(lambda: lost == ["a"])
            await until(lambda: any(isinstance(message, WorkerStatus) for message in received["b"]))
            assert isinstance(received["b"][0], RegisterWorker)
            assert views == [[worker]], "known workers stay known while the proxy moves"
        finally:
            registration.close()
            for proxy in proxies.values():
                proxy.close()
            context.destroy(linger=0)

    asyncio.run(main())
