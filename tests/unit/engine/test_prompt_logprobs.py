"""Log-probabilities of prompt tokens, in chunks and mixed batches, equal those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from tandem.engine import model_head
from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.sampling import SamplingParams, TokenLogprobs

COMMON = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    model = (
        LlamaForCausalLM(LlamaConfig(**COMMON))
        if request.param == "llama"
        # Its head caps logits, which must not be lost.
        else Gemma2ForCausalLM(Gemma2Config(**COMMON, final_logit_softcapping=3.0, sliding_window=16))
    )
    path: Path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("rows_per_slice", [256, 7])
def test_prompt_logprobs_equal_transformers(folder: Path, rows_per_slice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_head, "_ROWS_PER_SLICE", rows_per_slice)
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", block_size=8, kv_cache_bytes=1 << 22)
    loaded = load_model(config)
    pool = KVPool(loaded, config)
    runner = ModelRunner(loaded, pool)
    rng = random.Random(3)
    prompt = [rng.randrange(320) for _ in range(45)]
    other = [rng.randrange(320) for _ in range(20)]
    greedy = Sample(SamplingParams(temperature=0.0, logprobs=2))
    reported: list[TokenLogprobs] = []
    for start, end in ((0, 20), (20, 21), (21, 45)):
        item = BatchItem(
            prompt[start:end],
            start,
            list(range(10)),
            [greedy, greedy] if end == 45 else [],
            3,
            prompt[start + 1 : end + 1],
        )
        beside = BatchItem(other, 0, list(range(20, 30)), [greedy])
        first, second = runner.run(Batch([beside, item]))
        assert first.prompt_logprobs == []
        reported += second.prompt_logprobs
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        [of_other] = model(torch.tensor([other])).logits[0, -1:].argmax(-1).tolist()
    assert first.tokens[0].token_id == of_other
    assert [token.token_id for token in second.tokens] == [int(logprobs[-1].argmax())] * 2
    assert len(reported) == 44
    for row, target, one in zip(logprobs[:-1], prompt[1:], reported, strict=True):
        assert one.logprob == pytest.approx(float(row[target]), abs=1e-4)
        assert one.rank == 1 + int((row > row[target]).sum())
        assert [p for _, p in one.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert second.tokens[0].logprobs is not None
    assert second.tokens[0].logprobs.logprob == pytest.approx(float(logprobs[-1].max()), abs=1e-4)
    pool.close()
