"""Plain attention on a GPU is the reference for kernels there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.batch import BatchItem
from tandem.engine.config import EngineConfig
from tandem.engine.kv_pool import KVPool
from tandem.engine.loading.model_loader import LoadedModel
from tandem.protocol.messages.transfer import KVLayout
from tests.support.fake_gpu import CUDA, fake_gpu


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
