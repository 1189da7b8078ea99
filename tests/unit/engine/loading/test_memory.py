"""GPU memory that a checkpoint's weights take once layers are fused, by the rules of CUDA's caching allocator."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from tandem.engine.cuda.fused_layers import CUDALayerOperators
from tandem.engine.engine_config import EngineConfig
from tandem.engine.layers.fused_layer import FusedLayer
from tandem.engine.layers.fusing import fuse_layers
from tandem.engine.loading import model_loader, model_probe
from tests.support.caching_allocator import MIB, CachingAllocator, sized_gpu

NUM_LAYERS = 4  # a larger file cannot be mapped everywhere
LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=NUM_LAYERS, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip
QWEN3_32B = Qwen3Config(
    vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=NUM_LAYERS, num_attention_heads=64,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip


def save_without_values(config: Any, folder: Path) -> None:
    """Saves a checkpoint whose file has the size of its weights, but takes no room on the disk."""
    config.save_pretrained(folder)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    header, end = {}, 0
    for name, weight in weights.items():
        begin, end = end, end + weight.nbytes
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)


@pytest.mark.parametrize("config", [LLAMA_8B, QWEN3_32B], ids=["Llama-3.1-8B", "Qwen3-32B"])
def test_fused_layers_take_no_more_memory_than_their_weights(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_without_values(config, tmp_path)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the double sees its own thread
    monkeypatch.setattr(model_loader, "_resolve_device", lambda config: torch.device("cuda", 0))
    monkeypatch.setattr(model_loader, "_model_id", lambda *_: "model")  # reads the file
    monkeypatch.setattr(model_probe, "_window_of", lambda *_: 0)  # reads masks
    with sized_gpu(80 << 30, monkeypatch) as memory:
        loaded = model_loader.load_model(EngineConfig(str(tmp_path), "bfloat16"))
        num_bytes = sum(each.nbytes for each in loaded.model.parameters())
        assert memory.used >= num_bytes > 1 << 30, "the weights are on the GPU"
        fuse_layers(loaded.model, CUDALayerOperators())
        torch.cuda.empty_cache()
        assert all(isinstance(layer, FusedLayer) for layer in loaded.model.base_model.layers)
        assert num_bytes <= memory.used < 1.01 * num_bytes
        assert memory.reserved < 1.03 * memory.used


def test_the_allocator_reserves_segments_as_torch_does() -> None:
    memory = CachingAllocator()
    blocks = [memory.allocate(size) for size in (100, 3 * MIB, 3 * MIB, 15 * MIB + 1)]
    assert memory.used == 512 + (3 + 3 + 16) * MIB, "less than 1 MiB more than the last one is not split off"
    assert memory.reserved == (2 + 20 + 16) * MIB
    memory.release(blocks[1])
    memory.allocate(4 * MIB)  # behind the others: the hole is too small
    memory.allocate(2 * MIB)  # in the hole, the smallest that is large enough
    memory.empty_cache()
    assert memory.reserved == (2 + 20 + 16) * MIB
    memory.release(blocks[3])
    memory.empty_cache()
    assert memory.reserved == (2 + 20) * MIB
