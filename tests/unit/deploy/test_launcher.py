"""A launcher with fake processes: it becomes ready, answers commands, and stops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tandem.deploy.commands.cluster_client import ClusterClient
from tandem.deploy.config import ClusterConfig
from tandem.deploy.launch.launcher import Launcher
from tandem.deploy.processes.runtime_dir import create_runtime_dir
from tandem.deploy.processes.supervisor import OnExit, Supervised
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import (
    FromProxyControl,
    GetStatus,
    PairStatus,
    Role,
    StatusReport,
    ToProxyControl,
    WorkerInfo,
    WorkerLoad,
    WorkerReport,
)
from tandem.protocol.messages.operations import ClusterScaled, ListProcesses, ScaleCluster
from tandem.protocol.network import Context
from tandem.protocol.sockets import RouterSocket, new_context
from tandem.runtime.errors import ConfigError
from tests.unit.deploy.test_scaling import FakeProcess, FakeSite

ROLES: tuple[Role, ...] = ("prefill", "decode")


class ProxySite(FakeSite):
    """Its proxy reports one ready pair, or one that was refused."""

    def __init__(self, context: Context, folder: Path, pair: PairStatus) -> None:
        super().__init__(room=4)
        self._pair = pair
        codec: Codec[ToProxyControl] = Codec(ToProxyControl)
        self.proxy = RouterSocket(context, f"ipc://{folder}/proxy-0.sock", codec, self._on_message)

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        on_endpoint(name, self.proxy.endpoint)
        return FakeProcess(name)

    def _on_message(self, identity: bytes, message: ToProxyControl) -> None:
        if isinstance(message, GetStatus):
            workers = [
                WorkerReport(
                    WorkerInfo(f"{role}-0", "e", role, "", FakeProcess(role).last_pid),
                    WorkerLoad(),
                    [self._pair] if role == "prefill" else [],
                    0.0,
                )
                for role in ROLES
            ]
            answer: FromProxyControl = StatusReport("proxy-0-x", "m", True, 0, workers)
            self.proxy.send(identity, answer)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: PairStatus, body: Callable[[], Awaitable[None]]) -> None:
    """Run a launcher on port 1; `body` is a coroutine function that is called when it is ready."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def main() -> None:
        folder = create_runtime_dir(1)
        context = new_context()
        site = ProxySite(context, folder, pair)
        launcher = Launcher(ClusterConfig(port=1), site, context, folder)
        tasks: list[asyncio.Task[None]] = []

        async def use() -> None:
            try:
                await body()
            finally:
                launcher.stop()

        try:
            async with asyncio.timeout(30):
                await launcher.run(lambda text, loaded: None, lambda: tasks.append(asyncio.create_task(use())))
            await tasks[0]
        finally:
            site.proxy.close()
            context.destroy(linger=0)

    asyncio.run(main())


def test_it_answers_commands_from_when_it_is_ready_until_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        cluster = ClusterClient(1)
        assert list(await cluster.processes(ListProcesses())) == ["proxy-0", "prefill-0", "decode-0"]
        assert (await cluster.status())[0].num_ready_pairs == 1
        assert await cluster.ask_launcher(ScaleCluster(decode=2), ClusterScaled) == ClusterScaled(1, 2)
        with pytest.raises(ConfigError, match="no room"):
            await cluster.ask_launcher(ScaleCluster(decode=9), ClusterScaled)
        with pytest.raises(ConfigError, match="no cluster runs on port 2"):
            await ClusterClient(2).status()

    run(tmp_path, monkeypatch, PairStatus("decode-0", "e", "ready"), use)


def test_workers_that_cannot_be_paired_end_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        raise AssertionError("it must not become ready")

    with pytest.raises(ConfigError, match="refused to pair with a prefill worker: other model"):
        run(tmp_path, monkeypatch, PairStatus("decode-0", "e", "refused", reason="other model"), use)
