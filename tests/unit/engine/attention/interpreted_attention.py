"""Run by `test_triton_attention.py` in a process with TRITON_INTERPRET=1, where kernels run on CPU tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.config import EngineConfig
from tandem.engine.cuda import attention_kernel
from tandem.engine.cuda.triton_attention import triton_attention, triton_problem
from tandem.engine.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.generation import SamplingParams

NUM_LAYERS, NUM_BLOCKS = 2, 24
GREEDY = Sample(SamplingParams(temperature=0.0))


def new_pool(num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype = torch.float32) -> Any:
    shape = (NUM_BLOCKS, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = tensor.view(-1, block_size * head_dim)
    layout = SimpleNamespace(num_layers=NUM_LAYERS, num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim)
    return SimpleNamespace(
        tensor=tensor,
        layout=layout,
        layer_blocks=[
            (rows[2 * layer * num_kv_heads :], rows[(2 * layer + 1) * num_kv_heads :]) for layer in range(NUM_LAYERS)
        ],
        layer_tokens=[(keys, values) for keys, values in tensor.permute(1, 2, 0, 4, 3, 5)],
    )


@dataclass(frozen=True)
class Case:
    """lengths: (tokens before the step, tokens in it) of each sequence."""

    block_size: int
    head_dim: int
    num_kv_heads: int
    group: int
    lengths: list[tuple[int, int]]
    window: int
    softcap: float
    has_sinks: bool
    layer: int
    seed: int

    @property
    def items(self) -> list[BatchItem]:
        free = list(range(NUM_BLOCKS))
        random.Random(self.seed).shuffle(free)
        items = []
        for start, num_tokens in self.lengths:
            num_blocks = -(-(start + num_tokens) // self.block_size)
            items.append(BatchItem([0] * num_tokens, start, free[:num_blocks]))
            free = free[num_blocks:]
        return items


CASES = st.builds(
    Case,
    block_size=st.sampled_from([16, 24]),
    head_dim=st.sampled_from([16, 20]),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 4]),
    lengths=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 33])), min_size=1, max_size=4),
    window=st.sampled_from([0, 1, 7, 40]),
    softcap=st.sampled_from([0.0, 5.0]),
    has_sinks=st.booleans(),
    layer=st.integers(0, 1),
    seed=st.integers(0, 9),
)


@settings(max_examples=25, deadline=None)
@given(CASES)
def test_the_kernels_compute_what_plain_attention_does(case: Case) -> None:
    pool = new_pool(case.num_kv_heads, case.head_dim, case.block_size)
    num_heads, num_tokens = case.num_kv_heads * case.group, sum(number for _, number in case.lengths)
    sinks = torch.linspace(-1, 2, num_heads) if case.has_sinks else None
    options = AttentionOptions(case.head_dim**-0.5, case.window, case.softcap, sinks)
    generator = torch.Generator().manual_seed(2)
    # As models make them: views of a projection's output.
    query = torch.randn((1, num_tokens, num_heads, case.head_dim), generator=generator).transpose(1, 2)
    key = torch.randn((1, num_tokens, case.num_kv_heads, case.head_dim), generator=generator).transpose(1, 2)
    value = torch.randn((1, case.num_kv_heads, num_tokens, case.head_dim), generator=generator)
    before = pool.tensor.clone()
    expected = PlainAttention(pool, case.items).attend(case.layer, query, key, value, options)
    written = pool.tensor.clone()
    pool.tensor.copy_(before)
    got = triton_attention(pool, case.items, attention_kernel).attend(case.layer, query, key, value, options)
    assert torch.equal(pool.tensor, written), "the same slots are written, and no others"
    torch.testing.assert_close(got, expected.view_as(got), rtol=2e-5, atol=2e-5)


def test_the_check_at_startup_finds_a_wrong_kernel_and_restores_the_pool() -> None:
    pool = new_pool(2, 64, 16)
    before = pool.tensor.clone()
    assert triton_problem(pool, attention_kernel, 4, [0, 8]) is None

    class Wrong:
        write_kv = attention_kernel.write_kv

        class attend:
            def __class_getitem__(cls, grid: Any) -> Any:
                return lambda query, keys, values, output, *rest, **sizes: output.fill_(0.5)

    wrong: Any = Wrong
    assert "is off by" in str(triton_problem(pool, wrong, 4, [0]))
    assert triton_problem(pool, None, 4, [0]) == "Triton is not installed"
    assert torch.equal(pool.tensor, before)


def test_a_model_with_a_sliding_window_generates_what_it_does_with_plain_attention(tmp_path: Path) -> None:
    torch.manual_seed(4)
    shape: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
    }  # fmt: skip
    MistralForCausalLM(MistralConfig(**shape, sliding_window=10)).save_pretrained(tmp_path)
    config = EngineConfig(str(tmp_path), dtype="float32", device="cpu", block_size=8, kv_cache_bytes=1 << 21)
    model = load_model(config)
    pool = KVPool(model, config)
    runner = ModelRunner(model, pool)
    expected = generate(runner)
    runner._make_attention = lambda items: triton_attention(pool, items, attention_kernel)
    assert generate(runner) == expected
    replayed: list[int] = []

    def capture(function: Any) -> Any:
        return lambda: replayed.append(1) or function()

    runner._capture_graphs(capture)
    assert generate(runner) == expected
    assert len(replayed) == 5, "all steps except the first, which has prompts, run from graphs"


def generate(runner: ModelRunner) -> list[list[int]]:
    rng = random.Random(1)
    tokens = [[rng.randrange(320) for _ in range(length)] for length in (1, 23, 12)]
    starts = [0, 0, 0]
    for _ in range(6):
        items = [
            BatchItem(tokens[i][starts[i] :], starts[i], list(range(8 * i, 8 * i + 8)), [GREEDY]) for i in range(3)
        ]
        for i, output in enumerate(runner.run(Batch(items))):
            starts[i] = len(tokens[i])
            tokens[i].append(output.tokens[0].token_id)
    return tokens
