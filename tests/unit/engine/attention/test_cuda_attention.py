"""The CUDA path as far as a CPU can run it: `varlen_attn` is emulated in plain torch, graphs run without capture.

Tests that need a GPU are in tests/gpu.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.config import EngineConfig
from tandem.engine.cuda.attention import VarlenAttention, find_varlen_attn, varlen_attention, varlen_problem
from tandem.engine.cuda.decode_graphs import LADDER
from tandem.engine.kv_pool import KVPool
from tandem.engine.loading.model_loader import LoadedModel, load_model
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.generation import SamplingParams

torch.set_num_threads(1)
BLOCK_SIZE = 8


def emulated_varlen_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: None, max_q: int,
    max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Emulates paged `varlen_attn` as torch documents it, one sequence after the other."""
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert int(seqused_k.max()) <= max_k and int(cu_seq_q.diff().max()) <= max_q
    assert enable_gqa or query.shape[1] == key.shape[2]
    outputs = []
    for i in range(len(seqused_k)):
        q = query[cu_seq_q[i] : cu_seq_q[i + 1]]
        k, v = (cache[block_table[i].long()].flatten(0, 1)[: int(seqused_k[i])] for cache in (key, value))
        positions = torch.arange(len(k) - len(q), len(k))[:, None]  # the queries are the last tokens
        keys = torch.arange(len(k))
        seen = keys <= positions
        if window_size[0] >= 0:
            seen &= keys >= positions - window_size[0]
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen, scale=scale, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(outputs)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, KVPool]:
    common: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(4)
    path: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        LlamaForCausalLM(LlamaConfig(**common)).save_pretrained(path)
    else:
        MistralForCausalLM(MistralConfig(**common, sliding_window=10)).save_pretrained(path)
    config = EngineConfig(str(path), dtype="float32", device="cpu", block_size=BLOCK_SIZE, kv_cache_bytes=1 << 23)
    model = load_model(config)
    return model, KVPool(model, config)


def generate(runner: ModelRunner, num_seqs: int) -> list[list[int]]:
    """Runs the prompts in one step, then steps of single tokens while sequences end one by one."""
    rng = random.Random(1)
    greedy = [Sample(SamplingParams(temperature=0.0))]
    tokens = [[rng.randrange(320) for _ in range(rng.randint(1, 30))] for _ in range(num_seqs)]
    tables = [list(range(10 * i, 10 * i + 10)) for i in range(num_seqs)]
    starts = [0] * num_seqs
    for step in range(12):
        live = [i for i in range(num_seqs) if step < 12 - i]
        items = [BatchItem(tokens[i][starts[i] :], starts[i], tables[i], greedy) for i in live]
        for i, output in zip(live, runner.run(Batch(items)), strict=True):
            starts[i] = len(tokens[i])
            tokens[i].append(output.tokens[0].token_id)
    return tokens


def test_varlen_attention_and_graphs_equal_plain(
    loaded: tuple[LoadedModel, KVPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pool = loaded
    plain = ModelRunner(model, pool)
    expected = generate(plain, 7)
    varlen = ModelRunner(model, pool)
    varlen._make_attention = lambda items: varlen_attention(pool, items, emulated_varlen_attn)
    assert generate(varlen, 7) == expected
    num_captured = []

    def capture(function: Any) -> Any:
        num_captured.append(1)
        return function

    varlen._capture_graphs(capture)
    assert len(num_captured) == len(LADDER)
    eager_calls: list[int] = []
    make = varlen._make_attention
    monkeypatch.setattr(varlen, "_make_attention", lambda items: eager_calls.append(len(items)) or make(items))
    assert generate(varlen, 7) == expected
    assert eager_calls == [7], "all steps except the first, which has prompts, run from graphs"


def test_the_attention_check_detects_wrong_results(loaded: tuple[LoadedModel, KVPool]) -> None:
    _, pool = loaded
    before = pool.tensor.clone()
    windows = [0, 10]
    assert varlen_problem(pool, emulated_varlen_attn, 4, windows) is None
    assert "no varlen_attn" in (varlen_problem(pool, None, 4, windows) or "")

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        return emulated_varlen_attn(*args, **kwargs | {"window_size": (-1, 0)})

    assert "off by" in (varlen_problem(pool, wrong, 4, windows) or "")

    def refusing(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("Paged KV cache block size must be divisible by 256\nmore")

    assert "divisible by 256" in (varlen_problem(pool, refusing, 4, windows) or "")
    assert torch.equal(pool.tensor, before)
    assert find_varlen_attn() is not None, "this torch has varlen_attn"


def test_soft_caps_use_plain_attention(loaded: tuple[LoadedModel, KVPool]) -> None:
    from tandem.engine.attention.interface import AttentionOptions
    from tandem.engine.attention.plain import PlainAttention

    _, pool = loaded
    items = [BatchItem([1, 2, 3], 0, [5])]
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    options = AttentionOptions(0.25, softcap=2.0, sinks=torch.randn(4))
    attention = varlen_attention(pool, items, emulated_varlen_attn)
    assert isinstance(attention, VarlenAttention)
    torch.testing.assert_close(
        attention.attend(0, query, key, key, options), PlainAttention(pool, items).attend(0, query, key, key, options)
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=6), st.randoms())
def test_step_index(shapes: list[tuple[int, int]], rng: random.Random) -> None:
    """Compares every token's slot with the definition."""
    items = [
        BatchItem([rng.randrange(99) for _ in range(n)], start, rng.sample(range(50), -(-(start + n) // BLOCK_SIZE)))
        for n, start in shapes
    ]
    index = StepIndex.of(items, BLOCK_SIZE)
    flat = [(item, item.start + i) for item in items for i in range(len(item.token_ids))]
    assert index.token_ids.tolist() == [item.token_ids[p - item.start] for item, p in flat]
    assert index.positions.tolist() == [p for _, p in flat]
    assert index.blocks.tolist() == [item.block_table[p // BLOCK_SIZE] for item, p in flat]
    assert index.offsets.tolist() == [p % BLOCK_SIZE for _, p in flat]
    assert index.num_context.tolist() == [item.start + len(item.token_ids) for item in items]
    assert index.cu_seqlens.tolist() == [sum(n for n, _ in shapes[:i]) for i in range(len(shapes) + 1)]
    for row, item in zip(index.block_table.tolist(), items, strict=True):
        assert row[: len(item.block_table)] == item.block_table
        assert set(row[len(item.block_table) :]) <= {item.block_table[0]}
