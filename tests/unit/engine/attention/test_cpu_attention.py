"""The compiled kernels equal torch's plain operations and formulas in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.batch import BatchItem
from tandem.engine.cpu.attention import CPUAttention
from tandem.engine.cpu.compiler import as_array
from tandem.engine.cpu.layer_operators import rms_norm, rotation
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.sampling.sampler import argmax
from tandem.protocol.messages.transfer import KVLayout

LAYER = 1
SINKS = torch.linspace(-2, 2, 28)
OPTIONS = {
    "plain": AttentionOptions(0.2),
    "window": AttentionOptions(0.2, window=9),
    "window of one": AttentionOptions(0.2, window=1),
    "softcap": AttentionOptions(0.2, softcap=3.0),
    "sinks": AttentionOptions(0.2, window=17, sinks=SINKS),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # plain operations round weights to bfloat16


def make_pool(dtype: torch.dtype, num_kv_heads: int, head_dim: int, block_size: int) -> KVPool:
    layout = KVLayout("m", str(dtype).removeprefix("torch."), 3, num_kv_heads, head_dim, block_size, 1)
    loaded = LoadedModel(None, 64, 10, dtype, torch.device("cpu"), layout)
    return KVPool(loaded, EngineConfig("m", kv_cache_bytes=1 << 23))


# Group sizes up to the kernel's limit, groups that are split with and without a rest, odd sizes.
@pytest.fixture(
    params=[
        (4, 3, 64, 16),
        *(pytest.param(each, marks=pytest.mark.extended) for each in ((1, 7, 40, 4), (2, 1, 16, 8))),
    ],
    ids=str,
)
def sizes(request: pytest.FixtureRequest) -> tuple[int, int, int, int]:
    size: tuple[int, int, int, int] = request.param
    return size


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def pools(request: pytest.FixtureRequest, sizes: tuple[int, int, int, int]) -> Iterator[tuple[KVPool, KVPool]]:
    """Returns two pools with the same contents."""
    num_kv_heads, _, head_dim, block_size = sizes
    first, second = (make_pool(request.param, num_kv_heads, head_dim, block_size) for _ in range(2))
    torch.manual_seed(0)
    first.tensor.normal_()
    second.tensor.copy_(first.tensor)
    yield first, second
    first.close()
    second.close()


@pytest.mark.parametrize("name", OPTIONS)
def test_kernels_equal_plain_operations_for_tokens_and_chunks(
    name: str, pools: tuple[KVPool, KVPool], sizes: tuple[int, int, int, int]
) -> None:
    num_kv_heads, group, head_dim, block_size = sizes
    options = OPTIONS[name]
    if options.sinks is not None:
        options = AttentionOptions(options.scale, options.window, sinks=SINKS[: num_kv_heads * group])
    rng = random.Random(1)
    free = rng.sample(range(pools[0].num_blocks), 64)
    items = []
    for start, num_tokens in ((40, 1), (0, 4), (0, 1), (30, 5), (16, 1), (15, 1)):
        table = [free.pop() for _ in range(-(-(start + num_tokens) // block_size))]
        items.append(BatchItem([1] * num_tokens, start, table))
    num_tokens = sum(len(item.token_ids) for item in items)
    dtype = pools[0].tensor.dtype
    query = torch.randn(1, num_kv_heads * group, num_tokens, head_dim).to(dtype)
    key, value = torch.randn(2, 1, num_kv_heads, num_tokens, head_dim).to(dtype)
    for part in (items, items[:1], [item for item in items if len(item.token_ids) == 1]):
        n = sum(len(item.token_ids) for item in part)
        states = query[:, :, :n], key[:, :, :n], value[:, :, :n]
        got = CPUAttention(pools[0], part).attend(LAYER, *states, options)
        expected = PlainAttention(pools[1], part).attend(LAYER, *states, options)
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])
        assert torch.equal(pools[0].tensor, pools[1].tensor)  # the new tokens' keys and values, and nothing else


def test_attention_of_one_token_equals_the_formula(
    pools: tuple[KVPool, KVPool], sizes: tuple[int, int, int, int]
) -> None:
    num_kv_heads, group, head_dim, block_size = sizes
    pool, dtype = pools[0], pools[0].tensor.dtype
    table = [5, 3, 9, 1, 7, 2, 8, 0, 4, 6, 11, 12, 10][: -(-50 // block_size)]
    query = torch.randn(1, num_kv_heads * group, 1, head_dim).to(dtype)
    key, value = torch.randn(2, 1, num_kv_heads, 1, head_dim).to(dtype)
    got = CPUAttention(pool, [BatchItem([1], 49, table)]).attend(LAYER, query, key, value, AttentionOptions(0.3))
    context = (
        pool.tensor[table, LAYER].double().permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)[:, :, :50]
    )
    assert torch.equal(context[:, :, 49], torch.stack((key, value))[:, 0, :, 0].double())
    keys, values = context.repeat_interleave(group, 1)
    weights = (query[0].double() @ keys.transpose(1, 2) * 0.3).softmax(-1)
    expected = (weights @ values)[:, 0]
    torch.testing.assert_close(got[0].double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_equal_llamas(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    torch.manual_seed(0)
    norm = LlamaRMSNorm(48, 1e-5).to(dtype).requires_grad_(False)
    norm.weight.normal_()
    inputs = torch.randn(7, 48).to(dtype)
    output = torch.empty_like(inputs)
    rms_norm(dtype)(as_array(inputs), as_array(norm.weight), 1e-5, as_array(output))
    torch.testing.assert_close(output, norm(inputs), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)

    heads = torch.randn(5, 6, 16).to(dtype)
    cos, sin = torch.randn(2, 1, 5, 16).to(dtype)
    rotated = torch.empty(5, 4, 16, dtype=dtype)
    rotation(dtype)(as_array(heads), as_array(cos[0]), as_array(sin[0]), as_array(rotated))
    first = heads[None, :, :4].transpose(1, 2)
    expected = apply_rotary_pos_emb(first, first, cos, sin)[0][0].transpose(0, 1)
    torch.testing.assert_close(rotated, expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 6e-2)


@pytest.mark.parametrize("size", [1, 100, 512, 1024, 1300, 2048])
def test_argmax_returns_the_first_largest(size: int) -> None:
    rows = torch.randn(50, size, generator=torch.Generator().manual_seed(size))
    assert torch.equal(argmax(rows), rows.max(-1).indices)
    rows[:, -1] = 10.0
    assert argmax(rows).tolist() == [size - 1] * 50
