"""A prefill worker's configuration, read from the file that the launcher writes."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig


class PrefillConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """worker_id survives restarts. endpoint: what its ROUTER binds. host: own address for KV data.
    proxies_file: where the proxies' control endpoints are told anew when one moves, one a line; empty: they do not.

    kv_checksums: compare every block that is shipped (debugging). kv_lease_s: for so long a prompt's blocks
    are kept for a decode worker that no longer asks for them.
    max_num_batched_tokens: prompt tokens per step, the size of a chunk. max_num_seqs: prompts under way at once.
    """

    worker_id: str
    endpoint: str
    proxy_endpoints: list[str]
    engine: EngineConfig
    kv_connector: str = "auto"
    kv_checksums: bool = False
    kv_lease_s: float = 10.0
    host: str = "127.0.0.1"
    proxies_file: str = ""
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    log_level: str = "info"
