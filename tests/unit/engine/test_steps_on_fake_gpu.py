"""Whole steps on a GPU without values: no devices are mixed, and the host waits only where it must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.cuda import experts
from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.cuda.streams import upload
from tandem.engine.engine_config import EngineConfig
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sampling import sampler
from tandem.engine.sampling.grammar_mask import GrammarMasks, StepMask
from tandem.engine.sampling.sampler import SamplingStep
from tandem.protocol.messages.sampling import SamplingParams, Thinking
from tests.support.fake_gpu import CUDA, ValuelessGPU, fake_gpu, runner_on_fake_gpu
from tests.unit.engine.test_engine_parity import COMMON, MODELS

TOKENS = "result: a copy to the host"
VOCAB_SIZE: int = COMMON["vocab_size"]
THINKING = Thinking(True, (7,), (8,), (8, 9), max_tokens=1)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.7, "seed": 3},
    "top_k": {"temperature": 1.0, "top_k": 10},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
    "logit_bias": {"temperature": 0.0, "logit_bias": ((3, 1.0),)},
    "allowed tokens": {"temperature": 0.0, "allowed_token_ids": (1, 2)},
    "bad words": {"bad_words": ((4,), (1, 5))},
    "thinking": {"thinking": THINKING},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "named logprobs": {"temperature": 0.0, "logprobs": 2, "logprob_token_ids": (4, 5)},
    "filters and logprobs": {"top_k": 10, "logprobs": 2},
}
SAMPLES = [Sample(SamplingParams(**options), (1, 2), (1,), frozenset({6})) for options in OPTIONS.values()]


@pytest.mark.parametrize("vocab_size", [1000, 150_000])
@pytest.mark.parametrize("name", [*OPTIONS, "all"])
def test_sampling_reads_once(name: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = SAMPLES if name == "all" else [SAMPLES[list(OPTIONS).index(name)]] * 3
    with fake_gpu(monkeypatch) as gpu:
        logits = torch.empty((len(samples), vocab_size), dtype=torch.bfloat16, device=CUDA)
        step = SamplingStep(samples, range(5, 5 + len(samples)), vocab_size)
        sampled = step.run(logits, upload(step.arrays, CUDA))
        assert not gpu.waits, "the next step can be launched before this one has ended"
        tokens = sampled.result()
    assert len(tokens) == len(samples) and all((t.logprobs is None) == (s.params.logprobs is None)
                                               for t, s in zip(tokens, samples, strict=True))  # fmt: skip
    assert gpu.waits == [TOKENS]
    assert gpu.num_uploads <= 1
    if vocab_size > 4096:  # smaller ones are sorted as a whole
        assert gpu.largest_float64 < vocab_size, "no float64 over the vocabulary"


def test_a_grammar_uploads_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = StepMask([0, 2], [0, 0], np.full((1, 128), 0xF0, np.uint8), {})
    with fake_gpu(monkeypatch) as gpu:
        logits = torch.empty((3, 1000), device=CUDA)
        for expected in (3, 2):  # the first step also uploads the table of bits
            step = SamplingStep(SAMPLES[:3], [5, 6, 7], 1000)
            gpu.num_uploads = 0
            step.run(logits, upload(step.arrays, CUDA), mask).result()
            assert gpu.num_uploads == expected
    assert gpu.waits == [TOKENS] * 2


@pytest.fixture(params=["llama", "gemma2", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> EngineConfig:
    model_class, config_class, extra = MODELS[request.param]
    model_class(config_class(**COMMON, **extra)).save_pretrained(tmp_path)
    return EngineConfig(str(tmp_path), dtype="bfloat16", device="cpu", block_size=8, kv_cache_bytes=1 << 24)


STEPS = {
    "single tokens": ([TOKENS], 1),
    "beside a prompt": ([TOKENS], 1),
    "a prompt's first chunk": ([], 1),
    "two of a prompt": ([TOKENS], 1),
    "a copied block": ([TOKENS], 2),
}
"""Kinds of steps, and the waits and uploads of each."""


def steps(runner: ModelRunner, gpu: ValuelessGPU) -> dict[str, tuple[list[str], int]]:
    """Returns the waits and uploads of the kinds of STEPS."""
    every = [BatchItem([1], 9 + i, [i, i + 20, i + 40], [sample]) for i, sample in enumerate(SAMPLES)]
    prompt = BatchItem([1] * 9, 8, [60, 61, 62], [SAMPLES[0]])
    batches = {
        "single tokens": Batch(every),
        "beside a prompt": Batch([*every, prompt]),
        "a prompt's first chunk": Batch([msgspec.structs.replace(prompt, samples=[])]),
        "two of a prompt": Batch([msgspec.structs.replace(prompt, samples=[SAMPLES[1]] * 2)]),
        "a copied block": Batch(every[:1], [(3, 4)]),
    }
    found = {}
    for name, batch in batches.items():
        gpu.waits, gpu.num_uploads = [], 0
        outputs = runner.run(batch)
        assert [len(output.tokens) for output in outputs] == [len(item.samples) for item in batch.items]
        found[name] = gpu.waits, gpu.num_uploads
    return found


@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
def test_a_step_uploads_once_and_reads_once(
    model: EngineConfig, has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(model)
    with fake_gpu(monkeypatch) as gpu:
        runner = runner_on_fake_gpu(loaded, model, monkeypatch, has_graphs=has_graphs)
        found = steps(runner, gpu)
        assert (runner._graphs is not None) == has_graphs
    assert found == STEPS


@pytest.mark.parametrize("capability", [(8, 0), pytest.param((8, 9), marks=pytest.mark.extended), (12, 0)])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_small_steps_of_experts_do_not_wait_where_grouped_products_do(
    family: str, capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger ones do, and have no graphs."""
    model_class, config_class, extra = MODELS[family]
    model_class(config_class(**COMMON, **extra)).save_pretrained(tmp_path)
    config = EngineConfig(str(tmp_path), dtype="bfloat16", device="cpu", block_size=8, kv_cache_bytes=1 << 24)
    loaded = load_model(config)
    layer = loaded.model.base_model.layers[0].mlp.experts
    # 4 experts may have 17 copies; a token needs 2.
    monkeypatch.setattr(experts, "_COPIED_BYTES", sum(each.nbytes for each in layer.parameters()) * 17 // 16)
    with fake_gpu(monkeypatch) as gpu:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        runner = runner_on_fake_gpu(loaded, config, monkeypatch, has_graphs=True)
        assert runner._graphs is not None
        assert {shape.num_tokens for shape in runner._graphs.decode_shapes} == {1, 2, 3, 4, 6, 8}
        assert {shape.num_tokens for shape in runner._graphs.chunk_shapes} == {8}
        for num_tokens, waits_for_experts in ((8, False), (9, True)):
            gpu.waits = []
            runner.run(Batch([BatchItem([1], 9, [i, i + 20], [SAMPLES[0]]) for i in range(num_tokens)]))
            assert (gpu.waits == [TOKENS]) != waits_for_experts
            assert ("_forward: the tokens of each expert" in gpu.waits) == waits_for_experts


@pytest.fixture
def long_context(tmp_path: Path) -> EngineConfig:
    model_class, config_class, extra = MODELS["llama"]
    model_class(config_class(**COMMON | extra | {"max_position_embeddings": 1 << 17})).save_pretrained(tmp_path)
    return EngineConfig(str(tmp_path), dtype="bfloat16", device="cpu", block_size=64, kv_cache_bytes=1 << 24)


@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
def test_a_step_is_queued_before_the_tokens_that_its_sampling_depends_on_are_read(
    long_context: EngineConfig, has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model, with the other indices, in one upload; and its sampling in another, when they have been read."""
    loaded = load_model(long_context)
    with fake_gpu(monkeypatch) as gpu:
        runner = runner_on_fake_gpu(loaded, long_context, monkeypatch, has_graphs=has_graphs)
        items = [BatchItem([1], 9 + i, [i], [sample]) for i, sample in enumerate(SAMPLES)]
        first = runner.launch(Batch(items))
        gpu.waits, gpu.num_uploads = [], 0
        following = [msgspec.structs.replace(item, start=item.start + 1, follows=i) for i, item in enumerate(items)]
        second = runner.launch(Batch(following), first)
        assert (gpu.waits, gpu.num_uploads) == ([], 1)
        second.sample_after(first.result())
        assert (gpu.waits, gpu.num_uploads) == ([TOKENS], 2), "the first step's tokens are read, and no others"
        assert len(second.result()) == len(items)


def test_a_step_uploads_no_more_than_its_contexts_need(
    long_context: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(long_context)
    item = BatchItem([1], 1000, list(range(16)), [Sample(SamplingParams(temperature=0.0))])
    with fake_gpu(monkeypatch) as gpu:
        runner = runner_on_fake_gpu(loaded, long_context, monkeypatch, has_graphs=True)
        gpu.uploaded_bytes = 0
        runner.run(Batch([item] * 64))
        assert runner._graphs is not None and runner._graphs.captured, "the step runs from a graph"
    assert gpu.uploaded_bytes < 64 * 16 * 4 + 64 * 50, "blocks of the contexts, and a few numbers for each sequence"


def test_no_memory_for_one_graph_leaves_the_others(
    long_context: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(long_context)
    num_captures = 0

    def capture(function: Any) -> Any:
        nonlocal num_captures
        num_captures += 1
        if num_captures == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return function

    with fake_gpu(monkeypatch):
        runner = runner_on_fake_gpu(loaded, long_context, monkeypatch, has_graphs=True)
        runner.use_graphs(GraphLimits(max_num_seqs=4, max_num_batched_tokens=64), capture)
        assert runner._graphs is not None
        shapes = [*reversed(runner._graphs.chunk_shapes), *reversed(runner._graphs.decode_shapes)]
        runner.warm_up()
        assert runner._graphs is not None and runner._graphs.captured == [shapes[0], *shapes[2:]]
    assert f"no CUDA graph for {shapes[1].num_tokens} tokens, which is slower: CUDA out of memory" in caplog.text


def test_a_step_over_an_fp8_cache_waits_for_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, config_class, extra = MODELS["llama"]
    model_class(config_class(**COMMON, **extra)).save_pretrained(tmp_path)
    config = EngineConfig(
        str(tmp_path), dtype="bfloat16", device="cpu", block_size=8, kv_cache_bytes=1 << 24, kv_cache_dtype="fp8"
    )
    loaded = load_model(config)
    with fake_gpu(monkeypatch) as gpu:
        runner = runner_on_fake_gpu(loaded, config, monkeypatch, has_graphs=True)
        assert runner._pool.tensor.dtype == loaded.kv_dtype == torch.float8_e4m3fn
        assert steps(runner, gpu) == STEPS


def test_the_check_finds_a_wait_an_upload_and_a_mix_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    argmax = sampler.argmax

    def run() -> list[str]:
        gpu.waits = []
        step = SamplingStep([Sample(SamplingParams(temperature=0.0))], [5], 1000)
        step.run(torch.empty((1, 1000), device=CUDA), []).result()
        return gpu.waits

    with fake_gpu(monkeypatch) as gpu:
        assert run() == [TOKENS]
        monkeypatch.setattr(sampler, "argmax", lambda rows: argmax(rows) + int(rows.sum() > 0))
        assert len(run()) == 2
        monkeypatch.setattr(sampler, "argmax", lambda rows: argmax(rows) + torch.tensor([0], device=CUDA))
        assert len(run()) == 2
        monkeypatch.setattr(sampler, "argmax", lambda rows: argmax(rows) + torch.zeros(1, dtype=torch.long))
        with pytest.raises(Exception, match="device"):
            run()


def test_the_check_finds_a_wait_in_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, config_class, extra = MODELS["llama"]
    model_class(config_class(**COMMON, **extra)).save_pretrained(tmp_path)
    config = EngineConfig(str(tmp_path), dtype="bfloat16", device="cpu", block_size=8, kv_cache_bytes=1 << 24)
    loaded = load_model(config)
    loaded.model.base_model.layers[1].register_forward_pre_hook(lambda _, args: args[0].sum().item() and None)
    with fake_gpu(monkeypatch) as gpu:
        runner = runner_on_fake_gpu(loaded, config, monkeypatch, has_graphs=False)
        gpu.waits = []  # those of comparing fused layers
        runner.run(Batch([BatchItem([1], 0, [0], SAMPLES[:1])]))
    assert len(gpu.waits) == 2


def test_no_thread_computes_masks_without_a_grammar() -> None:
    assert GrammarMasks().start(SAMPLES, True) is None
