"""vLLM's engine as `worker.kv_traffic` sees it: its blocks, and the paths to and from the pools of other workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tandem.engine.loading.model_identity import dummy_identity, folder_identity, hub_identity
from tandem.kv_transfer.checksums import OnChecksums
from tandem.kv_transfer.connector import DataNetwork, KVConnector, KVReceiver, KVSender, OnDone, Peer
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.registry import load_connector
from tandem.protocol.messages.transfer import KVLayout
from tandem.runtime.errors import ConfigError, KVTransferFailed
from tandem.runtime.host import host_id
from tandem.runtime.processes.exits import WatchExit, watch_exit
from tandem.vllm_worker.resumed_sequences import EXTENSION
from tandem.vllm_worker.vllm_lora import MAX_LOADED_ADAPTERS
from tandem.vllm_worker.vllm_worker_config import VLLM_VERSION, VllmEngineConfig

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
        more |= {"enable_lora": True, "max_lora_rank": max_lora_rank, "max_cpu_loras": MAX_LOADED_ADAPTERS}
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
            kv_connector_module_path="tandem.vllm_worker.tandem_connector",
            kv_role="kv_both",
        ),
        **more,
    )


def kv_layout(config: VllmEngineConfig, vllm_config: VllmConfig, kv_caches: Sequence[torch.Tensor]) -> KVLayout:
    """Returns what must be the same in both workers of a pair. kv_caches: one for each layer."""
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
    return KVLayout(
        model_id=f"{identity} {model.dtype}",
        dtype=str(kv_caches[0].dtype).removeprefix("torch."),
        num_layers=len(kv_caches),
        num_kv_heads=num_heads,
        head_dim=model.get_head_size(),
        block_size=size,
        tensor_parallel_size=parallel.tensor_parallel_size,
        # How vLLM orders layers, blocks, heads and tokens in memory depends on the attention backend and on settings.
        engine=f"{ENGINE} {vllm_config.cache_config.get_resolved_kv_cache_layout().name}",
    )


@dataclass(frozen=True)
class VllmPools:
    """The blocks of one rank, rows of bytes as `kv_memory.block_rows` returns them."""

    layout: KVLayout
    rows: torch.Tensor
    network: DataNetwork
    checksum_thread: JobThread = field(default_factory=lambda: JobThread("checksums", keeps_going=True))

    def open_sender(self, connector: str, pair_id: str, addresses: list[list[bytes]], on_ready: OnDone) -> KVSender:
        if len(addresses) != 1 or len(addresses[0]) != 1:
            raise KVTransferFailed("the peer has more than one rank")
        num_layers, row_bytes = self.rows.shape[1:]
        by_layer = self.rows.stride(1) > self.rows.stride(0)

        def view(pool: torch.Tensor) -> torch.Tensor:
            if by_layer:
                return pool.view(num_layers, -1, row_bytes).transpose(0, 1)
            return pool.view(-1, num_layers, row_bytes)

        peer = Peer(pair_id, addresses[0][0], view)
        return load_connector(connector).open_sender(peer, self.rows, self.network, on_ready)

    def open_receiver(
        self,
        connector: str,
        pair_id: str,
        num_senders: int,
        on_addresses: Callable[[list[list[bytes]] | KVTransferFailed], None],
    ) -> KVReceiver:
        if num_senders != 1:
            raise KVTransferFailed("the peer has more than one rank")

        def on_address(address: bytes | KVTransferFailed) -> None:
            on_addresses(address if isinstance(address, KVTransferFailed) else [[address]])

        return load_connector(connector).open_receiver(pair_id, self.rows, self.network, on_address)

    def checksums(self, block_ids: Sequence[int], on_checksums: OnChecksums) -> None:
        ids = list(block_ids)
        self.checksum_thread.submit(
            lambda: [xxhash.xxh3_64_intdigest(self.rows[each].contiguous().cpu().numpy().data) for each in ids],
            on_checksums,
        )


@dataclass(frozen=True)
class VllmHost:
    """Implements `worker.kv_interfaces.KVHost`."""

    pools: VllmPools
    connectors: Mapping[str, KVConnector]
    device: str
    pids: list[int] = field(default_factory=lambda: [os.getpid()])
    host_id: str = field(default_factory=host_id)
    watch_exit: WatchExit = watch_exit

    @property
    def block_bytes(self) -> int:
        return self.pools.rows[0].numel()
