"""Puts a diagnosis together: where the time goes, what is narrow, what would help, and what looks wrong. Pure."""

from __future__ import annotations

import msgspec

from tandem.deploy.autoscale.planner import counts_text
from tandem.deploy.diagnosis.advice import advice
from tandem.deploy.diagnosis.findings import (
    cache_findings,
    host_findings,
    pair_findings,
    proxy_findings,
    worker_findings,
)
from tandem.deploy.diagnosis.latency import Latency, itl, ttft
from tandem.deploy.diagnosis.model import ClusterModel
from tandem.deploy.diagnosis.narrow_part import narrow_part
from tandem.deploy.diagnosis.observation import Observation
from tandem.deploy.diagnosis.wording import Finding, count_text, rate_text


class Diagnosis(msgspec.Struct, frozen=True):
    """What `tandem doctor` says about a cluster."""

    head: str
    """What was observed."""
    ttft: Latency | None
    """None if no request has finished, as for itl."""
    itl: Latency | None
    narrow_part: Finding | None
    advice: list[Finding]
    """What would help, by the models of router and planner."""
    findings: list[Finding]
    """What looks wrong."""

    @property
    def kinds(self) -> list[str]:
        return [finding.kind for finding in self.findings]


def diagnose(observation: Observation) -> Diagnosis:
    model, first, later = ClusterModel(observation), ttft(observation), itl(observation)
    findings = [
        *proxy_findings(observation),
        *worker_findings(observation),
        *pair_findings(observation),
        *cache_findings(observation),
        *host_findings(observation),
    ]
    if observation.is_idle:
        return Diagnosis(_head(observation), None, None, None, [], findings)
    narrow = narrow_part(observation, first, later, model)
    return Diagnosis(_head(observation), first, later, narrow, advice(observation, first, later, model), findings)


def _head(observation: Observation) -> str:
    roles = [worker.info.role for worker in observation.workers]
    counts = counts_text(roles.count("prefill"), roles.count("decode"), roles.count("any"))
    proxies = count_text(len(observation.samples[-1].reports), "proxy", "proxies")
    head = (
        f"{observation.samples[-1].reports[0].model}: {counts}, {proxies}, observed for {observation.window_s:.0f} s. "
    )
    if observation.is_idle:
        return head + (
            f"Nothing was served in the last {observation.window_s:.0f} s; send requests and run `tandem doctor` again."
        )
    recent, demand = observation.recent, observation.demand
    if not recent.num_finished:
        if observation.serving.num_finished:
            return (
                head
                + "No request has finished meanwhile, so latencies are those since the start. --seconds N looks longer."
            )
        return head + "No request has finished since the start, so latencies are not known. --seconds N looks longer."
    requests = count_text(recent.num_finished, "request")
    tokens = f" with {demand.mean_prompt_tokens:,.0f} uncached tokens a prompt" if demand.mean_prompt_tokens else ""
    text = f"{requests} finished ({rate_text(recent.finished_per_s or 0.0, 'requests')}{tokens}),"
    return f"{head}{text} {rate_text(recent.output_tokens_per_s or 0.0, 'output tokens')}."
