"""Our attention kernels alone, as a share of the GPU's limits: single tokens and prompts in the sizes of Llama 3.1 8B.

    python -m bench.gpu.attention [--device cpu] [--quick] [--json FILE]

Single tokens are limited by the memory bandwidth, prompts by the matrix rate; the limits are those that a copy and a
matrix product reach. Prompts are compared with torch's own attention over adjacent keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu.engine import copy_bandwidth, matrix_rate, seconds
from bench.gpu.part import Part
from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.batch import BatchItem
from tandem.engine.cuda.triton_attention import TritonAttention, triton_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 64
OPTIONS = AttentionOptions(HEAD_DIM**-0.5)


@dataclass(frozen=True)
class AttentionShape:
    """Attention of `num_sequences` equal sequences. num_context: with the new tokens."""

    num_sequences: int
    num_new: int
    num_context: int

    def __str__(self) -> str:
        new = "a token" if self.num_new == 1 else f"{self.num_new:,} tokens"
        return f"{new} of {self.num_sequences} behind {self.num_context - self.num_new:,}"

    @property
    def num_blocks(self) -> int:
        """Of one sequence."""
        return -(-self.num_context // BLOCK_SIZE)

    @property
    def num_bytes(self) -> int:
        """Keys and values of one layer in bfloat16."""
        return self.num_sequences * self.num_context * 2 * NUM_KV_HEADS * HEAD_DIM * 2

    @property
    def num_operations(self) -> int:
        """Products with the keys and values that each token sees."""
        before = self.num_context - self.num_new
        seen = self.num_new * before + self.num_new * (self.num_new + 1) // 2
        return self.num_sequences * 4 * NUM_HEADS * HEAD_DIM * seen


SHAPES = (
    AttentionShape(1, 1, 1025), AttentionShape(1, 1, 16385), AttentionShape(16, 1, 1025), AttentionShape(64, 1, 1025),
    AttentionShape(256, 1, 1025), AttentionShape(1, 2048, 2048), AttentionShape(1, 8192, 8192),
    AttentionShape(1, 2048, 16384),
)  # fmt: skip


def new_pool(num_blocks: int, num_layers: int, device: str) -> Any:
    """Returns a pool of noise with the attributes that attention uses."""
    shape = (num_blocks, num_layers, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    tensor.normal_()
    return SimpleNamespace(tensor=tensor, layout=SimpleNamespace(block_size=BLOCK_SIZE))


def step(pool: Any, shape: AttentionShape) -> Callable[[], object]:
    """Returns a function that runs one step's attention in all layers of the pool, from a CUDA graph on GPUs."""
    each = shape.num_blocks
    items = [
        BatchItem([0] * shape.num_new, shape.num_context - shape.num_new, list(range(i * each, (i + 1) * each)))
        for i in range(shape.num_sequences)
    ]
    attention = triton_attention(pool, items)
    queries = torch.randn(shape.num_sequences * shape.num_new, NUM_HEADS, HEAD_DIM).to(pool.tensor)

    def run() -> None:
        for layer in range(pool.tensor.shape[1]):
            attend(attention, layer, queries)

    if pool.tensor.device.type == "cpu":
        return run
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def attend(attention: TritonAttention, layer: int, queries: torch.Tensor) -> torch.Tensor:
    return attention._attend(queries, attention._cache(layer), OPTIONS)


def torch_attention(shape: AttentionShape, device: str) -> Callable[[], object]:
    """Returns torch's attention of one layer over adjacent keys and values."""

    def states(num_heads: int, num_tokens: int) -> torch.Tensor:
        return torch.randn(1, num_heads, num_tokens, HEAD_DIM, dtype=torch.bfloat16, device=device)

    query = states(NUM_HEADS, shape.num_new)
    key, value = (states(NUM_HEADS, shape.num_context) for _ in "kv")
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)


def main() -> None:
    part = Part("attention", __doc__)
    part.interpret_kernels()
    is_cuda = part.device == "cuda"
    shapes = SHAPES if is_cuda else (AttentionShape(2, 1, 70), AttentionShape(1, 70, 70))
    num_layers, repeat = (32, 10) if is_cuda else (1, 1)
    bandwidth, rate = copy_bandwidth(part.device), matrix_rate(part.device)
    pool = new_pool(max(shape.num_sequences * shape.num_blocks for shape in shapes), num_layers, part.device)
    for shape in shapes:
        with part.case(str(shape)):
            layer_s = seconds(step(pool, shape), repeat, part.device) / num_layers
            least, of = (
                (shape.num_bytes / bandwidth, "copy's bandwidth")
                if shape.num_new == 1
                else (shape.num_operations / rate, "matrix product's rate")
            )
            part.compare(f"{shape}, us", layer_s * 1e6, least * 1e6, least / layer_s, of)
            if shape.num_new == shape.num_context and is_cuda:
                theirs = seconds(torch_attention(shape, part.device), repeat, part.device)
                part.add(f"{shape}: torch's attention, us", theirs * 1e6)
    part.end()


if __name__ == "__main__":
    main()
