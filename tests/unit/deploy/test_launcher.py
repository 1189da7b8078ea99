"""A launcher with fake processes: it becomes ready, answers commands, and stops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.launch.launcher import Launcher
from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.processes.runtime_dir import create_runtime_dir
from tandem.deploy.processes.supervisor import OnExit, Supervised
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import (
    FromProxyControl,
    GetStatus,
    PairStatus,
    Role,
    SetWorkerRole,
    StatusDetail,
    StatusReport,
    ToProxyControl,
    WorkerInfo,
    WorkerLoad,
    WorkerOrdered,
    WorkerReport,
)
from tandem.protocol.messages.operations import ClusterScaled, ListProcesses, ScaleCluster
from tandem.protocol.network import Context
from tandem.protocol.sockets import RouterSocket, new_context
from tandem.runtime.errors import ConfigError
from tests.support.settings import cluster_config
from tests.unit.deploy.test_scaling import FakeProcess, FakeSite


class ProxySite(FakeSite):
    """Its proxy reports one ready pair, or one that was refused."""

    def __init__(self, context: Context, folder: Path, pair: PairStatus) -> None:
        super().__init__(room=4)
        self._pair = pair
        self.roles: dict[str, Role] = {"prefill-0": "prefill", "decode-0": "decode"}
        self.noted: dict[str, Role] = {}
        self.asked: list[StatusDetail] = []
        codec: Codec[ToProxyControl] = Codec(ToProxyControl)
        self.proxy = RouterSocket(context, f"ipc://{folder}/proxy-0.sock", codec, self._on_message)

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        on_endpoint(name, self.proxy.endpoint)
        return FakeProcess(name)

    def make_worker(self, role: Role, name: str, on_exit: OnExit) -> Supervised:
        self.roles[name] = role
        return super().make_worker(role, name, on_exit)

    def set_role(self, name: str, role: Role) -> None:
        self.noted[name] = role

    def _on_message(self, identity: bytes, message: ToProxyControl) -> None:
        if isinstance(message, SetWorkerRole):
            error = "" if message.worker_id == "decode-1" else f"{message.worker_id} is draining"
            if not error:
                self.roles[message.worker_id] = message.role
            self.proxy.send(identity, WorkerOrdered(message.worker_id, error))
        if isinstance(message, GetStatus):
            self.asked.append(message.detail)
            pairs = {name: [self._pair] * len(self.roles) for name, role in self.roles.items() if role == "prefill"}
            num_ready = len(self.roles) if self._pair.state == "ready" else 0
            workers = [
                WorkerReport(
                    WorkerInfo(name, "e", role, "", FakeProcess(role).last_pid),
                    WorkerLoad(),
                    pairs.get(name, []),
                    0.0,
                    num_ready if name in pairs else 0,
                )
                for name, role in self.roles.items()
                if message.detail != "proxy"
            ]
            answer: FromProxyControl = StatusReport("proxy-0-x", "m", True, 0, workers)
            self.proxy.send(identity, answer)


def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pair: PairStatus,
    body: Callable[[ProxySite], Awaitable[None]],
    num_decode: int = 1,
) -> None:
    """Run a launcher on port 1; `body` is a coroutine function that is called when it is ready."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def main() -> None:
        folder = create_runtime_dir(1)
        context = new_context()
        site: Any = ProxySite(context, folder, pair)
        launcher = Launcher(cluster_config(port=1, decode=num_decode), site, context, folder)
        tasks: list[asyncio.Task[None]] = []

        async def use() -> None:
            try:
                await body(site)
            finally:
                launcher.stop()

        try:
            async with asyncio.timeout(30):
                await launcher.run(lambda text, loaded: None, lambda _: tasks.append(asyncio.create_task(use())))
            await tasks[0]
        finally:
            site.proxy.close()
            context.destroy(linger=0)

    asyncio.run(main())


def test_it_answers_commands_from_when_it_is_ready_until_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(site: ProxySite) -> None:
        cluster = ClusterClient(1)
        assert list(await cluster.processes(ListProcesses())) == ["proxy-0", "prefill-0", "decode-0"]
        assert (await cluster.status())[0].num_ready_pairs >= 1
        with pytest.raises(ConfigError, match="no worker could decode any more; keep one of role decode or any"):
            await cluster.ask_launcher(ScaleCluster(decode=0), ClusterScaled)
        with pytest.raises(ConfigError, match="no room"):
            await cluster.ask_launcher(ScaleCluster(decode=9), ClusterScaled)
        with pytest.raises(ConfigError, match="no cluster runs on port 2"):
            await ClusterClient(2).status()

    run(tmp_path, monkeypatch, PairStatus("decode-0", "e", "ready"), use)


def test_the_launcher_never_asks_for_all_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(site: ProxySite) -> None:
        assert set(site.asked) == {"workers"}

    run(tmp_path, monkeypatch, PairStatus("decode-0", "e", "ready"), use)


def test_running_workers_change_their_role_before_others_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(site: ProxySite) -> None:
        cluster = ClusterClient(1)
        assert await cluster.ask_launcher(ScaleCluster(2, 1), ClusterScaled) == ClusterScaled(2, 1)
        assert site.noted == {"decode-1": "prefill"}
        async with asyncio.timeout(10):
            while site.roles["decode-1"] != "prefill":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert list(await cluster.processes(ListProcesses())) == ["proxy-0", "prefill-0", "decode-0", "decode-1"]
        assert await cluster.ask_launcher(ScaleCluster(1, 1, 1), ClusterScaled) == ClusterScaled(1, 1, 1)
        assert site.noted == {"decode-1": "any"}

    run(tmp_path, monkeypatch, PairStatus("decode-0", "e", "ready"), use, num_decode=2)


def test_workers_that_cannot_be_paired_end_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(site: ProxySite) -> None:
        raise AssertionError("it must not become ready")

    with pytest.raises(ConfigError, match="refused to pair with a prefill worker: other model"):
        run(tmp_path, monkeypatch, PairStatus("decode-0", "e", "refused", reason="other model"), use)
