"""Memory on a GPU: the measured KV cache leaves room for the largest step within the rank's share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_cache_size import fit_kv_cache, largest_step
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")

FRACTION = 0.3  # other tests of this process hold memory too


def test_the_measured_cache_and_the_largest_step_fit_into_the_share(tmp_path: Path) -> None:
    LlamaConfig(vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8).save_pretrained(
        tmp_path
    )
    config = EngineConfig(
        str(tmp_path), "bfloat16", device="cuda", load_format="dummy", max_num_seqs=256, max_num_batched_tokens=2048,
        gpu_memory_fraction=FRACTION,
    )  # fmt: skip
    loaded, sized = fit_kv_cache(load_model(config), config)
    assert sized.kv_cache_bytes > 1 << 30
    pool = KVPool(loaded, sized)
    runner = ModelRunner(loaded, pool)
    runner.warm_up()
    runner.run(largest_step(config, loaded.max_model_len, loaded.layout.block_size))
    _, total = torch.cuda.mem_get_info()
    assert torch.cuda.max_memory_reserved() <= FRACTION * total
