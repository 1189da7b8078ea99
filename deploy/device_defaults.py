"""Settings whose defaults depend on whether the workers run on GPUs, and how many ranks share each GPU. Pure."""

from __future__ import annotations

import msgspec

from tandem.deploy.cluster_config import ClusterConfig
from tandem.runtime.settings import with_values

_CPU = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_waiting_requests": 1024}
_GPU = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_waiting_requests": 4096}


def with_device_defaults(config: ClusterConfig, on_gpus: bool) -> ClusterConfig:
    """Returns the configuration with values for the settings that are 0 and mean a default by device."""
    defaults = dict(_GPU if on_gpus else _CPU)
    if config.engine == "vllm":
        del defaults["max_num_batched_tokens"]  # depends on the model's context, which the worker knows
    given = msgspec.structs.asdict(config.engine_settings) | msgspec.structs.asdict(config.admission)
    return with_values(config, {key: given[key] or value for key, value in defaults.items()})


def ranks_per_gpu(config: ClusterConfig, num_gpus: int) -> int:
    """Returns how many ranks of the workers at the start share the most used GPU. num_gpus: at least 1."""
    num_ranks = sum(count * config.num_ranks(role) for role, count in config.counts.items())
    return max(1, -(-num_ranks // num_gpus))
