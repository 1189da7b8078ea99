"""vLLM's settings, and its engine as `worker.kv_traffic` sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from vllm import envs as vllm_envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tandem.engine.loading.model_identity import dummy_identity, folder_identity, hub_identity
from tandem.kv_transfer.connector import KVConnector
from tandem.kv_transfer.ranks.fan_out import FanOutPools
from tandem.protocol.messages.transfer import KVLayout
from tandem.runtime.errors import ConfigError
from tandem.runtime.host import host_id
from tandem.runtime.processes.exits import WatchExit, watch_exit
from tandem.vllm_worker.engine.loras import MAX_LOADED_ADAPTERS, MAX_STEP_ADAPTERS
from tandem.vllm_worker.extensions.kv_ranks import RankFacts
from tandem.vllm_worker.extensions.worker_extension import EXTENSION
from tandem.vllm_worker.vllm_worker_config import VLLM_VERSION, VllmEngineConfig, batch_problem

ENGINE = f"vllm {VLLM_VERSION}"
_DEFAULT_CPU_CACHE_BYTES = 1 << 30
_CPU_BLOCK_SIZE = 32
"""vLLM's attention on the CPU takes multiples of 32."""


def engine_arguments(config: VllmEngineConfig, max_lora_rank: int) -> EngineArgs:
    """Returns vLLM's settings. What is not here is as vLLM has it. max_lora_rank: 0 without adapters."""
    from vllm.config import KVTransferConfig
    from vllm.config.kv_events import KVEventsConfig

    on_cpu = config.device == "cpu"
    more: dict[str, Any] = {"enforce_eager": True, "async_scheduling": False} if on_cpu else {}
    if max_lora_rank:
        more |= {"enable_lora": True, "max_lora_rank": max_lora_rank}
        more |= {"max_loras": MAX_STEP_ADAPTERS, "max_cpu_loras": MAX_LOADED_ADAPTERS}
    return EngineArgs(
        model=config.model,
        dtype=config.dtype,
        load_format=config.load_format,
        quantization=None if config.quantization == "auto" else config.quantization,
        trust_remote_code=config.trust_remote_code,
        max_model_len=config.max_model_len or None,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or None,
        block_size=config.block_size or (_CPU_BLOCK_SIZE if on_cpu else None),
        kv_cache_memory_bytes=config.kv_cache_bytes or (_DEFAULT_CPU_CACHE_BYTES if on_cpu else None),
        gpu_memory_utilization=config.gpu_memory_fraction,
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend="uni" if config.tensor_parallel_size == 1 else "mp",
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy="priority",
        generation_config="vllm",  # the proxy applies the model's own defaults
        worker_extension_cls=EXTENSION,
        mm_processor_cache_gb=0.0,  # of images that the proxy processes
        mm_device_do_normalize=False,  # the proxy does
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="TandemConnector",
            kv_connector_module_path="tandem.vllm_worker.extensions.tandem_connector",
            kv_role="kv_both",
        ),
        **more,
    )


def kv_layout(config: VllmEngineConfig, vllm_config: VllmConfig, rank: RankFacts) -> KVLayout:
    """Returns what must be the same in both workers of a pair. rank: any of this worker's."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    is_dummy, folder = config.load_format == "dummy", Path(config.model)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if folder.is_dir():
        identity = folder_identity(folder, with_weights=not is_dummy, with_code=config.trust_remote_code)
    elif commit:
        identity = hub_identity(config.model, commit)
    else:
        raise ConfigError(f"the commit of {config.model} is not known; download the model into a folder")
    if is_dummy:
        identity = dummy_identity(identity, f"{ENGINE} {config.device}")
    num_heads, size = model.get_num_kv_heads(parallel), vllm_config.cache_config.block_size
    num_ranks, order = parallel.tensor_parallel_size, vllm_config.cache_config.get_resolved_kv_cache_layout().name
    return KVLayout(
        model_id=f"{identity} {model.dtype}",
        dtype=rank.dtype,
        num_layers=rank.num_layers,
        num_kv_heads=num_heads,
        head_dim=model.get_head_size(),
        block_size=size,
        tensor_parallel_size=num_ranks,
        # How vLLM orders layers, blocks, heads and tokens in memory depends on the attention backend and on settings.
        engine=f"{ENGINE} {order}" + (f" on {num_ranks} ranks" if num_ranks > 1 else ""),
        numerics=msgspec.structs.replace(
            rank.machine,
            engine=ENGINE,
            kv_dtype=rank.dtype,
            quantization=model.quantization or "",
            kernels=f"vLLM's, blocks of {size}",
            num_threads=config.num_threads if config.device == "cpu" else 0,
            num_ranks=num_ranks,
            problem=batch_problem(config.device, bool(vllm_envs.VLLM_BATCH_INVARIANT)),
        ),
    )


@dataclass(frozen=True)
class VllmHost:
    """Implements `worker.kv_interfaces.KVHost`."""

    pools: FanOutPools
    pids: list[int]
    block_bytes: int
    connectors: Mapping[str, KVConnector]
    device: str
    host_id: str = field(default_factory=host_id)
    watch_exit: WatchExit = watch_exit
