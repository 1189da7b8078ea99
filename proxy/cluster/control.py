"""The control socket: workers register and report, the launcher reports exits, `tandem status` asks for the state.

A shell around the worker table. It answers messages and passes membership changes to its callbacks.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from tandem.protocol.codec import Codec
from tandem.protocol.messages.checks import check_register, check_status
from tandem.protocol.messages.membership import (
    ClusterView,
    DrainAnswer,
    DrainWorker,
    GetStatus,
    GetTimeline,
    LeaveCluster,
    RegisterWorker,
    RegistrationRefused,
    ServingFigures,
    StatusReport,
    TimelineReport,
    ToProxyControl,
    WorkerExited,
    WorkerInfo,
    WorkerLeft,
    WorkerStatus,
)
from tandem.protocol.sockets import RouterSocket
from tandem.proxy.cluster.worker_table import CHECK_INTERVAL_S, MembershipChange, WorkerTable
from tandem.runtime.errors import InvalidMessage, ProtocolError

log = logging.getLogger(__name__)


class ControlListener(Protocol):
    """The rest of the proxy, as the control socket calls it on the loop.

    on_cluster_changed: after every change of the workers that can be chosen. timeline: JSON, empty for an unknown id.
    """

    def on_worker_joined(self, worker: WorkerInfo) -> None: ...
    def on_worker_lost(self, worker: WorkerInfo, reason: str) -> None: ...
    def on_cluster_changed(self) -> None: ...
    def on_worker_refusals(self, worker_id: str, refusals: list[tuple[str, int]]) -> None: ...
    def num_running(self) -> int: ...
    def serving_figures(self) -> ServingFigures: ...
    def timeline(self, request_id: str) -> bytes: ...


class Control:
    """tcp_endpoint: bound as well, for other hosts. Binding raises zmq's error when an endpoint is taken."""

    def __init__(
        self,
        context: Any,
        endpoint: str,
        tcp_endpoint: str,
        proxy_id: str,
        model: str,
        table: WorkerTable,
        listener: ControlListener,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._proxy_id = proxy_id
        self._model = model
        self._table = table
        self._listener = listener
        self._num_changes_seen = 0
        self._identities: dict[str, bytes] = {}  # socket identities of registered workers, by epoch
        self._socket: RouterSocket[ToProxyControl] = RouterSocket(
            context, endpoint, Codec(ToProxyControl), self._on_message, tcp_endpoint
        )
        self.endpoint = self._socket.endpoint
        """The bound endpoint, with its port."""
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)

    def _on_message(self, identity: bytes, message: ToProxyControl) -> None:
        now = self._loop.time()
        match message:
            case RegisterWorker():
                self._register(now, identity, message)
            case WorkerStatus():
                check_status(message)
                known = self._table.on_status(now, message)
                if known and message.load.refusals:
                    self._listener.on_worker_refusals(message.worker_id, message.load.refusals)
                self._socket.send(identity, self._view(known, self._table.prefixes.needs_restart(message.epoch)))
            case WorkerLeft():
                self._apply(self._table.on_left(message.epoch))
            case DrainWorker():
                self._socket.send(identity, DrainAnswer(message.worker_id, self._drain(message.worker_id)))
            case WorkerExited():
                self._apply(self._table.on_exited(message.worker_id, message.pid))
            case GetStatus():
                report = StatusReport(
                    self._proxy_id,
                    self._model,
                    self._table.why_not_ready() is None,
                    self._listener.num_running(),
                    self._table.report(now),
                    self._listener.serving_figures(),
                )
                self._socket.send(identity, report)
            case GetTimeline():
                self._socket.send(
                    identity, TimelineReport(message.request_id, self._listener.timeline(message.request_id))
                )
        self._notify_changes()

    def _drain(self, worker_id: str) -> str:
        """Asks the worker to leave. Returns an error message, or "" on success."""
        workers = {worker.worker_id: worker for worker in self._table.workers()}
        if (worker := workers.get(worker_id)) is None:
            return f"no worker {worker_id} is registered; registered workers: {', '.join(sorted(workers)) or 'none'}"
        if not self._socket.send(self._identities[worker.epoch], LeaveCluster()):
            return f"{worker_id} does not read its messages"
        log.info("asked %s to leave", worker_id)
        return ""

    def _register(self, now: float, identity: bytes, message: RegisterWorker) -> None:
        try:
            check_register(message)
            change = self._table.on_register(now, message)
        except ProtocolError as error:
            self._socket.send(identity, RegistrationRefused(error.message))
            raise InvalidMessage(error.message) from error  # the socket counts and logs it
        self._identities[message.worker.epoch] = identity
        if change:
            self._apply(change)
        else:
            self._socket.send(identity, self._view(known=True))

    def _check(self) -> None:
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)
        self._apply(self._table.check(self._loop.time()))
        self._notify_changes()

    def _notify_changes(self) -> None:
        if self._num_changes_seen != self._table.num_changes:
            self._num_changes_seen = self._table.num_changes
            self._listener.on_cluster_changed()

    def _apply(self, change: MembershipChange) -> None:
        if not change:
            return
        for gone in change.lost:
            log.warning("lost %s (epoch %s): %s", gone.worker.worker_id, gone.worker.epoch, gone.reason)
            self._identities.pop(gone.worker.epoch, None)
            self._listener.on_worker_lost(gone.worker, gone.reason)
        for worker in change.joined:
            log.info("%s joined (epoch %s, pid %d)", worker.worker_id, worker.epoch, worker.pid)
            try:
                self._listener.on_worker_joined(worker)
            except Exception as error:  # ZeroMQ's error, or a tcp endpoint without keys
                log.error("cannot connect to %s at %s: %s", worker.worker_id, worker.endpoint, error)
                self._apply(self._table.on_exited(worker.worker_id, worker.pid))
        # Sent now, not as the answer to the next status: prefill workers pair with a new decode worker at once.
        view = self._view(known=True)
        for identity in self._identities.values():
            self._socket.send(identity, view)

    def _view(self, known: bool, restart_prefixes: bool = False) -> ClusterView:
        return ClusterView(self._proxy_id, known, self._table.workers(), restart_prefixes)

    def close(self) -> None:
        self._timer.cancel()
        self._socket.close()
