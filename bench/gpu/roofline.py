"""Predicts step times on a GPU from the bytes that a step reads and the operations that it computes.

    python -m bench.gpu.roofline        prints the table of docs/gpu.md

A decode step reads all weights once and each sequence's keys and values; a prefill step multiplies every token with all
weights. The prediction is the larger of bytes / bandwidth and operations / matrix rate, so it is a lower limit of the
time: launches, sampling and the host come on top. See Williams et al., "Roofline", CACM 2009. `make gpu-check` measures
the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Data sheet of a card: dense bfloat16 rate in FLOP/s, memory bandwidth in bytes/s, memory in bytes."""

    name: str
    flops: float
    bandwidth: float
    memory: float


@dataclass(frozen=True)
class Model:
    """Sizes of a dense decoder in bfloat16 whose MLP has gate, up and down projections."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @property
    def num_layer_weights(self) -> int:
        attention = 2 * self.num_heads + 2 * self.num_kv_heads  # query and output, key and value
        return self.hidden_size * (attention * self.head_dim + 3 * self.intermediate_size)

    @property
    def num_step_weights(self) -> int:
        """Weights that a step reads: all layers and the output projection, not the table of input embeddings."""
        return self.num_layers * self.num_layer_weights + self.hidden_size * self.vocab_size

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES


BYTES = 2
"""Of a weight, a key or a value in bfloat16."""

GPUS = (
    Gpu("A100 80 GB", 312e12, 2.04e12, 80e9),
    Gpu("H100", 989e12, 3.35e12, 80e9),
    Gpu("H200", 989e12, 4.8e12, 141e9),
    Gpu("B200", 2250e12, 8.0e12, 180e9),
)
"""SXM variants, from NVIDIA's data sheets; without structured sparsity."""

MODELS = (
    Model("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    Model("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936),
)

DECODE_SHARE, PREFILL_SHARE = 0.7, 0.5
"""Our aims: the share of the bandwidth in decode and of the matrix rate in prefill."""
BATCHES = (1, 16, 64)
CONTEXT = 1024
"""Tokens of each sequence in a decode step."""
PROMPT = 2048
"""Tokens of a prefill step with one prompt."""


def decode_s(model: Model, gpu: Gpu, num_sequences: int, context: int) -> float:
    """Returns the least seconds of a decode step."""
    num_bytes = BYTES * model.num_step_weights + num_sequences * context * model.kv_bytes_per_token
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * context  # scores and weighted values
    operations = num_sequences * (2 * model.num_step_weights + attention)
    return max(num_bytes / gpu.bandwidth, operations / gpu.flops)


def prefill_s(model: Model, gpu: Gpu, num_tokens: int) -> float:
    """Returns the least seconds of a step that computes one prompt. Causal attention computes half of the scores."""
    layers = 2 * model.num_layers * model.num_layer_weights * num_tokens
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * num_tokens**2
    operations = layers + attention + 2 * model.hidden_size * model.vocab_size  # logits of the last token
    return max(BYTES * model.num_step_weights / gpu.bandwidth, operations / gpu.flops)


def fits(model: Model, gpu: Gpu, num_sequences: int, context: int) -> bool:
    """Whether weights and keys and values take at most 0.9 of the memory."""
    num_weights = model.num_step_weights + model.hidden_size * model.vocab_size
    return BYTES * num_weights + num_sequences * context * model.kv_bytes_per_token <= 0.9 * gpu.memory


def table() -> Iterator[str]:
    """Yields the lines of a Markdown table: step times in ms at our aims."""
    decode = " | ".join(f"decode of {batch}" for batch in BATCHES)
    yield f"| model, GPU | {decode} | prefill of {PROMPT:,} |"
    yield "| --- |" + " --- |" * (len(BATCHES) + 1)
    for model in MODELS:
        for gpu in GPUS:
            cells = [
                f"{1000 * decode_s(model, gpu, batch, CONTEXT) / DECODE_SHARE:.1f}"
                if fits(model, gpu, batch, CONTEXT)
                else "does not fit"
                for batch in BATCHES
            ]
            cells.append(f"{1000 * prefill_s(model, gpu, PROMPT) / PREFILL_SHARE:.0f}")
            yield f"| {model.name}, {gpu.name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table()))
