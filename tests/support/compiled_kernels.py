"""Compiles our Triton kernels for GPUs that are not here, and tells what a program takes there.

    python -m tests.support.compiled_kernels        prints the table of docs/gpu.md

The kernels are compiled for the arguments with which the product launches them, in the sizes of Llama-3.1-8B with norms
of queries and keys as in Qwen3. It needs Triton, but no GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.batch import BatchItem
from tandem.engine.cuda import (
    attention_kernel,
    layer_kernels,
    layer_operators,
    quantized_linears,
    triton_attention,
)

CAPABILITIES = (80, 90, 100, 120)
"""A100; H100 and H200; B200; consumer cards of B200's generation."""
BLOCK_SIZE = 64


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one decoder layer."""

    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, without its grid."""

    name: str
    kernel: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes. registers, spilled_bytes: of a thread."""

    shared_bytes: int
    registers: int
    spilled_bytes: int


class RecordedKernels:
    """Takes the place of a module of kernels, and calls `on_launch` instead of launching them."""

    def __init__(self, kernels: Any, on_launch: Callable[[Launch], object]) -> None:
        self._kernels = kernels
        self._on_launch = on_launch

    def __getattr__(self, name: str) -> Any:
        return _RecordedKernel(name, getattr(self._kernels, name), self._on_launch)


class _RecordedKernel:
    def __init__(self, name: str, kernel: Any, on_launch: Callable[[Launch], object]) -> None:
        self._name = name
        self._kernel = kernel
        self._on_launch = on_launch

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **keywords: self._on_launch(Launch(self._name, self._kernel, arguments, keywords))


@contextmanager
def recorded_launches(found: list[Launch]) -> Iterator[None]:
    """Adds the launches of all our kernels to `found` instead of running them."""

    def recorded(kernels: Any) -> Any:
        return lambda: RecordedKernels(kernels, found.append)

    with (
        patch.object(triton_attention, "find_kernels", recorded(attention_kernel)),
        patch.object(layer_operators, "find_layer_kernels", recorded(layer_kernels)),
        patch.object(quantized_linears, "find_layer_kernels", recorded(layer_kernels)),
    ):
        yield


def attention_launches(
    sizes: LayerSizes,
    lengths: Sequence[int] = (2, 1),
    options: AttentionOptions | None = None,
    block_size: int = BLOCK_SIZE,
    stored: torch.dtype | None = None,
    converts_fp8: bool = True,
    is_exact: bool = False,
) -> list[Launch]:
    """Returns the launches of a layer's attention with and without fused kernels. lengths: new tokens of each sequence.

    stored: dtype of the pool, if it differs. converts_fp8: see `engine.cuda.triton_attention`.
    """
    found: list[Launch] = []
    num_tokens, dtype = sum(lengths), sizes.dtype
    pool: Any = SimpleNamespace(
        tensor=torch.empty((2, 1, 2, sizes.num_kv_heads, block_size, sizes.head_dim), dtype=stored or dtype),
        layout=SimpleNamespace(block_size=block_size),
    )
    heads = torch.empty((num_tokens, sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim), dtype=dtype)
    query, key, value = (
        part.transpose(0, 1)[None] for part in torch.split(heads, [sizes.num_heads, *[sizes.num_kv_heads] * 2], 1)
    )
    angles, weight = heads[:, 0].contiguous(), torch.empty(sizes.head_dim, dtype=dtype)
    options = options or AttentionOptions(sizes.head_dim**-0.5)
    with recorded_launches(found), patch.object(triton_attention, "_converts_fp8", lambda device: converts_fp8):
        attention = triton_attention.triton_attention(pool, [BatchItem([0] * n, 0, [0, 1]) for n in lengths], is_exact)
        attention.attend(0, query, key, value, options)
        attention.rotate_and_attend(0, heads, angles, angles, (weight, weight, 1e-5), options)
    return found


def launches(sizes: LayerSizes, lengths: Sequence[int] = (2, 1)) -> list[Launch]:
    """Returns the launches of a layer with and without fused kernels. lengths: new tokens of each sequence."""
    found = attention_launches(sizes, lengths)
    found += [each for each in attention_launches(sizes, lengths, is_exact=True) if "IS_EXACT" in each.keywords]
    dtype = sizes.dtype
    rows, norm = (torch.empty((*shape, sizes.hidden_size), dtype=dtype) for shape in ((sum(lengths),), ()))
    gate_up = torch.empty((len(rows), 2 * sizes.intermediate_size), dtype=dtype)
    with recorded_launches(found):
        torch.ops.tandem.rms_norm(rows, norm, 1e-5)
        torch.ops.tandem.add_rms_norm(rows, rows, norm, 1e-5)
        torch.ops.tandem.silu_mul(gate_up)
        for to in (torch.float8_e4m3fn, torch.int8):
            torch.ops.tandem.rms_norm_quantized(rows, norm, 1e-5, None, to)
            torch.ops.tandem.add_rms_norm_quantized(rows, rows, norm, 1e-5, None, to)
            torch.ops.tandem.quantize_rows(rows, None, to)
            torch.ops.tandem.silu_mul_quantized(gate_up, None, to)
        fp8, int8 = torch.float8_e4m3fn, torch.int8
        for num_rows, num_outputs, of in [
            (64, 28672, fp8),
            *((16, 4096, int8), (64, 4096, int8), (64, 28672, int8), (512, 4096, int8), (2048, 4096, int8)),
        ]:
            values = torch.empty((num_rows, sizes.hidden_size), dtype=of)
            weight, scales = torch.empty((num_outputs, sizes.hidden_size), dtype=of), torch.empty(num_outputs)
            torch.ops.tandem.scaled_product(values, scales[:num_rows, None], weight, scales, None, dtype)
        for each in (torch.float32, torch.float64):
            torch.ops.tandem.sum_rows(torch.empty((len(rows), 512), dtype=each))
        torch.ops.tandem.add_up_rows(torch.empty((len(rows), 1024), dtype=torch.float64))
        tile = next(tile for tile in (128, 64, 32) if sizes.hidden_size % tile == 0)
        num_tiles = sizes.hidden_size // tile
        packed = torch.empty((sizes.intermediate_size // 8, num_tiles, tile), dtype=torch.int32)
        groups = torch.empty((num_tiles, sizes.intermediate_size, 2), dtype=dtype)
        torch.ops.tandem.unpack_int4(packed, torch.empty(8 * tile, dtype=torch.int32), groups)
    return found


def bound(launch: Launch, capability: int) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any], dict[str, Any]]:
    """Returns what Triton compiles for at this launch: signature, constants, attributes and options."""
    kernel, backend = launch.kernel, CUDABackend(GPUTarget("cuda", capability, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    arguments, specialization, options = bind(*launch.arguments, **launch.keywords)
    kinds = dict(zip(kernel.arg_names, specialization, strict=True))
    signature = {name: kind for name, (kind, _) in kinds.items()}
    constants = {(i,): arguments[name] for i, name in enumerate(kinds) if signature[name] == "constexpr"}
    attributes = {
        (i,): backend.parse_attr(special)
        for i, (kind, special) in enumerate(kinds.values())
        if kind != "constexpr" and isinstance(special, str)
    }
    return signature, constants, attributes, options


def compiled(launch: Launch, capability: int) -> Any:
    """Compiles the kernel as this launch would: with its constants, number of warps and stages."""
    signature, constants, attributes, options = bound(launch, capability)
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, GPUTarget("cuda", capability, 32), options)


def resources(launch: Launch, capability: int) -> Resources:
    """Reads the cubin of the kernel."""
    kernel = compiled(launch, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(kernel.metadata.shared, numbers["REG"], max(numbers["STACK"], numbers["LOCAL"]))


def is_supported(launch: Launch, capability: int) -> bool:
    """Whether the product launches it there. FP8 products need compute capability 8.9."""
    return capability >= 89 or launch.name != "scaled_product" or launch.arguments[0].dtype == torch.int8


def variants(found: Sequence[Launch]) -> dict[str, Launch]:
    """Returns one launch for each kernel and its variants."""
    return dict(zip(map(_variant, found), found, strict=True))


def _variant(launch: Launch) -> str:
    """Returns the kernel's name, and what it does besides."""
    name = launch.name
    if launch.keywords.get("HAS_RESIDUAL"):
        name += ", with a residual"
    if launch.keywords.get("IS_GATED"):
        name += " of silu_mul"
    if launch.keywords.get("IS_EXACT"):
        name += ", exact"
    if launch.name == "sum_rows":
        name += f" of {str(launch.arguments[0].dtype).removeprefix('torch.')}"
    if launch.keywords.get("QUANTIZES") or name.startswith("quantize"):
        is_int8 = any(isinstance(each, torch.Tensor) and each.dtype == torch.int8 for each in launch.arguments)
        name += ", to INT8" if is_int8 else ", to FP8"
    if launch.name == "scaled_product":
        of = "INT8" if launch.arguments[0].dtype == torch.int8 else "FP8"
        name += " of {}, up to {BLOCK_ROWS} x {BLOCK_OUTPUTS}".format(of, **launch.keywords)
    return name


def cell(launch: Launch, capability: int) -> str:
    """Returns bytes of shared memory, registers, and bytes of spilled registers if there are any."""
    if not is_supported(launch, capability):
        return "-"
    taken = resources(launch, capability)
    spills = f" / {taken.spilled_bytes} spilled" if taken.spilled_bytes else ""
    return f"{taken.shared_bytes:,} / {taken.registers}{spills}"


def table() -> Iterator[str]:
    """Yields the lines of a Markdown table."""
    yield f"| kernel | {' | '.join(f'{capability / 10:.1f}' for capability in CAPABILITIES)} |"
    yield "| --- |" + " --- |" * len(CAPABILITIES)
    for name, launch in variants(launches(LayerSizes())).items():
        yield f"| {name} | {' | '.join(cell(launch, each) for each in CAPABILITIES)} |"


if __name__ == "__main__":
    print("\n".join(table()))
