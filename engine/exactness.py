"""Whether the bits of a model's log-probabilities depend on nothing but its numerics and what they are given.

See docs/adr/0042-exact-arithmetic.md for what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tandem.engine.cuda.exactness import setting_problem as cuda_setting_problem
from tandem.engine.engine_config import EngineConfig
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.loading.sharding import local_tensor
from tandem.engine.quantization.linears import Int8WeightLinear, QuantizedLinear
from tandem.engine.row_products import differing_count, linear

_ROW_COUNTS = (1, 2, 3, 8, 33)
_LARGE_WEIGHT = 1 << 26
"""Elements of a weight that is checked with few rows only, because a product of more takes long."""
_MAX_RANKS = 2

_Found = tuple[str, int, int, Callable[[torch.Tensor], torch.Tensor]]
"""Name, inputs, elements and product of a layer."""


def exactness_problem(config: EngineConfig, loaded: LoadedModel) -> str:
    """Returns why the bits depend on more, such as the batch, as one sentence; empty if they do not.

    Call before the model is prepared for its device.
    """
    if loaded.device.type != "cpu":
        return cuda_setting_problem(config, loaded)
    return _setting_problem(config, loaded) or _expert_problem(loaded.model) or _row_problem(loaded)


def _setting_problem(config: EngineConfig, loaded: LoadedModel) -> str:
    if loaded.dtype not in (torch.bfloat16, torch.float32):
        name = str(loaded.dtype).removeprefix("torch.")
        return f"attention in {name} on CPUs depends on how a prompt is split into chunks; use bfloat16 or float32"
    if loaded.dtype == torch.float32 and not config.exact:
        return "float32 products on CPUs depend on the number of rows in a step, unless --exact is given"
    if config.tensor_parallel_size > _MAX_RANKS:
        return (
            f"the order in which more than {_MAX_RANKS} ranks on CPUs are added up depends on the size of the step; "
            f"use --tensor-parallel-size {_MAX_RANKS} or less"
        )
    kernels_differ = any(
        isinstance(module, Int8WeightLinear) and module.has_two_kernels(loaded.dtype)
        for module in loaded.model.modules()
    )
    if kernels_differ and not config.exact:
        return "INT8 weights are multiplied by another kernel in larger steps, unless --exact is given"
    return ""


def _expert_problem(model: Any) -> str:
    """Returns a problem for experts whose products we do not know, because they are in the code of the model."""
    for name, module in model.named_modules():
        is_batch = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
        if is_batch and not hasattr(module, "is_transposed"):  # as transformers' experts interface sets it
            return f"{name} ({type(module).__name__}) multiplies batches of matrices in a way that was not checked"
    return ""


def _row_problem(loaded: LoadedModel) -> str:
    """Tries one weight of each shape in batches of several sizes."""
    for name, num_inputs, num_elements, product in _products(loaded.model):
        counts = _ROW_COUNTS if num_elements <= _LARGE_WEIGHT else _ROW_COUNTS[:3]
        if count := differing_count(product, num_inputs, counts, loaded.dtype, loaded.device):
            return f"rows of the product of {name} depend on their number, {count} or {counts[-1]}"
    return ""


def _products(model: Any) -> Iterator[_Found]:
    """Yields the name, inputs, elements and product of one linear layer or expert of each kind and shape."""
    seen: set[tuple[Any, ...]] = set()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            key: tuple[Any, ...] = (type(module), module.in_features, module.out_features)
            found: _Found = name, module.in_features, module.in_features * module.out_features, module.product
        elif isinstance(module, nn.Linear):
            key, found = _plain(name, module.weight)
        else:
            experts = [each for each in module.parameters(recurse=False) if each.ndim == 3]
            for weight in experts:
                first = local_tensor(weight)[0]
                key, found = _plain(name, first.t() if getattr(module, "is_transposed", False) else first)
                if key not in seen:
                    seen.add(key)
                    yield found
            continue
        if key not in seen:
            seen.add(key)
            yield found


def _plain(name: str, weight: torch.Tensor) -> tuple[tuple[Any, ...], _Found]:
    return (weight.dtype, *weight.shape), (name, weight.shape[1], weight.numel(), lambda rows: linear(rows, weight))
