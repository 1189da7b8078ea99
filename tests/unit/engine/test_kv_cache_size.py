"""The size of the KV cache: the arithmetic, and the measurement on a double of a GPU's memory statistics."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache import kv_cache_size
from tandem.engine.kv_cache.kv_cache_size import CONTEXT_BYTES, LENGTH_STEP, PEER_BYTES, CudaMemory, fit_kv_cache
from tandem.engine.kv_cache.kv_pool import KVPool, block_bytes
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.kv_transfer.connectors.block_messages import MESSAGE_BYTES
from tandem.kv_transfer.connectors.nccl_group import NCCL_MAX_CTAS
from tandem.runtime.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30
MODEL_LEN = 4096
BYTES_PER_TOKEN = 100_000  # of a step, on the double


@given(
    total=st.integers(8 * GIB, 200 * GIB),
    fraction=st.floats(0.5, 1.0),
    num_ranks=st.integers(1, 4),
    weights=st.integers(100 * MIB, 4 * GIB),
    step=st.integers(0, 2 * GIB),
    context=st.integers(0, CONTEXT_BYTES),
    foreign=st.integers(0, 8 * GIB),
)
def test_ranks_on_one_gpu_fit_and_get_the_same(
    total: int, fraction: float, num_ranks: int, weights: int, step: int, context: int, foreign: int
) -> None:
    """The ranks start one after another, as is worst for the last. Their buffers for peers are in use."""
    used, sizes = foreign, []
    for _ in range(num_ranks):
        used += context + weights
        use = kv_cache_size.MemoryUse(total - used, total, weights, weights + step)
        size = kv_cache_size.kv_cache_bytes(use, fraction, num_ranks, 1)
        sizes.append(size)
        if size <= 0:
            return
        used += size + step + PEER_BYTES
    assert used <= total - (total - int(total * fraction)) // num_ranks, "the rest of the memory is not left alone"
    if not foreign:
        assert used <= total * fraction
        if context == CONTEXT_BYTES or num_ranks > 1:
            assert max(sizes) - min(sizes) <= 1, "who starts first must not get more"


def test_the_buffers_of_a_peer_are_those_of_the_nccl_connector() -> None:
    nccl_bytes = 10 * MIB * NCCL_MAX_CTAS
    assert 2 * MESSAGE_BYTES["nccl"] + nccl_bytes == PEER_BYTES, "a message in each direction"


@given(max_model_len=st.integers(5, 1 << 20), num_tokens=st.integers(0, 1 << 21))
def test_the_length_fits_and_only_drops_when_it_must(max_model_len: int, num_tokens: int) -> None:
    length = kv_cache_size.fitting_length(max_model_len, num_tokens)
    assert 0 <= length <= min(max_model_len, num_tokens)
    assert (length == max_model_len) == (num_tokens >= max_model_len)
    if length < max_model_len:
        assert length % LENGTH_STEP == 0 and num_tokens - length < LENGTH_STEP


class FakeGPU:
    """Stands in for torch's memory statistics. A step needs BYTES_PER_TOKEN for each of its tokens.

    used_by_others: memory of other processes.
    """

    def __init__(self, total: int, weights: int, used_by_others: int) -> None:
        self.total = total
        self.weights = self.highest = weights
        self.used_by_others = used_by_others
        self.steps: list[Batch] = []
        self.released = False

    def on_step(self, batch: Batch) -> None:
        num_tokens = sum(len(item.token_ids) for item in batch.items)
        if self.weights + num_tokens * BYTES_PER_TOKEN > self.total - self.used_by_others:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.steps.append(batch)
        self.highest = max(self.highest, self.weights + num_tokens * BYTES_PER_TOKEN)
        self.released = False

    def reset(self, device: object = None) -> None:
        self.highest = self.weights

    def release(self) -> None:
        self.released = True

    def reserved(self, device: object = None) -> int:
        return self.weights if self.released else self.highest

    def free_and_total(self, device: object = None) -> tuple[int, int]:
        return self.total - self.used_by_others - CONTEXT_BYTES - self.reserved(), self.total


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=MODEL_LEN,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def config(folder: Path) -> EngineConfig:
    return EngineConfig(str(folder), "float32", device="cpu", max_num_batched_tokens=200, max_num_seqs=7)


@pytest.fixture
def loaded(config: EngineConfig) -> LoadedModel:
    return load_model(config)


@pytest.fixture
def make_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns a function that makes a double and puts it behind torch.cuda."""

    def make(total: int = 2 * GIB, weights: int = 300 * MIB, used_by_others: int = 0) -> FakeGPU:
        gpu = FakeGPU(total, weights, used_by_others)
        for name, function in (
            ("mem_get_info", gpu.free_and_total),
            ("memory_reserved", gpu.reserved),
            ("max_memory_reserved", lambda device: gpu.highest),
            ("reset_peak_memory_stats", gpu.reset),
            ("empty_cache", gpu.release),
            ("synchronize", lambda device: None),
        ):
            monkeypatch.setattr(torch.cuda, name, function)
        run = ModelRunner.run

        def spy(runner: ModelRunner, batch: Batch) -> list[ItemOutput]:
            gpu.on_step(batch)
            return run(runner, batch)

        monkeypatch.setattr(ModelRunner, "run", spy)
        return gpu

    yield make


GPU = CudaMemory(torch.device("cuda", 0))
LARGEST = 207 * BYTES_PER_TOKEN


def test_the_cache_gets_what_weights_and_the_largest_step_leave_of_the_share(
    loaded: LoadedModel, config: EngineConfig, make_gpu: Any
) -> None:
    gpu = make_gpu()
    fitted, sized = fit_kv_cache(loaded, config, GPU)
    assert max(sum(len(item.token_ids) for item in step.items) for step in gpu.steps) == 200 + 7
    assert max(sum(len(item.samples) for item in step.items) for step in gpu.steps) == 7
    assert sized.kv_cache_bytes == int(gpu.total * 0.9) - gpu.weights - LARGEST - CONTEXT_BYTES - PEER_BYTES
    assert fitted.max_model_len == MODEL_LEN


def test_memory_in_which_layers_are_fused_is_not_counted(
    loaded: LoadedModel, config: EngineConfig, make_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = make_gpu()

    class Fusing(ModelRunner):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            gpu.highest = gpu.weights + 500 * MIB

    monkeypatch.setattr(kv_cache_size, "ModelRunner", Fusing)
    _, sized = fit_kv_cache(loaded, config, GPU)
    assert sized.kv_cache_bytes == int(gpu.total * 0.9) - gpu.weights - LARGEST - CONTEXT_BYTES - PEER_BYTES


@pytest.mark.extended
def test_ranks_on_one_gpu_divide_the_fraction(loaded: LoadedModel, config: EngineConfig, make_gpu: Any) -> None:
    gpu = make_gpu(total=4 * GIB)
    shared = msgspec.structs.replace(config, ranks_per_gpu=2, gpu_memory_fraction=0.8, num_peers=3)
    _, sized = fit_kv_cache(loaded, shared, GPU)
    expected = int(gpu.total * 0.8) // 2 - gpu.weights - LARGEST - CONTEXT_BYTES - 3 * PEER_BYTES
    assert sized.kv_cache_bytes == expected


@pytest.mark.extended
def test_memory_of_other_programs_is_left_alone(loaded: LoadedModel, config: EngineConfig, make_gpu: Any) -> None:
    make_gpu()
    _, alone = fit_kv_cache(loaded, config, GPU)
    make_gpu(used_by_others=400 * MIB)
    _, beside = fit_kv_cache(load_model(config), config, GPU)
    assert alone.kv_cache_bytes - beside.kv_cache_bytes == pytest.approx(400 * MIB, abs=1)


@pytest.mark.extended
def test_without_room_the_error_says_what_takes_the_memory(
    loaded: LoadedModel, config: EngineConfig, make_gpu: Any
) -> None:
    make_gpu(used_by_others=1200 * MIB)
    with pytest.raises(ConfigError, match=r"no room for a KV cache \(2.0 GiB of memory, 0.0 GiB free; 1 rank uses 90%"):
        fit_kv_cache(loaded, config, GPU)


def test_a_step_that_does_not_fit_names_its_settings(loaded: LoadedModel, config: EngineConfig, make_gpu: Any) -> None:
    make_gpu(total=300 * MIB + 20_000_000, weights=300 * MIB)
    with pytest.raises(ConfigError, match=r"200 prompt tokens and 7 sequences .* lower --max-num-batched-tokens"):
        fit_kv_cache(loaded, config, GPU)


def test_all_ranks_of_a_worker_take_the_smallest_size(
    loaded: LoadedModel, config: EngineConfig, make_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gpu()

    def reduce(tensor: torch.Tensor, operation: Any) -> None:
        assert operation == torch.distributed.ReduceOp.MIN
        tensor.clamp_(max=100 * MIB)  # what another rank has

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    _, sized = fit_kv_cache(loaded, msgspec.structs.replace(config, tensor_parallel_size=2), GPU)
    assert sized.kv_cache_bytes == 100 * MIB


def test_an_explicit_size_is_not_measured(loaded: LoadedModel, config: EngineConfig, make_gpu: Any) -> None:
    gpu = make_gpu()
    _, sized = fit_kv_cache(loaded, msgspec.structs.replace(config, kv_cache_bytes=3 * MIB), GPU)
    assert sized.kv_cache_bytes == 3 * MIB and not gpu.steps


def test_on_cpu_nothing_is_measured(loaded: LoadedModel, config: EngineConfig) -> None:
    _, sized = fit_kv_cache(loaded, config)
    assert sized.kv_cache_bytes == GIB


def test_a_length_that_does_not_fit_is_lowered_with_a_warning(
    loaded: LoadedModel, config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    token_bytes = block_bytes(loaded) // loaded.layout.block_size
    small = msgspec.structs.replace(config, kv_cache_bytes=3000 * token_bytes)
    with caplog.at_level(logging.WARNING):
        fitted, sized = fit_kv_cache(loaded, small)
    assert fitted.max_model_len == 2048
    assert "the model's limit is 4096: --max-model-len is lowered to 2048" in caplog.text
    pool = KVPool(fitted, sized)
    assert pool.num_blocks * pool.layout.block_size >= 2048
    pool.close()


def test_an_explicit_length_that_does_not_fit_is_refused_with_what_fits(config: EngineConfig) -> None:
    explicit = msgspec.structs.replace(config, max_model_len=4000)
    loaded = load_model(explicit)
    token_bytes = block_bytes(loaded) // loaded.layout.block_size
    with pytest.raises(ConfigError, match=r"holds 2944 tokens, .* --max-model-len 4000: .* to at most 2944$"):
        fit_kv_cache(loaded, msgspec.structs.replace(explicit, kv_cache_bytes=3000 * token_bytes))


def test_a_pool_for_which_the_gpu_has_no_memory_names_the_setting(
    loaded: LoadedModel, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "zeros", full)
    on_gpu = msgspec.structs.replace(config, kv_cache_bytes=GIB)
    with pytest.raises(ConfigError, match=r"has not 1.00 GiB left for the KV cache: lower --kv-cache-gib"):
        KVPool(dataclasses.replace(loaded, device=torch.device("cuda")), on_gpu)


@pytest.mark.parametrize(("dtype", "gain"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_fp8_holds_more_tokens_in_the_same_memory(config: EngineConfig, dtype: Any, gain: int) -> None:
    """Its blocks are never taken for those of another type, also not of a model that computes in another."""
    num_blocks, identities = [], set()
    for kv_cache_dtype in ("auto", "fp8"):
        own = msgspec.structs.replace(config, dtype=dtype, kv_cache_dtype=kv_cache_dtype, kv_cache_bytes=3 * MIB)
        loaded, sized = fit_kv_cache(load_model(own), own)
        pool = KVPool(loaded, sized)
        num_blocks.append(pool.num_blocks)
        assert pool.num_bytes == pool.num_blocks * pool.block_bytes == pool.as_blocks().nbytes <= 3 * MIB
        identities.add(loaded.layout.model_id)
        assert dtype in loaded.layout.model_id or kv_cache_dtype == "auto"
        pool.close()
    assert num_blocks[1] == num_blocks[0] * gain
    assert len(identities) == 2
