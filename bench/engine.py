"""CPU time of engine steps on one thread, relative to their linear layers and attention products.

    python -m bench.engine [--model FOLDER] [--quick] [--json FILE]

Measures CPU time of the thread and interleaves the variants, so that other load on the machine disturbs them little and
equally.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.support.report import Aim, Report, finish, new_parser, print_rows
from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.cpu.packed_linear import PackedLinear
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.layers.linear import MergedLinear
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.sampling import SamplingParams

CONTEXT = 300  # tokens of each decoding sequence
PROMPT = 1024
NUM_SEQS = (1, 8, 32)
CHUNKS = (256, 512, 1024)
GREEDY = Sample(SamplingParams(temperature=0.0))


def make_model(folder: Path) -> Path:
    """Writes a Llama with 100 M random bfloat16 parameters, unless the folder has one."""
    if not (folder / "config.json").is_file():
        config = LlamaConfig(
            vocab_size=32000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
            head_dim=64, intermediate_size=2048, max_position_embeddings=8192, tie_word_embeddings=True,
        )  # fmt: skip
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


class LowerLimits:
    """The operations of a step that no engine can avoid, on random inputs of the same shapes."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        head: Any = loaded.model.get_output_embeddings()
        self._head = head
        self._layers = [
            m
            for m in loaded.model.modules()
            if isinstance(m, PackedLinear | MergedLinear | nn.Linear) and m is not head
        ]

    def linears(self, num_tokens: int, num_sampled: int) -> Callable[[], None]:
        """Runs every linear layer once, and the output embedding on the sampled rows."""
        widths = {layer.in_features for layer in (*self._layers, self._head)}
        dtype = self._loaded.dtype
        inputs = {width: torch.randn(num_tokens, width, dtype=dtype) for width in widths}

        def run() -> None:
            for layer in self._layers:
                layer(inputs[layer.in_features])
            self._head(inputs[self._head.in_features][:num_sampled])

        return run

    def products(self, num_tokens: int) -> Callable[[], None]:
        """Runs causal attention over one whole prompt in all layers with torch's flash kernel."""
        config = self._loaded.model.config
        layout = self._loaded.layout
        shape = (1, config.num_attention_heads, num_tokens, layout.head_dim)
        query, key, value = (torch.randn(shape, dtype=self._loaded.dtype) for _ in range(3))

        def run() -> None:
            for _ in range(layout.num_layers):
                F.scaled_dot_product_attention(query, key, value, is_causal=True)

        return run


def decode_step(runner: ModelRunner, num_seqs: int, block_size: int) -> Callable[[], None]:
    blocks = -(-CONTEXT // block_size)
    items = [
        BatchItem([i + 1], CONTEXT - 1, list(range(i * blocks, (i + 1) * blocks)), [GREEDY]) for i in range(num_seqs)
    ]

    def run() -> None:
        runner.run(Batch(items))

    return run


def prefill(runner: ModelRunner, chunk: int, block_size: int) -> Callable[[], None]:
    """Computes one prompt in chunks."""
    table = list(range(-(-PROMPT // block_size)))
    tokens = [i % 1000 + 1 for i in range(PROMPT)]

    def run() -> None:
        for start in range(0, PROMPT, chunk):
            end = start + chunk
            runner.run(Batch([BatchItem(tokens[start:end], start, table, [GREEDY] if end == PROMPT else [])]))

    return run


def measure(variants: dict[str, Callable[[], None]], repetitions: int) -> dict[str, dict[str, float]]:
    """Calls the variants in turn. Returns median, minimum and maximum CPU time of this thread in ms."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for _ in range(repetitions):
        for name, run in variants.items():
            start = time.thread_time_ns()
            run()
            times[name].append((time.thread_time_ns() - start) / 1e6)
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in times.items()
    }


@torch.inference_mode()
def measure_engine(folder: Path, repetitions: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    config = EngineConfig(model=str(folder), dtype="bfloat16", device="cpu", kv_cache_bytes=1 << 29)
    loaded = load_model(config)
    pool = KVPool(loaded, config)
    block_size = loaded.layout.block_size
    runner = ModelRunner(loaded, pool)
    runner.warm_up()
    limits = LowerLimits(loaded)
    figures: dict[str, dict[str, float]] = {}
    for num_seqs in NUM_SEQS:
        variants = {
            f"decode {num_seqs}": decode_step(runner, num_seqs, block_size),
            f"decode {num_seqs}, linears alone": limits.linears(num_seqs, num_seqs),
        }
        figures |= measure(variants, repetitions)
    variants = {f"prefill {PROMPT} in chunks of {chunk}": prefill(runner, chunk, block_size) for chunk in CHUNKS}
    variants[f"prefill {PROMPT}, linears alone"] = limits.linears(PROMPT, 1)
    variants[f"prefill {PROMPT}, attention products alone"] = limits.products(PROMPT)
    figures |= measure(variants, max(3, repetitions // 4))
    pool.close()
    return figures


def aims_of(figures: dict[str, dict[str, float]]) -> list[Aim]:
    def ms(name: str) -> float:
        return figures[name]["median"]

    aims = [
        Aim.of(
            f"decode step of {num_seqs} at {CONTEXT} tokens / its linear layers",
            ms(f"decode {num_seqs}") / ms(f"decode {num_seqs}, linears alone"),
            aim,
            "lower",
        )
        for num_seqs, aim in ((8, 1.6), (32, 2.0))
    ]
    lower_limit = ms(f"prefill {PROMPT}, linears alone") + ms(f"prefill {PROMPT}, attention products alone")
    name = f"prefill of {PROMPT} tokens / its linear layers and attention products"
    return [*aims, Aim.of(name, ms(f"prefill {PROMPT} in chunks of {PROMPT}") / lower_limit, 1.25, "lower")]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--model", type=Path, help="model folder (default: a Llama with 100 M random parameters)")
    arguments = parser.parse_args()
    folder = arguments.model or make_model(Path(tempfile.gettempdir()) / "tandem-bench" / "llama100m")
    figures = measure_engine(folder, repetitions=5 if arguments.quick else 40)
    print_rows([{"step": name} | {f"{key} ms": ms for key, ms in values.items()} for name, values in figures.items()])
    finish(Report.of("engine", {"milliseconds": figures}, aims_of(figures)), arguments.json)


if __name__ == "__main__":
    main()
