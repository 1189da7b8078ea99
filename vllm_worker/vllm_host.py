"""Loads vLLM's engine: its settings, the layout of its KV, and what the worker's shell needs of it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from vllm import envs as vllm_envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tandem.engine.loading.model_identity import dummy_identity, folder_identity, hub_identity
from tandem.kv_transfer.connector import KVConnector
from tandem.kv_transfer.handshake import offered_connectors
from tandem.kv_transfer.ranks.fan_out import WorkerPools
from tandem.protocol.messages.transfer import KVLayout
from tandem.protocol.messaging import Network
from tandem.runtime.errors import ConfigError
from tandem.runtime.host import host_id
from tandem.runtime.processes.lifetime import WatchExit, watch_exit
from tandem.vllm_worker.engine.loras import MAX_LOADED_ADAPTERS, MAX_STEP_ADAPTERS, lora_modules, max_lora_rank
from tandem.vllm_worker.engine.parsed_args import parsed_args
from tandem.vllm_worker.engine.vllm_engine import VllmEngine
from tandem.vllm_worker.engine.vllm_media import VllmMedia
from tandem.vllm_worker.extensions.kv_memory import block_order
from tandem.vllm_worker.extensions.kv_ranks import AskRanks, RankFacts, RankKV, open_ranks
from tandem.vllm_worker.extensions.worker_extension import EXTENSION
from tandem.vllm_worker.load_turns import turn_to_load
from tandem.vllm_worker.scheduler.engine_orders import AddRequest, StepReport
from tandem.vllm_worker.versions import SUPPORTED_VERSIONS, block_version, installed_version
from tandem.vllm_worker.vllm_worker import LoadedVllm, OnFailed
from tandem.vllm_worker.vllm_worker_config import VllmEngineConfig, VllmWorkerConfig, batch_problem
from tandem.worker.remote_media import RemoteMedia

log = logging.getLogger(__name__)

ENGINE = f"vllm {installed_version()}"
_DEFAULT_CPU_CACHE_BYTES = 1 << 30
_CPU_BLOCK_SIZE = 32
"""vLLM's attention on the CPU takes multiples of 32."""
_CONNECTORS = ("ipc", "nixl", "tcp")
"""Those that move strided blocks between processes without a group."""


def engine_arguments(config: VllmEngineConfig, max_lora_rank: int) -> EngineArgs:
    """Returns vLLM's settings. What is not here is as `vllm serve` has it. max_lora_rank: 0 without adapters.

    Raises ConfigError for an argument of the operator that vLLM's parser refuses.
    """
    from vllm.config import KVTransferConfig
    from vllm.config.kv_events import KVEventsConfig

    on_cpu = config.device == "cpu"
    more: dict[str, Any] = {
        "load_format": config.load_format,
        "quantization": None if config.quantization == "auto" else config.quantization,
    }
    if on_cpu:
        more |= {"enforce_eager": True, "async_scheduling": False}
    if config.speculative_config:
        more["speculative_config"] = msgspec.json.decode(config.speculative_config)
    if max_lora_rank:
        more |= {"enable_lora": True, "max_lora_rank": max_lora_rank}
        more |= {"max_loras": MAX_STEP_ADAPTERS, "max_cpu_loras": MAX_LOADED_ADAPTERS}
    more |= parsed_args(config.engine_args)
    return EngineArgs(
        model=config.model,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        max_model_len=config.max_model_len or None,
        max_num_seqs=config.max_num_seqs or None,
        max_num_batched_tokens=config.max_num_batched_tokens or None,
        block_size=config.block_size or (_CPU_BLOCK_SIZE if on_cpu else None),
        kv_cache_memory_bytes=config.kv_cache_bytes or (_DEFAULT_CPU_CACHE_BYTES if on_cpu else None),
        gpu_memory_utilization=config.gpu_memory_fraction,
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend="uni" if config.tensor_parallel_size == 1 else "mp",
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


def kv_layout(config: VllmEngineConfig, vllm_config: VllmConfig, prefix_block_size: int, rank: RankFacts) -> KVLayout:
    """Returns what must be the same in both workers of a pair.

    prefix_block_size: tokens of a block of vLLM's prefix cache. rank: any of this worker's.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    is_dummy, folder = vllm_config.load_config.load_format == "dummy", Path(config.model)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if folder.is_dir():
        identity = folder_identity(folder, with_weights=not is_dummy, with_code=config.trust_remote_code)
    elif commit:
        identity = hub_identity(config.model, commit)
    else:
        raise ConfigError(f"the commit of {config.model} is not known; download the model into a folder")
    if is_dummy:
        identity = dummy_identity(identity, f"{ENGINE} {config.device}")
    num_ranks, version = parallel.tensor_parallel_size, block_version(config.device)
    arguments = "".join(f" {each}" for each in sorted(config.engine_args))
    ranks = f" on {num_ranks} ranks" if num_ranks > 1 else ""
    return KVLayout(
        model_id=f"{identity} {model.dtype}",
        dtype=rank.dtype,
        # Of the rows that move. A block may be of any group of layers, so heads and their sizes say nothing of it.
        num_layers=rank.num_regions,
        num_kv_heads=1,
        head_dim=rank.block_bytes // rank.num_regions,
        block_size=prefix_block_size,
        tensor_parallel_size=num_ranks,
        # The order depends on the version, the attention backend and settings, and the operator's arguments may change
        # what the KV means.
        engine=f"vllm {block_order(vllm_config)} of {version}{arguments}: {rank.groups}{ranks}",
        immovable=rank.immovable,
        numerics=msgspec.structs.replace(
            rank.machine,
            engine=ENGINE,
            kv_dtype=rank.dtype,
            quantization=model.quantization or "",
            kernels=f"vLLM's, blocks of {vllm_config.cache_config.block_size}",
            num_threads=config.num_threads if config.device == "cpu" else 0,
            num_ranks=num_ranks,
            problem=batch_problem(config.device, bool(vllm_envs.VLLM_BATCH_INVARIANT)),
        ),
    )


@dataclass(frozen=True)
class VllmHost:
    """Implements `handover.kv_host.KVHost`."""

    pools: WorkerPools
    pids: list[int]
    block_bytes: int
    connectors: Mapping[str, KVConnector]
    device: str
    host_id: str = field(default_factory=host_id)
    watch_exit: WatchExit = watch_exit


async def load_vllm(
    config: VllmWorkerConfig, on_report: Callable[[StepReport], None], on_failed: OnFailed
) -> LoadedVllm:
    """Loads the model. Raises ConfigError for settings that cannot be kept, and what `VllmEngine.start` raises."""
    if (version := installed_version()) not in SUPPORTED_VERSIONS:  # a restarted worker may find another one
        raise ConfigError(f"vLLM {version} is installed, but workers need {' or '.join(SUPPORTED_VERSIONS)}")
    problem = batch_problem(config.engine.device, bool(vllm_envs.VLLM_BATCH_INVARIANT))
    if config.exact and problem:
        raise ConfigError(f"--exact: answers would not be exact: {problem}; leave out --exact")
    keys = config.network.keys_of("worker")
    connectors = offered_connectors(config.kv_connector, config.engine.device, keys is not None, _CONNECTORS)
    if config.host != "127.0.0.1" and not any(each.crosses_hosts for each in connectors.values()):
        log.warning(
            "workers on other hosts get no KV from this one: install NIXL (pip install nixl) for %s", sys.executable
        )
    modules = lora_modules(config.engine) if config.adapters else {}
    max_rank = max_lora_rank(config.adapters, modules)

    def open_kv(vllm_config: VllmConfig, prefix_block_size: int, ask: AskRanks) -> RankKV:
        if (device := vllm_config.device_config.device_type) != config.engine.device:
            raise ConfigError(f"this vLLM computes on {device}, and the workers' device is {config.engine.device}")
        return open_ranks(ask, partial(kv_layout, config.engine, vllm_config, prefix_block_size), config.host, keys)

    engine = VllmEngine(engine_arguments(config.engine, max_rank), open_kv, on_report, on_failed)
    async with turn_to_load(config.load_turns):
        await asyncio.wrap_future(engine.start())
    if config.adapters and config.engine.device == "cpu":
        log.warning("on CPUs, vLLM computes wrong tokens in steps with and without an adapter (docs/vllm.md)")
    pids, block_bytes, pools = engine.kv
    if pools.layout.immovable and config.role != "any":
        reason = f"the KV of this model does not move between workers: {pools.layout.immovable}"
        raise ConfigError(f"{reason}; let each worker decode what it computes: --workers N")

    def open_media(network: Network, add: Callable[[AddRequest], None]) -> VllmMedia:
        remote = RemoteMedia(network, config.max_fetched_media_bytes)
        return VllmMedia(engine.vllm_config, engine.facts.max_item_tokens, remote, add)

    host = VllmHost(pools, pids, block_bytes, connectors, config.engine.device)
    return LoadedVllm(ENGINE, os.getpid(), engine, host, engine.facts, open_media, modules, max_rank)
