"""Our Triton kernels: interpreted on the CPU against plain attention, and compiled for GPUs that are not here."""

from __future__ import annotations

import random
import re
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

from bench.gpu.compiled_kernels import LayerSizes, bound, launches
from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.batch import BatchItem
from tandem.engine.cuda import attention_kernel
from tandem.engine.cuda import triton_attention as backend
from tandem.engine.cuda.triton_attention import constants, triton_attention
from tests.support.interpreted import run_interpreted

MAX_SHARED_BYTES = 99 * 1024
"""Of a program on consumer GPUs (compute capability 8.6, 8.9 and 12.0); others have more."""
EXTENDED = pytest.mark.extended
INTERPRETED = Path(__file__).with_name("interpreted_attention.py")


@EXTENDED
def test_the_kernels_compute_what_plain_attention_does() -> None:
    run_interpreted(
        INTERPRETED, "what_plain_attention_does", "same_result_in_every_batch", "splits_are_of",
        "startup_finds", "startup_passes", "bits_of_fp8",
    )  # fmt: skip


@EXTENDED
def test_models_run_with_the_kernels_from_recorded_graphs() -> None:
    run_interpreted(
        INTERPRETED, "same_from_recorded_graphs", "fp8_cache_from_recorded_graphs", "worker_of_prompts", "all_ranks",
        "without_graphs", "sinks_and_experts",
    )  # fmt: skip


@EXTENDED
def test_a_step_takes_tokens_from_the_device() -> None:
    run_interpreted(INTERPRETED, "host_has_not_seen")


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


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_one_variant_of_each_kernel_serves_all_steps(pool_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    num_kv_heads, group, head_dim, block_size = 2, 4, 64, 64
    pool: Any = SimpleNamespace(
        tensor=torch.empty((4, 2, 2, num_kv_heads, block_size, head_dim), dtype=pool_dtype),
        layout=SimpleNamespace(num_kv_heads=num_kv_heads, block_size=block_size),
    )
    binders = Binders()
    monkeypatch.setattr(backend, "find_kernels", lambda: binders)
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
            triton_attention(pool, items).attend(1, query, key, value, options)
    counts = {name: len(variants) for name, variants in binders.variants.items()}
    assert counts == dict.fromkeys(["write_kv", "attend_chunks", "attend_tokens", "combine_splits"], 1)


POINTERS = {
    "partial": "*fp32", "statistics": "*fp32", "block_table": "*i32", "cu_seqlens": "*i32", "num_context": "*i32",
    "split_starts": "*i32", "blocks": "*i32", "offsets": "*i32",
}  # fmt: skip
STATES = ("query", "key", "value", "key_cache", "value_cache", "output", "sinks")


def compiled(name: str, capability: int, dtype: str, cache: str, sizes: dict[str, Any]) -> Any:
    """Compiles a kernel as a launch would, without a GPU. cache: type of the pool's elements."""
    kernel = getattr(attention_kernel, name)
    types = POINTERS | dict.fromkeys(STATES, f"*{dtype}") | {"scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(("key_cache", "value_cache"), f"*{cache}")
    sizes = {"HAS_SOFTCAP": True, "HAS_SINKS": True, "SPLITS_AT_ONCE": 16} | sizes
    options = {"enable_fp_fusion": True} | {name: sizes[name] for name in ("num_warps", "num_stages") if name in sizes}
    sizes = {size: value for size, value in sizes.items() if size in kernel.arg_names}
    signature = {each: "constexpr" if each in sizes else types.get(each, "i32") for each in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=sizes)
    return triton.compile(source, GPUTarget("cuda", capability, 32), options)


def compiles_and_fits(
    name: str, capability: int, dtype: str, cache: str, head_dim: int, group: int, block_size: int = 64
) -> None:
    of_queries = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    sizes = constants(head_dim, group, block_size, of_queries, for_chunks=name == "attend_chunks")
    result = compiled(name, capability, dtype, cache, sizes)
    assert result.asm["cubin"]
    assert result.metadata.shared <= MAX_SHARED_BYTES, name


OTHER_SIZES = [
    (64, 1, "bf16", 16), (256, 8, "fp16", 256), (80, 7, "bf16", 64), (96, 3, "fp16", 32), (192, 5, "bf16", 128),
    (128, 48, "bf16", 64), (128, 4, "fp32", 64),
]  # fmt: skip


@pytest.mark.parametrize("capability", [80, *(pytest.param(each, marks=EXTENDED) for each in (89, 90, 100, 120))])
@pytest.mark.parametrize(
    ("head_dim", "group", "dtype", "block_size"),
    [(128, 4, "bf16", 64), *(pytest.param(*each, marks=EXTENDED) for each in OTHER_SIZES)],
)
def test_the_kernels_compile_and_fit(capability: int, head_dim: int, group: int, dtype: str, block_size: int) -> None:
    for name in ("write_kv", "attend_chunks", "attend_tokens", "combine_splits"):
        compiles_and_fits(name, capability, dtype, dtype, head_dim, group, block_size)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["attend_chunks", "attend_tokens"])
def test_keys_and_values_are_loaded_ahead(name: str, capability: int) -> None:
    """Their addresses do not wait for a lookup in the block table. With three stages there is room for two tiles."""
    launch = next(launch for launch in launches(LayerSizes()) if launch.name == name)
    signature, sizes, attributes, options = bound(launch, capability)
    source = ASTSource(launch.kernel, signature, constexprs=sizes, attrs=attributes)
    program = triton.compile(source, GPUTarget("cuda", capability, 32), options | {"num_stages": 3}).asm["ttgir"]
    buffers = re.findall(r"local_alloc.*?memdesc<(\d+)x\d+x\d+xbf16", program)
    assert len(buffers) >= 2 and min(map(int, buffers)) >= 2
    assert max(int(num) for num in re.findall(r"async_wait.*?num = (\d+)", program)) > 0


@pytest.mark.parametrize(
    ("capability", "cache"),
    [(80, "u8"), (90, "fp8e4nv"), *(pytest.param(each, "fp8e4nv", marks=EXTENDED) for each in (89, 100, 120))],
)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, "bf16"), *(pytest.param(*each, marks=EXTENDED) for each in ((64, "bf16"), (256, "fp16")))],
)
def test_the_kernels_compile_and_fit_with_an_fp8_pool(capability: int, cache: str, head_dim: int, dtype: str) -> None:
    """GPUs from capability 8.9 on load FP8, others its bits. All store bits."""
    compiles_and_fits("write_kv", capability, dtype, "u8", head_dim, 4)
    for name in ("attend_chunks", "attend_tokens"):
        compiles_and_fits(name, capability, dtype, cache, head_dim, 4)


def test_gpus_before_capability_8_9_read_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    backend._converts_fp8.cache_clear()
    expected = {(8, 0): False, (8, 6): False, (8, 9): True, (9, 0): True, (12, 0): True}
    for number, (capability, converts) in enumerate(expected.items()):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, result=capability: result)
        assert backend._converts_fp8(torch.device("cuda", number)) == converts
    backend._converts_fp8.cache_clear()
