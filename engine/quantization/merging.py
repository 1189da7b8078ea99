"""Merges quantised linear layers that have the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem.engine.quantization.int4_linear import Int4Linear
from tandem.engine.quantization.linears import QuantizedLinear, ScaledLinear


def merged_quantized(linears: Sequence[Any]) -> QuantizedLinear | None:
    """Returns one layer that computes the concatenated outputs of `linears`, with weights of its own.

    Returns None if they are of several kinds, or if they quantise or sort their inputs in different ways.
    """
    first = linears[0]
    if any(type(each) is not type(first) or each._forward_hooks or each._forward_pre_hooks for each in linears):
        return None
    if isinstance(first, ScaledLinear):
        if not all(_equal(first.input_scale, each.input_scale) for each in linears):
            return None
        weight, scale = (torch.cat([each.get_buffer(name) for each in linears]) for name in ("weight", "weight_scale"))
        return type(first)(weight, scale, first.input_scale, _merged_bias(linears))
    if isinstance(first, Int4Linear):
        is_alike = all(
            each.group_size == first.group_size and _equal(first.input_order, each.input_order) for each in linears
        )
        if not is_alike:
            return None
        packed = torch.cat([each.packed for each in linears])
        scales_and_zeros = torch.cat([each.scales_and_zeros for each in linears], 1)
        return Int4Linear(packed, scales_and_zeros, first.input_order, first.group_size, _merged_bias(linears))
    return None


def _equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first is second or torch.equal(first, second)


def _merged_bias(linears: Sequence[QuantizedLinear]) -> torch.Tensor | None:
    found = [each.bias for each in linears]
    given = next((bias for bias in found if bias is not None), None)
    if given is None:
        return None
    return torch.cat(
        [
            given.new_zeros(each.out_features) if bias is None else bias
            for bias, each in zip(found, linears, strict=True)
        ]
    )
