"""Configuration of a worker, read from the JSON file that the launcher writes."""

from __future__ import annotations

import msgspec

from tandem.engine.engine_config import EngineConfig
from tandem.kv_transfer.tiers.tier import TiersConfig
from tandem.protocol.messages.adapter import AdapterRef
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.runtime.logs import LogFormat


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """worker_id: survives restarts. role: the phases of requests that proxies send to it. role_file: keeps a role that
    was set later across restarts. endpoint: address that the ROUTER socket binds. host: own address for KV transfer.
    network: protection of tcp endpoints. proxies_file: file with the proxies' current control endpoints, one per line;
    empty if they never change.

    kv_checksums: verify every transferred block (debugging). drain_timeout_s: time that requests in flight get when the
    worker is told to leave. metrics_host: address of /metrics, on any free port; "" serves none.
    kv_lease_s: how long a prompt's blocks are kept for a decode worker that does not renew its lease.
    embedding_cache_bytes: embeddings kept for later prompts with the same image. max_fetched_media_bytes: limit on
    processed media from other hosts, for all prompts together. media_cache_endpoint: of this host's media cache; "" if
    the model takes text only. itl_slo_ms: limit on a step that holds prompt tokens beside running sequences; 0 derives
    it from measured steps, see `engine.step_times`. adapters: LoRA adapters that the worker must be able to load;
    requests may name others. tiers: of the KV cache, below the pool.
    """

    worker_id: str
    role: Role
    endpoint: str
    proxy_endpoints: list[str]
    engine: EngineConfig
    kv_connector: str = "auto"
    kv_checksums: bool = False
    host: str = "127.0.0.1"
    proxies_file: str = ""
    drain_timeout_s: float = 30.0
    metrics_host: str = "127.0.0.1"
    network: NetworkConfig = NetworkConfig()
    kv_lease_s: float = 10.0
    embedding_cache_bytes: int = 256 << 20
    max_fetched_media_bytes: int = 1 << 30
    media_cache_endpoint: str = ""
    role_file: str = ""
    itl_slo_ms: int = 0
    adapters: list[AdapterRef] = []
    tiers: TiersConfig = TiersConfig()
    log_level: str = "info"
    log_format: LogFormat = "text"
