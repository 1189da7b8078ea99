"""Decides how many blocks a worker's KV cache has, and how long its sequences may therefore be.

On a GPU each rank has an equal share of `gpu_memory_fraction` of the memory. It runs its largest step once, and the KV
cache gets the rest of the share. So the size depends only on the configuration, the model and the device, and all
workers on one GPU get the same. Memory that other programs use reduces it; then the last worker may find too little.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace

import msgspec
import torch
import torch.distributed as dist

from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool, block_bytes
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.sampling import SamplingParams
from tandem.runtime.errors import ConfigError

log = logging.getLogger(__name__)

CPU_BYTES = 1 << 30
CONTEXT_BYTES = 512 << 20
"""Memory of a process that torch does not count: the CUDA context, libraries, modules of kernels, and NCCL between the
ranks of a worker."""
PEER_BYTES = (32 + 40) << 20
"""Buffers of the `nccl` connector for one peer: a message in each direction, and 10 MiB of NCCL for each multiprocessor
that its messages occupy. NCCL's share is an estimate: with 32 multiprocessors, a group takes 295 MiB over NVLink."""
LENGTH_STEP = 1024
"""A lowered maximum length is a multiple of this, so that workers whose measurements differ a little agree."""
_PROFILE_BLOCKS = 2  # the self-check of attention needs two
_GIB = 1 << 30


class CudaMemory:
    """What a GPU and torch's allocator report, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Returns unused memory to the device and begins a new measurement of the peak."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def reserved(self) -> int:
        """Returns the memory that torch's allocator holds for this process."""
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """Returns the maximum of `reserved` since the last `reset`."""
        return torch.cuda.max_memory_reserved(self._device)

    def free_and_total(self) -> tuple[int, int]:
        """Returns the free memory and the size of the device, with all its processes."""
        free, total = torch.cuda.mem_get_info(self._device)
        return free, total


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a device in bytes."""

    free: int
    """Free memory of the device."""
    total: int
    """Memory of the device."""
    held: int
    """Memory that this process has reserved, with the weights."""
    peak: int
    """The same in the largest step, with CUDA graphs."""


def kv_cache_bytes(use: MemoryUse, fraction: float, ranks_per_gpu: int, num_peers: int) -> int:
    """Returns the size of a rank's KV cache; not positive if there is no room for one.

    It is limited by the rank's share, and by the free memory of which the rank leaves its part of the rest unused.
    """
    share = int(use.total * fraction) // ranks_per_gpu
    unused = use.total // ranks_per_gpu - share
    others = num_peers * PEER_BYTES
    in_share = share - use.peak - CONTEXT_BYTES - others
    in_free = use.free - (use.peak - use.held) - others - unused
    return min(in_share, in_free)


def fit_kv_cache(
    loaded: LoadedModel, config: EngineConfig, memory: CudaMemory | None = None
) -> tuple[LoadedModel, EngineConfig]:
    """Returns the model with the sequence length that fits, and the configuration with the size of the KV cache.

    Every rank of a worker must call it. memory: by default that of the model's device. Raises ConfigError if not even
    short sequences fit, or not those of --max-model-len.
    """
    if memory is None and loaded.device.type == "cuda":
        memory = CudaMemory(loaded.device)
    num_bytes = config.kv_cache_bytes
    if not num_bytes:
        num_bytes = CPU_BYTES if memory is None else _measured_bytes(loaded, config, memory)
    num_tokens = num_bytes // block_bytes(loaded) * loaded.layout.block_size
    length = fitting_length(loaded.max_model_len, num_tokens)
    if length < loaded.max_model_len:
        advice = _advice(loaded, config, on_gpu=memory is not None)
        holds = f"the KV cache of {num_bytes / _GIB:.2f} GiB holds {num_tokens} tokens"
        if config.max_model_len or not length:
            wanted = f"--max-model-len {config.max_model_len}" if config.max_model_len else "a sequence"
            lower = f", or lower --max-model-len to at most {num_tokens}" if config.max_model_len else ""
            raise ConfigError(f"{holds}, which is too few for {wanted}: {advice}{lower}")
        log.warning(
            "%s, but the model's limit is %d: --max-model-len is lowered to %d; for longer sequences %s",
            holds, loaded.max_model_len, length, advice,
        )  # fmt: skip
    return replace(loaded, max_model_len=length), msgspec.structs.replace(config, kv_cache_bytes=num_bytes)


def fitting_length(max_model_len: int, num_tokens: int) -> int:
    """Returns the maximum length of sequences with a KV cache of `num_tokens`; 0 if that is too few for any use."""
    if num_tokens >= max_model_len:
        return max_model_len
    return num_tokens // LENGTH_STEP * LENGTH_STEP


def largest_step(config: EngineConfig, max_model_len: int, block_size: int) -> Batch:
    """Returns a step with all prompt tokens and all sequences that the configuration allows, on block 0."""

    def item(num_tokens: int, samples: list[Sample]) -> BatchItem:
        return BatchItem([0] * num_tokens, 0, [0] * -(-num_tokens // block_size), samples)

    sample = Sample(SamplingParams(temperature=1.0, top_p=0.9, top_k=10, logprobs=1))
    sequences = [item(1, [sample]) for _ in range(config.max_num_seqs)]
    whole, rest = divmod(config.max_num_batched_tokens, max_model_len)
    prompts = [item(length, []) for length in [max_model_len] * whole + [rest] * (rest > 0)]
    return Batch(sequences + prompts)


def _measured_bytes(loaded: LoadedModel, config: EngineConfig, memory: CudaMemory) -> int:
    """Raises ConfigError if the largest step does not fit or leaves no room."""
    try:
        use = _profile(loaded, config, memory)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {config.max_num_batched_tokens} prompt tokens and {config.max_num_seqs} sequences does not fit "
            "into the GPU's memory beside the weights: lower --max-num-batched-tokens or --max-num-seqs, or raise "
            "--tensor-parallel-size"
        ) from error
    num_bytes = kv_cache_bytes(use, config.gpu_memory_fraction, config.ranks_per_gpu, config.num_peers)
    if config.tensor_parallel_size > 1:  # all ranks have the same blocks
        smallest = torch.tensor([num_bytes], device=loaded.device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        num_bytes = int(smallest)
    shown = (
        f"{use.total / _GIB:.1f} GiB of memory, {use.free / _GIB:.1f} GiB free; {config.ranks_per_gpu} "
        f"{'rank uses' if config.ranks_per_gpu == 1 else 'ranks share'} {config.gpu_memory_fraction:.0%} of it; "
        f"weights {use.held / _GIB:.1f} GiB, largest step {(use.peak - use.held) / _GIB:.1f} GiB"
    )
    if num_bytes < _PROFILE_BLOCKS * block_bytes(loaded):
        raise ConfigError(
            f"the GPU has no room for a KV cache ({shown}): raise --gpu-memory-fraction or --tensor-parallel-size, "
            "lower --max-num-batched-tokens, start fewer workers, or end other programs on the GPU"
        )
    log.info("KV cache of %.2f GiB (%s)", num_bytes / _GIB, shown)
    return num_bytes


def _profile(loaded: LoadedModel, config: EngineConfig, memory: CudaMemory) -> MemoryUse:
    """Captures the graphs and runs the largest step behind another one, over a small pool that is released again."""
    num_bytes = _PROFILE_BLOCKS * block_bytes(loaded)
    pool = KVPool(loaded, msgspec.structs.replace(config, kv_cache_bytes=num_bytes))
    runner = ModelRunner(loaded, pool, GraphLimits.of(config))
    memory.reset()  # not counted: what it takes to fuse the layers
    runner.warm_up()
    largest = largest_step(config, loaded.max_model_len, loaded.layout.block_size)
    before = runner.launch(largest)  # its logits are kept until it is read
    runner.run(largest)
    before.result()
    peak = memory.peak()
    pool.close()
    del runner, pool, before
    memory.reset()
    free, total = memory.free_and_total()
    return MemoryUse(free, total, memory.reserved(), peak)


def _advice(loaded: LoadedModel, config: EngineConfig, on_gpu: bool) -> str:
    needed = -(-loaded.max_model_len // loaded.layout.block_size) * block_bytes(loaded) / _GIB
    if config.kv_cache_bytes or not on_gpu:
        return f"raise --kv-cache-gib to at least {needed:.2f}"
    return (
        "raise --gpu-memory-fraction or --tensor-parallel-size, or start fewer workers on a GPU "
        f"({needed:.2f} GiB are needed)"
    )
