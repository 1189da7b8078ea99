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
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.batch import BatchItem
from tandem.engine.cuda import attention_kernel
from tandem.engine.cuda import triton_attention as backend
from tandem.engine.cuda.triton_attention import triton_attention
from tests.support.compiled_kernels import LayerSizes, attention_launches, compiled, launches
from tests.support.interpreted import run_interpreted

MAX_SHARED_BYTES = 99 * 1024
"""Of a program on consumer GPUs (compute capability 8.6, 8.9 and 12.0); others have more."""
EXTENDED = pytest.mark.extended
INTERPRETED = Path(__file__).with_name("interpreted_attention.py")
INTERPRETED_GRAPHS = Path(__file__).with_name("interpreted_graphs.py")


@EXTENDED
def test_the_kernels_compute_what_plain_attention_does() -> None:
    run_interpreted(
        INTERPRETED, "what_plain_attention_does", "same_result_in_every_batch", "splits_are_of",
        "startup_finds", "startup_passes", "bits_of_fp8",
    )  # fmt: skip


@EXTENDED
def test_exact_tokens_have_the_same_bits_in_every_chunk() -> None:
    run_interpreted(INTERPRETED, "exact_tokens")


@EXTENDED
def test_models_run_with_the_kernels_from_recorded_graphs() -> None:
    run_interpreted(
        INTERPRETED_GRAPHS, "same_from_recorded_graphs", "fp8_cache_from_recorded_graphs", "worker_of_prompts",
        "all_ranks", "without_graphs", "sinks_and_experts",
    )  # fmt: skip


@EXTENDED
def test_a_step_takes_tokens_from_the_device() -> None:
    run_interpreted(INTERPRETED_GRAPHS, "host_has_not_seen")


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


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compiles_and_fits(
    capability: int, head_dim: int, group: int, dtype: str, block_size: int = 64, stored: torch.dtype | None = None,
    is_exact: bool = False,
) -> None:  # fmt: skip
    """All kernels of attention, as the product launches them. stored: dtype of the pool, if it differs."""
    sizes = LayerSizes(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, dtype=DTYPES[dtype])
    options = AttentionOptions(head_dim**-0.5, 20, 5.0, torch.empty(sizes.num_heads, dtype=sizes.dtype))
    found = attention_launches(
        sizes,
        options=options,
        block_size=block_size,
        stored=stored,
        converts_fp8=capability >= 89,
        is_exact=is_exact,
    )
    kernels = {launch.name: compiled(launch, capability) for launch in found if launch.name != "rotate_and_write"}
    assert kernels.keys() == {"write_kv", "attend_chunks", "attend_tokens", "combine_splits"}
    for name, kernel in kernels.items():
        assert kernel.asm["cubin"] and kernel.metadata.shared <= MAX_SHARED_BYTES, name


OTHER_SIZES = [
    (64, 1, "bf16", 16), (256, 8, "fp16", 256), (80, 7, "bf16", 64), (96, 3, "fp16", 32), (192, 5, "bf16", 128),
    (128, 48, "bf16", 64), (128, 4, "fp32", 64),
]  # fmt: skip


CAPABILITIES = [80, *(pytest.param(each, marks=EXTENDED) for each in (89, 90, 100, 120))]
OTHER_CAPABILITIES = [
    *(pytest.param(each, marks=EXTENDED) for each in (90, 120)),
    *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (80, 89, 100)),
]
"""For other sizes than the usual one: those whose code differs most, and one with the least shared memory."""


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernels_compile_and_fit(capability: int) -> None:
    compiles_and_fits(capability, 128, 4, "bf16")


@pytest.mark.parametrize("capability", OTHER_CAPABILITIES)
@pytest.mark.parametrize(("head_dim", "group", "dtype", "block_size"), OTHER_SIZES)
def test_kernels_of_other_sizes_compile_and_fit(
    capability: int, head_dim: int, group: int, dtype: str, block_size: int
) -> None:
    compiles_and_fits(capability, head_dim, group, dtype, block_size)


@pytest.mark.parametrize("capability", OTHER_CAPABILITIES)
@pytest.mark.parametrize(("head_dim", "group", "dtype", "block_size"), OTHER_SIZES)
def test_exact_kernels_of_other_sizes_compile_and_fit(
    capability: int, head_dim: int, group: int, dtype: str, block_size: int
) -> None:
    compiles_and_fits(capability, head_dim, group, dtype, block_size, is_exact=True)


ARITHMETIC = re.compile(r"(tt\.dot|tt\.reduce|ttng\.(?:warp_group_dot|tc_gen5_mma)|math\.\w+|arith\.\w+f)\b")


def arithmetic(program: str) -> list[str]:
    """Returns the operations of the loop over tiles that compute numbers, with their types, in order.

    A type has the layout, which says which thread holds what: it decides a GPU's instructions, and the order in which a
    row is added up. Left out: addresses, copies and masks. program: in Triton's TTGIR.
    """
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", program, re.MULTILINE))
    [body] = computing_loops(program)  # of keys that some rows may not see
    lines = (re.sub(r" loc\(.*", "", line) for line in body.splitlines())
    found = [(operation[1], line.rpartition(" : ")[2]) for line in lines if (operation := ARITHMETIC.search(line))]
    return [re.sub(r"#\w+", lambda each: layouts.get(each[0], each[0]), f"{name} {kind}") for name, kind in found]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_exact_kernels_compute_a_tile_by_the_same_operations(capability: int) -> None:
    """Of tokens and of chunks."""
    kernels = [
        compiled(launch, capability)
        for launch in attention_launches(LayerSizes(), is_exact=True)
        if launch.name in ("attend_chunks", "attend_tokens")
    ]
    assert not any(kernel.metadata.enable_fp_fusion for kernel in kernels)
    first, *others = (arithmetic(kernel.asm["ttgir"]) for kernel in kernels)
    assert others and all(each == first for each in others)
    assert sum("dot" in line.split()[0] or "mma" in line.split()[0] for line in first) == 2


def computing_loops(program: str) -> list[str]:
    """Returns the bodies of the innermost loops with products of matrices. program: in Triton's TTGIR."""
    found = []
    for head in re.finditer(r"^( *)%\S+ = scf\.for .*$", program, re.MULTILINE):
        body = program[head.end() :].partition(f"\n{head[1]}}}")[0]
        if "scf.for" not in body and re.search(r"dot |_mma ", body):
            found.append(body)
    return found


def loads_behind(value: str, body: str) -> list[str]:
    """Returns the loads of this iteration whose results `value` is computed from."""
    lines = dict(re.findall(r"^ *(%\S+?)(?::\d+)? = (.*?)(?: : .*)?$", body, re.MULTILINE))
    found, wanted, seen = [], [value], set[str]()
    while wanted:
        name = wanted.pop()
        if name in lines and name not in seen:
            seen.add(name)
            found += [name] * lines[name].startswith("tt.load")
            wanted += re.findall(r"%\w+", lines[name])
    return found


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["attend_chunks", "attend_tokens"])
def test_keys_and_values_are_copied_before_the_iteration_that_reads_them(name: str, capability: int) -> None:
    """As the product launches the kernels: asynchronous copies, whose addresses wait for no lookup there.

    With two stages there is room for no more than the next tile: its copies begin when this one has been read.
    """
    launch = next(launch for launch in launches(LayerSizes()) if launch.name == name)
    loops = computing_loops(compiled(launch, capability).asm["ttgir"])
    assert len(loops) == 2, "keys that all rows see, and keys that some may not see"
    for body in loops:
        [passed_on] = re.findall(r"^ *scf\.yield (.*) : .*\Z", body.rstrip(), re.MULTILINE)
        for states in "kv":
            [(copy, address)] = re.findall(rf"(%{states}_?\d*) = ttg\.async_copy_global_to_local (%\w+)", body)
            [committed] = re.findall(rf"(%\S+) = ttg\.async_commit_group tokens {copy}\b", body)
            assert committed in passed_on.split(", "), "the next iteration waits for it"
            assert not loads_behind(address, body)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernels_compile_and_fit_with_an_fp8_pool(capability: int) -> None:
    """GPUs from capability 8.9 on load FP8, others its bits. All store bits."""
    compiles_and_fits(capability, 128, 4, "bf16", stored=torch.float8_e4m3fn)


@pytest.mark.parametrize("capability", OTHER_CAPABILITIES)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (256, "fp16")])
def test_kernels_of_other_sizes_compile_and_fit_with_an_fp8_pool(capability: int, head_dim: int, dtype: str) -> None:
    compiles_and_fits(capability, head_dim, 4, dtype, stored=torch.float8_e4m3fn)


def test_gpus_before_capability_8_9_read_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    backend._converts_fp8.cache_clear()
    expected = {(8, 0): False, (8, 6): False, (8, 9): True, (9, 0): True, (12, 0): True}
    for number, (capability, converts) in enumerate(expected.items()):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, result=capability: result)
        assert backend._converts_fp8(torch.device("cuda", number)) == converts
    backend._converts_fp8.cache_clear()
