"""Whether the bits of a model's log-probabilities depend on nothing but its numerics and what they are given.

See docs/adr/0042-exact-arithmetic.md for what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.batch import BatchItem
from tandem.engine.cuda import step_tensors
from tandem.engine.cuda.quantized_linears import CUDAInt4Linear, CUDAScaledLinear
from tandem.engine.cuda.triton_attention import triton_attention
from tandem.engine.engine_config import EngineConfig
from tandem.engine.layers.fused_layer import FusedLayer
from tandem.engine.layers.fusing import FinalNorm
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.loading.sharding import local_tensor
from tandem.engine.quantization.linears import Int8WeightLinear, QuantizedLinear
from tandem.engine.row_products import ExactLinear, differing_count, linear, product_problem

if TYPE_CHECKING:
    from tandem.engine.kv_cache.kv_pool import KVPool

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
        return gpu_setting_problem(config, loaded)
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


_PRODUCTS = (ExactLinear, CUDAScaledLinear, CUDAInt4Linear)


def gpu_setting_problem(config: EngineConfig, loaded: LoadedModel) -> str:
    """Returns why a model on a GPU is not exact with these settings, as one sentence; empty if it may be.

    `gpu_problem` tells the rest when its kernels have been chosen.
    """
    if not config.exact:
        return "without --exact, products on GPUs add in another order for another number of rows"
    return _model_problem(loaded)


def _model_problem(loaded: LoadedModel) -> str:
    if loaded.layout.tensor_parallel_size > 1:
        return "sums over the ranks of a worker on GPUs may have another order in another batch"
    if loaded.vision is not None:
        return "the vision encoder's products on GPUs depend on the number of pictures"
    return ""


def use_exact_head(model: Any, row_counts: Sequence[int]) -> None:
    """Makes the products of the output projection exact, if it is a plain linear layer."""
    if type(head := getattr(model, "lm_head", None)) is torch.nn.Linear:
        model.lm_head = ExactLinear(head.weight, head.bias, row_counts)


def gpu_problem(loaded: LoadedModel, pool: KVPool, row_counts: Sequence[int]) -> str:
    """Returns why this model is not exact on this GPU, as one sentence, or an empty string if it is.

    loaded: its layers are fused with operators for exact products (`engine.layers.fusing`). The pool's content is
    restored.
    """
    if problem := _model_problem(loaded):
        return problem
    model = loaded.model
    layers = list(getattr(model.base_model, "layers", []))
    fused = [layer for layer in layers if isinstance(layer, FusedLayer)]
    if not layers or len(fused) < len(layers):
        return f"{len(layers) - len(fused)} of {len(layers)} layers have no kernels whose sums have a fixed order"
    if not isinstance(getattr(model.base_model, "norm", None), FinalNorm):
        return "the norm behind the last layer has no kernel whose sum has a fixed order"
    if not isinstance(getattr(model, "lm_head", None), ExactLinear):
        return "the output projection is not a plain linear layer"
    return product_problem(_exact_layers(model), row_counts, loaded.dtype, loaded.device) or chunk_problem(pool, fused)


def _exact_layers(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, _PRODUCTS))


@torch.inference_mode()
def chunk_problem(pool: KVPool, layers: Iterable[FusedLayer]) -> str:
    """Returns which kind of attention has other bits in another chunk, or an empty string if none has."""
    found: dict[Any, tuple[AttentionOptions, int]] = {}
    for layer in layers:
        heads, options = layer.head_parameters, layer.head_parameters.options
        kind = heads.num_heads, options.scale, options.window, options.softcap, options.sinks is None
        found.setdefault(kind, (options, heads.num_heads))
    layout = pool.layout
    num_tokens = min(2 * step_tensors.SPLIT + 70, len(pool.tensor) * layout.block_size)
    blocks = list(range(-(-num_tokens // layout.block_size)))
    saved = pool.tensor[: len(blocks)].clone()
    generator = torch.Generator().manual_seed(0)

    def random(num_heads: int) -> torch.Tensor:
        values = torch.randn((1, num_tokens, num_heads, layout.head_dim), generator=generator)
        return values.to(pool.model_dtype).to(pool.tensor.device).transpose(1, 2)

    chunkings = ([num_tokens], _chunks(num_tokens, 33), [1] * num_tokens)
    try:
        for options, num_heads in found.values():
            query, key, value = random(num_heads), random(layout.num_kv_heads), random(layout.num_kv_heads)
            results = []
            for sizes in chunkings:
                starts = [sum(sizes[:number]) for number in range(len(sizes))]
                # The chunks are in one step, as if they were several sequences that share blocks.
                items = [BatchItem([0] * size, start, blocks) for start, size in zip(starts, sizes, strict=True)]
                results.append(triton_attention(pool, items, True).attend(0, query, key, value, options))
            if not all(torch.equal(result, results[0]) for result in results[1:]):
                return f"attention with a window of {options.window} tokens gives other bits in other chunks"
    finally:
        pool.tensor[: len(blocks)] = saved
    return ""


def _chunks(num_tokens: int, size: int) -> list[int]:
    """Returns sizes that add up to `num_tokens`: one token, then `size` at most."""
    return [1, *(min(size, num_tokens - start) for start in range(1, num_tokens, size))]
