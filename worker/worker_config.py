"""Configuration that workers of every engine have, read from the JSON file that the launcher writes."""

from __future__ import annotations

import msgspec

from tandem.protocol.messages.dispatch import AdapterRef
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.runtime.logs import LogSettings


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker without its engine. Each engine's configuration extends it."""

    worker_id: str
    """Name of the worker, which it keeps when it is restarted."""
    role: Role
    """Phases of requests that proxies send to it."""
    endpoint: str
    """Address that the ROUTER socket binds."""
    proxy_endpoints: list[str]
    """Control endpoints of the proxies."""
    kv_connector: str = "auto"
    exact: bool = False
    """Whether to pair only with workers of equal numerics, and to refuse what is not exact."""
    kv_checksums: bool = False
    """Whether every transferred block is verified, for debugging."""
    host: str = "127.0.0.1"
    """Own address for KV transfer."""
    proxies_file: str = ""
    """File with the proxies' current control endpoints, one per line; empty if they never change."""
    drain_timeout_s: float = 30.0
    """Time that requests in flight get when the worker is told to leave."""
    metrics_host: str = "127.0.0.1"
    """Address of /metrics, on any free port; empty serves none."""
    network: NetworkConfig = NetworkConfig()
    kv_lease_s: float = 10.0
    """Time that a prompt's blocks are kept for a decode worker that does not renew its lease."""
    media_cache_endpoint: str = ""
    """Media cache of this host; empty if the model takes text only."""
    max_fetched_media_bytes: int = 1 << 30
    """Limit on processed media from other hosts, for all prompts together."""
    role_file: str = ""
    """File that keeps a role that was set later across restarts; empty for none."""
    itl_slo_ms: int = 0
    """Inter-token latency that running sequences keep while prompts are computed; 0 lets the engine choose."""
    adapters: list[AdapterRef] = []
    """LoRA adapters that the worker must be able to load; requests may name others."""
    logs: LogSettings = LogSettings()

    @property
    def itl_slo_s(self) -> float:
        return self.itl_slo_ms / 1000
