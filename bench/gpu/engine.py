"""Engine steps on one GPU beside their prediction, and as a share of its limits.

    python -m bench.gpu.engine [--device cpu] [--quick] [--json FILE]

Decode is compared with the memory bandwidth, prefill with the matrix rate (`tools.roofline`). Decode steps run with
each attention backend, with and without CUDA graphs, for several batch sizes, and must choose the same tokens. The
model has the shape of Llama 3.1 8B (or a small one with --quick) and random weights, made on the device.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig

from bench.gpu.part import Part
from bench.gpu.step_profile import profile_steps
from tandem.engine import model_runner
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.sampling import SamplingParams
from tools import roofline
from tools.roofline import Gpu, Model, Precision

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = LLAMA_8B | {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 8}
TINY = SMALL | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 16}
GREEDY = Sample(SamplingParams(temperature=0.0))
WITH_LOGPROBS = Sample(SamplingParams(temperature=0.0, logprobs=20))
MAX_GAP = 0.5
"""Between logarithms of probabilities that rounding in 32 layers may exchange; 0.22 was seen among 81 sequences. A
token that is not among the twenty likeliest, as after wrong keys, is infinitely far."""
CONTEXT = 1024
COPIES, WAITS = 3, 2
"""Of a step with a graph. Copies: from pinned memory to the device, into the graph's buffer, tokens back. Waits: for
the tokens, and for the end of the step."""


def seconds(function: Callable[[], object], repeat: int, device: str) -> float:
    """Returns the median time, measured with CUDA events, or by the host's clock on CPU."""
    times: list[float] = []
    for _ in range(3):
        function()
    for _ in range(repeat):
        if device == "cpu":
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
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), 10, device)


def matrix_rate(device: str) -> float:
    """Returns operations per second of a large matrix product, in bfloat16 on GPUs."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in "ab")
    return 2 * size**3 / seconds(lambda: a @ b, 20, device)


def measured_card(part: Part) -> Gpu:
    """Returns the card's data sheet; of an unknown card, and of a CPU, what a copy and a matrix product reach."""
    name = torch.cuda.get_device_name() if part.device == "cuda" else "CPU"
    bandwidth, rate = copy_bandwidth(part.device), matrix_rate(part.device)
    card = roofline.gpu_named(name) or Gpu(name, rate, bandwidth, 0)
    part.add("device", name)
    part.add(
        "limits are", "of the data sheet" if roofline.gpu_named(name) else "those of the copy and the matrix product"
    )
    part.compare("copy, GB/s", bandwidth / 1e9, card.bandwidth / 1e9, bandwidth / card.bandwidth, "bandwidth")
    part.compare("matrix product, TFLOP/s", rate / 1e12, card.flops / 1e12, rate / card.flops, "matrix rate")
    return card


def new_runner(
    shape: dict[str, Any], device: Any, *, is_plain: bool = False, quantization: Any = "auto",
    change: Callable[[Any], None] | None = None, exact: bool = False,
) -> ModelRunner:  # fmt: skip
    """Returns a runner as workers have it, over a pool of noise. exact: see `EngineConfig`.

    is_plain: without our kernels, and without graphs. change: is called with the model before the runner is made.
    """
    is_cuda = device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        config = EngineConfig(
            folder, dtype="bfloat16" if is_cuda else "float32", device=device, load_format="dummy", block_size=64,
            kv_cache_bytes=(36 << 30) if is_cuda else (1 << 28), quantization=quantization, exact=exact,
        )  # fmt: skip
        loaded = load_model(config)
    if change is not None:
        change(loaded.model)
    pool = KVPool(loaded, config)
    pool.tensor.normal_(generator=torch.Generator(device).manual_seed(1))
    plain: Any = mock.patch.multiple(
        model_runner, uses_triton=lambda *_: False, attention_maker=lambda pool: partial(PlainAttention, pool)
    )
    with plain if is_plain else nullcontext():
        limits = GraphLimits(max_num_seqs=256, max_num_batched_tokens=2048)
        runner = ModelRunner(loaded, pool, limits)
    runner.warm_up()
    return runner


def decode_items(size: int, sample: Sample = GREEDY) -> list[BatchItem]:
    """One token of each sequence, behind a context of CONTEXT tokens. Block 0 is left out: `warm_up` writes to it."""
    each = -(-(CONTEXT + 1) // 64)
    return [BatchItem([7 + i], CONTEXT, list(range(1 + i * each, 1 + (i + 1) * each)), [sample]) for i in range(size)]


def prompt(length: int) -> Batch:
    return Batch([BatchItem([7] * length, 0, list(range(-(-length // 64))), [GREEDY])])


@dataclass
class EngineBench:
    """repeat: measured steps of each kind. tokens: the first choices of each batch size."""

    part: Part
    model: Model
    card: Gpu
    runner: ModelRunner
    repeat: int
    tokens: dict[int, list[int]] = field(default_factory=dict)

    @property
    def precision(self) -> Precision:
        return roofline.BFLOAT16 if self.part.device == "cuda" else roofline.FLOAT32

    def decode(self, name: str, sizes: Sequence[int], is_compared: bool = False) -> None:
        """Measures decode steps. is_compared: whether they appear in the table that ends the check."""
        for size in sizes:
            what = f"decode of {size}, {name}"
            with self.part.case(what):
                batch = Batch(decode_items(size))
                self._compare_tokens(size)
                step = seconds(partial(self.runner.run, batch), self.repeat, self.part.device)
                arguments = self.model, self.card, size, CONTEXT, self.precision
                least, predicted = roofline.decode_s(*arguments), roofline.design_decode_s(*arguments)
                self.part.add(what, {"step_ms": step * 1e3, "least_ms": least * 1e3, "share": least / step})
                if is_compared:
                    share = "bandwidth", roofline.DECODE_SHARE
                    self.part.compare(f"decode of {size}, ms", step * 1e3, predicted * 1e3, least / step, *share)

    def _compare_tokens(self, size: int) -> None:
        """Raises AssertionError if a sequence's token is not about as likely as that of the first combination.

        Equal tokens would be too much to ask: bfloat16 has 8 bits, so several tokens share the largest logit.
        """
        found = [output.tokens[0] for output in self.runner.run(Batch(decode_items(size, WITH_LOGPROBS)))]
        tokens = [token.token_id for token in found]
        for token, first in zip(found, self.tokens.setdefault(size, tokens), strict=True):
            assert token.logprobs is not None
            gap = token.logprobs.logprob - dict(token.logprobs.top).get(first, float("-inf"))
            assert gap < MAX_GAP, f"the first combination's token is less likely, by {gap:.3f} in the logarithm"

    def prefill(self, lengths: Sequence[int]) -> None:
        for length in lengths:
            with self.part.case(f"prefill of {length}"):
                step = seconds(partial(self.runner.run, prompt(length)), self.repeat, self.part.device)
                arguments = self.model, self.card, length, self.precision
                least, predicted = roofline.prefill_s(*arguments), roofline.design_prefill_s(*arguments)
                share = "matrix rate", roofline.PREFILL_SHARE
                self.part.compare(f"prefill of {length}, ms", step * 1e3, predicted * 1e3, least / step, *share)
                self.part.add(f"prefill of {length}, tokens/s", length / step)

    def profile(self, sizes: Sequence[int]) -> None:
        """Counts what decode steps do, and measures the device's time and the host's gap between steps.

        The device's time is that of a step whose host work is hidden behind the step before.
        """
        for size in sizes:
            name = f"decode of {size}"
            with self.part.case(f"profile of {name}"):
                run = partial(self.runner.run, Batch(decode_items(size)))
                step_ms = seconds(run, self.repeat, self.part.device) * 1e3
                found = profile_steps(run)
                self.part.add(f"profile of {name}", dataclasses.asdict(found))
                if self.part.device == "cuda":
                    assert found.num_kernels, "the profiler has seen no kernel"
                    arguments = self.model, self.card, size, CONTEXT, self.precision
                    least, predicted = roofline.decode_s(*arguments), roofline.design_decode_s(*arguments)
                    share = 1e3 * least / found.device_ms
                    self.part.compare(
                        f"{name}, device only, ms", found.device_ms, predicted * 1e3, share, "bandwidth",
                        roofline.DECODE_SHARE,
                    )  # fmt: skip
                gaps = self.model.num_kernels * roofline.KERNEL_GAP_S * 1e3
                self.part.compare(f"{name}, kernels", found.num_kernels, self.model.num_kernels)
                self.part.compare(f"{name}, idle between kernels, ms", found.device_ms - found.busy_ms, gaps)
                self.part.compare(f"{name}, launches", found.num_launches)
                self.part.compare(f"{name}, copies", found.num_copies, COPIES)
                self.part.compare(f"{name}, waits of the host", found.num_waits, WAITS)
                self.part.compare(f"{name}, host's gap, ms", max(0.0, step_ms - found.device_ms))


def main() -> None:
    part = Part("engine", __doc__)
    is_cuda = part.device == "cuda"
    shape = TINY if not is_cuda else SMALL if part.quick else LLAMA_8B
    card = measured_card(part)
    runner = new_runner(shape, part.device)
    part.add("attention", "Triton" if runner._uses_triton else type(runner._make_attention(decode_items(1))).__name__)
    part.add("graphs", 0 if runner._graphs is None else len(runner._graphs.captured))
    bench = EngineBench(part, Model.of("Llama", shape), card, runner, 20 if is_cuda and not part.quick else 3)
    sizes = (1, 16, 64, 256) if is_cuda else (1, 4)
    bench.decode("as served", sizes, is_compared=True)
    bench.profile((sizes[0], sizes[-1]))
    if (graphs := runner._graphs) is not None:
        runner._graphs = None
        bench.decode("without graphs", sizes)
        runner._graphs = graphs
    bench.prefill((2048, 8192) if is_cuda else (64,))  # last, because it writes to the blocks of the others
    del bench.runner, runner
    gc.collect()  # frees the model and the pool before the next are made
    with part.case("plain attention starts"):
        bench.runner = new_runner(shape, part.device, is_plain=True)
        bench.decode("plain attention", sizes[:3])
    part.end()


if __name__ == "__main__":
    main()
