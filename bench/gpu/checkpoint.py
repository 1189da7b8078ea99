"""A saved checkpoint on a GPU: how long it takes to load, and the memory that it holds beside what it uses.

    python -m bench.gpu.checkpoint [--device cpu] [--quick] [--json FILE]

Unlike `--load-format dummy`, which makes weights where they are used, it shows what the loader and the fused layers
leave behind in torch's allocator. Half of the layers of Llama 3.1 8B (or a tiny model), saved and loaded on the spot.
"""

from __future__ import annotations

import gc
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.gpu.engine import LLAMA_8B, TINY
from bench.gpu.part import Part
from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner

NUM_LAYERS = 16
MAX_EXCESS = 1.03
"""Reserved memory over used memory, once the layers are fused and unused memory is returned."""


def save(shape: dict[str, Any], folder: str, device: str) -> None:
    with torch.device(device):
        model: Any = LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="5GB")


def memory(device: str) -> tuple[float, float]:
    """Returns the GiB that torch's allocator holds for this process, and those of them that tensors use."""
    if device == "cpu":
        return 0.0, 0.0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() / 2**30, torch.cuda.memory_allocated() / 2**30


def main() -> None:
    part = Part("checkpoint", __doc__)
    is_cuda = part.device == "cuda"
    shape = LLAMA_8B | {"num_hidden_layers": NUM_LAYERS} if is_cuda else TINY
    with tempfile.TemporaryDirectory() as folder, part.case("a saved checkpoint takes what its weights take"):
        began = time.monotonic()
        save(shape, folder, part.device)
        part.add("saved, s", time.monotonic() - began)
        part.add("held before loading, GiB", memory(part.device))
        began = time.monotonic()
        config: Any = EngineConfig(folder, device=part.device, max_model_len=2048, kv_cache_bytes=1 << 28)  # type: ignore[arg-type]
        loaded = load_model(config)
        part.add("loaded, s", time.monotonic() - began)
        part.add("reserved and used after loading, GiB", memory(part.device))
        began = time.monotonic()
        runner = ModelRunner(loaded, KVPool(loaded, config), GraphLimits(256, 2048))
        part.add("fused, s", time.monotonic() - began)
        reserved, used = memory(part.device)
        part.add("reserved and used after fusing, GiB", (reserved, used))
        began = time.monotonic()
        runner.warm_up()
        part.add("warmed up with graphs, s", time.monotonic() - began)
        part.add("reserved and used after warming up, GiB", memory(part.device))
        if is_cuda:
            part.compare("memory of a saved checkpoint, GiB", reserved, used)
            assert reserved <= MAX_EXCESS * used, f"{reserved:.2f} GiB are reserved for {used:.2f} GiB"
    part.end()


if __name__ == "__main__":
    main()
