"""Which reports of the proxies end the start of workers. Pure."""

from __future__ import annotations

from collections.abc import Container, Sequence, Set

from tandem.deploy.cluster_config import ClusterConfig
from tandem.protocol.messages.membership import StatusReport, WorkerReport
from tandem.runtime.errors import ConfigError


def check_reports(config: ClusterConfig, reports: Sequence[StatusReport], ours: Container[str]) -> None:
    """ours: names of this launcher's workers.

    Raises ConfigError for a cluster with another engine that is joined without --engine, and for workers that cannot be
    paired with others of their engine.
    """
    workers = [worker for report in reports for worker in report.workers]
    others = [worker for worker in workers if _engine(worker) not in ("", config.engine)]
    if config.join and not config.engine_is_given and others:
        raise ConfigError(
            f"engine: {others[0].worker.worker_id} of this cluster runs {others[0].engine}, not {config.engine}; give "
            f"--engine {_engine(others[0])}, or --engine {config.engine} to have both, between which no KV moves"
        )
    if not config.moves_kv:
        return
    unlike = {worker.worker.epoch for worker in others}
    pairs = [pair for worker in workers if worker.worker.worker_id in ours for pair in worker.pairs]
    refused = next((pair for pair in pairs if pair.state == "refused" and pair.decode_epoch not in unlike), None)
    if refused is not None:
        raise ConfigError(f"{refused.decode_worker_id} refused to pair with a prefill worker: {refused.reason}")


def is_complete(report: StatusReport | None, ours: Set[tuple[str, int]], num_pairs: int) -> bool:
    """Whether a proxy knows all our workers, has had their answers, and has as many ready pairs as are needed.

    ours: names and process ids, since a worker of another host may have the same name.
    """
    if report is None or report.num_ready_pairs < num_pairs:
        return False
    answering = [worker for worker in report.workers if worker.unanswered_s is None]
    return ours <= {(worker.worker.worker_id, worker.worker.pid) for worker in answering}


def unanswered_text(report: StatusReport) -> str:
    """Returns which workers do not answer the proxy, for progress; empty if all do."""
    late = [f"{each.worker.worker_id} at {each.worker.endpoint}" for each in report.workers if each.unanswered_s]
    return f", {report.proxy_id} has no answer from {', '.join(late)}" if late else ""


def _engine(worker: WorkerReport) -> str:
    """Name of the engine without its version; empty if the worker does not say it."""
    return worker.engine.partition(" ")[0]
