"""Engine steps on one GPU relative to its limits: decode to memory bandwidth, prefill to matrix throughput.

    python -m bench.gpu.engine [--quick] [--json FILE]

The model has the shape of Llama 3.1 8B (or a small one with --quick) and random weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from bench.support.report import Aim, Report, add_common_options, finish
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
GREEDY = Sample(SamplingParams(temperature=0.0))
CONTEXT = 1024


def seconds(function: Callable[[], object], repeat: int) -> float:
    """Returns the median time, measured with CUDA events."""
    times: list[float] = []
    for _ in range(3):
        function()
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Returns bytes read and written per second by a device-to-device copy."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), 10)


def matrix_rate() -> float:
    """Returns bfloat16 operations per second of a large matrix product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    return 2 * 8192**3 / seconds(lambda: a @ b, 20)


def measure(shape: dict[str, Any], quick: bool) -> dict[str, Any]:
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**shape).save_pretrained(folder)
        config = EngineConfig(folder, dtype="bfloat16", device="cuda", load_format="dummy", kv_cache_bytes=16 << 30)
        loaded = load_model(config)
    pool = KVPool(loaded, config)
    runner = ModelRunner(loaded, pool)
    runner.warm_up()
    num_weights = sum(p.numel() for p in loaded.model.parameters()) - shape["vocab_size"] * shape["hidden_size"]
    block_size = pool.layout.block_size
    token_bytes = pool.block_bytes / block_size
    blocks_each = -(-(CONTEXT + 1) // block_size)
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "copy_bandwidth_gb_per_s": bandwidth / 1e9,
        "matrix_rate_tflops": rate / 1e12, "graphs": runner._graphs is not None, "decode": {}, "prefill": {},
    }  # fmt: skip
    for size in (1, 16, 64):
        items = [
            BatchItem([7], CONTEXT, list(range(i * blocks_each, (i + 1) * blocks_each)), [GREEDY]) for i in range(size)
        ]
        step = seconds(lambda items=items: runner.run(Batch(items)), 10 if quick else 50)  # type: ignore[misc]
        limit = (2 * num_weights + size * CONTEXT * token_bytes) / bandwidth
        figures["decode"][str(size)] = {"step_ms": step * 1e3, "limit_ms": limit * 1e3, "share": limit / step}
    for length in (1024, 8192):
        item = BatchItem([7] * length, 0, list(range(-(-length // block_size))), [GREEDY])
        step = seconds(lambda item=item: runner.run(Batch([item])), 3 if quick else 10)  # type: ignore[misc]
        per_layer = 2 * shape["num_attention_heads"] * pool.layout.head_dim * length**2
        operations = 2 * num_weights * length + per_layer * shape["num_hidden_layers"]
        figures["prefill"][str(length)] = {"step_ms": step * 1e3, "share": operations / step / rate}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.engine", description=__doc__)
    add_common_options(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, but none is visible")
    figures = measure(SMALL if options.quick else LLAMA_8B, options.quick)
    table = Table("case", "step ms", "share of the limit")
    for kind in ("decode", "prefill"):
        for size, values in figures[kind].items():
            table.add_row(f"{kind} {size}", f"{values['step_ms']:.2f}", f"{values['share']:.2f}")
    Console().print(table)
    aims = [
        Aim.of(f"decode of {size}, share of the memory limit", v["share"], 0.7, "higher")
        for size, v in figures["decode"].items()
    ]
    aims += [
        Aim.of(f"prefill of {size}, share of the matrix rate", v["share"], 0.5, "higher")
        for size, v in figures["prefill"].items()
    ]
    finish(Report.of("gpu.engine", figures, aims), options.json)


if __name__ == "__main__":
    main()
