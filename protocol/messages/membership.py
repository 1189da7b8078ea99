"""Messages about cluster membership: between workers and proxies, and from the launcher and `tandem status` to proxies.

A worker has a DEALER to each proxy's control ROUTER. It registers, then sends status (heartbeat and load report in
one). The proxy sends it all workers once and then what changes (`ClusterView`), so prefill workers learn of decode
workers. While nothing changes, the size of a message does not depend on that of the cluster
(docs/adr/0037-control-at-scale.md).
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL_VERSION = 21
"""Incremented by every change to a message. Processes with different versions refuse each other."""

PROXY_SILENCE_S = 5.0
"""A worker takes a proxy that is silent for this long as lost."""

Role = Literal["prefill", "decode", "any"]
"""The phases of requests that proxies send to a worker. Every worker is able to do both; `any` gets both."""
PREFILL_ROLES: frozenset[Role] = frozenset({"prefill", "any"})
DECODE_ROLES: frozenset[Role] = frozenset({"decode", "any"})


class WorkerInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of a worker. `worker_id` survives a restart ("decode-0"), `epoch` does not.

    role: the one at registration; in a ClusterView or a report the current one. pid: of rank 0, which represents all
    num_ranks processes of the worker. metrics_address: host:port of its /metrics, or empty. host_id: see
    `runtime.host`; empty means this host.
    """

    worker_id: str
    epoch: str
    role: Role
    endpoint: str
    pid: int
    num_ranks: int = 1
    metrics_address: str = ""
    host_id: str = ""


class PairTraffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV shipped from a prefill worker to one decode worker since the start. shipping_s: total duration."""

    decode_worker_id: str
    num_bytes: int
    num_shipments: int
    shipping_s: float


class TierFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tier of a worker's KV cache, rank 0's share of it. Counts are totals since the worker's start.

    name: host, disk or store. num_blocks: blocks that this worker can load. num_bytes, max_bytes: size and limit of the
    tier, which other workers may share; 0 if unknown. num_skipped: blocks that were not stored because the tier was
    behind or failing. num_corrupt: blocks that were not whole. error: why it is not used at the moment.
    """

    name: str
    num_blocks: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    num_stored: int = 0
    num_loaded: int = 0
    num_skipped: int = 0
    num_corrupt: int = 0
    error: str = ""


class WorkerLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load of a worker. Blocks that are neither free nor quarantined belong to waiting or running requests. Counts
    without a unit of time are totals since the start.

    num_cached_blocks: free blocks that hold a prefix. num_cached_tokens: prompt tokens found in the prefix cache, of
    num_prompt_tokens. num_compared_blocks: received blocks whose checksums were compared; num_corrupt_blocks: those
    that differed. waiting_tokens: num_waiting_tokens by priority, as (priority, tokens). num_kept_blocks: blocks that
    arrived for attempts which ended before decoding, and stayed in the prefix cache. prompt_tokens_per_s: recent
    prefill speed; 0 before the first prompt. refusals: see `protocol.refusals`. num_media_encoded: images and videos
    encoded here. num_media_found: items whose embeddings came from another worker. num_media_fetched_bytes: processed
    media from other hosts. num_decoding: sequences of the decode role, running or waiting. fixed_step_s,
    step_s_per_sequence: coefficients of the duration of a step without prompt tokens. itl_slo_s: limit on a step with
    both, see `engine.step_times`. The three are 0 before the first step. num_role_changes: total. num_received_tokens,
    num_received: prompt tokens without cached ones, and sequences, whose KV another worker computed. num_shipped:
    sequences, of num_finished, that were computed here and decode on another worker. num_loaded_tokens: of
    num_cached_tokens, those that came from a tier below the pool. loaded_tokens_per_s: recent speed of loading them; 0
    before the first. tiers: fastest first.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_cached_blocks: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preempted: int = 0
    step_time_s: float = 0.0
    num_finished: int = 0
    num_transferred_bytes: int = 0
    num_compared_blocks: int = 0
    num_corrupt_blocks: int = 0
    num_kept_blocks: int = 0
    waiting_tokens: list[tuple[int, int]] = []
    prompt_tokens_per_s: float = 0.0
    traffic: list[PairTraffic] = []  # of pairs with transfers since the last report; of all after `ClusterView.restart`
    refusals: list[tuple[str, int]] = []
    num_media_encoded: int = 0
    num_media_found: int = 0
    num_media_fetched_bytes: int = 0
    num_decoding: int = 0
    fixed_step_s: float = 0.0
    step_s_per_sequence: float = 0.0
    itl_slo_s: float = 0.0
    num_role_changes: int = 0
    num_received_tokens: int = 0
    num_received: int = 0
    num_shipped: int = 0
    num_loaded_tokens: int = 0
    loaded_tokens_per_s: float = 0.0
    tiers: list[TierFigures] = []


class PrefixUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks that the prefix cache has gained and lost since the previous update. Limited in size; the rest follows
    later.

    number: consecutive; a proxy that finds a gap asks for a restart. restart: discard all earlier updates. added,
    evicted: packed short hashes, see `protocol.prefix_hash`.
    """

    number: int
    restart: bool
    added: bytes
    evicted: bytes


class PairStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One (prefill, decode) pair as its prefill side sees it. reason: why it was refused or failed."""

    decode_worker_id: str
    decode_epoch: str
    state: Literal["opening", "ready", "refused", "failed"]
    connector: str = ""
    reason: str = ""


class RegisterWorker(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy, once per connection and whenever the proxy does not know the worker.

    model_id, block_size: inputs of the worker's prefix hashes. lora_modules: (inputs, outputs) of the linear layers
    that LoRA adapters may change, by name; empty if the worker does not support adapters. quantization: of the
    weights, for people; "" for none.
    """

    version: int
    worker: WorkerInfo
    max_model_len: int
    vocab_size: int
    model_id: str
    block_size: int
    lora_modules: dict[str, tuple[int, int]] = {}
    quantization: str = ""


class WorkerStatus(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy, every HEARTBEAT_INTERVAL_S. All proxies get the same reports. draining: send it no new work.

    pairs: those it has opened; None if they are as in the report before. num_pair_changes: reports with pairs so far,
    which shows a proxy that it has missed one. prefixes: of the pool. tier_prefixes: of the tiers below it, from which
    the worker can load.
    """

    worker_id: str
    epoch: str
    role: Role
    load: WorkerLoad
    pairs: list[PairStatus] | None = None
    prefixes: PrefixUpdate | None = None
    draining: bool = False
    tier_prefixes: PrefixUpdate | None = None
    num_pair_changes: int = 0


class WorkerLeft(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy: the worker exits now. Its requests in flight migrate."""

    worker_id: str
    epoch: str


class WorkerExited(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Launcher to proxy: the process has exited. Faster than waiting for silence.

    has_crashed: it ended by a signal or an error that nobody asked for. False if that is not known.
    """

    worker_id: str
    pid: int
    has_crashed: bool = False


class GetStatus(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """`tandem status` to proxy."""


class DrainWorker(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """`tandem drain` to proxy: this worker must leave for good. Answered by WorkerOrdered."""

    worker_id: str


class SetWorkerRole(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """`tandem role`, or the launcher for its planner, to proxy. Answered by WorkerOrdered."""

    worker_id: str
    role: Role


class ClearWorkerCache(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """`tandem cache clear kv` to proxy, for one worker. Answered by WorkerOrdered."""

    worker_id: str


class WorkerOrdered(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy's answer to DrainWorker, SetWorkerRole and ClearWorkerCache. error: "" if the worker has the order."""

    worker_id: str
    error: str = ""


class LeaveCluster(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: drain, then end for good."""


class ChangeRole(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: take this role. Requests in flight are not affected."""

    role: Role


class ClearCache(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: forget all prefixes that no request uses, in the pool and in the tiers below it."""


class GetTimeline(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to proxy: return the timeline of this request, if you have served it."""

    request_id: str


class ClusterView(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker, after each registration and status, and when its workers change: the proxy is alive.

    A worker that finds a gap in the versions registers again, which is answered with all workers.
    """

    proxy_id: str
    known: bool  # whether the proxy knows this worker's epoch
    version: int  # of the proxy's list of workers, from 1 on
    since: int  # the version to which this message adds; 0 if it has all workers; `version` if nothing has changed
    workers: list[WorkerInfo] = []  # that have joined or have another role
    gone: list[str] = []  # epochs
    restart: bool = False  # the proxy has missed prefixes or pairs: the next report must have all of them


class RegistrationRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: the proxy will not use this worker, for this reason."""

    reason: str


class WorkerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker as a proxy sees it. max_model_len, block_size, quantization: see RegisterWorker."""

    worker: WorkerInfo
    load: WorkerLoad
    pairs: list[PairStatus]
    silence_s: float
    draining: bool = False
    max_model_len: int = 0
    block_size: int = 0
    quantization: str = ""


class LatencyBuckets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A histogram. bounds_s: ascending upper bounds. counts: one for each bound, and one above the last."""

    bounds_s: list[float]
    counts: list[int]


class PredictionFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Latencies that were predicted at the dispatch and then measured, as sums. error_s: of absolute differences."""

    num_measured: int
    predicted_s: float
    measured_s: float
    error_s: float


class ServingFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Totals of one proxy since its start, except num_waiting. stages_s: seconds of finished sequences, by stage.

    num_refused: requests refused for lack of capacity, without those above a client's limit. predictions: by latency
    (ttft, itl). placements: sequences by where they ran, see `telemetry.stages`.
    """

    num_waiting: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_finished: int
    ttft: LatencyBuckets
    itl: LatencyBuckets
    e2e: LatencyBuckets
    stages_s: dict[str, float]
    num_refused: int = 0
    predictions: dict[str, PredictionFigures] = {}
    placements: dict[str, int] = {}


class StatusReport(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to `tandem status`. generation_config, sampling_defaults: where the defaults of sampling come from, and
    those that are set."""

    proxy_id: str
    model: str
    ready: bool
    num_requests: int
    workers: list[WorkerReport]
    figures: ServingFigures | None = None
    generation_config: str = ""
    sampling_defaults: dict[str, float] = {}

    @property
    def num_ready_pairs(self) -> int:
        return sum(pair.state == "ready" for worker in self.workers for pair in worker.pairs)


class TimelineReport(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to proxy. timeline: JSON; empty if the request is not known."""

    request_id: str
    timeline: bytes


ToProxyControl = (
    RegisterWorker
    | WorkerStatus
    | WorkerLeft
    | WorkerExited
    | GetStatus
    | DrainWorker
    | SetWorkerRole
    | ClearWorkerCache
    | GetTimeline
)
FromProxyControl = (
    ClusterView
    | RegistrationRefused
    | StatusReport
    | LeaveCluster
    | ChangeRole
    | ClearCache
    | WorkerOrdered
    | TimelineReport
)
