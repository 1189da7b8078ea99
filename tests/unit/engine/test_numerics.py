"""The numerics of Tandem's own engine, and the names of its arithmetic.

A hash of the code that computes stands beside each name. If the code has changed so that a bit of a log-probability may
differ, raise the name in engine/numerics.py. In any case write the new hash here; this prints it:

    python -m tests.unit.engine.test_numerics
"""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tandem.engine.engine_config import EngineConfig
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.numerics import (
    CPU_KERNELS,
    CUDA_KERNELS,
    machine_numerics,
    numerics_of,
    onednn_isa,
    probe,
    shown_variables,
)
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.transfer import KVLayout

ENGINE = Path(__file__).parents[3] / "engine"
_SHARED = (
    "attention/plain.py", "layers/*.py", "loading/rope.py", "loading/sharding.py", "lora/layers.py", "model_head.py",
    "model_runner.py", "quantization/int4_linear.py", "quantization/linears.py", "quantization/online.py",
    "row_products.py", "sampling/logprobs.py", "sampling/noise.py", "sampling/penalties.py", "sampling/sampler.py",
    "vision/models.py",
)  # fmt: skip
"""Patterns of files that compute on all devices."""
HASHES = {
    CPU_KERNELS: "cfd74168e475af8f",
    CUDA_KERNELS: "4fc1b940d429c78f",
}
"""Of the code that computes on each kind of device, by the name of its arithmetic."""


def files_of(folder: str) -> list[Path]:
    return sorted(file for pattern in (f"{folder}/*.py", *_SHARED) for file in ENGINE.glob(pattern))


def code_hash(files: list[Path]) -> str:
    """Hashes the code without comments, docstrings, blank lines and the spaces within lines."""
    found = blake2b(digest_size=8)
    for file in files:
        found.update(f"{file.relative_to(ENGINE)}\n".encode())
        found.update("\n".join(code_lines(file.read_text())).encode())
    return found.hexdigest()


def code_lines(source: str) -> Iterator[str]:
    """Yields the lines without what only people read."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for number, line in enumerate(lines, start=1):
        if number not in docstrings and line.strip():
            yield "".join(line.split())


@pytest.mark.parametrize(("folder", "name"), [("cpu", CPU_KERNELS), ("cuda", CUDA_KERNELS)])
def test_a_change_of_the_arithmetic_raises_its_name(folder: str, name: str) -> None:
    assert code_hash(files_of(folder)) == HASHES[name], (
        f"code that computes on {folder} has changed since {name} got its hash: if a bit of a log-probability may "
        "differ, raise the name in engine/numerics.py; then write the new hash here (see the docstring of this module)"
    )


def test_the_hash_is_of_the_code_and_not_of_its_comments() -> None:
    source = '"""A module."""\n\n\ndef double(x):  # why\n    """Doubles."""\n    # a line\n    return x * 2\n'
    plain = "def double(x):\n    return x * 2\n"
    assert list(code_lines(source)) == list(code_lines(plain)) == ["defdouble(x):", "returnx*2"]
    assert list(code_lines(source.replace("2", "3"))) != list(code_lines(plain))


CONFIG = EngineConfig("m")
LAYOUT = KVLayout("m", "bfloat16", 2, 2, 16, 64)
LOADED = LoadedModel(None, 64, 10, torch.bfloat16, torch.device("cpu"), LAYOUT)


@pytest.mark.parametrize(
    ("field", "loaded"),
    [
        ("dtype", replace(LOADED, dtype=torch.float32)),
        ("kv_dtype", replace(LOADED, layout=msgspec.structs.replace(LAYOUT, dtype="float8_e4m3fn"))),
        ("kernels", replace(LOADED, layout=msgspec.structs.replace(LAYOUT, block_size=32))),
        ("quantization", replace(LOADED, quantization="fp8 W8A8, quantised when loaded")),
        ("max_model_len", replace(LOADED, rope_length=64)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_changes_the_arithmetic_of_a_model_changes_its_numerics(field: str, loaded: LoadedModel) -> None:
    difference = numerics_of(CONFIG, LOADED, "").first_difference(numerics_of(CONFIG, loaded, ""))
    assert difference is not None and difference[0] == field


def test_threads_ranks_and_a_problem_change_the_numerics_and_limits_on_steps_do_not() -> None:
    ours = numerics_of(CONFIG, LOADED, "")
    more = numerics_of(msgspec.structs.replace(CONFIG, num_threads=4), LOADED, "")
    assert ours.first_difference(more) == ("num_threads", "1", "4"), "products may be split in another order"
    split = numerics_of(msgspec.structs.replace(CONFIG, tensor_parallel_size=2), LOADED, "")
    assert ours.first_difference(split) == ("num_ranks", "1", "2")
    assert numerics_of(CONFIG, LOADED, "the batch matters").digest != ours.digest
    steps = msgspec.structs.replace(
        CONFIG, max_num_seqs=7, max_num_batched_tokens=99, kv_cache_bytes=1 << 20, exact=True
    )
    assert numerics_of(steps, LOADED, "") == ours
    other = replace(LOADED, max_model_len=32, layout=msgspec.structs.replace(LAYOUT, model_id="other", num_layers=3))
    assert numerics_of(CONFIG, other, "") == ours


def test_the_model_of_a_gpu_and_what_cublas_may_do_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    found = numerics_of(CONFIG, replace(LOADED, device=torch.device("cuda", 0)), "products are split")
    assert found.device == "NVIDIA H200, 132 multiprocessors"
    assert found.instruction_set == "compute capability 9.0" and found.kernels == f"{CUDA_KERNELS}, blocks of 64"
    assert found.environment == "CUBLAS_WORKSPACE_CONFIG=:16:8" and "triton" in found.libraries
    assert not found.num_threads, "those of the host do not compute"


_SCRIPT = """
import msgspec, torch
from tandem.engine.numerics import machine_numerics
found = [machine_numerics(torch.device("cpu"), dtype) for dtype in (torch.bfloat16, torch.float32)]
print(msgspec.json.encode(found).decode())
"""


def test_the_environment_that_limits_a_worker_is_seen() -> None:
    """Each variable is read when torch or numba is imported, so other values need other processes."""

    def found(**variables: str) -> list[Numerics]:
        """Returns the numerics in bfloat16 and in float32."""
        env = {name: value for name, value in os.environ.items() if name not in variables} | variables
        done = subprocess.run([sys.executable, "-c", _SCRIPT], env=env, capture_output=True, check=True)
        return msgspec.json.decode(done.stdout, type=list[Numerics])

    ours = [machine_numerics(torch.device("cpu"), dtype) for dtype in (torch.bfloat16, torch.float32)]
    generic = found(OMP_NUM_THREADS="2", NUMBA_CPU_NAME="generic")
    older = found(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", MKL_ENABLE_INSTRUCTIONS="AVX2")
    for our, its, old in zip(ours, generic, older, strict=True):
        assert its.instruction_set.endswith("generic in numba")
        same = msgspec.structs.replace(its, instruction_set=our.instruction_set)
        assert same == our, "the number of threads is a field of its own"
        assert old.environment == "MKL_ENABLE_INSTRUCTIONS=AVX2"
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            assert old.instruction_set.startswith("AVX2 in torch, AVX2 in oneDNN, ")
            assert old.probe != our.probe


def test_onednn_uses_the_best_that_the_cpu_has_and_the_environment_allows() -> None:
    haswell = ["sse4_1", "avx", "avx2", "fma"]
    skylake = [*haswell, *["avx512f", "avx512bw", "avx512vl", "avx512dq"]]
    rapids = [*skylake, *["avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"]]
    assert [onednn_isa(flags, "") for flags in ([], haswell, skylake, rapids)] == [
        "none", "AVX2", "AVX512_CORE", "AVX512_CORE_AMX",
    ]  # fmt: skip
    assert [onednn_isa(rapids, limit) for limit in ("avx2", "AVX2_VNNI", "AVX512_CORE_BF16", "ALL", "nonsense")] == [
        "AVX2", "AVX2_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_AMX", "AVX512_CORE_AMX",
    ]  # fmt: skip
    assert onednn_isa(haswell, "AVX512_CORE_AMX") == "AVX2"


def test_variables_are_shown_if_they_are_set_and_long_values_are_cut() -> None:
    shown = shown_variables({"A": "1", "B": "", "C": "x" * 1000, "D": "3"}, ["A", "B", "C", "E"])
    assert shown == f"A=1 C={'x' * 64}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_the_probe_does_not_depend_on_threads_and_leaves_their_number(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    found = set()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        found.add(probe(dtype))
        assert torch.get_num_threads() == num_threads
    torch.set_num_threads(before)
    assert len(found) == 1


if __name__ == "__main__":
    for folder, name in (("cpu", CPU_KERNELS), ("cuda", CUDA_KERNELS)):
        print(f"{name}: {code_hash(files_of(folder))}")
