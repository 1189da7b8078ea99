"""Predicts step times on a GPU from the bytes that a step moves, the operations that it computes, and its kernels.

    python -m tools.roofline        prints the tables of docs/gpu.md

A decode step reads all weights once and each sequence's keys and values; a prefill step multiplies every token with all
weights. The least time is the larger of bytes / bandwidth and operations / matrix rate. See Williams et al.,
"Roofline", CACM 2009. The design's prediction adds a gap for each kernel of a CUDA graph. `make gpu-check` measures the
same steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A card: dense bfloat16 rate in FLOP/s, memory bandwidth in bytes/s, memory in bytes.

    device_names: those that CUDA reports. has_fp8: whether it multiplies FP8, at twice the bfloat16 rate.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    device_names: tuple[str, ...] = ()
    has_fp8: bool = True


@dataclass(frozen=True)
class Precision:
    """Bytes of a layer's weight, with its scales, and of a key or value. The output projection stays in bfloat16.

    is_fp8: whether products are computed in FP8; otherwise weights are converted to bfloat16.
    """

    name: str
    weight_bytes: float
    kv_bytes: float
    is_fp8: bool = False


@dataclass(frozen=True)
class Model:
    """Sizes of a dense decoder whose MLP has gate, up and down projections."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @classmethod
    def of(cls, name: str, shape: Mapping[str, Any]) -> Model:
        """shape: the fields of a model's `config.json`."""
        hidden_size, num_heads = shape["hidden_size"], shape["num_attention_heads"]
        return cls(
            name, shape["num_hidden_layers"], hidden_size, num_heads, shape["num_key_value_heads"],
            shape.get("head_dim", hidden_size // num_heads), shape["intermediate_size"], shape["vocab_size"],
        )  # fmt: skip

    @property
    def num_layer_weights(self) -> int:
        attention = 2 * self.num_heads + 2 * self.num_kv_heads  # query and output, key and value
        return self.hidden_size * (attention * self.head_dim + 3 * self.intermediate_size)

    @property
    def num_step_weights(self) -> int:
        """Weights that a step reads: all layers and the output projection, not the table of input embeddings."""
        return self.num_layers * self.num_layer_weights + self.num_head_weights

    @property
    def num_head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def num_layer_kv(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def num_layer_activations(self) -> int:
        """Elements that the design's kernels of one layer read and write for one token, apart from the cache."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, merged = self.num_heads * self.head_dim, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        norms = 2 * (2 + 2) * hidden  # each reads an output and the residual, and writes the sum and its norm
        attention = (hidden + merged) + 2 * merged + 2 * query + (query + hidden)  # QKV, RoPE, attention, output
        mlp = (hidden + 2 * inner) + 3 * inner + (inner + hidden)  # gate and up, SiLU * up, down
        return norms + attention + mlp

    @property
    def num_kernels(self) -> int:
        return KERNELS_PER_LAYER * self.num_layers + OTHER_KERNELS


GPUS = (
    Gpu("A100 80 GB", 312e12, 2.04e12, 80e9, ("NVIDIA A100-SXM4-80GB",), has_fp8=False),
    Gpu("H100", 989e12, 3.35e12, 80e9, ("NVIDIA H100 80GB HBM3",)),
    Gpu("H200", 989e12, 4.8e12, 141e9, ("NVIDIA H200",)),
    Gpu("B200", 2250e12, 8.0e12, 180e9, ("NVIDIA B200",)),
)
"""SXM variants, from NVIDIA's data sheets; without structured sparsity."""

MODELS = (
    Model("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    Model("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936),
)

BFLOAT16 = Precision("bfloat16", 2, 2)
FLOAT32 = Precision("float32", 4, 4)
FP8 = Precision("FP8", 1, 1, is_fp8=True)
INT4 = Precision("INT4", 0.5 + 2.5 / 128, 2)
"""A scale and a zero point for each group of 128."""

DECODE_SHARE, PREFILL_SHARE = 0.7, 0.5
"""Our aims: the share of the bandwidth in decode and of the matrix rate in prefill."""
BATCHES = (1, 16, 64)
CONTEXT = 1024
"""Tokens of each sequence in a decode step."""
PROMPT = 2048
"""Tokens of a prefill step with one prompt."""
KERNELS_PER_LAYER = 12
"""The design's most, for a dense layer."""
OTHER_KERNELS = 8
"""Embedding, last norm, output projection, greedy sampling, copies."""
KERNEL_GAP_S = 2e-6
"""Between two kernels of a CUDA graph. Assumed, not measured."""


def gpu_named(device_name: str) -> Gpu | None:
    """Returns the card of which CUDA reports this name, or None if its data sheet is not listed."""
    return next((gpu for gpu in GPUS if device_name in gpu.device_names), None)


def decode_bytes(model: Model, num_sequences: int, context: int, precision: Precision = BFLOAT16) -> float:
    """Returns the bytes that a decode step must read: weights, keys and values."""
    head_bytes = max(precision.weight_bytes, BFLOAT16.weight_bytes) * model.num_head_weights
    weights = precision.weight_bytes * model.num_layers * model.num_layer_weights + head_bytes
    return weights + precision.kv_bytes * num_sequences * context * model.num_layers * model.num_layer_kv


def decode_s(model: Model, gpu: Gpu, num_sequences: int, context: int, precision: Precision = BFLOAT16) -> float:
    """Returns the least seconds of a decode step."""
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * context  # scores and weighted values
    operations = num_sequences * (2 * model.num_step_weights + attention)
    return max(decode_bytes(model, num_sequences, context, precision) / gpu.bandwidth, operations / gpu.flops)


def prefill_s(model: Model, gpu: Gpu, num_tokens: int, precision: Precision = BFLOAT16) -> float:
    """Returns the least seconds of a step that computes one prompt. Causal attention computes half of the scores."""
    layers = 2 * model.num_layers * model.num_layer_weights * num_tokens / (2 if precision.is_fp8 else 1)
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * num_tokens**2
    operations = layers + attention + 2 * model.num_head_weights  # logits of the last token
    return max(decode_bytes(model, 0, 0, precision) / gpu.bandwidth, operations / gpu.flops)


def design_decode_s(model: Model, gpu: Gpu, num_sequences: int, context: int, precision: Precision = BFLOAT16) -> float:
    """Returns the seconds that the design predicts: the least time, activations, and a gap for each kernel."""
    activations = BFLOAT16.weight_bytes * num_sequences * model.num_layers * model.num_layer_activations
    least = decode_s(model, gpu, num_sequences, context, precision)
    return least + activations / gpu.bandwidth + model.num_kernels * KERNEL_GAP_S


def design_prefill_s(model: Model, gpu: Gpu, num_tokens: int, precision: Precision = BFLOAT16) -> float:
    """Returns the seconds that the design predicts: products and attention, then the activations in memory."""
    activations = BFLOAT16.weight_bytes * num_tokens * model.num_layers * model.num_layer_activations
    least = prefill_s(model, gpu, num_tokens, precision)
    return least + activations / gpu.bandwidth + model.num_kernels * KERNEL_GAP_S


def fits(model: Model, gpu: Gpu, num_sequences: int, context: int, precision: Precision = BFLOAT16) -> bool:
    """Whether weights and keys and values take at most 0.9 of the memory."""
    embeddings = BFLOAT16.weight_bytes * model.num_head_weights
    return embeddings + decode_bytes(model, num_sequences, context, precision) <= 0.9 * gpu.memory


def _head(first: str, *columns: str) -> Iterator[str]:
    yield f"| {' | '.join([first, *columns])} |"
    yield "| --- |" + " --- |" * len(columns)


def table() -> Iterator[str]:
    """Yields the lines of a Markdown table: step times in ms at our aims."""
    yield from _head("model, GPU", *(f"decode of {batch}" for batch in BATCHES), f"prefill of {PROMPT:,}")
    for model in MODELS:
        for gpu in GPUS:
            cells = [_decode_cell(model, gpu, batch, BFLOAT16) for batch in BATCHES]
            cells.append(f"{1000 * prefill_s(model, gpu, PROMPT) / PREFILL_SHARE:.0f}")
            yield f"| {model.name}, {gpu.name} | {' | '.join(cells)} |"


def _decode_cell(model: Model, gpu: Gpu, batch: int, precision: Precision) -> str:
    if not fits(model, gpu, batch, CONTEXT, precision):
        return "does not fit"
    return f"{1000 * decode_s(model, gpu, batch, CONTEXT, precision) / DECODE_SHARE:.1f}"


def layer_table() -> Iterator[str]:
    """Yields the lines of a Markdown table: what one layer moves in a decode step, by the design."""
    yield from _head("model", "weights", f"KV of {CONTEXT:,} tokens", "activations of a token", "kernels of a step")
    for model in MODELS:
        moved = 2 * model.num_layer_weights, 2 * CONTEXT * model.num_layer_kv, 2 * model.num_layer_activations
        cells = [f"{num_bytes / 1e6:.3g} MB" for num_bytes in moved]
        layers = f"{KERNELS_PER_LAYER} x {model.num_layers} + {OTHER_KERNELS} = {model.num_kernels}"
        yield f"| {model.name} | {' | '.join(cells)} | {layers} |"


def design_table() -> Iterator[str]:
    """Yields the lines of a Markdown table: the design's step times in ms, and the share of the bandwidth they mean."""
    yield from _head("model, GPU", "gaps", *(f"decode of {batch}" for batch in BATCHES))
    for model in MODELS:
        for gpu in GPUS:
            cells = [f"{1000 * model.num_kernels * KERNEL_GAP_S:.2f}"]
            for batch in BATCHES:
                predicted = design_decode_s(model, gpu, batch, CONTEXT)
                share = decode_s(model, gpu, batch, CONTEXT) / predicted
                fitting = fits(model, gpu, batch, CONTEXT)
                cells.append(f"{1000 * predicted:.1f} ({share:.2f})" if fitting else "does not fit")
            yield f"| {model.name}, {gpu.name} | {' | '.join(cells)} |"


def quantised_table() -> Iterator[str]:
    """Yields the lines of a Markdown table: step times in ms at our aims with FP8 weights and KV, and INT4 weights."""
    decode = [f"{precision.name}: decode of {batch}" for precision in (FP8, INT4) for batch in BATCHES]
    yield from _head("model, GPU", *decode[:3], f"FP8: prefill of {PROMPT:,}", *decode[3:])
    for model in MODELS:
        for gpu in GPUS:
            fp8 = [_decode_cell(model, gpu, batch, FP8) for batch in BATCHES]
            fp8.append(f"{1000 * prefill_s(model, gpu, PROMPT, FP8) / PREFILL_SHARE:.0f}")
            int4 = [_decode_cell(model, gpu, batch, INT4) for batch in BATCHES]
            yield f"| {model.name}, {gpu.name} | {' | '.join((fp8 if gpu.has_fp8 else ['-'] * 4) + int4)} |"


if __name__ == "__main__":
    for lines in (table(), layer_table(), design_table(), quantised_table()):
        print("\n".join(lines), end="\n\n")
