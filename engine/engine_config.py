"""Configuration of a worker's engine."""

from __future__ import annotations

from typing import Literal

import msgspec

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "fp8"]
LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["auto", "fp8", "int8"]


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model, the device, the size of the KV pool and of steps.

    model: a folder or a hub id. dtype: "auto" uses the checkpoint's. max_model_len: maximum tokens of a sequence,
    prompt and output; 0 uses the model's own limit, or what fits into the pool. block_size: tokens per KV block; 0
    chooses by device. num_threads: torch's intra-op threads per rank. load_format: "dummy" creates random weights.
    quantization: "auto" keeps the weights as the checkpoint has them; others quantise those of an unquantised one.
    tensor_parallel_size: ranks, one process each, that share the model. progress_file: receives the loading progress
    from 0 to 1; empty for none.

    kv_cache_dtype: "auto" stores keys and values as the model computes them, "fp8" rounds them to float8_e4m3fn.
    kv_cache_bytes: KV pool size per rank; 0 chooses it, see `engine.kv_cache_size`. gpu_memory_fraction: of each GPU,
    for all ranks of the cluster that use it. ranks_per_gpu: how many those are. num_peers: ranks of other workers with
    which one rank exchanges KV over NCCL. max_num_batched_tokens: prompt tokens per step, which is the chunk size.
    max_num_seqs: sequences per step, and prompts that compute concurrently.
    """

    model: str
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization = "auto"
    device: Device = "auto"
    max_model_len: int = 0
    block_size: int = 0
    kv_cache_dtype: KVCacheDtype = "auto"
    kv_cache_bytes: int = 0
    gpu_memory_fraction: float = 0.9
    ranks_per_gpu: int = 1
    num_peers: int = 1
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    num_threads: int = 1
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    progress_file: str = ""
