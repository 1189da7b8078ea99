"""Configuration of a worker's engine."""

from __future__ import annotations

from typing import Literal

import msgspec

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "cuda"]


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model, the device, and the size of the KV pool.

    model: a folder or a hub id. dtype: "auto" uses the checkpoint's. max_model_len: maximum tokens of a sequence,
    prompt and output; 0 uses the model's own limit. block_size: tokens per KV block. kv_cache_bytes: KV pool size per
    rank. num_threads: torch's intra-op threads per rank. load_format: "dummy" creates random weights.
    tensor_parallel_size: ranks, one process each, that share the model. progress_file: receives the loading progress
    from 0 to 1; empty for none.
    """

    model: str
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    device: Device = "auto"
    max_model_len: int = 0
    block_size: int = 64
    kv_cache_bytes: int = 1 << 30
    num_threads: int = 1
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    progress_file: str = ""
