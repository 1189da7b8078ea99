"""Pooled hidden states, in chunks and mixed batches, equal those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.sampling import Pooling, SamplingParams


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_equal_transformers(pooling: Pooling, tmp_path: Path) -> None:
    torch.manual_seed(2)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, bos_token_id=None,
            eos_token_id=None, pad_token_id=0,
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", block_size=8, kv_cache_bytes=1 << 22)
    loaded = load_model(config)
    runner = ModelRunner(loaded, pool := KVPool(loaded, config))
    rng = random.Random(3)
    prompt, other = ([rng.randrange(320) for _ in range(length)] for length in (45, 20))
    pooled = []
    for start, end in ((0, 20), (20, 45)):
        wants = pooling == "mean" or end == 45
        item = BatchItem(prompt[start:end], start, list(range(10)), pooling=pooling if wants else None)
        beside = BatchItem(other, 0, list(range(20, 30)), [Sample(SamplingParams(temperature=0.0))])
        first, second = runner.run(Batch([beside, item]))
        assert first.pooled is None and second.tokens == []
        if second.pooled is not None:
            pooled.append(np.frombuffer(second.pooled).reshape(-1, 64).sum(0))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
        [token_id] = model(torch.tensor([other])).logits[0, -1:].argmax(-1).tolist()
    wanted = hidden[-1] if pooling == "last" else hidden.sum(0)
    np.testing.assert_allclose(sum(pooled), wanted.numpy(), rtol=1e-4, atol=1e-4)
    assert first.tokens[0].token_id == token_id
    pool.close()
