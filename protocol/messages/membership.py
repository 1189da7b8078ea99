"""Messages about cluster membership: between workers and proxies, and from the launcher and `tandem status` to proxies.

A worker has a DEALER to each proxy's control ROUTER. It registers, then sends status (heartbeat and load report in
one). The proxy sends it all workers once and then what changes (`ClusterView`), so prefill workers learn of decode
workers. While nothing changes, the size of a message does not depend on that of the cluster
(docs/adr/0037-control-at-scale.md).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem.protocol.messages.numerics import Numerics
from tandem.runtime.files.lora_files import MAX_RANK


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
    """Totals of one proxy since its start, except num_waiting."""

    num_waiting: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_finished: int
    ttft: LatencyBuckets
    itl: LatencyBuckets
    e2e: LatencyBuckets
    stages_s: dict[str, float]
    """Seconds of finished sequences, by stage."""
    num_refused: int = 0
    """Requests refused for lack of capacity, without those above a client's limit."""
    predictions: dict[str, PredictionFigures] = {}
    """Predictions by latency (ttft, itl)."""
    placements: dict[str, int] = {}
    """Sequences by where they ran, see `telemetry.stages.Placement`."""
    stages: dict[str, LatencyBuckets] = {}
    """Times of finished sequences, by stage."""


PROTOCOL_VERSION = 34
"""Incremented by every change to a message. Processes with different versions refuse each other."""

PROXY_SILENCE_S = 5.0
"""A worker takes a proxy that is silent for this long as lost."""

Role = Literal["prefill", "decode", "any"]
"""The phases of requests that proxies send to a worker. Every worker is able to do both; `any` gets both."""
PREFILL_ROLES: frozenset[Role] = frozenset({"prefill", "any"})
DECODE_ROLES: frozenset[Role] = frozenset({"decode", "any"})


class WorkerInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of a worker. `worker_id` survives a restart ("decode-0"), `epoch` does not."""

    worker_id: str
    epoch: str
    role: Role
    """The role at registration; in a ClusterView or a report the current one."""
    endpoint: str
    pid: int
    """Process of rank 0, which represents all processes of the worker."""
    num_ranks: int = 1
    metrics_address: str = ""
    """host:port of its /metrics; empty without one."""
    host_id: str = ""
    """See `runtime.host`; empty means this host."""


class PairTraffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV shipped from a prefill worker to one decode worker since the start. shipping_s: total duration."""

    decode_worker_id: str
    num_bytes: int
    num_shipments: int
    shipping_s: float


class TierFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tier of a worker's KV cache, rank 0's share of it. Counts are totals since the worker's start."""

    name: str
    """host, disk or store."""
    num_blocks: int = 0
    """Blocks that this worker can load."""
    num_bytes: int = 0
    """Size of the tier, which other workers may share; 0 if unknown."""
    max_bytes: int = 0
    """Limit on the size; 0 if unknown."""
    num_stored: int = 0
    num_loaded: int = 0
    num_skipped: int = 0
    """Blocks that were not stored because the tier was behind or failing."""
    num_corrupt: int = 0
    """Blocks that were not whole."""
    error: str = ""
    """Why the tier is not used at the moment; empty if it is."""


class WorkerLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load of a worker. Counts without a unit of time are totals since the start.

    Blocks that are neither free nor quarantined belong to waiting or running requests.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_cached_blocks: int = 0
    """Free blocks that hold a prefix."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens of `num_prompt_tokens` that were found in the prefix cache."""
    num_preempted: int = 0
    step_time_s: float = 0.0
    num_finished: int = 0
    num_transferred_bytes: int = 0
    num_compared_blocks: int = 0
    """Received blocks whose checksums were compared."""
    num_corrupt_blocks: int = 0
    """Compared blocks whose checksums differed."""
    num_kept_blocks: int = 0
    """Blocks that arrived for attempts which ended before decoding, and stayed in the prefix cache."""
    waiting_tokens: list[tuple[int, int]] = []
    """`num_waiting_tokens` by priority, as (priority, tokens)."""
    prompt_tokens_per_s: float = 0.0
    """Recent prefill speed; 0 before the first prompt."""
    traffic: list[PairTraffic] = []
    """Pairs with transfers since the last report; all pairs after `ClusterView.restart`."""
    num_media_encoded: int = 0
    """Images and videos that were encoded here."""
    num_media_found: int = 0
    """Images and videos whose embeddings came from another worker."""
    num_media_fetched_bytes: int = 0
    """Size of processed media from other hosts."""
    num_decoding: int = 0
    """Sequences of the decode role, running or waiting."""
    fixed_step_s: float = 0.0
    """Duration of a step without prompt tokens and without its share per sequence; 0 before the first step."""
    step_s_per_sequence: float = 0.0
    """Duration that each sequence adds to such a step; 0 before the first."""
    step_gap_s: float = 0.0
    """Recent mean time from the end of a step to the start of the next while work waits; 0 before the first."""
    itl_slo_s: float = 0.0
    """Limit on a step with prompt tokens beside sequences, see `engine.steps.step_times`; 0 before the first."""
    num_role_changes: int = 0
    num_received_tokens: int = 0
    """Prompt tokens, without cached ones, whose KV another worker computed."""
    num_received: int = 0
    """Sequences whose KV another worker computed."""
    num_shipped: int = 0
    """Sequences of `num_finished` that were computed here and decode on another worker."""
    num_loaded_tokens: int = 0
    """Tokens of `num_cached_tokens` that came from a tier below the pool."""
    loaded_tokens_per_s: float = 0.0
    """Recent speed of loading them; 0 before the first."""
    tiers: list[TierFigures] = []
    """Tiers below the pool, fastest first."""
    num_drafted_tokens: int = 0
    """Tokens that speculative decoding has proposed."""
    num_accepted_tokens: int = 0
    """Tokens of `num_drafted_tokens` that were generated."""


class PrefixUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks that the prefix cache has gained and lost since the previous update. Limited in size; the rest follows
    later.
    """

    number: int
    """Consecutive; a proxy that finds a gap asks for a restart."""
    restart: bool
    """Whether all earlier updates must be discarded."""
    added: bytes
    """Packed short hashes, see `protocol.prefix_hash`."""
    evicted: bytes
    """Packed short hashes."""


class PairStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One (prefill, decode) pair as its prefill side sees it."""

    decode_worker_id: str
    decode_epoch: str
    state: Literal["opening", "ready", "refused", "failed"]
    connector: str = ""
    reason: str = ""
    """Why it was refused or failed; of a ready pair, why better connectors could not be used."""


class PairChanges(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pairs that a prefill worker has opened, or what has changed of them."""

    since: int
    """`WorkerStatus.num_pair_changes` of the report to which this adds; 0 if it has all pairs."""
    changed: list[PairStatus]
    """At most one of each decode worker's epoch."""
    gone: list[str] = []
    """Epochs of decode workers with which it has no pair any more."""


class RegisterWorker(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy, once per connection and whenever the proxy does not know the worker."""

    version: int
    worker: WorkerInfo
    max_model_len: int
    vocab_size: int
    model_id: str
    """Input of the worker's prefix hashes."""
    block_size: int
    """Input of the worker's prefix hashes."""
    lora_modules: dict[str, tuple[int, int]] = {}
    """(inputs, outputs) of the linear layers that LoRA adapters may change, by name; empty without support."""
    max_lora_rank: int = MAX_RANK
    """Largest rank of adapters that it takes."""
    quantization: str = ""
    """Quantisation of the weights, for people; empty for none."""
    engine: str = ""
    """Name and version of the engine, for people."""
    numerics: Numerics = Numerics()
    """How it computes."""
    exact: bool = False
    """Whether it runs with --exact: an answer that began here may only continue on workers of equal numerics."""


class WorkerStatus(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy, every HEARTBEAT_INTERVAL_S. All proxies get the same reports."""

    worker_id: str
    epoch: str
    role: Role
    load: WorkerLoad
    pairs: PairChanges | None = None
    """None if the pairs that it has opened are as in the report before."""
    prefixes: PrefixUpdate | None = None
    """Changes of the pool's prefixes."""
    draining: bool = False
    """Whether the worker must get no new work."""
    tier_prefixes: PrefixUpdate | None = None
    """Changes of the prefixes that it can load from the tiers below the pool."""
    num_pair_changes: int = 0
    """Number of reports with changed pairs up to this one, which shows a proxy that it has missed one."""


LeaveCause = Literal["order", "failure", "silence"]
"""order: it was told to stop or to drain. failure: an error ends it, and a request may be the cause. silence: it heard
nothing from the proxy for PROXY_SILENCE_S, has given that proxy's requests up, and does not exit."""


class WorkerLeft(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy: the worker has given up its requests in flight, which migrate.

    After a silence it says so with each status until the proxy no longer knows it, and registers again.
    """

    worker_id: str
    epoch: str
    cause: LeaveCause = "order"
    attempt_ids: list[str] = []
    """Attempts in the step whose failure ended the engine, of all proxies; empty if they are not known."""


ExitCause = Literal["order", "crash", "unknown"]
"""order: the launcher asked for it, or the process was drained. crash: nobody asked, so a request may be the cause,
whatever the exit code. unknown: the process is gone with its host."""


class WorkerExited(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Launcher to proxy: the process has exited. Faster than waiting for silence."""

    worker_id: str
    pid: int
    cause: ExitCause = "unknown"


StatusDetail = Literal["proxy", "workers", "pairs"]
"""proxy: figures of the proxy alone, whose size does not depend on the cluster's. workers: also its workers, with a
refused pair for each reason. pairs: also all pairs and their traffic, which grow with the square of the cluster."""


class GetStatus(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The launcher or a command to proxy. Answered by StatusReport."""

    detail: StatusDetail = "pairs"


class DrainWorker(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """`tandem drain` to proxy: this worker must leave for good. Answered by WorkerOrdered."""

    worker_id: str


class SetWorkerRole(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """`tandem role`, or the launcher, to proxy. Answered by WorkerOrdered, unless it is void."""

    worker_id: str
    role: Role
    number: int = 0
    """Of the launcher's order, which the answer has too."""
    proxy_id: str = ""
    """The process of the proxy for which it is meant, and void for others; empty for any."""
    until_s: float | None = None
    """Time of that process's clock after which it is void, see `StatusReport.clock_s`; None for no limit."""


class ClearWorkerCache(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """`tandem cache clear kv` to proxy, for one worker. Answered by WorkerOrdered."""

    worker_id: str


class WorkerOrdered(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy's answer to DrainWorker, SetWorkerRole and ClearWorkerCache. error: "" if the worker has the order."""

    worker_id: str
    error: str = ""
    number: int = 0
    """Of the order, see SetWorkerRole."""


class LeaveCluster(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: drain, then end for good."""


class ChangeRole(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: take this role. Requests in flight are not affected."""

    role: Role


class ClearCache(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: forget all prefixes that no request uses, in the pool and in the tiers below it."""


class GetTimeline(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy or `tandem doctor` to proxy: return the timeline of this request, if you have served it."""

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
    """One worker as a proxy sees it."""

    worker: WorkerInfo
    load: WorkerLoad
    pairs: list[PairStatus]
    silence_s: float
    num_ready_pairs: int = 0
    """Ready pairs with workers of this cluster that take decodes."""
    draining: bool = False
    max_model_len: int = 0
    """See RegisterWorker."""
    block_size: int = 0
    """See RegisterWorker."""
    quantization: str = ""
    """See RegisterWorker."""
    engine: str = ""
    """See RegisterWorker."""
    numerics: str = ""
    """Digest of its numerics, which are in `StatusReport.numerics`."""
    exact: bool = False
    """See RegisterWorker."""
    unanswered_s: float | None = None
    """Time for which it has not answered the proxy's Ping at its endpoint, so that it gets no prompts; None if it has.
    """


class StatusReport(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to the launcher or a command, see `StatusDetail`. generation_config, sampling_defaults: where the defaults
    of sampling come from, and those that are set."""

    proxy_id: str
    model: str
    ready: bool
    num_requests: int
    workers: list[WorkerReport]
    figures: ServingFigures | None = None
    generation_config: str = ""
    sampling_defaults: dict[str, float] = {}
    numerics: dict[str, Numerics] = {}
    """Those of the workers, by digest."""
    exact: bool = False
    """Whether an answer's bits depend neither on what else runs nor on the workers that compute it."""
    exactness: str = ""
    """The same in words, with the reason if not; empty without workers."""
    clock_s: float = 0.0
    """Time of the proxy's clock, whose zero means nothing to others."""

    @property
    def num_ready_pairs(self) -> int:
        return sum(worker.num_ready_pairs for worker in self.workers)


class TimelineReport(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answer to GetTimeline. timeline: JSON; empty if the request is not known."""

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
