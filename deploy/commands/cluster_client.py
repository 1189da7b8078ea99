"""Asks the launcher and the proxies of a running cluster over their private sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from tandem.deploy.launch.admin_socket import SOCKET_NAME
from tandem.deploy.processes.runtime_dir import NETWORK_FILE, PROXIES_FILE, runtime_dir
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import FromProxyControl, ToProxyControl
from tandem.protocol.messages.operations import FromLauncher, ScaleRefused, ToLauncher
from tandem.protocol.network import NetworkConfig
from tandem.protocol.proxy_endpoints import EndpointsFile
from tandem.protocol.sockets import DealerSocket, new_context
from tandem.runtime.errors import ConfigError, Overloaded

PROXY_TIMEOUT_S = 3.0
LAUNCHER_TIMEOUT_S = 10.0

A = TypeVar("A", bound=msgspec.Struct)


async def ask_launcher(port: int, question: ToLauncher, kind: type[A], timeout_s: float = LAUNCHER_TIMEOUT_S) -> A:
    """The launcher's answer, which is of `kind`.

    Raises ConfigError when no cluster runs on `port` or the launcher refuses, Overloaded when it does not answer.
    """
    path = runtime_dir(port) / SOCKET_NAME
    if not path.exists():
        raise no_cluster(port)
    answers = await _ask(
        [f"ipc://{path}"], NetworkConfig(), question, Codec(FromLauncher), (kind, ScaleRefused), timeout_s
    )
    if not answers:
        raise Overloaded(f"the launcher on port {port} did not answer within {timeout_s:.0f} s; try again")
    if isinstance(answers[0], ScaleRefused):
        raise ConfigError(answers[0].reason)
    assert isinstance(answers[0], kind)
    return answers[0]


async def ask_proxies(
    port: int,
    question: ToProxyControl,
    kind: type[A],
    endpoints: Sequence[str] = (),
    network: NetworkConfig | None = None,
) -> list[A]:
    """The answers of `kind` of all proxies that answer within PROXY_TIMEOUT_S.

    endpoints, network: proxies of another host instead of those on `port`. Raises ConfigError when no cluster runs on
    `port`, Overloaded when no proxy answers.
    """
    asked = list(endpoints) or proxy_endpoints(port)
    if not asked:
        raise no_cluster(port)
    if network is None or not endpoints:
        network = own_network(port)
    answers = await _ask(asked, network, question, Codec(FromProxyControl), (kind,), PROXY_TIMEOUT_S)
    if not answers:
        where = ", ".join(endpoints) or f"port {port}"
        raise Overloaded(f"the cluster on {where} did not answer within {PROXY_TIMEOUT_S:.0f} s")
    return answers


async def _ask(
    endpoints: Sequence[str],
    network: NetworkConfig,
    question: msgspec.Struct,
    codec: Codec[Any],
    kinds: tuple[type, ...],
    timeout_s: float,
) -> list[Any]:
    """Send the question to every endpoint; return the answers of `kinds` that arrive in time, at most one for each."""
    context = new_context("operator", network)
    received: asyncio.Queue[Any] = asyncio.Queue()
    sockets: list[DealerSocket[Any]] = []
    answers: list[Any] = []
    try:
        for endpoint in endpoints:
            sockets.append(DealerSocket(context, endpoint, codec, received.put_nowait, peer="proxy"))
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


def no_cluster(port: int) -> ConfigError:
    return ConfigError(f"no cluster runs on port {port}; start one with `tandem up`, or give its --port")


def proxy_endpoints(port: int) -> list[str]:
    """Control endpoints of the proxies: sockets in the runtime folder and endpoints in its file of remote proxies."""
    folder = runtime_dir(port)
    remote = EndpointsFile(folder / PROXIES_FILE).changed() or []
    return remote + [f"ipc://{path}" for path in sorted(folder.glob("proxy-*.sock"))]


def own_network(port: int) -> NetworkConfig:
    """Protection of the endpoints of `proxy_endpoints`; local sockets need none."""
    try:
        return msgspec.json.decode((runtime_dir(port) / NETWORK_FILE).read_bytes(), type=NetworkConfig)
    except OSError:
        return NetworkConfig()
