"""Made-up figures of clusters, from which observations are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.deploy.diagnosis.observation import Observation
from tandem.deploy.operations.serving_rates import RateSample
from tandem.protocol.messages.membership import (
    LatencyBuckets,
    PairStatus,
    PredictionFigures,
    Role,
    ServingFigures,
    StatusReport,
    WorkerInfo,
    WorkerLoad,
    WorkerReport,
)
from tandem.telemetry.stages import STAGES

NUM_SAMPLES = 6
USUAL = WorkerLoad(
    num_blocks=100,
    num_free_blocks=80,
    num_cached_blocks=50,
    prompt_tokens_per_s=1000.0,
    fixed_step_s=0.010,
    step_s_per_sequence=0.001,
)


def loads(now: dict[str, Any], before: dict[str, Any] | None = None) -> list[WorkerLoad]:
    """Reports of one worker. now: what differs from USUAL; before: what differed in the first one."""
    last = msgspec.structs.replace(USUAL, **now)
    first = msgspec.structs.replace(last, **before) if before is not None else last
    return [first, *[last] * (NUM_SAMPLES - 1)]


def serving(
    num_finished: int,
    stages_s: dict[str, float] | None = None,
    num_output_tokens: int = 0,
    num_waiting: int = 0,
    num_refused: int = 0,
    ttft: PredictionFigures | None = None,
) -> ServingFigures:
    """stages_s: mean of each stage."""
    means = dict.fromkeys(STAGES, 0.0) | (stages_s or {})
    buckets = LatencyBuckets([0.1, 1.0], [num_finished, 0, 0])
    return ServingFigures(
        num_waiting=num_waiting,
        num_prompt_tokens=100 * num_finished,
        num_output_tokens=num_output_tokens or 10 * num_finished,
        num_finished=num_finished,
        ttft=buckets,
        itl=buckets,
        e2e=buckets,
        stages_s={name: num_finished * mean for name, mean in means.items()},
        num_refused=num_refused,
        predictions={"ttft": ttft} if ttft is not None else {},
        stages={name: LatencyBuckets([0.001, 0.01, 0.1], [0, num_finished, 0, 0]) for name in STAGES},
    )


class Cluster:
    """Collects workers, and makes an observation of them."""

    def __init__(self) -> None:
        self._workers: list[tuple[WorkerInfo, Sequence[WorkerLoad], dict[str, Any]]] = []

    def worker(
        self,
        name: str,
        now: dict[str, Any] | None = None,
        before: dict[str, Any] | None = None,
        host: str = "a",
        pairs: Sequence[PairStatus] = (),
        **report: Any,
    ) -> Cluster:
        role: Role = "prefill" if name.startswith("prefill") else "decode" if name.startswith("decode") else "any"
        info = WorkerInfo(name, f"epoch of {name}", role, "", 1, host_id=host)
        options = {"silence_s": 0.1, "block_size": 16, "pairs": list(pairs), **report}
        self._workers.append((info, loads(now or {}, before), options))
        return self

    def observe(
        self,
        now: ServingFigures | None = None,
        before: ServingFigures | None = None,
        **fields: Any,
    ) -> Observation:
        now, before = now or serving(100), before or serving(0)
        samples = []
        for number in range(NUM_SAMPLES):
            workers = [WorkerReport(info, seen[number], **options) for info, seen, options in self._workers]
            figures = now if number else before
            samples.append(RateSample(float(number), [StatusReport("proxy-0", "m", True, 0, workers, figures)]))
        return Observation(samples, **fields)


def pair(decode: str, state: Any = "ready", connector: str = "ipc", reason: str = "") -> PairStatus:
    return PairStatus(decode, f"epoch of {decode}", state, connector, reason)


def usual_cluster() -> Cluster:
    """One prefill and one decode worker, without any fault."""
    return Cluster().worker("prefill-0", pairs=[pair("decode-0")]).worker("decode-0")
