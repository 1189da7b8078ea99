"""Plain attention on a GPU is the reference for kernels there. Over a pool in FP8 it is one over rounded numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.batch import BatchItem
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loaded_model import LoadedModel
from tandem.protocol.messages.transfer import KVLayout
from tests.support.fake_gpu import CUDA, fake_gpu

FP8 = torch.float8_e4m3fn


class Products(TorchDispatchMode):
    """Collects the dtypes of the results of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func._schema.name in ("aten::bmm", "aten::mm"):
            self.dtypes.append(result.dtype)
        return result


@pytest.mark.parametrize(("start", "num_tokens"), [(40, 1), (40, 6), (0, 6)])
def test_scores_are_not_rounded_to_bfloat16(start: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout("m", "bfloat16", 3, 2, 64, 16, 1)
    with fake_gpu(monkeypatch):
        loaded = LoadedModel(None, 64, 10, torch.bfloat16, CUDA, layout)
        pool = KVPool(loaded, EngineConfig("m", kv_cache_bytes=1 << 23))
        query, key = (torch.empty((1, heads, num_tokens, 64), dtype=torch.bfloat16, device=CUDA) for heads in (4, 2))
        options = AttentionOptions(0.125, softcap=50.0, sinks=torch.empty(4, device=CUDA))
        attention = PlainAttention(pool, [BatchItem([1] * num_tokens, start, [2, 0, 1])])
        with Products() as products:
            attention.attend(1, query, key, key, options)
    assert products.dtypes == [torch.float32, torch.bfloat16], "scores, and the mix of values"


def new_pool(dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> KVPool:
    layout = KVLayout("m", str(kv_dtype).removeprefix("torch."), 2, 2, 16, 8, 1)
    loaded = LoadedModel(None, 64, 10, dtype, device, layout)
    return KVPool(loaded, EngineConfig("m", kv_cache_bytes=1 << 18))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_fp8_pool_gives_what_a_pool_of_rounded_numbers_gives(dtype: torch.dtype) -> None:
    """Also for prompts from their first token on, which read nothing from the pool. Large numbers become 448."""
    cpu = torch.device("cpu")
    small, exact = new_pool(dtype, FP8, cpu), new_pool(dtype, dtype, cpu)
    torch.manual_seed(0)
    small.tensor.copy_(torch.randn(small.tensor.shape))
    num_blocks = exact.num_blocks
    assert small.num_blocks == num_blocks * dtype.itemsize and small.num_bytes == exact.num_bytes
    exact.tensor.copy_(small.tensor[:num_blocks])
    rng = random.Random(1)
    free = rng.sample(range(num_blocks), 16)
    items = []
    for start, num_tokens in ((0, 11), (9, 6), (20, 1), (3, 1)):
        items.append(BatchItem([1] * num_tokens, start, [free.pop() for _ in range(-(-(start + num_tokens) // 8))]))
    query = torch.randn(1, 4, 19, 16).to(dtype)
    key, value = (torch.randn(2, 1, 2, 19, 16) * torch.logspace(-4, 0, 16)).to(dtype)
    value[..., -1] *= 1000
    rounded = [states.clamp(-448, 448).to(FP8).to(dtype) for states in (key, value)]
    assert (rounded[1].abs() == 448).any()
    first_tokens = [0, 11, 17, 18, 19]
    for first, end in ((0, 4), (0, 1), (1, 2), (2, 4)):
        rows = slice(first_tokens[first], first_tokens[end])
        part, queries = items[first:end], query[:, :, rows]
        (keys, values), (exact_keys, exact_values) = (
            [each[:, :, rows] for each in pair] for pair in ((key, value), rounded)
        )
        got = PlainAttention(small, part).attend(1, queries, keys, values, AttentionOptions(0.25))
        expected = PlainAttention(exact, part).attend(1, queries, exact_keys, exact_values, AttentionOptions(0.25))
        assert torch.equal(got, expected)
        assert torch.equal(small.tensor[:num_blocks].to(dtype), exact.tensor)
    small.close()
    exact.close()


def test_no_kernel_of_a_gpu_must_index_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every version of torch has one. Casts and copies exist everywhere."""
    names: set[str] = set()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(isinstance(each, torch.Tensor) and each.dtype == FP8 for each in args):
                names.add(func._schema.name)
            return func(*args, **kwargs or {})

    with fake_gpu(monkeypatch):
        pool = new_pool(torch.bfloat16, FP8, CUDA)
        query, key = (torch.empty((1, heads, 7, 16), dtype=torch.bfloat16, device=CUDA) for heads in (4, 2))
        items = [BatchItem([1] * 6, 8, [2, 0]), BatchItem([1], 3, [1])]
        with Operators():
            PlainAttention(pool, items).attend(1, query, key, key, AttentionOptions(0.25))
    assert names and not {name for name in names if "index" in name or "gather" in name or "scatter" in name}
