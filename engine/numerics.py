"""What decides the bits that this worker computes: `protocol.messages.numerics.Numerics` of Tandem's own engine.

Versions of libraries and the machine's model do not describe the arithmetic completely: on CPUs, libraries choose among
many kernels by environment variables and by what a virtual machine lets them see. So a probe hashes the results of
fixed computations there.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from msgspec.structs import replace
from torch.nn import functional

from tandem.engine.cpu.packed_linear import PackedLinear, is_packable
from tandem.engine.engine import ENGINE_NAME
from tandem.engine.engine_config import EngineConfig
from tandem.engine.loaded_model import LoadedModel
from tandem.protocol.messages.numerics import GPU_INSTRUCTION_SET, Numerics
from tandem.runtime.version import own_version

CPU_KERNELS = "cpu-3"
"""Name of the arithmetic of this repository's code on CPUs. Raise its number with every change that may change a bit of
a log-probability: kernels, the order of sums, where values are rounded. A test compares the code with its hash."""
CUDA_KERNELS = "cuda-2"
"""The same for GPUs."""

_CPU_VARIABLES = (
    "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX", "NUMBA_OPT", "NUMBA_LOOP_VECTORIZE",
    "NUMBA_SLP_VECTORIZE", "NUMBA_DISABLE_INTEL_SVML",
)  # fmt: skip
"""Environment variables by which libraries on CPUs choose other kernels."""
_CUDA_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE",
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE",
)  # fmt: skip
"""The same on GPUs."""
_MAX_SHOWN_VALUE = 64
_MAX_PROBLEM = 1024

_ONEDNN_ISAS: tuple[tuple[str, frozenset[str]], ...] = (
    ("SSE41", frozenset({"sse4_1"})),
    ("AVX", frozenset({"avx"})),
    ("AVX2", frozenset({"avx2", "fma"})),
    ("AVX2_VNNI", frozenset({"avx_vnni"})),
    ("AVX2_VNNI_2", frozenset({"avx_vnni_int8", "avx_ne_convert"})),
    ("AVX512_CORE", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})),
    ("AVX512_CORE_VNNI", frozenset({"avx512_vnni"})),
    ("AVX512_CORE_BF16", frozenset({"avx512_bf16"})),
    ("AVX512_CORE_FP16", frozenset({"avx512_fp16"})),
    ("AVX512_CORE_AMX", frozenset({"amx_tile", "amx_int8", "amx_bf16"})),
    ("AVX512_CORE_AMX_FP16", frozenset({"amx_fp16"})),
)
"""oneDNN's names of instruction sets, each with what it needs beyond the ones before it, as Linux names it. The newer
AVX2 sets are not in every CPU with AVX-512."""
_OPTIONAL_ISAS = ("AVX2_VNNI", "AVX2_VNNI_2")


def numerics_of(config: EngineConfig, loaded: LoadedModel, problem: str) -> Numerics:
    """Returns the numerics of a model. problem: why the bits depend on more than them; empty if they do not."""
    on_cpu = loaded.device.type == "cpu"
    return replace(
        machine_numerics(loaded.device, loaded.dtype),
        engine=f"{ENGINE_NAME} {own_version()}",
        kv_dtype=loaded.layout.dtype,
        quantization=loaded.quantization,
        kernels=f"{CPU_KERNELS if on_cpu else CUDA_KERNELS}, blocks of {loaded.layout.block_size}",
        max_model_len=loaded.rope_length,
        num_threads=config.num_threads if on_cpu else 0,
        num_ranks=config.tensor_parallel_size,
        problem=problem[:_MAX_PROBLEM],
    )


def machine_numerics(device: torch.device, dtype: torch.dtype, variables: Sequence[str] = ()) -> Numerics:
    """Returns what the machine and its libraries decide, for any engine. variables: those of the environment that
    change the engine's arithmetic, besides those that all engines know."""
    on_cpu = device.type == "cpu"
    known = _CPU_VARIABLES if on_cpu else _CUDA_VARIABLES
    return Numerics(
        libraries=_libraries(on_cpu),
        device=_cpu_name(_cpu_fields()) if on_cpu else _gpu_name(device),
        instruction_set=_instruction_set() if on_cpu else _compute_capability(device),
        environment=shown_variables(os.environ, [*known, *variables]),
        dtype=str(dtype).removeprefix("torch."),
        probe=probe(dtype) if on_cpu else "",
    )


def probe(dtype: torch.dtype) -> str:
    """Hashes products, sums and functions of fixed numbers as the CPU computes them, with one thread. Takes a few
    milliseconds."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _probe(dtype)
    finally:
        torch.set_num_threads(num_threads)


@torch.inference_mode()
def _probe(dtype: torch.dtype) -> str:
    num_inputs, num_outputs = 2048, 96
    numbers = torch.arange((64 + num_outputs) * num_inputs) * 1103515245 % 65521  # the same everywhere
    values = (numbers.view(-1, num_inputs) / 65521 - 0.5).to(dtype)
    inputs, weight = values[:64], values[64:]
    multiply = PackedLinear(weight, None) if is_packable(weight) else partial(functional.linear, weight=weight)
    wide = inputs.float()
    results = [multiply(inputs[:rows]) for rows in (1, 4, 64)]
    results += [wide.softmax(-1), wide.log_softmax(-1), wide.mean(-1), torch.rsqrt(wide.square().mean(-1))]
    results += [functional.silu(inputs), wide.exp(), wide.cos(), wide.sin()]
    found = blake2b(digest_size=8, person=b"tandem-probe")
    for result in results:
        found.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def onednn_isa(flags: Collection[str], limit: str) -> str:
    """Returns the highest of oneDNN's instruction sets that a CPU has, by its Linux flags, and that the environment
    allows. limit: value of ONEDNN_MAX_CPU_ISA, which oneDNN ignores if it does not know it."""
    names = [name for name, _ in _ONEDNN_ISAS]
    allowed = names.index(limit.upper()) if limit.upper() in names else len(names) - 1
    highest = "none"
    for name, needed in _ONEDNN_ISAS[: allowed + 1]:
        if needed <= set(flags):
            highest = name
        elif name not in _OPTIONAL_ISAS:
            break
    return highest


def shown_variables(environment: Mapping[str, str], names: Collection[str]) -> str:
    """Returns those of the variables that are set, as NAME=VALUE."""
    values = {name: environment.get(name, "") for name in names}
    return " ".join(f"{name}={value[:_MAX_SHOWN_VALUE]}" for name, value in values.items() if value)


def _instruction_set() -> str:
    import llvmlite.binding as llvm
    from numba import config

    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    onednn = onednn_isa(_cpu_fields().get("flags", "").split(), limit)
    features = llvm.get_host_cpu_features().flatten().encode()
    compiled_for = config.CPU_NAME or f"{llvm.get_host_cpu_name()} {blake2b(features, digest_size=2).hexdigest()}"
    return f"{torch.backends.cpu.get_cpu_capability()} in torch, {onednn} in oneDNN, {compiled_for} in numba"


def _cpu_fields() -> dict[str, str]:
    """Returns what Linux says of the first core; nothing where it does not say it."""
    fields: dict[str, str] = {}
    try:
        with Path("/proc/cpuinfo").open() as lines:
            for line in lines:
                if not line.strip():
                    break
                name, _, value = line.partition(":")
                fields[name.strip()] = value.strip()
    except OSError:
        pass
    return fields


def _cpu_name(fields: Mapping[str, str]) -> str:
    numbers = "/".join(fields.get(name, "") for name in ("cpu family", "model", "stepping"))
    return f"{fields.get('model name', platform.machine())} {numbers.strip('/')}".strip()


def _gpu_name(device: torch.device) -> str:
    """The number of multiprocessors decides how cuBLAS splits products."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.multi_processor_count} multiprocessors"


def _compute_capability(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{GPU_INSTRUCTION_SET} {major}.{minor}"


def _libraries(on_cpu: bool) -> str:
    names = ["numba", "llvmlite"] if on_cpu else ["triton", "nvidia-cublas", "nvidia-cublas-cu12"]
    found = [f"torch {torch.__version__}"]
    for name in ["transformers", *names]:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
