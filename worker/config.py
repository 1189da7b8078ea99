"""What both kinds of worker are told, in the file that the launcher writes."""

from __future__ import annotations

import msgspec

from tandem.engine.config import EngineConfig
from tandem.protocol.network import NetworkConfig
from tandem.runtime.logs import LogFormat


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """worker_id survives restarts. endpoint: what its ROUTER binds. host: own address for KV data.
    network: how tcp endpoints are protected.
    proxies_file: where the proxies' control endpoints are told anew when one moves, one a line; empty: they do not.

    kv_checksums: compare every block that travels (debugging). max_num_batched_tokens: prompt tokens per step, the size
    of a chunk. max_num_seqs: on a prefill worker prompts under way at once, on decode sequences in one step.
    drain_timeout_s: what is under way when the worker is told to leave has so long to end.
    metrics_host, metrics_port: where its /metrics are served; 0 takes any free port.
    """

    worker_id: str
    endpoint: str
    proxy_endpoints: list[str]
    engine: EngineConfig
    kv_connector: str = "auto"
    kv_checksums: bool = False
    host: str = "127.0.0.1"
    proxies_file: str = ""
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    drain_timeout_s: float = 30.0
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    network: NetworkConfig = NetworkConfig()
    log_level: str = "info"
    log_format: LogFormat = "text"
