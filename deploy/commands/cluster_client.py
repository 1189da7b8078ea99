"""Asks the launcher and the proxies of a running cluster over their private sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from tandem.deploy.launch.admin_socket import SOCKET_NAME
from tandem.deploy.processes.runtime_dir import NETWORK_FILE, PROXIES_FILE, runtime_dir
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import FromProxyControl, GetStatus, StatusReport, ToProxyControl
from tandem.protocol.messages.operations import (
    FromLauncher,
    LaunchedProcess,
    ListProcesses,
    ProcessList,
    RestartProcess,
    ScaleRefused,
    ToLauncher,
)
from tandem.protocol.messaging import MessageDealer
from tandem.protocol.network import NetworkConfig
from tandem.protocol.proxy_endpoints import EndpointsFile
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import ConfigError, Overloaded

PROXY_TIMEOUT_S = 3.0
LAUNCHER_TIMEOUT_S = 10.0

A = TypeVar("A", bound=msgspec.Struct)


class ClusterClient:
    """The cluster on `port` of this host.

    join, network: control endpoints of a cluster on another host, to be asked instead, and their protection; its
    launcher cannot be asked. Questions raise ConfigError when no cluster runs on `port`, Overloaded when no answer
    arrives in time.
    """

    def __init__(self, port: int, join: Sequence[str] = (), network: NetworkConfig = NetworkConfig()) -> None:  # noqa: B008  # frozen
        self.port = port
        self.folder = runtime_dir(port)
        self.is_remote = bool(join)
        self._join = list(join)
        self._network = network

    def proxy_endpoints(self) -> list[str]:
        """Returns the control endpoints: `join`, or sockets in the runtime folder and endpoints listed there."""
        if self.is_remote:
            return self._join
        listed = EndpointsFile(self.folder / PROXIES_FILE).changed() or []
        return listed + [f"ipc://{path}" for path in sorted(self.folder.glob("proxy-*.sock"))]

    def not_running(self) -> ConfigError:
        return ConfigError(f"no cluster runs on port {self.port}; start one with `tandem up`, or give its --port")

    async def ask_launcher(self, question: ToLauncher, kind: type[A], timeout_s: float = LAUNCHER_TIMEOUT_S) -> A:
        """The launcher's answer, which is of `kind`. Raises ConfigError when the launcher refuses."""
        path = self.folder / SOCKET_NAME
        if not path.exists():
            raise self.not_running()
        codec: Codec[Any] = Codec(FromLauncher)
        answers = await _ask([f"ipc://{path}"], NetworkConfig(), question, codec, (kind, ScaleRefused), timeout_s)
        if not answers:
            raise Overloaded(f"the launcher on port {self.port} did not answer within {timeout_s:.0f} s; try again")
        if isinstance(answers[0], ScaleRefused):
            raise ConfigError(answers[0].reason)
        assert isinstance(answers[0], kind)
        return answers[0]

    async def processes(self, question: ListProcesses | RestartProcess) -> dict[str, LaunchedProcess]:
        """Processes of the launcher by name."""
        answer = await self.ask_launcher(question, ProcessList)
        return {process.name: process for process in answer.processes}

    async def ask_proxies(self, question: ToProxyControl, kind: type[A]) -> list[A]:
        """The answers of `kind` of all proxies that answer within PROXY_TIMEOUT_S."""
        endpoints = self.proxy_endpoints()
        if not endpoints:
            raise self.not_running()
        network = self._network if self.is_remote else self._own_network()
        answers = await _ask(endpoints, network, question, Codec(FromProxyControl), (kind,), PROXY_TIMEOUT_S)
        if not answers:
            where = ", ".join(self._join) or f"port {self.port}"
            raise Overloaded(f"the cluster on {where} did not answer within {PROXY_TIMEOUT_S:.0f} s")
        return answers

    async def status(self) -> list[StatusReport]:
        """Reports of all proxies that answer in time, sorted by name."""
        reports = await self.ask_proxies(GetStatus(), StatusReport)
        return sorted(reports, key=lambda report: report.proxy_id)

    def _own_network(self) -> NetworkConfig:
        """Protection of the proxies on other nodes; local sockets need none."""
        try:
            return msgspec.json.decode((self.folder / NETWORK_FILE).read_bytes(), type=NetworkConfig)
        except OSError:
            return NetworkConfig()


async def _ask(
    endpoints: Sequence[str],
    network: NetworkConfig,
    question: msgspec.Struct,
    codec: Codec[Any],
    kinds: tuple[type, ...],
    timeout_s: float,
) -> list[Any]:
    """Asks every endpoint and returns the answers of `kinds` that arrive in time, at most one for each."""
    context = new_context("operator", network)
    received: asyncio.Queue[Any] = asyncio.Queue()
    sockets: list[MessageDealer] = []
    answers: list[Any] = []
    try:
        for endpoint in endpoints:
            sockets.append(context.dealer(endpoint, codec, received.put_nowait, peer="proxy"))
            sockets[-1].send(question)
        async with asyncio.timeout(timeout_s):
            while len(answers) < len(sockets):
                if isinstance(answer := await received.get(), kinds):
                    answers.append(answer)
    except TimeoutError:
        pass
    finally:
        for socket in sockets:
            socket.close()
        context.destroy(linger=0)
    return answers
