"""Configuration of a prefill worker, read from the JSON file that the launcher writes."""

from __future__ import annotations

import msgspec

from tandem.worker.config import WorkerConfig


class PrefillConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """kv_lease_s: how long a prompt's blocks are kept for a decode worker that does not renew its lease.
    embedding_cache_bytes: embeddings kept for later prompts with the same image. max_fetched_media_bytes: limit on
    processed media from other hosts, for all prompts together. media_cache_endpoint: of this host's media cache; "" if
    the model takes text only."""

    worker: WorkerConfig
    kv_lease_s: float = 10.0
    embedding_cache_bytes: int = 256 << 20
    max_fetched_media_bytes: int = 1 << 30
    media_cache_endpoint: str = ""
