"""Configuration shared by both kinds of worker, read from the JSON file that the launcher writes."""

from __future__ import annotations

import msgspec

from tandem.engine.config import EngineConfig
from tandem.protocol.network import NetworkConfig
from tandem.runtime.logs import LogFormat


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """worker_id: survives restarts. endpoint: address that the ROUTER socket binds. host: own address for KV transfer.
    network: protection of tcp endpoints. proxies_file: file with the proxies' current control endpoints, one per line;
    empty if they never change.

    kv_checksums: verify every transferred block (debugging). max_num_batched_tokens: prompt tokens per step, which is
    the chunk size. max_num_seqs: concurrent prompts on a prefill worker, sequences per step on a decode worker.
    drain_timeout_s: time that requests in flight get when the worker is drained. metrics_host, metrics_port:
    address of /metrics; port 0 takes any free port.
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
