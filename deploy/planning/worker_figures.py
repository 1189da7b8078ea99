"""What a simulated worker computes with, read from the status of a cluster or written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.deploy.cluster_config import ClusterConfig
from tandem.deploy.planning.player import MeasuredStepTimes
from tandem.protocol.messages.membership import StatusReport
from tandem.runtime.errors import ConfigError
from tandem.runtime.settings import with_values
from tandem.simulator.scenario import MODEL, ClusterShape

_Seconds = Annotated[float, Meta(ge=0, le=3600)]
_Count = Annotated[int, Meta(ge=1, le=100_000_000)]


class WorkerFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker computes with, as `protocol.messages.membership.WorkerLoad` reports it."""

    prompt_tokens_per_s: Annotated[float, Meta(gt=0, le=1e9)]
    fixed_step_s: _Seconds
    step_s_per_sequence: _Seconds
    num_blocks: _Count
    block_size: _Count
    max_model_len: _Count
    kv_s_per_token: _Seconds = 0.0
    """Time to transfer the KV of one token to another worker."""
    step_gap_s: _Seconds = 0.0
    """Time between two steps."""
    start_s: _Seconds = 10.0
    """Time from the start of a worker to its first request."""

    @classmethod
    def of_reports(cls, reports: Sequence[StatusReport]) -> WorkerFigures:
        """Means of the workers that have measured a figure, of those whose role it is if there are any: a decode worker
        computes few and short prompts, and looks slower. Raises ConfigError if no worker has measured one."""
        workers = [worker for report in reports[:1] for worker in report.workers]
        means: dict[str, float] = {}
        for name, others in (
            ("prompt_tokens_per_s", "decode"),
            ("fixed_step_s", "prefill"),
            ("step_s_per_sequence", "prefill"),
            ("step_gap_s", "prefill"),
        ):
            measured = [(value, each.worker.role) for each in workers if (value := getattr(each.load, name)) > 0]
            chosen = [value for value, role in measured if role != others] or [value for value, _ in measured]
            means[name] = sum(chosen) / len(chosen) if chosen else 0.0
        if not means["prompt_tokens_per_s"] or not means["fixed_step_s"] + means["step_s_per_sequence"]:
            raise ConfigError("the workers have not measured their steps yet: send the cluster some load first")
        num_received = sum(worker.load.num_received_tokens for worker in workers)
        shipping_s = sum(pair.shipping_s for worker in workers for pair in worker.load.traffic)
        return cls(
            **means,
            num_blocks=min(worker.load.num_blocks for worker in workers),
            block_size=workers[0].block_size,
            max_model_len=min(worker.max_model_len for worker in workers),
            kv_s_per_token=shipping_s / num_received if num_received else 0.0,
        )


def read_figures(file: Path) -> WorkerFigures:
    """Reads the output of `tandem status --json`, or the figures themselves. Raises ConfigError."""
    try:
        content = file.read_bytes()
        if content.lstrip().startswith(b"["):
            return WorkerFigures.of_reports(msgspec.json.decode(content, type=list[StatusReport]))
        return msgspec.json.decode(content, type=WorkerFigures)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{file} is neither what `tandem status --json` prints nor figures of a worker: {error}"
        ) from error


def planned_shape(figures: WorkerFigures, config: ClusterConfig, lease_s: float = 10.0) -> ClusterShape:
    """Returns the shape of a cluster without faults."""
    return ClusterShape(
        config=with_values(config, {"model": MODEL, "served_model_name": MODEL}),
        num_blocks=figures.num_blocks,
        max_queued=1_000_000,
        lease_s=lease_s,
        block_s=figures.kv_s_per_token * figures.block_size,
        step_times=MeasuredStepTimes(
            figures.fixed_step_s, 1 / figures.prompt_tokens_per_s, figures.step_s_per_sequence, figures.step_gap_s
        ),
        block_size=figures.block_size,
        max_model_len=figures.max_model_len,
        max_latency_s=0.0003,
        keeps_kv=False,
        first_boot_s=figures.start_s,
        boot_s=figures.start_s,
    )
