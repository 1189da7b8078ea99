"""The control socket: workers register and report, the launcher reports exits, `tandem status` asks for the state.

It answers messages, and passes changes of the worker table on to the rest of the proxy.
"""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path

from prometheus_client import Histogram

from tandem.protocol.codec import Codec
from tandem.protocol.messages.checks import check_register, plausible_status
from tandem.protocol.messages.dispatch import AbortAllAttempts, Ping, Pong, ToProxy
from tandem.protocol.messages.membership import (
    ChangeRole,
    ClearCache,
    ClearWorkerCache,
    ClusterView,
    DrainWorker,
    GetStatus,
    GetTimeline,
    LatencyBuckets,
    LeaveCluster,
    PredictionFigures,
    RegisterWorker,
    RegistrationRefused,
    Role,
    ServingFigures,
    SetWorkerRole,
    StatusReport,
    TimelineReport,
    ToProxyControl,
    WorkerExited,
    WorkerInfo,
    WorkerLeft,
    WorkerOrdered,
    WorkerStatus,
)
from tandem.protocol.messaging import Network
from tandem.proxy.admission.admission import Admission
from tandem.proxy.cluster.worker_record import MembershipChange
from tandem.proxy.cluster.worker_table import CHECK_INTERVAL_S
from tandem.proxy.dispatch.dispatcher import WorkerConnections
from tandem.proxy.dispatch.generation import CAPACITY_REASONS
from tandem.proxy.http.app_state import AppState
from tandem.proxy.proxy_config import ProxyConfig
from tandem.runtime.errors import ConfigError, InvalidMessage, ProtocolError
from tandem.runtime.files.whole_file import write_whole
from tandem.telemetry.proxy_metrics import PREDICTED, Predictions, ProxyMetrics
from tandem.telemetry.stages import PLACEMENTS

log = logging.getLogger(__name__)

_ANNOUNCEMENT_S_PER_WORKER = 0.0001
"""Least time between two announcements of changes, for each worker that gets them, as their cost grows with the number
of workers: changes within this time are announced together."""

UNUSED_S = 15.0
"""Time for which workers must lack others that compute alike before the log says so: those may be starting."""


class Control:
    def __init__(
        self, network: Network, config: ProxyConfig, proxy_id: str, state: AppState, connections: WorkerConnections
    ) -> None:
        """Raises ConfigError when an endpoint cannot be bound."""
        self._loop = asyncio.get_running_loop()
        self._proxy_id = proxy_id
        self._refusals = network.refusals
        self._model = config.served_model_name
        self._generation_config = config.requests.generation_config
        self._state = state
        self._table = state.worker_table
        self._connections = connections
        self._num_changes_seen = self._num_list_changes_seen = 0
        self._unused: list[str] = []  # kinds of workers
        self._num_unused_seen, self._log_unused_at = 0, math.inf
        self._version = 1  # see ClusterView
        self._announced = {worker.epoch: worker for worker in self._table.workers()}
        self._announced_at = 0.0
        self._announcement: asyncio.TimerHandle | None = None  # of changes that wait for it
        self._identities: dict[str, bytes] = {}  # socket identities of registered workers, by epoch
        try:
            codec = self._codec = Codec[ToProxyControl](ToProxyControl)
            self._socket = network.router(config.control_endpoint, codec, self._on_message, config.control_tcp_endpoint)
        except ConfigError:
            raise
        except Exception as error:  # zmq's own error class, which only `protocol` may name
            where = " and ".join(filter(None, (config.control_endpoint, config.control_tcp_endpoint)))
            advice = "; choose another --cluster-port" if config.control_tcp_endpoint else ""
            raise ConfigError(f"cannot bind the control endpoint {where}: {error}{advice}") from error
        if config.control_endpoint_file:
            write_whole(Path(config.control_endpoint_file), self._socket.endpoint)
        self._unchanged = self._encode_unchanged()
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)

    def _on_message(self, identity: bytes, message: ToProxyControl) -> None:
        now = self._loop.time()
        match message:
            case RegisterWorker():
                self._register(now, identity, message)
            case WorkerStatus():
                message, dropped = plausible_status(message, self._table.last_load(message.epoch))
                if dropped:
                    self._refusals.count("implausible_figure", f"{', '.join(dropped)} of {message.worker_id}")
                known = self._table.on_status(now, message)
                answer = self._unchanged[known, self._table.needs_restart(message.epoch)]
                self._socket.send(identity, answer)
            case WorkerLeft():
                self._apply(self._table.on_left(message.epoch, message.cause, message.attempt_ids))
            case DrainWorker():
                error = self._order(message.worker_id, LeaveCluster())
                if not error:
                    self._table.on_drain_ordered(now, message.worker_id)
                self._socket.send(identity, WorkerOrdered(message.worker_id, error))
            case SetWorkerRole():
                if self._is_void(now, message):
                    log.info("an order to %s came too late", message.worker_id)
                else:
                    error = self.set_role(message.worker_id, message.role)
                    self._socket.send(identity, WorkerOrdered(message.worker_id, error, message.number))
            case ClearWorkerCache():
                error = self._order(message.worker_id, ClearCache())
                self._socket.send(identity, WorkerOrdered(message.worker_id, error))
            case WorkerExited():
                self._apply(self._table.on_exited(message.worker_id, message.pid, message.cause))
            case GetStatus():
                has_workers, has_pairs = message.detail != "proxy", message.detail == "pairs"
                is_exact, exactness = self._table.exactness() if has_workers else (False, "")
                report = StatusReport(
                    self._proxy_id,
                    self._model,
                    self._table.why_not_ready() is None,
                    self._state.dispatcher.num_running,
                    self._table.report(now, with_pairs=has_pairs) if has_workers else [],
                    serving_figures(self._state.metrics, self._state.admission),
                    self._generation_config,
                    self._state.text.sampling_defaults.known(),
                    self._table.numerics() if has_workers else {},
                    is_exact,
                    exactness,
                    now,
                )
                self._socket.send(identity, report)
            case GetTimeline():
                timeline = self._state.timelines.own(message.request_id)
                self._socket.send(identity, TimelineReport(message.request_id, timeline))
        self._notify_changes()

    def _is_void(self, now: float, order: SetWorkerRole) -> bool:
        """Whether an order has waited until its sender counts on it no more: for a process before this one, or while
        this one was frozen (`deploy.launch.worker_roles`)."""
        is_for_another = order.proxy_id not in ("", self._proxy_id)
        return is_for_another or (order.until_s is not None and not now <= order.until_s)

    def set_role(self, worker_id: str, role: Role) -> str:
        """Orders a worker to take a role. Returns an error message, or "" on success."""
        return self._table.change_role(self._loop.time(), worker_id, role) or self._order(worker_id, ChangeRole(role))

    def _order(self, worker_id: str, order: LeaveCluster | ChangeRole | ClearCache) -> str:
        """Sends an order to the worker. Returns an error message, or "" on success."""
        epochs = {worker.worker_id: worker.epoch for worker in self._table.workers()}
        if (epoch := epochs.get(worker_id)) is None:
            return self._table.unknown_worker(worker_id)
        if not self._socket.send(self._identities[epoch], order):
            return f"{worker_id} does not read its messages"
        log.info("sent %s to %s", order, worker_id)
        return ""

    def _register(self, now: float, identity: bytes, message: RegisterWorker) -> None:
        try:
            check_register(message)
            change = self._table.on_register(now, message)
        except ProtocolError as error:
            self._socket.send(identity, RegistrationRefused(error.message))
            raise InvalidMessage(error.message) from error  # the socket counts and logs it
        self._identities[message.worker.epoch] = identity
        workers = list(self._announced.values())
        self._socket.send(identity, ClusterView(self._proxy_id, True, self._version, 0, workers))
        self._apply(change)

    def _check(self) -> None:
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)
        self._apply(self._table.check(self._loop.time()))
        for worker, is_first in self._table.to_reconnect(self._loop.time()):
            if is_first:
                log.warning(
                    "%s reports to this proxy, but does not answer it at %s, so this proxy sends it no requests; check "
                    "that this is an address of its host (--cluster-host) and that no firewall is in between",
                    worker.worker_id,
                    worker.endpoint,
                )
            self._connections.close(worker, is_gone=True)
            self._connect(worker)
        self._notify_changes()
        self._warn_of_unused()

    def _warn_of_unused(self) -> None:
        """Logs once which workers get no work because they compute differently, as `tandem status` says."""
        if self._num_unused_seen != self._table.num_list_changes:
            self._num_unused_seen = self._table.num_list_changes
            if (unused := self._table.unused_kinds()) != self._unused:
                self._unused = unused
                self._log_unused_at = self._loop.time() + UNUSED_S if unused else math.inf
        if self._loop.time() >= self._log_unused_at:
            self._log_unused_at = math.inf
            for each in self._unused:
                log.warning("%s", each)

    def _notify_changes(self) -> None:
        if self._num_list_changes_seen != self._table.num_list_changes:
            self._num_list_changes_seen = self._table.num_list_changes
            self._announce_soon()
        if self._num_changes_seen != self._table.num_changes:
            self._num_changes_seen = self._table.num_changes
            self._state.metrics.unanswered.set(self._table.num_unanswered)
            self._state.readiness.on_cluster_changed()
            self._state.dispatcher.on_cluster_changed()

    def _apply(self, change: MembershipChange) -> None:
        for gone in change.lost:
            log.warning("lost %s (epoch %s): %s", gone.worker.worker_id, gone.worker.epoch, gone.reason)
            self._identities.pop(gone.worker.epoch, None)
            self._state.dispatcher.on_worker_lost(
                gone.worker, gone.reason, gone.has_crashed, gone.has_left, gone.attempt_ids, gone.in_order
            )
            self._connections.close(gone.worker, is_gone=gone.is_gone)
        for worker in change.joined:
            log.info("%s joined (epoch %s, pid %d)", worker.worker_id, worker.epoch, worker.pid)
            self._state.metrics.on_joined(worker.worker_id)
            self._connect(worker)

    def _announce_soon(self) -> None:
        """Announces at once, unless the last announcement was just now: prefill workers pair with a new decode worker
        without waiting for a report."""
        if self._announcement is None:
            due_at = self._announced_at + _ANNOUNCEMENT_S_PER_WORKER * len(self._identities)
            if due_at <= self._loop.time():
                self._announce()
            else:
                self._announcement = self._loop.call_at(due_at, self._announce)

    def _announce(self) -> None:
        """Sends all workers what has changed."""
        self._announcement, self._announced_at = None, self._loop.time()
        before, self._announced = self._announced, {worker.epoch: worker for worker in self._table.workers()}
        changed = [worker for epoch, worker in self._announced.items() if before.get(epoch) != worker]
        gone = [epoch for epoch in before if epoch not in self._announced]
        if not changed and not gone:
            return
        self._state.metrics.on_workers((worker.worker_id, worker.role) for worker in self._announced.values())
        since, self._version = self._version, self._version + 1
        self._unchanged = self._encode_unchanged()
        view = self._codec.encode(ClusterView(self._proxy_id, True, self._version, since, changed, gone))
        for identity in self._identities.values():
            self._socket.send(identity, view)

    def _encode_unchanged(self) -> dict[tuple[bool, bool], bytes]:
        """Returns the answers to reports, by whether the worker is known and whether its next report must be whole."""
        return {
            (known, restart): self._codec.encode(
                ClusterView(self._proxy_id, known, self._version, self._version, restart=restart)
            )
            for known in (False, True)
            for restart in (False, True)
        }

    def _connect(self, worker: WorkerInfo) -> None:
        try:
            self._connections.open(worker, self._on_worker_message, self._on_broken)
        except Exception as error:  # ZeroMQ's error, or a tcp endpoint without keys
            log.error("cannot connect to %s at %s: %s", worker.worker_id, worker.endpoint, error)
            self._apply(self._table.on_exited(worker.worker_id, worker.pid, "unknown"))
            return
        # Prompts for an earlier process at this address may have reached this one before it registered.
        self._connections.send(worker, AbortAllAttempts(self._proxy_id))
        self._ping(worker)

    def _ping(self, worker: WorkerInfo) -> None:
        self._connections.send(worker, Ping(self._table.on_ping(self._loop.time(), worker.epoch)))

    def _on_worker_message(self, worker: WorkerInfo, message: ToProxy) -> None:
        if isinstance(message, Pong):
            self._table.on_pong(worker.epoch, message)
            self._notify_changes()
        else:
            self._state.dispatcher.on_message(worker, message)

    def _on_broken(self, worker: WorkerInfo) -> None:
        self._ping(worker)
        self._state.dispatcher.on_worker_lost(worker, "a connection to it broke")
        self._notify_changes()

    def close(self) -> None:
        self._timer.cancel()
        if self._announcement is not None:
            self._announcement.cancel()
        self._socket.close()


def serving_figures(metrics: ProxyMetrics, admission: Admission) -> ServingFigures:
    metrics.per_token.flush()
    return ServingFigures(
        num_waiting=admission.num_waiting,
        num_prompt_tokens=int(metrics.prompt_tokens._value.get()),
        num_output_tokens=int(metrics.generation_tokens._value.get()),
        num_finished=int(sum(bucket.get() for bucket in metrics.e2e._buckets)),
        ttft=_buckets(metrics.ttft),
        itl=_buckets(metrics.per_token.itl),
        e2e=_buckets(metrics.e2e),
        stages_s={name: stage._sum.get() for name, stage in metrics.stages.items()},
        num_refused=int(sum(metrics.rejected.labels(reason)._value.get() for reason in CAPACITY_REASONS)),
        predictions={latency: _predictions(metrics.predictions, latency) for latency in PREDICTED},
        placements={each: int(metrics.placements.labels(each)._value.get()) for each in PLACEMENTS},
        stages={name: _buckets(stage) for name, stage in metrics.stages.items()},
    )


def _predictions(predictions: Predictions, latency: str) -> PredictionFigures:
    return PredictionFigures(
        int(predictions.count.labels(latency)._value.get()),
        predictions.predicted_s.labels(latency)._value.get(),
        predictions.measured_s.labels(latency)._value.get(),
        predictions.error_s.labels(latency)._value.get(),
    )


def _buckets(histogram: Histogram) -> LatencyBuckets:
    # prometheus_client has no public way to read single values. They are of this process, also in a shared folder.
    *bounds, _ = histogram._upper_bounds
    return LatencyBuckets(list(bounds), [int(bucket.get()) for bucket in histogram._buckets])
