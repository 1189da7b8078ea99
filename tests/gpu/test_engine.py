"""The engine on a GPU. Each assumption about torch's kernels has its own test."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.cuda.triton_attention import triton_problem
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.sampling import SamplingParams
from tests.support.sampling import sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")

SHAPE: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.1,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GREEDY = Sample(SamplingParams(temperature=0.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.float32).save_pretrained(path)
    return path


def engine(folder: Path, dtype: str, **options: Any) -> tuple[ModelRunner, KVPool]:
    config = EngineConfig(str(folder), dtype=dtype, device="cuda", kv_cache_bytes=1 << 28, **options)  # type: ignore[arg-type]
    loaded = load_model(config)
    pool = KVPool(loaded, config)
    runner = ModelRunner(loaded, pool)
    runner.warm_up()
    return runner, pool


@pytest.fixture(scope="module")
def bfloat16(folder: Path) -> Iterator[tuple[ModelRunner, KVPool]]:
    yield engine(folder, "bfloat16")


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(2048) for _ in range(n)] for n in (1, 63, 64, 65, 200, 700)]


def greedy(runner: ModelRunner, num_new: int) -> list[list[int]]:
    """Generates greedily, in chunks of 100 mixed with single tokens."""
    tokens = [list(prompt) for prompt in prompts()]
    ends = [len(t) + num_new for t in tokens]
    done = [0] * len(tokens)
    tables = [list(range(20 * i, 20 * i + 20)) for i in range(len(tokens))]
    while any(len(t) < end for t, end in zip(tokens, ends, strict=True)):
        live = [i for i, t in enumerate(tokens) if len(t) < ends[i]]
        items = []
        for i in live:
            chunk = tokens[i][done[i] : done[i] + 100]
            last = done[i] + len(chunk) == len(tokens[i])
            items.append(BatchItem(chunk, done[i], tables[i], [GREEDY] if last else []))
        for i, item, output in zip(live, items, runner.run(Batch(items)), strict=True):
            done[i] += len(item.token_ids)
            tokens[i] += [token.token_id for token in output.tokens]
    return [t[len(p) :] for t, p in zip(tokens, prompts(), strict=True)]


def test_greedy_equals_generate_in_float32(folder: Path) -> None:
    runner, _ = engine(folder, "float32")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    expected = []
    for prompt in prompts():
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    assert greedy(runner, 16) == expected


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("window", [0, 5, 100])
def test_our_kernel_computes_what_plain_attention_does(folder: Path, block_size: int, window: int) -> None:
    config = EngineConfig(
        str(folder), dtype="bfloat16", device="cuda", kv_cache_bytes=1 << 28, block_size=block_size, load_format="dummy"
    )
    assert triton_problem(KVPool(load_model(config), config), 8, [window]) is None


def test_steps_run_from_graphs_and_equal_eager(bfloat16: tuple[ModelRunner, KVPool]) -> None:
    runner, _ = bfloat16
    assert runner._graphs is not None, "no graphs were captured; the log says why"
    with_graphs = greedy(runner, 24)
    graphs, runner._graphs = runner._graphs, None
    try:
        eager = greedy(runner, 24)
    finally:
        runner._graphs = graphs
    same = sum(a == b for x, y in zip(with_graphs, eager, strict=True) for a, b in zip(x, y, strict=True))
    assert same >= 0.9 * 24 * len(eager), "bfloat16 rounding may change a few choices only"


def test_a_greedy_decode_step_waits_for_the_device_once(bfloat16: tuple[ModelRunner, KVPool]) -> None:
    runner, _ = bfloat16
    batch = Batch([BatchItem([5], 70, [0, 1], [GREEDY]) for _ in range(4)])
    runner.run(batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # warnings are errors here, and torch warns of this mode itself
        torch.cuda.set_sync_debug_mode("warn")
        try:
            runner.run(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    syncs = [str(w.message) for w in caught if "called a synchronizing" in str(w.message)]
    assert len(syncs) <= 1, syncs


def test_the_sampler_chooses_the_same_as_on_cpu() -> None:
    logits = (torch.randn(64, 5000, generator=torch.Generator().manual_seed(2)) * 3).round(decimals=2)
    samples = [
        Sample(SamplingParams(temperature=0.8, top_p=0.9 if i % 2 else 1.0, top_k=i % 50, min_p=0.02 * (i % 3), seed=i))
        for i in range(64)
    ]
    positions = list(range(64))
    on_cpu, on_gpu = sample(logits, samples, positions), sample(logits.cuda(), samples, positions)
    assert sum(a == b for a, b in zip(on_cpu, on_gpu, strict=True)) >= 63


def test_dummy_weights_are_equal_in_two_engines(folder: Path) -> None:
    config = EngineConfig(str(folder), dtype="bfloat16", device="cuda", load_format="dummy")
    one, other = load_model(config).model.state_dict(), load_model(config).model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
