"""Makes a loaded model ready for steps on CPU: fused layers, packed weights, rows with the same bits in any batch."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2CLS

from tandem.engine.cpu.experts import PackedExperts, pack_experts
from tandem.engine.cpu.layer_operators import CPULayerOperators
from tandem.engine.cpu.packed_linear import PackedLinear, pack_linears
from tandem.engine.layers.fusing import fuse_layers
from tandem.engine.layers.linear import MergedLinear
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.quantization.linears import Int8WeightLinear, QuantizedLinear
from tandem.engine.row_products import RowProducts, computes_rows_alike

_COVERED = (nn.Embedding, PackedLinear, MergedLinear, PackedExperts, QuantizedLinear)
_ACTIVATIONS = tuple({each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values()} - {nn.Identity})
# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 1 << 30


@torch.inference_mode()
def prepare_model(loaded: LoadedModel) -> None:
    """Call before other threads start."""
    _keep_freed_memory()
    model: Any = loaded.model
    is_exact = loaded.is_exact
    if loaded.layout.tensor_parallel_size == 1:  # sharded layers contain collectives
        fuse_layers(model, CPULayerOperators(is_exact))
    pack_linears(model, is_exact)
    pack_experts(model, is_exact)
    if is_exact:
        for module in model.modules():
            if isinstance(module, Int8WeightLinear):
                module.use_one_kernel()
    if computes_rows_alike(loaded.dtype, is_exact):
        for module in list(model.modules()):
            if _needs_row_products(module):
                _run_in_row_products(module)


def _needs_row_products(module: nn.Module) -> bool:
    """Whether the module's own code has products, as routers do, or is an activation."""
    if isinstance(module, _ACTIVATIONS):
        return True
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not isinstance(module, _COVERED) and any(each.ndim >= 2 and each.is_floating_point() for each in own)


def _run_in_row_products(module: nn.Module) -> None:
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with RowProducts():
            return forward(*args, **kwargs)

    module.forward = run


def _keep_freed_memory() -> None:
    """Makes malloc keep freed memory, in one arena for all threads that start later.

    Every CPU worker gains: otherwise each layer of a prefill step returns its activations to the kernel and faults
    them in again, up to a third of the step. Without glibc (musl) this does nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_ARENA_MAX, 1)  # the arenas of threads ignore the thresholds
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
