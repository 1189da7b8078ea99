"""How vLLM reads the settings of a worker. Runs in vLLM's interpreter, and loads no model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.engine import arg_utils

from tandem.runtime.errors import ConfigError
from tandem.vllm_worker.engine.parsed_args import parsed_args
from tandem.vllm_worker.engine.vllm_engine import vllm_config_of
from tandem.vllm_worker.vllm_host import engine_arguments
from tandem.vllm_worker.vllm_worker_config import VllmEngineConfig

GIB = 1 << 30


class Device:
    """vLLM's platform as far as its defaults for steps ask for it."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self._name, self._num_bytes = name, num_bytes

    def get_device_name(self) -> str:
        return self._name

    def get_device_total_memory(self) -> int:
        return self._num_bytes

    def is_tpu(self) -> bool:
        return False

    def is_cpu(self) -> bool:
        return False


@contextmanager
def steps_for(device: Device) -> Iterator[None]:
    """Lets vLLM choose the size of steps for a GPU; all else follows the CPU."""
    choose = arg_utils.EngineArgs.get_batch_defaults

    def chosen(world_size: int) -> Any:
        platform, arg_utils.current_platform = arg_utils.current_platform, device
        try:
            return choose(world_size)
        finally:
            arg_utils.current_platform = platform

    arg_utils.EngineArgs.get_batch_defaults = staticmethod(chosen)
    try:
        yield
    finally:
        arg_utils.EngineArgs.get_batch_defaults = choose


def step_sizes(model: str, **settings: Any) -> list[int]:
    config = vllm_config_of(engine_arguments(VllmEngineConfig(model, **settings), 0)).scheduler_config
    return [config.max_num_batched_tokens, config.max_num_seqs]


def steps(model: str) -> dict[str, list[int]]:
    found = {"cpu": step_sizes(model)}
    for name, device in (("h200", Device("NVIDIA H200", 141 * GIB)), ("l4", Device("NVIDIA L4", 24 * GIB))):
        with steps_for(device):
            found[name] = step_sizes(model)
            found[f"{name}, given"] = step_sizes(model, max_num_batched_tokens=640, max_num_seqs=9)
    return found


def refusal(given: list[str]) -> str:
    try:
        parsed_args(given)
    except ConfigError as error:
        return error.message
    return ""


def applied(model: str) -> dict[str, Any]:
    """What arguments of all kinds become in vLLM's configuration."""
    given = [
        "enable-prefix-caching=false",
        'hf_overrides={"rope_theta": 4321.0}',
        "cudagraph_capture_sizes=[1, 2, 4]",
        "watermark=0.05",
        "compilation_config.mode=0",
        "load_format=dummy",
        "max_num_active_seqs=20",
    ]
    config = vllm_config_of(engine_arguments(VllmEngineConfig(model, engine_args=given), 0))
    scheduler = config.scheduler_config
    return {
        "prefix caching": config.cache_config.enable_prefix_caching,
        "rope_theta": config.model_config.hf_config.rope_theta,
        "watermark": scheduler.watermark,
        "load_format": config.load_config.load_format,
        "sequences": scheduler.max_num_active_seqs,
        "sizes": parsed_args(given)["cudagraph_capture_sizes"],
    }


def refused_model(model: str) -> str:
    try:
        vllm_config_of(engine_arguments(VllmEngineConfig(model), 0))
    except ConfigError as error:
        return error.message
    return ""


def main(model: str, encoder: str, answer: str) -> None:
    found = {
        "steps": steps(model),
        "applied": applied(model),
        "encoder": refused_model(encoder),
        "refusals": {
            each: refusal([each])
            for each in (
                "enable_expert_paralel=true",
                "kv_cache_dtype=int3",
                "watermark=much",
                "enable_expert_parallel=maybe",
                "cudagraph_capture_sizes=[1",
            )
        },
    }
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
