"""Engine steps on one GPU relative to its limits: decode to memory bandwidth, prefill to matrix throughput.

    python -m bench.gpu.engine [--device cpu] [--quick] [--json FILE]

Decode steps run with each attention backend, with and without CUDA graphs, for several batch sizes, and must choose
the same tokens. The model has the shape of Llama 3.1 8B (or a small one with --quick) and random weights.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig

from bench.gpu.part import Part
from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.config import EngineConfig
from tandem.engine.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.generation import SamplingParams

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = LLAMA_8B | {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 8}
TINY = SMALL | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 16}
GREEDY = Sample(SamplingParams(temperature=0.0))
CONTEXT = 1024


def seconds(function: Callable[[], object], repeat: int) -> float:
    """Returns the median time, measured with CUDA events, or by the host's clock on CPU."""
    times: list[float] = []
    for _ in range(3):
        function()
    for _ in range(repeat):
        if not torch.cuda.is_available():
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth(device: str) -> float:
    """Returns bytes read and written per second by a copy within the device."""
    source = torch.randn(1 << (30 if device == "cuda" else 22), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), 10)


def matrix_rate(device: str) -> float:
    """Returns operations per second of a large matrix product, in bfloat16 on GPUs."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in "ab")
    return 2 * size**3 / seconds(lambda: a @ b, 20)


def new_runner(shape: dict[str, Any], device: Any, backend: str) -> tuple[ModelRunner, KVPool]:
    """backend: the one that the worker chooses, or plain attention."""
    is_cuda = device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        config = EngineConfig(
            folder, dtype="bfloat16" if is_cuda else "float32", device=device, load_format="dummy", block_size=64,
            kv_cache_bytes=(16 << 30) if is_cuda else (1 << 28),
        )  # fmt: skip
        loaded = load_model(config)
    pool = KVPool(loaded, config)
    runner = ModelRunner(loaded, pool)
    if backend == "plain":
        runner._uses_triton, runner._graphs = False, None
    runner.warm_up()
    return runner, pool


def decode_items(size: int) -> list[BatchItem]:
    """One token of each sequence, behind a context of CONTEXT tokens."""
    each = -(-(CONTEXT + 1) // 64)
    return [BatchItem([7 + i], CONTEXT, list(range(i * each, (i + 1) * each)), [GREEDY]) for i in range(size)]


def check_decode(part: Part, shape: dict[str, Any], bandwidth: float, sizes: Sequence[int], repeat: int) -> None:
    """Measures decode steps of all combinations; they must choose the same tokens."""
    expected: dict[int, list[int]] = {}
    num_weights = 0
    for backend in ("chosen", "plain"):
        runner, pool = new_runner(shape, part.device, backend)
        parameters = sum(p.numel() for p in runner._model.parameters())
        num_weights = parameters - shape["vocab_size"] * shape["hidden_size"]
        token_bytes = pool.block_bytes / pool.layout.block_size
        pool.tensor.normal_(generator=torch.Generator(part.device).manual_seed(1))
        graphs = runner._graphs
        part.add(
            f"{backend}: attention",
            "Triton" if runner._uses_triton else type(runner._make_attention(decode_items(1))).__name__,
        )
        for has_graphs in (True, False) if graphs is not None else (False,):
            runner._graphs = graphs if has_graphs else None
            for size in sizes:
                name = f"decode, {backend} attention, {'graphs' if has_graphs else 'no graphs'}, {size} sequences"
                with part.case(name):
                    batch = Batch(decode_items(size))
                    tokens = [output.tokens[0].token_id for output in runner.run(batch)]
                    step = seconds(partial(runner.run, batch), repeat)
                    limit = (num_weights * 2 + size * CONTEXT * token_bytes) / bandwidth
                    part.add(name, {"step_ms": step * 1e3, "limit_ms": limit * 1e3, "share": limit / step})
                    same = sum(a == b for a, b in zip(tokens, expected.setdefault(size, tokens), strict=True))
                    assert same >= 0.8 * size, f"{same} of {size} tokens equal those of the first combination"
        runner._graphs = graphs = None  # frees their memory, and that of the pool, before the next backend


def check_prefill(part: Part, shape: dict[str, Any], rate: float, lengths: Sequence[int], repeat: int) -> None:
    runner, pool = new_runner(shape, part.device, "chosen")
    num_weights = sum(p.numel() for p in runner._model.parameters()) - shape["vocab_size"] * shape["hidden_size"]
    for length in lengths:
        with part.case(f"prefill of {length}"):
            batch = Batch([BatchItem([7] * length, 0, list(range(-(-length // 64))), [GREEDY])])
            step = seconds(partial(runner.run, batch), repeat)
            per_layer = 2 * shape["num_attention_heads"] * pool.layout.head_dim * length**2
            operations = 2 * num_weights * length + per_layer * shape["num_hidden_layers"]
            part.add(f"prefill of {length}", {"step_ms": step * 1e3, "share": operations / step / rate})


def main() -> None:
    part = Part("engine", __doc__)
    is_cuda = part.device == "cuda"
    shape = TINY if not is_cuda else SMALL if part.quick else LLAMA_8B
    part.add("gpu", torch.cuda.get_device_name() if is_cuda else "none")
    part.add("copy bandwidth, GB/s", (bandwidth := copy_bandwidth(part.device)) / 1e9)
    part.add("matrix rate, TFLOPS", (rate := matrix_rate(part.device)) / 1e12)
    repeat = 20 if is_cuda and not part.quick else 3
    check_decode(part, shape, bandwidth, (1, 16, 64) if is_cuda else (1, 4), repeat)
    check_prefill(part, shape, rate, (1024, 8192) if is_cuda else (64,), repeat)
    part.end()


if __name__ == "__main__":
    main()
