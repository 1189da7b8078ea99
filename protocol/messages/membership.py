"""Messages about who is there: workers to proxies and back, and the launcher and `tandem status` to proxies.

A worker holds a DEALER to each proxy's control ROUTER. It registers, then keeps sending status: heartbeat and load
report in one. The proxy answers each with what it knows of the cluster, so prefill workers find their decode peers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL_VERSION = 9
"""Raised by every change to a message; unequal versions refuse each other when they register or pair."""

Role = Literal["prefill", "decode"]


class WorkerInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who a worker is. `worker_id` survives a restart ("decode-0"), `epoch` does not.

    pid: of rank 0, which speaks for all num_ranks processes that share the worker's model. metrics_address: host:port
    of its own /metrics; empty where it has none. host_id: see `runtime.host`; one that tells none is taken for a
    process of the same host.
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
    """KV that a prefill worker has shipped to one decode worker: num_bytes in num_shipments, shipping_s in all."""

    decode_worker_id: str
    num_bytes: int
    num_shipments: int
    shipping_s: float


class WorkerLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How busy a worker is. Blocks that are neither free nor quarantined belong to running or waiting requests.

    num_cached_blocks: of the free ones, those that hold a prefix. num_cached_tokens: prompt tokens that were found in
    the prefix cache, of num_prompt_tokens, since the start. num_compared_blocks: those that arrived and whose checksums
    were looked at; num_corrupt_blocks: of these, those that were not what was sent. waiting_tokens: num_waiting_tokens,
    as (priority, tokens). num_kept_blocks: that had arrived for attempts which ended before they decoded, and stayed in
    the prefix cache. prompt_tokens_per_s: computed of late while prompts were computed; 0 before the first. refusals:
    see `protocol.refusals`, since the start. num_media_encoded: images and videos that the vision tower has encoded
    here; num_media_found: those whose embeddings another worker had left in the host's cache; num_media_fetched_bytes:
    of processed media, from other hosts.
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
    traffic: list[PairTraffic] = []
    refusals: list[tuple[str, int]] = []
    num_media_encoded: int = 0
    num_media_found: int = 0
    num_media_fetched_bytes: int = 0


class PrefixUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which blocks the prefix cache has gained and lost since the update before. Bounded: the rest follows.

    number: one more than that of the update before; a proxy that finds a gap asks for a restart in its ClusterView.
    restart: forget what was told before. added, evicted: packed short hashes, see `protocol.prefix_hash`.
    """

    number: int
    restart: bool
    added: bytes
    evicted: bytes


class PairStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One (prefill, decode) pair as its prefill side sees it. `reason` says why it was refused or failed."""

    decode_worker_id: str
    decode_epoch: str
    state: Literal["opening", "ready", "refused", "failed"]
    connector: str = ""
    reason: str = ""


class RegisterWorker(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy, once per connection and whenever the proxy says that it does not know the worker.

    model_id and block_size: what its prefix hashes depend on.
    """

    version: int
    worker: WorkerInfo
    max_model_len: int
    vocab_size: int
    model_id: str
    block_size: int


class WorkerStatus(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy, every `heartbeat_interval_s`. `pairs` is empty on decode workers.

    draining: it is to get no new work.
    """

    worker_id: str
    epoch: str
    load: WorkerLoad
    pairs: list[PairStatus] = []
    prefixes: PrefixUpdate | None = None
    draining: bool = False


class WorkerLeft(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy: it ends now. What it still has goes on at others."""

    worker_id: str
    epoch: str


class WorkerExited(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Launcher to proxy: the process is gone for certain. Sooner than silence would tell."""

    worker_id: str
    pid: int


class GetStatus(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """`tandem status` to proxy."""


class DrainWorker(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """`tandem drain` to proxy: this worker is to leave for good. Answered by DrainAnswer."""

    worker_id: str


class DrainAnswer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to `tandem drain`. error: "" when the worker was told."""

    worker_id: str
    error: str = ""


class LeaveCluster(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: drain, then end for good."""


class GetTimeline(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to proxy: somebody asks what became of this request, which may have been served by the other."""

    request_id: str


class ClusterView(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker, after each status: proof that the proxy lives, and the workers that it knows.

    restart_prefixes: it has missed a PrefixUpdate, so the next is to be a restart.
    """

    proxy_id: str
    known: bool
    workers: list[WorkerInfo]
    restart_prefixes: bool = False


class RegistrationRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: it will get no requests from this proxy, for this reason."""

    reason: str


class WorkerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    worker: WorkerInfo
    load: WorkerLoad
    pairs: list[PairStatus]
    silence_s: float
    draining: bool = False


class LatencyBuckets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A histogram. bounds_s: upper ones, ascending; counts: of each, and one more for what is above the last."""

    bounds_s: list[float]
    counts: list[int]


class ServingFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one proxy, since its start but for num_waiting. stages_s: seconds of finished sequences, by stage.

    num_refused: requests turned away for want of room, but not those beyond what one client may have.
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


class StatusReport(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to `tandem status`."""

    proxy_id: str
    model: str
    ready: bool
    num_requests: int
    workers: list[WorkerReport]
    figures: ServingFigures | None = None


class TimelineReport(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to proxy. timeline: JSON; empty where the request is not known."""

    request_id: str
    timeline: bytes


ToProxyControl = RegisterWorker | WorkerStatus | WorkerLeft | WorkerExited | GetStatus | DrainWorker | GetTimeline
FromProxyControl = ClusterView | RegistrationRefused | StatusReport | LeaveCluster | DrainAnswer | TimelineReport
