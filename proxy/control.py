"""The control socket: workers register and report on it, the launcher tells of exits, `tandem status` asks.

A shell around the registry: it answers, and carries membership changes to whoever opens and closes connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from protocol.codec import Codec
from protocol.errors import ProtocolError
from protocol.membership import (
    ClusterView,
    GetStatus,
    RegisterWorker,
    RegistrationRefused,
    StatusReport,
    ToProxyControl,
    WorkerExited,
    WorkerInfo,
    WorkerStatus,
)
from protocol.sockets import RouterSocket
from proxy.registry import CHECK_INTERVAL_S, MembershipChange, Registry

log = logging.getLogger(__name__)


class Control:
    """on_joined(worker) and on_lost(worker, reason) are called on the loop.

    num_requests() is asked for the status report. Binding raises zmq's error when the endpoint is taken.
    """

    def __init__(
        self,
        context: Any,
        endpoint: str,
        proxy_id: str,
        model: str,
        registry: Registry,
        on_joined: Callable[[WorkerInfo], None],
        on_lost: Callable[[WorkerInfo, str], None],
        num_requests: Callable[[], int],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._proxy_id = proxy_id
        self._model = model
        self._registry = registry
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._num_requests = num_requests
        self._identities: dict[str, bytes] = {}  # of registered workers, by epoch
        self._socket: RouterSocket[ToProxyControl] = RouterSocket(
            context, endpoint, Codec(ToProxyControl), self._on_message
        )
        self.endpoint = self._socket.endpoint
        """As bound: with the port where `endpoint` had none."""
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)

    def _on_message(self, identity: bytes, message: ToProxyControl) -> None:
        now = self._loop.time()
        match message:
            case RegisterWorker():
                self._register(now, identity, message)
            case WorkerStatus():
                known = self._registry.on_status(now, message)
                self._socket.send(identity, self._view(known, self._registry.prefixes.has_missed(message.epoch)))
            case WorkerExited():
                self._apply(self._registry.on_exited(message.worker_id, message.pid))
            case GetStatus():
                report = StatusReport(
                    self._proxy_id,
                    self._model,
                    self._registry.why_not_ready() is None,
                    self._num_requests(),
                    self._registry.report(now),
                )
                self._socket.send(identity, report)

    def _register(self, now: float, identity: bytes, message: RegisterWorker) -> None:
        try:
            change = self._registry.on_register(now, message)
        except ProtocolError as error:
            log.error("%s", error)
            self._socket.send(identity, RegistrationRefused(error.message))
            return
        self._identities[message.worker.epoch] = identity
        if change:
            self._apply(change)
        else:
            self._socket.send(identity, self._view(known=True))

    def _check(self) -> None:
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)
        self._apply(self._registry.check(self._loop.time()))

    def _apply(self, change: MembershipChange) -> None:
        if not change:
            return
        for gone in change.lost:
            log.warning("lost %s (epoch %s): %s", gone.worker.worker_id, gone.worker.epoch, gone.reason)
            self._identities.pop(gone.worker.epoch, None)
            self._on_lost(gone.worker, gone.reason)
        for worker in change.joined:
            log.info("%s joined (epoch %s, pid %d)", worker.worker_id, worker.epoch, worker.pid)
            self._on_joined(worker)
        # Told at once, not at their next status: a prefill worker begins to pair with a new decode worker right away.
        view = self._view(known=True)
        for identity in self._identities.values():
            self._socket.send(identity, view)

    def _view(self, known: bool, restart_prefixes: bool = False) -> ClusterView:
        return ClusterView(self._proxy_id, known, self._registry.workers(), restart_prefixes)

    def close(self) -> None:
        self._timer.cancel()
        self._socket.close()
