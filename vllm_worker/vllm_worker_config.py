"""Configuration of a worker with vLLM's engine, read from the JSON file that the launcher writes."""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem.protocol.messages.adapter import AdapterRef
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.runtime.logs import LogSettings

VLLM_VERSION = "0.32.0"
"""The only version of vLLM that the worker runs: it uses interfaces that vLLM calls experimental."""


class VllmEngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model, the device, the size of the KV cache and of steps, as vLLM's engine gets them."""

    model: str
    """Folder or Hugging Face id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    quantization: Literal["auto", "fp8"] = "auto"
    """auto keeps the weights as the checkpoint has them, quantised or not."""
    device: Literal["cpu", "cuda"] = "cpu"
    max_model_len: int = 0
    """Maximum number of tokens per sequence; 0 uses the model's limit."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 0
    """Limit on the tokens of a step; 0 lets the worker choose it."""
    block_size: int = 0
    """Tokens per KV block; 0 uses vLLM's default."""
    kv_cache_bytes: int = 0
    """Size of the KV cache per rank; 0 uses 1 GiB on CPU and what `gpu_memory_fraction` leaves on GPUs."""
    gpu_memory_fraction: float = 0.9
    """Share of each GPU's memory that this worker may use, after the division among the workers on one GPU."""
    tensor_parallel_size: int = 1
    num_threads: int = 1
    """Compute threads per rank."""
    trust_remote_code: bool = False
    enable_prefix_caching: bool = True


class VllmWorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON file that `python -m tandem.vllm_worker FILE` reads."""

    worker_id: str
    """Name of the worker, which it keeps when it is restarted."""
    role: Role
    """Phases of requests that proxies send to it."""
    endpoint: str
    """Address that the ROUTER socket binds."""
    proxy_endpoints: list[str]
    """Control endpoints of the proxies."""
    engine: VllmEngineConfig
    kv_connector: str = "auto"
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
    role_file: str = ""
    """File that keeps a role that was set later across restarts; empty for none."""
    itl_slo_ms: int = 0
    """Inter-token latency that running sequences should keep; 0 for none."""
    adapters: list[AdapterRef] = []
    """LoRA adapters that the worker must be able to load; requests may name others."""
    logs: LogSettings = LogSettings()
