"""Asks the launcher and the proxies of a running cluster over their private sockets."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from tandem.deploy.launch.admin_socket import SOCKET_NAME
from tandem.deploy.processes.runtime_dir import NETWORK_FILE, PROXIES_FILE, runtime_dir
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import FromProxyControl, GetStatus, StatusDetail, StatusReport, ToProxyControl
from tandem.protocol.messages.operations import (
    FromLauncher,
    LaunchedProcess,
    ListProcesses,
    ProcessList,
    RestartProcess,
    ScaleRefused,
    ToLauncher,
)
from tandem.protocol.messaging import MessageDealer, Network
from tandem.protocol.network import NetworkConfig
from tandem.protocol.proxy_endpoints import EndpointsFile
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import ConfigError, Overloaded

PROXY_TIMEOUT_S = 3.0
LAUNCHER_TIMEOUT_S = 10.0

A = TypeVar("A", bound=msgspec.Struct)


class Questions(ABC):
    """Asks the launcher and the proxies of a cluster. Questions raise Overloaded when no answer arrives in time, and
    ConfigError when no cluster runs there."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the cluster runs, for error messages."""

    @abstractmethod
    def launcher_endpoint(self) -> str:
        """Raises ConfigError when no cluster runs there."""

    @abstractmethod
    def proxy_endpoints(self) -> list[str]:
        """Returns the control endpoints; none when no cluster runs there."""

    @abstractmethod
    def not_running(self) -> ConfigError: ...

    @abstractmethod
    def open_network(self, *, to_proxies: bool) -> Network:
        """Returns a network for one question."""

    async def ask_launcher(self, question: ToLauncher, kind: type[A], timeout_s: float = LAUNCHER_TIMEOUT_S) -> A:
        """The launcher's answer, which is of `kind`. Raises ConfigError when the launcher refuses."""
        endpoints, network = [self.launcher_endpoint()], self.open_network(to_proxies=False)
        answers = await _ask(endpoints, network, question, Codec(FromLauncher), (kind, ScaleRefused), timeout_s)
        if not answers:
            raise Overloaded(f"the launcher on {self.place} did not answer within {timeout_s:.0f} s; try again")
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
        if not (endpoints := self.proxy_endpoints()):
            raise self.not_running()
        network = self.open_network(to_proxies=True)
        answers = await _ask(endpoints, network, question, Codec(FromProxyControl), (kind,), PROXY_TIMEOUT_S)
        if not answers:
            raise Overloaded(f"the cluster on {self.place} did not answer within {PROXY_TIMEOUT_S:.0f} s")
        return answers

    async def status(self, detail: StatusDetail = "pairs") -> list[StatusReport]:
        """Reports of all proxies that answer in time, sorted by name."""
        reports = await self.ask_proxies(GetStatus(detail), StatusReport)
        return sorted(reports, key=lambda report: report.proxy_id)


class ClusterClient(Questions):
    """Asks the cluster on `port` of this host.

    join, network: control endpoints of a cluster on another host, to be asked instead, and their protection; its
    launcher cannot be asked.
    """

    def __init__(self, port: int, join: Sequence[str] = (), network: NetworkConfig = NetworkConfig()) -> None:  # noqa: B008  # frozen
        self.port = port
        self.folder = runtime_dir(port)
        self.is_remote = bool(join)
        self._join = list(join)
        self._network = network

    @property
    def place(self) -> str:
        return ", ".join(self._join) or f"port {self.port}"

    def launcher_endpoint(self) -> str:
        path = self.folder / SOCKET_NAME
        if not path.exists():
            raise self.not_running()
        return f"ipc://{path}"

    def proxy_endpoints(self) -> list[str]:
        """Returns `join`, or the sockets in the runtime folder and the endpoints listed there."""
        if self.is_remote:
            return self._join
        listed = EndpointsFile(self.folder / PROXIES_FILE).changed() or []
        return listed + [f"ipc://{path}" for path in sorted(self.folder.glob("proxy-*.sock"))]

    def not_running(self) -> ConfigError:
        """Returns the error for a folder without sockets."""
        return ConfigError(f"no cluster runs on port {self.port}; start one with `tandem up`, or give its --port")

    def open_network(self, *, to_proxies: bool) -> Network:
        """Protects traffic to proxies on other nodes; local sockets need no protection."""
        network = self._network if self.is_remote else NetworkConfig()
        if to_proxies and not self.is_remote:
            with suppress(FileNotFoundError):  # there are no proxies on other nodes, or the cluster has just ended
                network = msgspec.json.decode((self.folder / NETWORK_FILE).read_bytes(), type=NetworkConfig)
        return new_context("operator", network)


async def _ask(
    endpoints: Sequence[str],
    network: Network,
    question: msgspec.Struct,
    codec: Codec[Any],
    kinds: tuple[type, ...],
    timeout_s: float,
) -> list[Any]:
    """Asks every endpoint and returns the answers of `kinds` that arrive in time, at most one for each.

    network: ended afterwards.
    """
    received: asyncio.Queue[Any] = asyncio.Queue()
    sockets: list[MessageDealer] = []
    answers: list[Any] = []
    try:
        for endpoint in endpoints:
            sockets.append(network.dealer(endpoint, codec, received.put_nowait, peer="proxy"))
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
        network.destroy(linger=0)
    return answers
