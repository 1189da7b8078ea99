"""Our Triton kernels: interpreted on the CPU against plain attention, and compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tandem.engine.cuda import attention_kernel
from tandem.engine.cuda.triton_attention import constants

MAX_SHARED_BYTES = 99 * 1024
"""Of a program on consumer GPUs (compute capability 8.6, 8.9 and 12.0); others have more."""


def test_the_kernels_compute_what_plain_attention_does() -> None:
    file = Path(__file__).with_name("interpreted_attention.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(file)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "3 passed" in run.stdout, run.stdout[-5000:]


def test_few_variants_serve_all_steps() -> None:
    """What is constant in the kernel, over all lengths of queries, contexts and tables."""
    variants = {tuple(constants(128, 4, 64, length).items()) for length in range(1, 5000)}
    assert len(variants) == 2


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
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
