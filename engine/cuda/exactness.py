"""Whether the bits of a GPU's log-probabilities depend on more than the tokens, the weights and the numerics (--exact).

Attention, norms, rotations and sums of sampling have a fixed order by their code. Products are a library's, so all
numbers of rows that steps have are tried when the worker starts, and attention is tried in chunks and token by token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.batch import BatchItem
from tandem.engine.cuda import step_tensors
from tandem.engine.cuda.exact_products import ExactLinear, product_problem
from tandem.engine.cuda.quantized_linears import CUDAInt4Linear, CUDAScaledLinear
from tandem.engine.cuda.triton_attention import triton_attention
from tandem.engine.layers.fused_layer import FusedLayer
from tandem.engine.layers.fusing import FinalNorm

if TYPE_CHECKING:
    from tandem.engine.engine_config import EngineConfig
    from tandem.engine.kv_cache.kv_pool import KVPool
    from tandem.engine.loaded_model import LoadedModel

_PRODUCTS = (ExactLinear, CUDAScaledLinear, CUDAInt4Linear)


def setting_problem(config: EngineConfig, loaded: LoadedModel) -> str:
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
    return product_problem(_products(model), row_counts, loaded.dtype, loaded.device) or chunk_problem(pool, fused)


def _products(model: Any) -> Iterator[Any]:
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
