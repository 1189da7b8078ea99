"""Arguments of vLLM's engine that the operator gives as `--engine-arg NAME=VALUE`. Pure.

The launcher refuses those that Tandem decides itself. A worker has vLLM's own parser check the others before it loads
the model (`vllm_worker.engine.parsed_args`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.runtime.errors import ConfigError

FLAGS = {
    "block_size": "--block-size",
    "data_parallel_size": "--workers, or --prefill and --decode",
    "device_memory_utilization": "--gpu-memory-fraction",
    "dtype": "--dtype",
    "enable_lora": "--lora",
    "generation_config": "--generation-config",
    "gpu_memory_utilization": "--gpu-memory-fraction",
    "kv_cache_memory_bytes": "--kv-cache-gib",
    "log_level": "--log-level",
    "max_logprobs": "--max-logprobs",
    "max_model_len": "--max-model-len",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_queued_reqs": "--max-waiting-requests",
    "max_num_seqs": "--max-num-seqs",
    "model": "--model",
    "otlp_traces_endpoint": "--otlp-endpoint",
    "reasoning_parser": "--reasoning-parser",
    "served_model_name": "--served-model-name",
    "shutdown_timeout": "--drain-timeout-s",
    "spec_method": "--speculative-config",
    "spec_model": "--speculative-config",
    "spec_tokens": "--speculative-config",
    "speculative_config": "--speculative-config",
    "tensor_parallel_size": "--tensor-parallel-size",
    "trust_remote_code": "--trust-remote-code",
}
"""Flags of Tandem in place of arguments of vLLM."""

_ADAPTERS = "Tandem loads adapters, and sets their number and rank from --lora"
_API = "clients speak to Tandem's proxies, not to vLLM's server"
_CONNECTOR = "Tandem's own connector moves KV between workers"
_COPIES = "Tandem starts, routes to and restarts the copies of the model: use --workers, or --prefill and --decode"
_EVENTS = "Tandem's routing reads these events"
_GRAMMARS = "Tandem compiles and follows grammars in processes of their own"
_MEDIA = "Tandem's proxies decode and process images and videos, as the model's preprocessor_config.json says"
_ONE_HOST = "all ranks of a worker are on one host, and the launcher gives them their GPUs"
_PIPELINE = (
    "KV moves between ranks that hold all layers and all tokens of their heads: use --tensor-parallel-size, or more "
    "workers"
)
_SAME_FILES = (
    "proxies read the tokeniser and the configuration from --model: download what you need into a folder, and give that"
)
_SCHEDULER = "Tandem orders requests by priority through vLLM's own scheduler, and shares steps among clients"
_SLEEP = "peers map the memory of a worker's KV, so it must stay where it is"
_TASK = "Tandem serves text generation with vLLM"
_TIERS = "there are no tiers below the KV cache of a worker with vLLM"
_WORKER = "Tandem extends vLLM's worker class and runs the engine in the worker's process"

OWNED = {
    "allowed_local_media_path": _API,
    "allowed_media_domains": _API,
    "code_revision": _SAME_FILES,
    "data_parallel_address": _COPIES,
    "data_parallel_backend": _COPIES,
    "data_parallel_external_lb": _COPIES,
    "data_parallel_hybrid_lb": _COPIES,
    "data_parallel_multi_port_external_lb": _COPIES,
    "data_parallel_rank": _COPIES,
    "data_parallel_rpc_port": _COPIES,
    "data_parallel_size_local": _COPIES,
    "data_parallel_start_rank": _COPIES,
    "decode_context_parallel_size": _PIPELINE,
    "default_mm_loras": _ADAPTERS,
    "device_ids": _ONE_HOST,
    "distributed_executor_backend": _WORKER,
    "ec_manager_config": _MEDIA,
    "ec_transfer_config": _CONNECTOR,
    "elastic_ep_max_dp_size": _COPIES,
    "enable_cumem_allocator": _SLEEP,
    "enable_elastic_ep": _COPIES,
    "enable_fault_tolerance": _COPIES,
    "enable_mm_embeds": _MEDIA,
    "enable_prompt_embeds": _API,
    "enable_sleep_mode": _SLEEP,
    "fault_tolerance_config": _COPIES,
    "hf_config_path": _SAME_FILES,
    "hf_token": "it would stand in files and reports: set the environment variable HF_TOKEN",
    "interleave_mm_strings": _MEDIA,
    "io_processor_plugin": _API,
    "kv_events_config": _EVENTS,
    "kv_offloading_backend": _TIERS,
    "kv_offloading_size": _TIERS,
    "kv_transfer_config": _CONNECTOR,
    "master_addr": _ONE_HOST,
    "master_port": _ONE_HOST,
    "max_cpu_loras": _ADAPTERS,
    "max_lora_rank": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "max_num_queued_tokens": _API,
    "media_io_kwargs": _MEDIA,
    "mm_device_do_normalize": _MEDIA,
    "mm_ipc_gpu_memory_gb": _MEDIA,
    "mm_processor_cache_gb": _MEDIA,
    "mm_processor_cache_type": _MEDIA,
    "mm_processor_device": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "mm_shm_cache_max_object_size_mb": _MEDIA,
    "mm_tensor_ipc": _MEDIA,
    "model_weights": _SAME_FILES,
    "nnodes": _ONE_HOST,
    "node_rank": _ONE_HOST,
    "override_generation_config": "give the fields in requests, or change the model's generation_config.json",
    "pipeline_parallel_size": _PIPELINE,
    "pooler_config": _TASK,
    "prefill_context_parallel_size": _PIPELINE,
    "reasoning_config": _GRAMMARS,
    "reasoning_parser_plugin": _API,
    "renderer_num_workers": _API,
    "revision": _SAME_FILES,
    "runner": _TASK,
    "convert": _TASK,
    "scheduler_cls": _SCHEDULER,
    "scheduling_policy": _SCHEDULER,
    "structured_outputs_config": _GRAMMARS,
    "tokenizer": _SAME_FILES,
    "tokenizer_mode": _SAME_FILES,
    "tokenizer_revision": _SAME_FILES,
    "worker_cls": _WORKER,
    "worker_extension_cls": _WORKER,
}
"""Why other arguments of vLLM cannot be given."""


def split_argument(given: str) -> tuple[str, str, str]:
    """Returns the argument's name as vLLM's code spells it, the key within it (`.KEY.KEY`, or empty), and the value.

    Raises ConfigError for what is not NAME=VALUE.
    """
    path, equals, value = given.partition("=")
    name, dot, key = path.strip().removeprefix("--").partition(".")
    if not (name and equals):
        raise ConfigError(f"engine_arg: {given!r} is not NAME=VALUE")
    return name.replace("-", "_"), dot + key, value


def check_engine_args(given: Sequence[str]) -> None:
    """Raises ConfigError for an argument that Tandem decides, with the reason, and for one that is given twice."""
    paths = set[str]()
    for each in given:
        name, key, _ = split_argument(each)
        if name in FLAGS:
            raise ConfigError(f"engine_arg: {name} is a setting of Tandem: use {FLAGS[name]}")
        if name in OWNED:
            raise ConfigError(f"engine_arg: {name} cannot be given: {OWNED[name]}")
        if name + key in paths:
            raise ConfigError(f"engine_arg: {name}{key} is given twice")
        paths.add(name + key)


def check_speculative_config(given: str) -> None:
    """Raises ConfigError for what is not an object in JSON. vLLM checks what is in it."""
    try:
        if given:
            msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"speculative_config: {given!r} is not an object in JSON, such as "
            f'\'{{"method": "ngram", "num_speculative_tokens": 4}}\': {error}'
        ) from error
