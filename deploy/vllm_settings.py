"""Settings that have no meaning, or fewer values, for workers with vLLM's engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.runtime.errors import ConfigError

_NO_TIERS = "vLLM's KV cache has no tiers below it"
_ONE_SIZE = "workers with vLLM's engine have one size; use --tensor-parallel-size"
VALUES_WITH_VLLM: dict[str, tuple[tuple[object, ...], str]] = {
    "prefill_tensor_parallel_size": ((0,), _ONE_SIZE),
    "decode_tensor_parallel_size": ((0,), _ONE_SIZE),
    "quantization": (("auto", "fp8"), "vLLM quantises to fp8, or takes a checkpoint that is quantised already"),
    "kv_cache_dtype": (("auto",), "KV moves between vLLM workers in the model's data type only"),
    "kv_connector": (("auto", "ipc", "tcp", "nixl"), "KV moves between vLLM workers over ipc, tcp or nixl"),
    "kv_host_gib": ((0,), _NO_TIERS),
    "kv_disk_dir": (("",), _NO_TIERS),
    "kv_disk_gib": ((0,), _NO_TIERS),
    "kv_store": (("",), _NO_TIERS),
}
"""Values with --engine vllm and why there are no others, by setting."""


def check_settings_of_vllm(given: Mapping[str, Any]) -> None:
    """Checks the settings that the operator has given. Raises ConfigError, in one line that names the setting."""
    for key, (values, reason) in VALUES_WITH_VLLM.items():
        if key in given and given[key] not in values:
            raise ConfigError(f"{key}: {given[key]} cannot be used with --engine vllm: {reason}")
