"""A prefill worker's configuration, read from the file that the launcher writes."""

from __future__ import annotations

import msgspec

from tandem.worker.config import WorkerConfig


class PrefillConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """kv_lease_s: for so long a prompt's blocks are kept for a decode worker that no longer asks for them.
    embedding_cache_bytes: of what the vision tower made, kept for the next prompt with the same image.
    max_fetched_media_bytes: of processed media from other hosts, those that prompts here wait for or use.
    media_cache_endpoint: of the host's media cache, where others find it; "" where the model takes text only.
    """

    worker: WorkerConfig
    kv_lease_s: float = 10.0
    embedding_cache_bytes: int = 256 << 20
    max_fetched_media_bytes: int = 1 << 30
    media_cache_endpoint: str = ""
