"""The modules of fused decoder layers on GPUs: Triton kernels between matrix products."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from tandem.engine.attention.interface import StepAttention
from tandem.engine.batch import BatchItem
from tandem.engine.cuda.quantized_linears import join, row_format_of
from tandem.engine.cuda.triton_attention import TritonAttention, triton_attention
from tandem.engine.layers.fused_layer import HeadParameters, NormParameters, NotFusedError, lora_slices
from tandem.engine.layers.linear import MergedLinear, is_plain, merged_parameters
from tandem.engine.lora.layers import AdaptedLinear, StepAdapters
from tandem.engine.quantization.linears import QuantizedRows, RowFormat
from tandem.engine.row_products import ExactLinear

_TRIAL_BLOCK_SIZE = 16


class CUDALayerOperators:
    """Implements `engine.layers.fused_layer.LayerOperators`.

    Plain linear layers are merged, and so are quantised ones of the same kind. Others, such as layers that sum the
    results of several ranks, are called one by one. row_counts: of exact products (`engine.row_products`); None
    for others.
    """

    def __init__(self, row_counts: Sequence[int] | None = None) -> None:
        self._row_counts = row_counts

    dtypes: Collection[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32)
    merges_only = False

    def norm(self, parameters: NormParameters) -> CUDANorm:
        return CUDANorm(parameters)

    def linear(self, linears: Sequence[Any]) -> Any:
        if all(is_plain(linear) for linear in linears):
            weight, bias = merged_parameters(linears)
            if self._row_counts is not None:
                return ExactLinear(weight, bias, self._row_counts)
            return MergedLinear(weight, bias)
        return join(linears, self._row_counts)

    def heads(self, parameters: HeadParameters) -> CUDAHeads:
        return CUDAHeads(parameters)

    def gate(self, linears: Sequence[Any]) -> CUDAGate:
        return CUDAGate(self.linear(linears), [linear.out_features for linear in linears])

    def trial(self, parameters: HeadParameters, num_tokens: int, device: torch.device) -> StepAttention:
        """Attends over a pool of its own, whose layers are all the same memory."""
        plan = parameters.plan
        num_blocks = -(-num_tokens // _TRIAL_BLOCK_SIZE)
        shape = (num_blocks, 1, 2, plan.num_kv_heads, _TRIAL_BLOCK_SIZE, plan.head_dim)
        blocks = torch.zeros(shape, device=device).expand(-1, plan.layer + 1, -1, -1, -1, -1)
        pool: Any = SimpleNamespace(tensor=blocks, layout=SimpleNamespace(block_size=_TRIAL_BLOCK_SIZE))
        return triton_attention(pool, [BatchItem([0] * num_tokens, 0, list(range(num_blocks)))])


class CUDANorm(nn.Module):
    """RMSNorm in one kernel, with the residual connection before it."""

    def __init__(self, parameters: NormParameters) -> None:
        super().__init__()
        self.weight = parameters.weight
        self._epsilon = parameters.epsilon

    def forward(self, inputs: torch.Tensor, reader: Any) -> torch.Tensor | QuantizedRows:
        wanted = row_format_of(reader)
        if wanted is None:
            output: torch.Tensor = torch.ops.tandem.rms_norm(inputs, self.weight, self._epsilon)
            return output
        values, scales = torch.ops.tandem.rms_norm_quantized(
            inputs, self.weight, self._epsilon, wanted.scale, wanted.dtype
        )
        return QuantizedRows(values, scales, inputs.dtype)

    def after(
        self, linear: Any, inputs: torch.Tensor, residual: torch.Tensor, reader: Any
    ) -> tuple[torch.Tensor, torch.Tensor | QuantizedRows]:
        wanted = row_format_of(reader)
        if wanted is None:
            total, normed = torch.ops.tandem.add_rms_norm(linear(inputs), residual, self.weight, self._epsilon)
            return total, normed
        total, values, scales = torch.ops.tandem.add_rms_norm_quantized(
            linear(inputs), residual, self.weight, self._epsilon, wanted.scale, wanted.dtype
        )
        return total, QuantizedRows(values, scales, residual.dtype)


class CUDAHeads(nn.Module):
    """Hands heads to attention as they are projected: it normalises and rotates them where it writes the keys."""

    def __init__(self, parameters: HeadParameters) -> None:
        super().__init__()
        self._layer, self._options = parameters.plan.layer, parameters.options
        query_norm, key_norm = parameters.query_norm, parameters.key_norm
        self._query_weight = self._key_weight = None
        self._epsilon = 0.0
        if query_norm is not None and key_norm is not None:
            if query_norm.epsilon != key_norm.epsilon or len(query_norm.weight) != parameters.plan.head_dim:
                raise NotFusedError("its norms of queries and keys are not of single heads")
            self._query_weight, self._key_weight = query_norm.weight, key_norm.weight
            self._epsilon = query_norm.epsilon

    def attend(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """attention: a TritonAttention, as all steps have on a GPU whose layers are fused."""
        norms = None
        if self._query_weight is not None and self._key_weight is not None:
            norms = self._query_weight, self._key_weight, self._epsilon
        return cast(TritonAttention, attention).rotate_and_attend(self._layer, heads, cos, sin, norms, self._options)


class CUDAGate(nn.Module):
    """linear: gate and up, merged. sizes: outputs of each original layer."""

    def __init__(self, linear: Any, sizes: Sequence[int]) -> None:
        super().__init__()
        self._linear = linear
        self._sizes = sizes

    @property
    def row_format(self) -> RowFormat | None:
        """See `engine.cuda.quantized_linears.row_format_of`."""
        return row_format_of(self._linear)

    def gated(self, inputs: torch.Tensor | QuantizedRows, reader: Any) -> torch.Tensor | QuantizedRows:
        gate_up: torch.Tensor = self._linear(inputs)
        wanted = row_format_of(reader)
        if wanted is None:
            output: torch.Tensor = torch.ops.tandem.silu_mul(gate_up)
            return output
        values, scales = torch.ops.tandem.silu_mul_quantized(gate_up, wanted.scale, wanted.dtype)
        return QuantizedRows(values, scales, gate_up.dtype)

    def adapt_linears(self, names: Sequence[str], step: StepAdapters) -> None:
        self._linear = AdaptedLinear(self._linear, lora_slices(names, self._sizes), step)
