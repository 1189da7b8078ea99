"""Configuration of a worker's engine."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tandem.runtime.settings import setting

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "fp8"]
LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["auto", "fp8", "int8"]


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model, the device, the size of the KV pool and of steps."""

    # fmt: off
    model: Annotated[str, setting("model", description=
        "Folder or Hugging Face id of the model; empty serves the built-in demo model.")]
    dtype: Annotated[Dtype, setting("model", description=
        "Data type of weights and KV cache; auto uses the checkpoint's.")] = "auto"
    load_format: Annotated[LoadFormat, setting("model", description=
        "auto loads the checkpoint; dummy fills the weights with random values.")] = "auto"
    quantization: Annotated[Quantization, setting("model", description=
        "auto keeps the weights as the checkpoint has them, quantised or not; fp8 and int8 quantise those of an "
        "unquantised checkpoint while it is loaded.")] = "auto"
    exact: Annotated[bool, setting("model", description=
        "Answers are the same bit for bit, whatever else runs and wherever they are computed. Uses slower arithmetic "
        "where it must, refuses models and settings for which this does not hold, and keeps an answer on workers that "
        "compute alike.")] = False
    device: Annotated[Device, setting("model", description=
        "Device that runs the model; auto uses GPUs where there are any.")] = "auto"
    max_model_len: Annotated[int, setting("model", ge=0, description=
        "Maximum number of tokens per sequence, prompt and output together; 0 uses the model's limit, or what fits "
        "into the KV cache if that is less.")] = 0
    block_size: Annotated[int, setting("KV cache", ge=0, le=512, description=
        "Tokens per KV block, at least 8; 0 chooses by device and attention backend.")] = 0
    kv_cache_dtype: Annotated[KVCacheDtype, setting("KV cache", description=
        "Data type of the KV cache: auto uses the model's; fp8 (e4m3, without scales) takes half the memory of 16-bit "
        "types and rounds keys and values to 4 significant bits.")] = "auto"
    kv_cache_bytes: int = 0
    """Size of the KV pool per rank; 0 lets `engine.kv_cache.kv_cache_size` choose it."""
    gpu_memory_fraction: Annotated[float, setting("KV cache", gt=0, le=1, description=
        "Share of each GPU's memory that this cluster may use. The workers on one GPU divide it equally. Each measures "
        "its largest step and uses the rest for its KV cache, unless --kv-cache-gib is given.")] = 0.9
    ranks_per_gpu: int = 1
    """Ranks of the whole cluster that share each GPU."""
    num_peers: int = 1
    """Ranks of other workers with which one rank exchanges KV over NCCL."""
    max_num_batched_tokens: Annotated[int, setting("workers", ge=0, le=65536, description=
        "Maximum number of prompt tokens that a worker computes per step, at least 16; 0 uses 512 on CPU and 2048 on "
        "GPUs, and with --engine vllm the default of `vllm serve`.")] = 512
    max_num_seqs: Annotated[int, setting("workers", ge=0, le=4096, description=
        "Maximum number of sequences that a worker runs at once; 0 uses 64 on CPU and 256 on GPUs, and with "
        "--engine vllm the default of `vllm serve`.")] = 64
    num_threads: int = 1
    """torch's intra-op threads per rank."""
    trust_remote_code: Annotated[bool, setting("model", "Run Python code that comes with the checkpoint.")] = False
    tensor_parallel_size: int = 1
    """Ranks, one process each, that share the model."""
    progress_file: str = ""
    """File that receives the loading progress from 0 to 1; empty for none."""
    # fmt: on
