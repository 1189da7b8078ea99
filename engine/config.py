"""What a worker's engine needs to know: the model, the device, and how much memory the KV pool may take."""

from __future__ import annotations

from typing import Literal

import msgspec

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "cuda"]


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker's engine.

    model: a folder or a hub id. dtype: "auto" takes the checkpoint's. max_model_len: tokens a sequence may have,
    prompt and output together; 0 takes the model's own limit. block_size: tokens per KV block.
    kv_cache_bytes: size of the KV pool of each rank. num_threads: torch's intra-op threads in each rank.
    load_format: "dummy" makes random weights from the config alone. tensor_parallel_size: how many ranks, a process
    each, share the worker's model. progress_file: where loading writes how far it is, from 0 to 1; empty for nowhere.
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
