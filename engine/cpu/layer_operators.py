"""The modules of fused decoder layers on CPUs: compiled kernels, and linear layers with packed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from numba import prange, types
from torch import nn

from tandem.engine.attention.interface import StepAttention
from tandem.engine.cpu.compiler import DTYPES, as_array, as_float, compile_kernel, rounded
from tandem.engine.cpu.packed_linear import merge
from tandem.engine.layers.fused_layer import HeadParameters, NormParameters
from tandem.engine.layers.fusing import MixingAttention
from tandem.engine.loading.sharding import plain_linear
from tandem.engine.lora.layers import AdaptedLinear, LoraSlice, StepAdapters


class CPULayerOperators:
    """Implements `engine.layers.fused_layer.LayerOperators`."""

    dtypes: Collection[torch.dtype] = DTYPES
    merges_only = True

    def __init__(self, is_exact: bool = False) -> None:
        """is_exact: see `packed_linear.is_packable`."""
        self._is_exact = is_exact

    def norm(self, parameters: NormParameters) -> CPUNorm:
        return CPUNorm(parameters)

    def linear(self, linears: Sequence[Any]) -> Any:
        return merge(linears, is_exact=self._is_exact)

    def heads(self, parameters: HeadParameters) -> CPUHeads:
        return CPUHeads(parameters)

    def gate(self, linears: Sequence[Any]) -> CPUGate:
        return CPUGate(linears, self._is_exact)

    def trial(self, parameters: HeadParameters, num_tokens: int, device: torch.device) -> StepAttention:
        return MixingAttention()


class CPUNorm(nn.Module):
    """RMSNorm with the compiled kernel `rms_norm`."""

    def __init__(self, parameters: NormParameters) -> None:
        super().__init__()
        self.weight: torch.Tensor = parameters.weight
        self._epsilon = parameters.epsilon
        self._weight_array = as_array(parameters.weight.detach())
        self._normalise = rms_norm(parameters.weight.dtype)

    def forward(self, inputs: torch.Tensor, reader: Any = None) -> torch.Tensor:
        rows = inputs.reshape(-1, len(self.weight))
        output = torch.empty(rows.shape, dtype=rows.dtype)
        self._normalise(as_array(rows), self._weight_array, self._epsilon, as_array(output))
        return output.view(inputs.shape)

    def after(
        self, linear: Any, inputs: torch.Tensor, residual: torch.Tensor, reader: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total: torch.Tensor = linear.combined(inputs, residual, "add")
        return total, self(total)


class CPUHeads(nn.Module):
    """Normalises and rotates heads with compiled kernels, then attends to them."""

    def __init__(self, parameters: HeadParameters) -> None:
        super().__init__()
        self._layer, self._options = parameters.plan.layer, parameters.options
        self._num_heads = parameters.num_heads
        self._num_rotated = parameters.num_heads + parameters.plan.num_kv_heads
        self._query_norm = None if parameters.query_norm is None else CPUNorm(parameters.query_norm)
        self._key_norm = None if parameters.key_norm is None else CPUNorm(parameters.key_norm)

    def attend(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        num_heads, num_rotated = self._num_heads, self._num_rotated
        inputs = heads
        if self._query_norm is not None and self._key_norm is not None:
            query, key = self._query_norm(heads[:, :num_heads]), self._key_norm(heads[:, num_heads:num_rotated])
            inputs = torch.cat((query, key), 1)
        rotated = torch.empty(len(heads), num_rotated, heads.shape[2], dtype=heads.dtype)
        rotation(heads.dtype)(as_array(inputs), as_array(cos), as_array(sin), as_array(rotated))
        return attention.attend(
            self._layer,
            rotated[:, :num_heads].transpose(0, 1)[None],
            rotated[:, num_heads:].transpose(0, 1)[None],
            heads[:, num_rotated:].transpose(0, 1)[None],
            self._options,
        )


class CPUGate(nn.Module):
    """Multiplies by the gate where up's outputs are rounded, so gate and up have a layer each."""

    def __init__(self, linears: Sequence[nn.Linear], is_exact: bool) -> None:
        super().__init__()
        gate, up = linears if len(linears) == 2 else _halves(linears[0])
        self._gate: Any = merge([gate], "swish", is_exact)
        self._up: Any = merge([up], is_exact=is_exact)

    def gated(self, inputs: torch.Tensor, reader: Any) -> torch.Tensor:
        output: torch.Tensor = self._up.combined(inputs, self._gate(inputs), "mul")
        return output

    def adapt_linears(self, names: Sequence[str], step: StepAdapters) -> None:
        size = self._gate.out_features
        up = LoraSlice(names[-1], 0, size, first_row=size if len(names) == 1 else 0)
        self._gate = AdaptedLinear(self._gate, [LoraSlice(names[0], 0, size)], step)
        self._up = AdaptedLinear(self._up, [up], step)


def _halves(linear: nn.Linear) -> tuple[nn.Linear, nn.Linear]:
    """Splits a layer by its outputs."""
    biases = (None, None) if linear.bias is None else linear.bias.chunk(2)
    first, second = (plain_linear(w, b) for w, b in zip(linear.weight.chunk(2), biases, strict=True))
    return first, second


_F32 = np.float32


@functools.cache
def rms_norm(dtype: torch.dtype) -> Callable[..., None]:
    """Returns a kernel (inputs, weight, epsilon, output): [num_rows, size], [size], float, [num_rows, size].

    RMSNorm: `x / sqrt(mean(x^2) + epsilon) * weight` (Zhang and Sennrich, NeurIPS 2019). Rounds before and after the
    multiplication by the weight, as transformers' Llama does.
    """
    kind = DTYPES[dtype]
    rows = types.Array(kind, 2, "C")
    signature = types.void(rows, types.Array(kind, 1, "C"), types.float32, rows)

    def normalise(inputs: Any, weight: Any, epsilon: Any, output: Any) -> None:
        size = inputs.shape[1]
        for row in prange(len(inputs)):
            squares = _F32(0)
            for i in range(size):
                squares += as_float(inputs[row, i]) * as_float(inputs[row, i])
            like = weight[0]
            factor = _F32(1) / np.sqrt(squares / _F32(size) + epsilon)
            for i in range(size):
                normed = as_float(rounded(as_float(inputs[row, i]) * factor, like))
                output[row, i] = rounded(normed * as_float(weight[i]), like)

    return compile_kernel(signature, normalise)


@functools.cache
def rotation(dtype: torch.dtype) -> Callable[..., None]:
    """Returns a kernel (heads, cos, sin, output) for rotary embeddings (Su et al., RoFormer, 2021).

    Rotates the two halves of a head against each other: `(a cos - b sin, b cos + a sin)`.
    heads: [num_tokens, num_heads, head_dim], of which the first `output.shape[1]` heads are rotated.
    cos, sin: [num_tokens, head_dim]. output: [num_tokens, num_rotated, head_dim].
    """
    kind = DTYPES[dtype]
    states, angles = types.Array(kind, 3, "C"), types.Array(kind, 2, "C")
    signature = types.void(states, angles, angles, states)

    def rotate(heads: Any, cos: Any, sin: Any, output: Any) -> None:
        half = heads.shape[2] // 2
        for token in prange(len(heads)):
            like = output[0, 0, 0]
            for head in range(output.shape[1]):
                for i in range(half):
                    a = as_float(heads[token, head, i])
                    b = as_float(heads[token, head, half + i])
                    turned = a * as_float(cos[token, i]) - b * as_float(sin[token, i])
                    output[token, head, i] = rounded(turned, like)
                for i in range(half):
                    a = as_float(heads[token, head, i])
                    b = as_float(heads[token, head, half + i])
                    turned = b * as_float(cos[token, half + i]) + a * as_float(sin[token, half + i])
                    output[token, head, half + i] = rounded(turned, like)

    return compile_kernel(signature, rotate)
