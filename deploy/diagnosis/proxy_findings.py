"""Proxies that do not answer, refuse requests, or predict badly. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.deploy.diagnosis.observation import Observation
from tandem.deploy.diagnosis.wording import Finding, count_text, rate_text, time_text

BIAS = 2.0
"""Measured over predicted latency, or the inverse, from which on the router chooses by wrong figures."""
MIN_PREDICTIONS = 20
NEGLIGIBLE_S = 0.01
"""Difference of two latencies that does not matter."""


def proxy_findings(observation: Observation) -> Iterator[Finding]:
    if observation.num_silent_proxies:
        number = count_text(observation.num_silent_proxies, "proxy", "proxies")
        yield Finding("silent proxy", f"{number} did not answer within 3 s. Clients that reach it wait.")
    for report in observation.samples[-1].reports:
        if not report.ready:
            text = f"{report.proxy_id} is not ready: no prompt can be computed and decoded. Requests wait for workers."
            yield Finding("not ready", text)
    if observation.demand.refused_per_s:
        text = f"{rate_text(observation.demand.refused_per_s, 'requests')} are refused because too many wait."
        yield Finding("refusals", text)
    ttft = observation.recent.predictions.get("ttft")
    if ttft is None or observation.recent.num_finished < MIN_PREDICTIONS:
        return
    worst = max(ttft.measured_s, ttft.predicted_s) / max(1e-6, min(ttft.measured_s, ttft.predicted_s))
    if worst >= BIAS and abs(ttft.measured_s - ttft.predicted_s) >= NEGLIGIBLE_S:
        text = f"The router predicted a TTFT of {time_text(ttft.predicted_s)} on average, and it was"
        yield Finding(
            "predictions",
            f"{text} {time_text(ttft.measured_s)} from the dispatch on: it chooses workers by wrong figures.",
        )
