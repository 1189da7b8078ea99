"""Our Triton kernels: interpreted on the CPU against plain attention, and compiled for GPUs that are not here."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.batch import BatchItem
from tandem.engine.cuda import attention_kernel
from tandem.engine.cuda.triton_attention import constants, triton_attention

MAX_SHARED_BYTES = 99 * 1024
"""Of a program on consumer GPUs (compute capability 8.6, 8.9 and 12.0); others have more."""


def test_the_kernels_compute_what_plain_attention_does() -> None:
    file = Path(__file__).with_name("interpreted_attention.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(file)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "3 passed" in run.stdout, run.stdout[-5000:]


class Binders:
    """Takes the place of the kernels: binds arguments as Triton does at a launch, and collects what it compiles for."""

    def __init__(self) -> None:
        self.variants: dict[str, set[str]] = defaultdict(set)

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(attention_kernel, name)
        bind = create_function_from_signature(kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32)))

        class Launch:
            def __getitem__(_, grid: tuple[int, ...]) -> Any:
                return lambda *args, **kwargs: self.variants[name].add(repr(bind(*args, **kwargs)[1]))

        return Launch()


def test_few_variants_serve_all_steps() -> None:
    num_kv_heads, group, head_dim, block_size = 2, 4, 64, 64
    pool: Any = SimpleNamespace(
        tensor=torch.empty((4, 2, 2, num_kv_heads, block_size, head_dim), dtype=torch.bfloat16),
        layout=SimpleNamespace(num_kv_heads=num_kv_heads, block_size=block_size),
    )
    binders = Binders()
    rng = random.Random(0)
    for _ in range(300):
        lengths = [rng.choice((1, 1, 1, rng.randint(1, 200))) for _ in range(rng.randint(1, 40))]
        items = [BatchItem([0] * length, start := rng.randint(0, 999), [0] * (2 + (start + length) // block_size))
                 for length in lengths]  # fmt: skip
        states = [
            torch.empty((1, sum(lengths), heads, head_dim), dtype=torch.bfloat16).transpose(1, 2)
            for heads in (num_kv_heads * group, num_kv_heads, num_kv_heads)
        ]
        query, key, value = states
        for window in (0, 4096):
            options = AttentionOptions(head_dim**-0.5, window)
            triton_attention(pool, items, binders).attend(1, query, key, value, options)
    assert len(binders.variants["write_kv"]) == 1
    assert len(binders.variants["attend"]) == 2, "with and without prompt chunks"


EXTENDED = pytest.mark.extended


@pytest.mark.parametrize("capability", [80, *(pytest.param(each, marks=EXTENDED) for each in (89, 90, 100, 120))])
@pytest.mark.parametrize(
    ("head_dim", "group", "max_query_len"), [(64, 1, 1), (128, 4, 1), (128, 4, 512), (256, 8, 512), (80, 7, 512)]
)
def test_the_kernels_compile_and_fit(capability: int, head_dim: int, group: int, max_query_len: int) -> None:
    sizes: dict[str, Any] = constants(head_dim, group, 64, max_query_len)
    states = ["query", "key_cache", "value_cache", "output", "sinks"]
    integers = ["block_table", "cu_seqlens", "num_context"]
    counts = [
        "num_sequences", "table_width", "query_token_stride", "query_head_stride", "block_stride", "head_stride",
        "num_heads", "window",
    ]  # fmt: skip
    signature = dict.fromkeys(states, "*bf16") | dict.fromkeys(integers, "*i32")
    signature |= dict.fromkeys(counts, "i32") | {"scale": "fp32", "softcap": "fp32"}
    sizes |= {"HAS_SOFTCAP": True, "HAS_SINKS": True}
    order = attention_kernel.attend.arg_names
    signature |= dict.fromkeys(sizes, "constexpr")
    source = ASTSource(attention_kernel.attend, {name: signature[name] for name in order}, constexprs=dict(sizes))
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), {"enable_fp_fusion": True})
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= MAX_SHARED_BYTES
