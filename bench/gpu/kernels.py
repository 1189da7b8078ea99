"""Our attention kernels against plain attention: block and head sizes, windows, soft caps, sinks, and pools in FP8.

    python -m bench.gpu.kernels [--device cpu] [--quick] [--json FILE]

Both write the same keys and values, to the same slots. On CPU the kernels are interpreted.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from bench.gpu.part import Part
from tandem.engine.attention.interface import AttentionOptions, StepAttention
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.batch import BatchItem
from tandem.runtime.cores import num_cores

NUM_LAYERS, NUM_BLOCKS = 2, 48
FP8 = torch.float8_e4m3fn
MAX_ERROR = {torch.float32: 5e-3, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Of values around 1. Plain attention's products may round the factors of float32 to ten bits."""


def new_pool(block_size: int, head_dim: int, num_kv_heads: int, dtype: torch.dtype, device: str) -> Any:
    """A pool with the attributes that attention uses, filled with noise."""
    shape = (NUM_BLOCKS, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    rows = tensor.view(-1, block_size * head_dim)
    layout = SimpleNamespace(
        num_layers=NUM_LAYERS, num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim,
    )  # fmt: skip
    first = [2 * layer * num_kv_heads for layer in range(NUM_LAYERS)]
    return SimpleNamespace(
        tensor=tensor, layout=layout, layer_blocks=[(rows[row:], rows[row + num_kv_heads :]) for row in first],
        layer_tokens=list(tensor.permute(1, 2, 0, 4, 3, 5)),
    )  # fmt: skip


def new_items(block_size: int, is_decode: bool, seed: int) -> list[BatchItem]:
    """Sequences of different lengths in scattered blocks; without `is_decode`, chunks of prompts among them."""
    rng = random.Random(seed)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    items: list[BatchItem] = []
    while len(free) > 12 and len(items) < 6:
        start = rng.choice([0, 1, block_size - 1, block_size, 3 * block_size + 2])
        num_tokens = 1 if is_decode else rng.choice([1, 2, block_size, 2 * block_size + 1])
        num_blocks = -(-(start + num_tokens) // block_size)
        items.append(BatchItem([0] * num_tokens, start, free[:num_blocks]))
        free = free[num_blocks:]
    return items


def compare(
    pool: Any, items: Sequence[BatchItem], options: AttentionOptions, group: int, dtype: torch.dtype,
    make: Callable[[Any, Sequence[BatchItem]], StepAttention],
) -> None:  # fmt: skip
    """Raises AssertionError where the two differ. dtype: of queries, keys and values before they are stored."""
    layout, like = pool.layout, pool.tensor
    num_tokens = sum(len(item.token_ids) for item in items)
    generator = torch.Generator().manual_seed(2)

    def noise(num_heads: int) -> torch.Tensor:
        values = torch.randn((1, num_tokens, num_heads, layout.head_dim), generator=generator)
        return values.to(like.device, dtype).transpose(1, 2)

    query, key, value = noise(layout.num_kv_heads * group), noise(layout.num_kv_heads), noise(layout.num_kv_heads)
    before = like.clone()
    expected = PlainAttention(pool, items).attend(1, query, key, value, options)
    written = like.clone()
    like.copy_(before)
    got = make(pool, items).attend(1, query, key, value, options)
    same_bits = torch.equal(like.view(torch.uint8), written.view(torch.uint8))
    assert same_bits, "other slots, or other keys and values, were written"
    error = float((got.view_as(expected).float() - expected.float()).abs().max())
    assert error < MAX_ERROR[dtype], f"the largest error is {error:.3g}"


def shapes(device: str, is_short: bool) -> list[tuple[int, int, tuple[int, int], torch.dtype]]:
    """Block size, head size, KV heads and query heads of each, dtype. The one that users run most comes first.

    Each shape is compiled for, which takes seconds. So each pair of values occurs in bfloat16, but not each
    combination; float32 compiles slowest, and occurs with two head sizes.
    """
    if device == "cpu":
        return [(16, head_dim, (1, 4), torch.float32) for head_dim in (32, 80)]
    blocks, heads, groups = [64, 16, 256], [128, 64, 80, 256], [(8, 4), (1, 4), (2, 1)]
    squares = [(blocks[i], heads[j], groups[(i + j) % 3], torch.bfloat16) for j in range(4) for i in range(3)]
    others = [(64, 128, (8, 4), torch.float16), (16, 64, (2, 1), torch.float32), (64, 128, (8, 4), torch.float32)]
    return squares[::4] if is_short else squares + others


@dataclass(frozen=True)
class Case:
    """The variants of one shape. stored: dtype of the pool. is_short: whether a fifth of the variants is enough."""

    block_size: int
    head_dim: int
    num_heads: tuple[int, int]
    dtype: torch.dtype
    stored: torch.dtype
    device: str
    is_short: bool

    def __str__(self) -> str:
        num_kv_heads, group = self.num_heads
        heads = f"{num_kv_heads} x {group} heads"
        return f"block {self.block_size}, head {self.head_dim}, {heads}, {self.dtype} in {self.stored}"


def check_case(case: Case) -> None:
    """Compares all variants of a case. Raises AssertionError where the two differ."""
    from tandem.engine.cuda.triton_attention import triton_attention

    num_kv_heads, group = case.num_heads
    pool = new_pool(case.block_size, case.head_dim, num_kv_heads, case.stored, case.device)
    sinks = torch.linspace(-1, 2, num_kv_heads * group, device=case.device)
    variants = list(itertools.product([0, 20], [0.0, 5.0], [False, True], [0, 1]))
    for window, softcap, has_sinks, is_decode in variants[:: 5 if case.is_short else 1]:
        items = new_items(case.block_size, bool(is_decode), window)
        options = AttentionOptions(case.head_dim**-0.5, window, softcap, sinks if has_sinks else None)
        try:
            compare(pool, items, options, group, case.dtype, triton_attention)
        except Exception as error:
            what = f"window {window}, soft cap {softcap}, sinks {has_sinks}, decode {bool(is_decode)}"
            raise AssertionError(f"{what}: {error}") from error


def cases_of(device: str, is_short: bool) -> list[Case]:
    found = [
        Case(*shape, shape[3], device, is_short or shape[3] == torch.float32)  # which compiles slowest
        for shape in shapes(device, is_short)
    ]
    if device == "cpu":
        return [*found, Case(16, 32, (1, 4), torch.float32, FP8, device, is_short)]
    return found + [Case(64, head_dim, (8, 4), torch.bfloat16, FP8, device, is_short) for head_dim in (128, 80)]


def main() -> None:
    part = Part("kernels", __doc__)
    part.interpret_kernels()
    cases = cases_of(part.device, part.device == "cpu" or part.quick)
    num_processes = min(num_cores(), len(cases))
    # Compiling takes most of the time, on one core for each case.
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as processes:
        running = [(case, processes.submit(check_case, case)) for case in cases]
        for case, future in running:
            with part.case(str(case)):
                future.result()
    part.end()


if __name__ == "__main__":
    main()
