"""--exact on a GPU, without one: products have numbers of rows that were tried, and other models are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tandem.engine import exactness, model_runner
from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.cuda.fused_layers import CUDALayerOperators
from tandem.engine.cuda.quantized_linears import join
from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.engine_config import EngineConfig
from tandem.engine.exactness import gpu_problem, gpu_setting_problem
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.layers.fusing import FinalNorm
from tandem.engine.loading.model_loader import load_model, takes_adapters
from tandem.engine.row_products import ExactLinear, product_problem
from tandem.engine.tensor_parallel import TensorParallelGroup
from tandem.protocol.messages.sampling import SamplingParams
from tandem.runtime.errors import ConfigError
from tandem.runtime.logs import LogSettings
from tests.support.compiled_kernels import Launch, recorded_launches
from tests.support.fake_gpu import fake_gpu, runner_on_fake_gpu
from tests.support.interpreted import run_interpreted
from tests.unit.engine.test_engine_parity import COMMON, MODELS

INTERPRETED = Path(__file__).with_name("interpreted_exactness.py")
CPU = torch.device("cpu")


@pytest.mark.extended
def test_kernels_and_sums_depend_on_the_row_alone() -> None:
    run_interpreted(INTERPRETED, "sums", "each_row_by_itself", "among_any_number")


@pytest.mark.extended
@pytest.mark.parametrize(
    "model", ["window", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("llama", "qwen3"))]
)
def test_models_have_the_same_bits_in_every_batch_and_chunking(model: str) -> None:
    run_interpreted(INTERPRETED, f"every_batch_and_chunking[{model}")


@pytest.mark.extended
def test_what_depends_on_the_batch_is_found() -> None:
    run_interpreted(INTERPRETED, "is_found")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True), st.integers(0, 90), st.booleans())
def test_an_exact_linear_layer_has_only_the_given_numbers_of_rows(counts: list[int], rows: int, has_bias: bool) -> None:
    counts = sorted(counts)
    plain = nn.Linear(6, 5, bias=has_bias)
    exact = ExactLinear(plain.weight, plain.bias if has_bias else None, counts)
    inputs = torch.randn(1, rows, 6)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        linear = nn.functional.linear
        patch.setattr(nn.functional, "linear", lambda rows, *others: seen.append(len(rows)) or linear(rows, *others))
        got = exact(inputs)
    assert set(seen) <= {*counts}
    torch.testing.assert_close(got, plain(inputs))


class Depends(nn.Module):
    """A product whose rows have other bits among `fewer` rows or less."""

    def __init__(self, fewer: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self._fewer = 6, 5, fewer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs[:, :5] * (1 if len(inputs) > self._fewer else 2)


class DependsOnPlace(Depends):
    """A product whose last rows have other bits than the first ones."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs[:, :5] * (1 + torch.arange(len(inputs))[:, None] // self._fewer)


def test_a_product_that_depends_on_the_number_of_rows_is_named() -> None:
    assert product_problem([Depends(0)], [1, 4, 8], torch.float32, CPU) == ""
    assert product_problem([DependsOnPlace(8), Depends(4)], [1, 4, 8], torch.bfloat16, CPU) == (
        "the product with a weight of 5 x 6 in bfloat16 gives other bits for 1 rows than for 8"
    )
    assert "for 4 rows than for 8" in product_problem([DependsOnPlace(5)], [4, 8], torch.float32, CPU)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return make_model("llama", tmp_path)


def make_model(family: str, folder: Path) -> EngineConfig:
    model_class, config_class, extra = MODELS[family]
    model_class(config_class(**COMMON, **extra)).save_pretrained(folder)
    return EngineConfig(str(folder), dtype="bfloat16", device="cpu", block_size=8, kv_cache_bytes=1 << 24, exact=True)


GREEDY, LOGGED = Sample(SamplingParams(temperature=0.0)), Sample(SamplingParams(temperature=0.7, top_p=0.9, logprobs=2))


@pytest.mark.parametrize("has_graphs", [False, True])
def test_all_products_of_a_step_have_numbers_of_rows_that_were_tried(
    config: EngineConfig, has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in steps without a graph. Sums of sampling have kernels of ours."""
    loaded = load_model(config)
    seen: set[int] = set()
    linear = nn.functional.linear
    with fake_gpu(monkeypatch) as gpu:
        runner = runner_on_fake_gpu(loaded, config, monkeypatch, has_graphs=has_graphs)

        def counted(rows: torch.Tensor, *others: Any) -> torch.Tensor:
            seen.add(rows.numel() // rows.shape[-1])
            return linear(rows, *others)

        monkeypatch.setattr(nn.functional, "linear", counted)
        prompt = BatchItem([1] * 33, 0, list(range(5)), [LOGGED])
        for items in ([prompt], [BatchItem([1], 7 + i, [i, i + 9], [GREEDY]) for i in range(7)]):
            gpu.operators.clear()
            runner.run(Batch(items))
            assert not {"aten::mean", "aten::cumsum", "aten::_log_softmax"} & {*gpu.operators}
            assert "tandem::paged_attention" in gpu.operators
    limits = GraphLimits()
    assert seen <= {*limits.row_counts, *limits.head_row_counts} and len(seen) > 1


def test_what_is_not_exact_on_gpus_is_named(config: EngineConfig) -> None:
    loaded: Any = SimpleNamespace(layout=SimpleNamespace(tensor_parallel_size=1), vision=None)
    assert gpu_setting_problem(config, loaded) == ""
    assert "without --exact" in gpu_setting_problem(msgspec.structs.replace(config, exact=False), loaded)
    pool: Any = None
    loaded.vision = object()
    assert "vision encoder" in gpu_setting_problem(config, loaded) == gpu_problem(loaded, pool, [])
    loaded.layout.tensor_parallel_size = 2
    assert "ranks" in gpu_setting_problem(config, loaded) == gpu_problem(loaded, pool, [])


def test_an_exact_gpu_takes_no_adapters(config: EngineConfig) -> None:
    assert not takes_adapters(config, torch.device("cuda"), has_vision=False)
    assert takes_adapters(config, CPU, has_vision=False)
    assert takes_adapters(msgspec.structs.replace(config, exact=False), torch.device("cuda"), has_vision=False)


@pytest.mark.parametrize(
    ("family", "problem"), [("llama", ""), ("gemma2", "3 of 3 layers have no kernels"), ("qwen3_moe", "3 of 3 layers")]
)
def test_models_with_other_layers_are_refused(
    family: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_model(family, tmp_path)
    loaded = load_model(config)
    monkeypatch.setattr(exactness, "product_problem", lambda *_: "")
    monkeypatch.setattr(exactness, "chunk_problem", lambda *_: "")
    with fake_gpu(monkeypatch):
        runner = runner_on_fake_gpu(loaded, config, monkeypatch, has_graphs=False)
    assert runner.gpu_problem.startswith(problem) and bool(runner.gpu_problem) == bool(problem)


def test_a_model_whose_last_norm_or_head_is_another_is_refused(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(config)
    with fake_gpu(monkeypatch):
        runner = runner_on_fake_gpu(loaded, config, monkeypatch, has_graphs=False)
        model = runner._model
        assert isinstance(model.base_model.norm, FinalNorm) and isinstance(model.lm_head, ExactLinear)
        model.lm_head = nn.Identity()
        assert "output projection" in runner.gpu_problem
        model.base_model.norm = nn.Identity()
        assert "the norm behind the last layer" in runner.gpu_problem
        runner._uses_triton = False
        assert "does not use our kernels" in runner.gpu_problem


def test_a_worker_whose_products_are_not_exact_does_not_start(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason names the shape."""
    loaded = load_model(config)
    monkeypatch.setattr(model_runner.ModelRunner, "gpu_problem", "the product with a weight of 5 x 6")
    group = TensorParallelGroup("w", config, "127.0.0.1", LogSettings(), lambda _: pytest.fail("one rank"))
    with pytest.raises(ConfigError, match="--exact: answers would not be exact: the product with a weight of 5 x 6"):
        group.make_runner(loaded, KVPool(loaded, config))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_exact_products_of_fp8_have_one_tile(dtype: torch.dtype) -> None:
    """Sums of INT8 are exact in every tile, so they keep the fastest ones."""
    tiles = set()
    for num_rows in (1, 16, 17, 64, 65, 512, 2048):
        found: list[Launch] = []
        rows, weight = torch.empty((num_rows, 256), dtype=dtype), torch.empty((512, 256), dtype=dtype)
        scales = torch.empty(num_rows, 1), torch.empty(512)
        with recorded_launches(found):
            torch.ops.tandem.scaled_product(rows, scales[0], weight, scales[1], None, torch.bfloat16, True)
        tiles.add(tuple(found[0].keywords[name] for name in ("BLOCK_ROWS", "BLOCK_OUTPUTS", "BLOCK", "num_warps")))
    assert (len(tiles) == 1) == (dtype != torch.int8)


def test_linear_layers_that_are_not_merged_are_exact_too() -> None:
    joined = join([nn.Linear(8, 4), nn.Linear(8, 6, bias=False)], [4, 8])
    assert {type(each) for each in joined.modules() if hasattr(each, "weight")} == {ExactLinear}
    assert CUDALayerOperators([4, 8]).linear([nn.Linear(8, 4)]).row_counts == [4, 8]
    assert not isinstance(CUDALayerOperators().linear([nn.Linear(8, 4)]), ExactLinear)
