"""The launcher's private socket: `tandem scale`, `status` and `restart` are answered here. And how they ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tandem.deploy.autoscale.autoscaler import Autoscaler
from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import Role
from tandem.protocol.messages.operations import (
    ClusterScaled,
    FromLauncher,
    GetPlan,
    LaunchedProcess,
    ListProcesses,
    ProcessList,
    RestartProcess,
    ScaleCluster,
    ScaleRefused,
    ToLauncher,
)
from tandem.protocol.sockets import DealerSocket, RouterSocket, new_context
from tandem.runtime.errors import ConfigError, Overloaded

log = logging.getLogger(__name__)

SOCKET_NAME = "launcher.sock"
ANSWER_TIMEOUT_S = 10.0
MAX_WORKERS = 256
"""Of one role."""


class Launched(Protocol):
    """The launcher, as the desk needs it."""

    @property
    def processes(self) -> list[LaunchedProcess]: ...

    def restart(self, name: str) -> None: ...

    @property
    def counts(self) -> dict[Role, int]: ...

    def scale(self, counts: Mapping[Role, int]) -> None: ...


class AdminSocket:
    """Open from its making until `close`. context: the process's for sockets."""

    def __init__(self, context: Any, folder: Path, cluster: Launched, autoscaler: Autoscaler) -> None:
        self._cluster = cluster
        self._autoscaler = autoscaler
        self._socket: RouterSocket[ToLauncher] = RouterSocket(
            context, f"ipc://{folder / SOCKET_NAME}", Codec(ToLauncher), self._on_message
        )

    def _on_message(self, identity: bytes, message: ToLauncher) -> None:
        match message:
            case ScaleCluster():
                self._socket.send(identity, self._scale(message))
            case GetPlan():
                if (plan := self._autoscaler.report()) is not None:
                    self._socket.send(identity, plan)
            case ListProcesses():
                self._socket.send(identity, ProcessList(self._cluster.processes))
            case RestartProcess():
                self._cluster.restart(message.name)
                self._socket.send(identity, ProcessList(self._cluster.processes))

    def _scale(self, message: ScaleCluster) -> FromLauncher:
        asked: dict[Role, int | None] = {"prefill": message.prefill, "decode": message.decode}
        wanted = {role: count for role, count in asked.items() if count is not None}
        for role, count in wanted.items():
            if not 1 <= count <= MAX_WORKERS:
                return ScaleRefused(f"{role}={count} is not between 1 and {MAX_WORKERS}")
        try:
            self._cluster.scale(wanted)
        except ConfigError as error:
            return ScaleRefused(error.message)
        counts = self._cluster.counts
        return ClusterScaled(counts["prefill"], counts["decode"])

    def close(self) -> None:
        self._socket.close()


async def ask_launcher(port: int, question: ToLauncher, timeout_s: float = ANSWER_TIMEOUT_S) -> FromLauncher:
    """Raises ConfigError when no cluster serves on `port`, and Overloaded when its launcher is silent."""
    path = runtime_dir(port) / SOCKET_NAME
    if not path.exists():
        raise ConfigError(f"no cluster serves on port {port}; start one with `tandem up`, or give its --port")
    context = new_context()
    answer: asyncio.Future[FromLauncher] = asyncio.get_running_loop().create_future()

    def on_answer(message: FromLauncher) -> None:
        if not answer.done():
            answer.set_result(message)

    socket: DealerSocket[FromLauncher] = DealerSocket(context, f"ipc://{path}", Codec(FromLauncher), on_answer)
    try:
        socket.send(question)
        return await asyncio.wait_for(answer, timeout_s)
    except TimeoutError:
        raise Overloaded(f"the launcher on port {port} gave no answer within {timeout_s:.0f} s") from None
    finally:
        socket.close()
        context.destroy(linger=0)
