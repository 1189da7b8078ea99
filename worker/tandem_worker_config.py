"""Configuration of a worker that runs Tandem's own engine."""

from __future__ import annotations

from tandem.engine.engine_config import EngineConfig
from tandem.kv_transfer.tiers.tier import TiersConfig
from tandem.worker.worker_config import WorkerConfig


class TandemWorkerConfig(WorkerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The JSON file that `python -m tandem.worker FILE` reads."""

    engine: EngineConfig
    embedding_cache_bytes: int = 256 << 20
    """Size of the embeddings that are kept for later prompts with the same image."""
    tiers: TiersConfig = TiersConfig()
