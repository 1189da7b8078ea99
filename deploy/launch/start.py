"""The start of workers: its stages, as `tandem up` shows them, and the proxies' reports that end it."""

from __future__ import annotations

from collections.abc import Container, Sequence, Set
from pathlib import Path

from tandem.deploy.cluster_config import ClusterConfig
from tandem.kv_transfer.handshake import UNLIKE_NUMERICS
from tandem.protocol.messages.membership import DECODE_ROLES, PREFILL_ROLES, StatusReport, WorkerReport
from tandem.runtime.errors import ConfigError

STAGES = ("preload", "load", "warm up")
"""Imports of what workers need; weights; kernels, registration and pairs."""


class StartStages:
    """The stages of a start and how long each took. Pure.

    A stage never comes back: a worker that is restarted meanwhile lengthens the present one.
    """

    def __init__(self, now: float) -> None:
        self._began_at = [now]  # of each stage so far, in order

    @property
    def current(self) -> str:
        return STAGES[len(self._began_at) - 1]

    def update(self, now: float, is_preloaded: bool, fraction_loaded: float | None) -> None:
        """fraction_loaded: mean over the workers; None before the first has loaded a part."""
        reached = 0 if not is_preloaded and fraction_loaded is None else 1
        if fraction_loaded is not None and fraction_loaded >= 1:
            reached = 2
        self._began_at += [now] * (reached + 1 - len(self._began_at))

    def summary(self, now: float) -> str:
        """Returns the stages with their seconds."""
        ends = [*self._began_at[1:], now]
        times = [f"{name} {end - start:.1f} s" for name, start, end in zip(STAGES, self._began_at, ends, strict=False)]
        return ", ".join(times)


UNREACHED_S = 30.0
"""Time without an answer to a proxy after which a new worker counts as out of its reach."""


def check_reports(config: ClusterConfig, reports: Sequence[StatusReport], ours: Container[str]) -> None:
    """ours: names of this launcher's workers.

    Raises ConfigError for a cluster with another engine that is joined without --engine, for workers that cannot be
    paired with others of their engine, and for those that a proxy does not reach. Workers that join with other numerics
    or another version of the engine need no pairs with the others if they serve without them.
    """
    for report in reports:
        for worker in report.workers:
            if worker.worker.worker_id in ours and (worker.unanswered_s or 0.0) >= UNREACHED_S:
                raise ConfigError(
                    f"{report.proxy_id} gets the reports of {worker.worker.worker_id}, but no answer from it at "
                    f"{worker.worker.endpoint}; give an address at which other hosts reach this one as --cluster-host, "
                    "and let the firewall accept connections from proxies"
                )
    workers = [worker for report in reports for worker in report.workers]
    others = [worker for worker in workers if _engine(worker) not in ("", config.engine)]
    if config.join and not config.engine_is_given and others:
        raise ConfigError(
            f"engine: {others[0].worker.worker_id} of this cluster runs {others[0].engine}, not {config.engine}; give "
            f"--engine {_engine(others[0])}, or --engine {config.engine} to have both, between which no KV moves"
        )
    unlike = {worker.worker.epoch for worker in others}
    pairs = [pair for worker in workers if worker.worker.worker_id in ours for pair in worker.pairs]
    if config.join and _serve_alone(config, workers, ours):
        own = {worker.engine for worker in workers if worker.worker.worker_id in ours}
        other_versions = {worker.worker.epoch for worker in workers if worker.engine not in own}
        pairs = [
            pair
            for pair in pairs
            if not pair.reason.startswith(UNLIKE_NUMERICS) and pair.decode_epoch not in other_versions
        ]
    refused = next((pair for pair in pairs if pair.state == "refused" and pair.decode_epoch not in unlike), None)
    if refused is not None:
        raise ConfigError(f"{refused.decode_worker_id} refused to pair with a prefill worker: {refused.reason}")


def _serve_alone(config: ClusterConfig, workers: Sequence[WorkerReport], ours: Container[str]) -> bool:
    """Whether our workers, with those of other hosts that compute alike, take both phases of requests."""
    known = {worker.numerics for worker in workers if worker.worker.worker_id in ours}
    roles = {worker.worker.role for worker in workers if worker.numerics in known}
    roles |= {role for role, count in config.counts.items() if count}
    return len(known) == 1 and bool(roles & PREFILL_ROLES) and bool(roles & DECODE_ROLES)


def is_complete(report: StatusReport | None, ours: Set[tuple[str, int]], num_pairs: int) -> bool:
    """Whether a proxy knows all our workers, has had their answers, and has as many ready pairs as are needed.

    ours: names and process ids, since a worker of another host may have the same name.
    """
    if report is None or report.num_ready_pairs < num_pairs:
        return False
    answering = [worker for worker in report.workers if worker.unanswered_s is None]
    return ours <= {(worker.worker.worker_id, worker.worker.pid) for worker in answering}


def _engine(worker: WorkerReport) -> str:
    """Name of the engine without its version; empty if the worker does not say it."""
    return worker.engine.partition(" ")[0]


def fraction_loaded(files: Sequence[Path]) -> float | None:
    """Mean fraction that the workers have written (`engine.loading.model_loader`); None before the first has."""
    fractions = [_read(file) for file in files]
    return sum(fractions) / len(fractions) if any(fractions) else None


def _read(file: Path) -> float:
    try:
        return float(file.read_text())
    except (OSError, ValueError):  # it does not exist yet or is being written
        return 0.0
