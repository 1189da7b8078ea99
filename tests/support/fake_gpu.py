"""A GPU whose tensors have shapes, dtypes and devices, but no values. It records where the host waits for it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tandem.engine import model_runner
from tandem.engine.cuda import streams
from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.quantization.int4_linear import Int4Linear, packed_values
from tandem.engine.sampling import grammar_mask

CUDA = torch.device("cuda", 0)
_VALUES = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}  # item: in inference mode
_READS = {"aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::repeat_interleave"}


class ValuelessGPU(TorchDispatchMode):
    """waits: "function of the engine: what it waits for". num_uploads: pinned copies, for which the host does not wait;
    uploaded_bytes: their total size.

    operators: names, in order. kernels: those that compute something, so neither views nor allocations.
    largest_float64: elements of the largest float64 tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.num_uploads = 0
        self.uploaded_bytes = 0
        self.operators: list[str] = []
        self.kernels: list[str] = []
        self.largest_float64 = 0

    def wait(self, what: str) -> None:
        frame = sys._getframe(1)
        while "/engine/" not in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename:
            assert frame.f_back is not None
            frame = frame.f_back
        self.waits.append(f"{frame.f_code.co_name}: {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        inputs = {t.device.type for t in given}
        if name in _VALUES:
            self.wait("a value")
            return args[0].dtype == torch.bool or 1
        if name == "aten::_grouped_mm" and torch.cuda.get_device_capability()[0] not in (9, 10):
            self.wait("the tokens of each expert")
        is_known = kwargs.get("output_size") is not None or func._overloadname == "self_int"  # of repeat_interleave
        if name in _READS and "cuda" in inputs and not is_known:
            self.wait(name)
        result = func(*args, **kwargs)
        outputs = [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]
        devices = {t.device.type for t in outputs}
        if name in ("aten::_to_copy", "aten::copy_", "aten::to") and len(inputs | devices) > 1:
            self.wait("a copy to the device" if "cuda" in devices else "a copy to the host")
        if "cuda" in (devices or inputs) and _computes(func, given, outputs):
            self.kernels.append(name)
        if "cuda" in devices:
            self.operators.append(name)
            sizes = [t.numel() for t in outputs if t.dtype == torch.float64]
            self.largest_float64 = max([self.largest_float64, *sizes])
        return result


def _computes(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether an operator is neither a view nor an allocation, nor asks for an attribute."""
    if func._schema.name.startswith(("aten::empty", "aten::new_empty", "prim::")):
        return False
    memory = {t.untyped_storage()._cdata for t in inputs}
    may_be_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
    return not (may_be_view and all(t.untyped_storage()._cdata in memory for t in outputs))


@contextmanager
def fake_gpu(patch: pytest.MonkeyPatch) -> Iterator[ValuelessGPU]:
    gpu = ValuelessGPU()

    def tolist(tensor: FakeTensor) -> Any:
        gpu.wait("tolist")
        return _ones(list(tensor.shape))

    def copy_to_device(host: Any, device: torch.device) -> torch.Tensor:
        gpu.num_uploads += 1
        gpu.uploaded_bytes += len(host)
        return torch.empty(len(host), dtype=torch.uint8, device=device)

    def copy_to_host(tensor: torch.Tensor) -> Any:
        def read() -> Any:
            gpu.wait("a copy to the host")
            return _ones(list(tensor.shape))

        return read

    patch.setattr(FakeTensor, "tolist", tolist)
    patch.setattr(streams, "_copy_to_host", copy_to_host)
    patch.setattr(streams, "_copy_to_device", copy_to_device)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    grammar_mask._table.cache_clear()
    with FakeTensorMode(), gpu:
        yield gpu
    grammar_mask._table.cache_clear()


def _ones(shape: list[int]) -> Any:
    return 1 if not shape else [_ones(shape[1:]) for _ in range(shape[0])]


def runner_on_fake_gpu(
    loaded: LoadedModel, config: EngineConfig, patch: pytest.MonkeyPatch, *, has_graphs: bool
) -> model_runner.ModelRunner:
    """Moves the model's shapes to the GPU; called within `fake_gpu`. Graphs run their function at each replay."""
    patch.setattr(model_runner, "uses_triton", lambda pool, config: True)
    patch.setattr(model_runner, "end_of_work", lambda device: lambda: None)
    patch.setattr(model_runner, "cuda_capture", lambda: lambda function: function)
    for module in loaded.model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(_moved(parameter), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _moved(buffer)
        if isinstance(module, Int4Linear):  # CPUs have another layout
            values = torch.empty((module.out_features, module.in_features), dtype=torch.uint8, device=CUDA)
            module.packed = packed_values(values)
    moved = dataclasses.replace(loaded, device=CUDA)
    runner = model_runner.ModelRunner(moved, KVPool(moved, config), GraphLimits())
    if not has_graphs:
        runner._graphs = None
    return runner


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
