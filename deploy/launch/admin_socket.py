"""The launcher's private socket, which answers `tandem scale`, `status`, `drain` and `restart`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tandem.deploy.autoscale.autoscaler import Autoscaler, Scalable
from tandem.deploy.launch.worker_roles import last_of_phase
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
from tandem.protocol.messaging import Network
from tandem.runtime.errors import ConfigError

SOCKET_NAME = "launcher.sock"
MAX_WORKERS = 256
"""Workers of each role that may be asked for."""


class ManagedCluster(Scalable, Protocol):
    """Interface of the launcher that the admin socket uses."""

    @property
    def processes(self) -> list[LaunchedProcess]: ...

    def restart(self, name: str, num_starts: int) -> None: ...


class AdminSocket:
    """Binds SOCKET_NAME in `folder` when it is made; `close` closes it.

    decode_may_prefill: whether the cluster serves without workers that prefill.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        cluster: ManagedCluster,
        autoscaler: Autoscaler,
        decode_may_prefill: bool = False,
    ) -> None:
        self._cluster = cluster
        self._decode_may_prefill = decode_may_prefill
        self._autoscaler = autoscaler
        self._socket = network.router(f"ipc://{folder / SOCKET_NAME}", Codec(ToLauncher), self._on_message)

    def _on_message(self, identity: bytes, message: ToLauncher) -> None:
        match message:
            case ScaleCluster():
                self._socket.send(identity, self._scale(message))
            case GetPlan():
                if (plan := self._autoscaler.plan) is not None:  # else the caller's question times out
                    self._socket.send(identity, plan)
            case ListProcesses():
                self._socket.send(identity, ProcessList(self._cluster.processes))
            case RestartProcess():
                self._cluster.restart(message.name, message.num_starts)
                self._socket.send(identity, ProcessList(self._cluster.processes))

    def _scale(self, message: ScaleCluster) -> FromLauncher:
        counts: dict[Role, int | None] = {"prefill": message.prefill, "decode": message.decode, "any": message.any}
        wanted = {role: count for role, count in counts.items() if count is not None}
        for role, count in wanted.items():
            if not 0 <= count <= MAX_WORKERS:
                return ScaleRefused(f"{role}={count}: give a number between 0 and {MAX_WORKERS}")
        if phase := last_of_phase(self._cluster.counts, wanted, decode_may_prefill=self._decode_may_prefill):
            return ScaleRefused(f"no worker could {phase} any more; keep one of role {phase} or any")
        try:
            self._cluster.scale(wanted)
        except ConfigError as error:
            return ScaleRefused(error.message)
        return ClusterScaled(**self._cluster.counts)

    def close(self) -> None:
        self._socket.close()
