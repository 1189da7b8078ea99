"""Feeds the planner with load reports once a second and, with --autoscale, scales the cluster as it proposes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from tandem.deploy.autoscale.demand import DemandMeter
from tandem.deploy.autoscale.planner import Planner, PlannerConfig, Proposal, counts_text
from tandem.deploy.cluster_config import ClusterConfig
from tandem.protocol.messages.membership import Role, WorkerInfo, WorkerLoad
from tandem.protocol.messages.operations import PlanReport
from tandem.runtime.errors import ConfigError

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
MAX_BOOT_S = 120.0
"""Longest assumed start of a worker; the first start of a cluster may include a download."""
DEFAULT_ITL_MS = 50
"""Inter-token latency that the planner aims at without --itl-slo-ms."""


class Scalable(Protocol):
    """Interface of the launcher that the autoscaler uses."""

    @property
    def counts(self) -> dict[Role, int]: ...

    @property
    def loads(self) -> list[tuple[WorkerInfo, WorkerLoad]]: ...

    @property
    def num_refused(self) -> int | None: ...

    def scale(self, counts: Mapping[Role, int]) -> None: ...


class Autoscaler:
    """Observes and plans once a second while `run` runs.

    boot_s: seconds that workers took to start, which is how far the planner must look ahead.
    """

    def __init__(self, config: ClusterConfig, cluster: Scalable, boot_s: float) -> None:
        self._cluster = cluster
        self._acts = config.autoscale
        self._meter = DemandMeter(config.engine_settings.max_num_seqs)
        self._planner = Planner(planner_config(config, foresee_s=min(max(boot_s, 1.0), MAX_BOOT_S)))
        self._announced = self._refusal = ""  # the last ones that were logged
        self.plan: PlanReport | None = None  # of the last observation

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.observe(loop.time())

    def observe(self, now: float) -> None:
        """Updates the proposal from the latest reports and acts on it."""
        demand = self._meter.observe(now, self._cluster.loads, self._cluster.num_refused)
        counts = self._cluster.counts
        current = counts["prefill"], counts["decode"], counts["any"]
        proposal = self._planner.propose(now, demand, *current)
        proposed = proposal.prefill, proposal.decode, proposal.any
        reasons = proposal.prefill_need.reason, proposal.decode_need.reason
        self.plan = PlanReport(
            self._acts, *current[:2], *proposed[:2], *reasons, demand.predicted_ttft_s, current[2], proposed[2]
        )
        if self._acts and proposed != current:
            self._scale(proposal, f"{counts_text(*proposed)} instead of {counts_text(*current)}")

    def _scale(self, proposal: Proposal, change: str) -> None:
        if change != self._announced:
            self._announced = change
            reasons = proposal.prefill_need.reason, proposal.decode_need.reason
            log.warning("autoscaling sets %s (prefill: %s; decode: %s)", change, *reasons)
        try:
            self._cluster.scale({"prefill": proposal.prefill, "decode": proposal.decode, "any": proposal.any})
        except ConfigError as error:  # not enough resources; the next observation tries again
            if error.message != self._refusal:
                self._refusal = error.message
                log.warning("autoscaling: %s", error)
        else:
            self._refusal = ""


def planner_config(config: ClusterConfig, foresee_s: float) -> PlannerConfig:
    """The planner's targets and limits; these always include the number of workers at the start."""
    return PlannerConfig(
        ttft_s=config.autoscale_ttft_ms / 1000,
        itl_s=(config.itl_slo_ms or DEFAULT_ITL_MS) / 1000,
        max_workers=max(config.autoscale_max_workers, sum(config.counts.values())),
        max_num_seqs=config.engine_settings.max_num_seqs,
        foresee_s=foresee_s,
    )
