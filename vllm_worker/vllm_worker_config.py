"""Configuration of a worker with vLLM's engine, read from the JSON file that the launcher writes."""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem.worker.worker_config import WorkerConfig


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
    max_num_seqs: int = 0
    """Limit on the sequences of a step; 0 uses the default of `vllm serve`."""
    max_num_batched_tokens: int = 0
    """Limit on the tokens of a step; 0 uses the default of `vllm serve`."""
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
    speculative_config: str = ""
    """JSON of vLLM's speculative decoding; empty without."""
    engine_args: list[str] = []
    """Further arguments of vLLM's engine, NAME=VALUE, which take precedence."""


class VllmWorkerConfig(WorkerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The JSON file that `python -m tandem.vllm_worker FILE` reads."""

    engine: VllmEngineConfig
    load_turns: list[str] = msgspec.field(default_factory=list)
    """A file for each GPU that this worker shares with others, which load one after another (`load_turns`)."""


def batch_problem(device: str, is_batch_invariant: bool) -> str:
    """Returns why the bits of vLLM's log-probabilities depend on the batch, or an empty string if they do not.

    is_batch_invariant: `vllm.envs.VLLM_BATCH_INVARIANT`. vLLM ends at the start if a part of the model has no kernels
    for it, with the reason.
    """
    if device == "cpu":
        return "vLLM has kernels whose results do not depend on the batch on GPUs only"
    if not is_batch_invariant:
        return "vLLM's results depend on the batch without VLLM_BATCH_INVARIANT=1, which --exact sets"
    return ""
