"""Random weights from a config alone: complete, equal in every process, and distributed as in a new model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedConfig

from tandem.engine.attention.interface import ATTENTION_NAME
from tandem.engine.engine_config import EngineConfig
from tandem.engine.loading.model_loader import load_model

COMMON = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize("config", [LlamaConfig(**COMMON), Gemma2Config(**COMMON)], ids=["llama", "gemma2, tied"])
def test_dummy_weights(config: PreTrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)  # no weights
    engine = EngineConfig(str(tmp_path), dtype="bfloat16", load_format="dummy", device="cpu")
    rng_state = torch.get_rng_state()
    model, again = load_model(engine).model, load_model(engine).model
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert model.config._attn_implementation == ATTENTION_NAME
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for (name, tensor), (_, other) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(tensor, other), name
        assert tensor.float().std() == pytest.approx(float(fresh.state_dict()[name].float().std()), rel=0.2, abs=1e-3)
    for (name, buffer), (_, other) in zip(model.named_buffers(), fresh.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
