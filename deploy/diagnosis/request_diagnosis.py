"""Says where the time of one request has gone, and what was unusual about it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.deploy.diagnosis.findings import Finding, count_text, time_text
from tandem.deploy.diagnosis.latency import LATER_STAGES, LATER_WORDS, TTFT_STAGES, TTFT_WORDS
from tandem.deploy.operations.serving_rates import RateSample, ServingRates, rates, stage_medians

UNUSUAL_FACTOR = 2.0
"""A stage is unusual if it took this many times its median."""
UNUSUAL_S = 0.005
"""And if it took this much longer."""
_LEAST_MEDIAN_S = 0.0005
"""Multiples of smaller medians say nothing."""
_WORDS = {**TTFT_WORDS, **LATER_WORDS, "decode": "decoding"}


class StageOfRequest(msgspec.Struct, frozen=True):
    """One stage. share: of the latency that it is a part of. median_s: of all requests; None if unknown."""

    name: str
    text: str
    seconds: float
    share: float
    median_s: float | None


class RequestDiagnosis(msgspec.Struct, frozen=True):
    """What `tandem doctor REQUEST_ID` says."""

    head: str
    ttft_s: float | None
    first: list[StageOfRequest]
    """Stages that make up TTFT."""
    later: list[StageOfRequest]
    """Stages behind the first token."""
    num_later_tokens: int
    unusual: list[Finding]
    events: list[str]
    """What has happened so far, where no stages are known."""


def diagnose_request(timeline: Mapping[str, Any], sample: RateSample) -> RequestDiagnosis:
    """timeline: as `telemetry.request_log.RequestRecord.timeline` returns it. sample: the proxies' figures."""
    medians, usual = stage_medians(sample), rates(sample, None)
    stages_s: Mapping[str, float] = timeline.get("stages_s", {})
    num_later = max(0, timeline.get("completion_tokens", 0) // max(1, timeline.get("sequences", 1)) - 1)
    first = _stages(stages_s, TTFT_STAGES, medians)
    later = _stages(stages_s, LATER_STAGES, medians)
    return RequestDiagnosis(
        _head(timeline),
        sum(stage.seconds for stage in first) if stages_s else None,
        first,
        later,
        num_later,
        [*_unusual(first + later, num_later, usual), *_attempts(timeline), *_prediction(timeline, first)],
        [] if stages_s else [_event_text(event) for event in timeline["events"]],
    )


def _stages(
    stages_s: Mapping[str, float], names: tuple[str, ...], medians: Mapping[str, float]
) -> list[StageOfRequest]:
    total_s = sum(stages_s.get(name, 0.0) for name in names)
    return [
        StageOfRequest(
            name, _WORDS[name], stages_s[name], stages_s[name] / total_s if total_s else 0.0, medians.get(name)
        )
        for name in names
        if name in stages_s
    ]


def _head(timeline: Mapping[str, Any]) -> str:
    cached = timeline.get("cached_tokens", 0)
    text = (
        f"Request {timeline['request_id']} ({timeline['api']}): {count_text(timeline['prompt_tokens'], 'prompt token')}"
    )
    text += f", {cached:,} of them cached; {count_text(timeline['completion_tokens'], 'token')} generated"
    if timeline.get("sequences", 1) > 1:
        text += f" in {timeline['sequences']} sequences, of which the slowest is shown"
    outcome = timeline["outcome"]
    text += "; it still runs." if outcome == "running" else f"; ended with {outcome}."
    for last in _dispatches(timeline)[-1:]:
        prefill, decode = last["prefill"], last.get("decode")
        both = f"{prefill} computed its prompt and decoded." if decode else f"{prefill} computed its prompt."
        text += f" {both if decode in (None, prefill) else f'{prefill} computed its prompt and {decode} decoded.'}"
    return text


def _dispatches(timeline: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The dispatches of the first sequence."""
    return [each for each in timeline["events"] if each["event"] == "dispatched" and not each.get("sequence")]


def _unusual(stages: list[StageOfRequest], num_later: int, usual: ServingRates) -> list[Finding]:
    found = []
    for stage in stages:
        seconds, median_s, unit = stage.seconds, stage.median_s, ""
        if stage.name == "decode":  # grows with the answer
            seconds, median_s, unit = seconds / max(1, num_later), usual.itl_s[0], " per token"
        if median_s is None or seconds < UNUSUAL_FACTOR * median_s:
            continue
        if (seconds - median_s) * (max(1, num_later) if unit else 1) < UNUSUAL_S:
            continue
        usually = "and usually takes about no time"
        if median_s >= _LEAST_MEDIAN_S:
            usually = f"{seconds / median_s:,.0f} times the median of {time_text(median_s)}"
        text = f"{stage.text[0].upper()}{stage.text[1:]} took {time_text(seconds)}{unit}"
        found.append(Finding(stage.name, f"{text}, {usually}."))
    return found


def _attempts(timeline: Mapping[str, Any]) -> list[Finding]:
    dispatches = _dispatches(timeline)
    if len(dispatches) < 2:
        return []
    places = " -> ".join(f"{each['prefill']}, {each.get('decode', '')}".rstrip(", ") for each in dispatches)
    return [Finding("attempts", f"It was dispatched {len(dispatches)} times ({places}), because attempts were lost.")]


def _prediction(timeline: Mapping[str, Any], first: list[StageOfRequest]) -> list[Finding]:
    dispatches = _dispatches(timeline)
    if len(dispatches) != 1 or not first:
        return []
    measured_s = sum(stage.seconds for stage in first if stage.name != "tokenize")
    predicted_s = dispatches[0].get("predicted_ttft_s", 0.0)
    if not predicted_s or measured_s < UNUSUAL_FACTOR * predicted_s or measured_s - predicted_s < UNUSUAL_S:
        return []
    text = (
        f"The router predicted a TTFT of {time_text(predicted_s)} from the dispatch on; it was {time_text(measured_s)}."
    )
    return [Finding("prediction", text)]


def _event_text(event: Mapping[str, Any]) -> str:
    workers = [event[name] for name in ("prefill", "decode") if event.get(name)]
    to = f" to {' and '.join(dict.fromkeys(workers))}" if workers else ""
    return f"{time_text(event['at_s'])}: {event['event']}{to}"
