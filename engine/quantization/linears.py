"""Linear layers with 8-bit weights: INT8 and FP8 products of quantised inputs, and INT8 weights alone.

The products are torch's own operators, which exist on CPU and on GPUs. Weights are buffers, because they never train.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from tandem.engine.row_products import linear

FP8 = torch.float8_e4m3fn
_LIMITS = {torch.int8: 127.0, FP8: torch.finfo(FP8).max}
_SMALLEST_VALUE = 1e-10  # in place of the largest of a row of zeros
_MIN_INT8_ROWS = 32
"""cuBLAS multiplies INT8 matrices of more than 16 rows; smaller ones are padded to this."""
_MAX_UNPACKED_ROWS = 16
"""Up to so many rows torch's kernel reads INT8 weights; for more it is slower than a product of converted weights. In
float32 it is slower for any number."""


class RowFormat(NamedTuple):
    """How a layer quantises its inputs."""

    dtype: torch.dtype  # INT8 or FP8
    scale: torch.Tensor | None  # [1], of a static quantisation; None gives each row a scale of its own


class QuantizedRows(NamedTuple):
    """Quantised inputs of a layer: `values * scale`."""

    values: torch.Tensor  # [num_rows, in_features], INT8 or FP8
    scale: torch.Tensor  # [num_rows, 1], or [1] for all rows, float32
    dtype: torch.dtype  # of the rows before


class QuantizedLinear(nn.Module):
    """Equivalent of `nn.Linear` for inference, for inputs [..., in_features] of the model's dtype."""

    bias: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.product(inputs.reshape(-1, self.in_features).contiguous())
        if self.bias is not None:
            output += self.bias
        return output.view(*inputs.shape[:-1], self.out_features)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns [num_rows, out_features] without the bias, in the dtype of `rows` [num_rows, in_features]."""
        raise NotImplementedError


class ScaledLinear(QuantizedLinear):
    """Weights and inputs of 8 bits (W8A8)."""

    weight: torch.Tensor
    """[out_features, in_features]"""
    weight_scale: torch.Tensor
    """[out_features], float32."""
    input_scale: torch.Tensor | None
    """[1], float32, of a static quantisation; None gives each row a scale of its own."""

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("input_scale", input_scale)

    @property
    def row_format(self) -> RowFormat:
        return RowFormat(self.weight.dtype, self.input_scale)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        return self.scaled_product(QuantizedRows(*quantized_rows(rows, *self.row_format), rows.dtype))

    def scaled_product(self, rows: QuantizedRows) -> torch.Tensor:
        """Returns what `product` returns for the rows before they were quantised."""
        raise NotImplementedError


class Int8Linear(ScaledLinear):
    """INT8 weights and inputs."""

    def scaled_product(self, rows: QuantizedRows) -> torch.Tensor:
        values, num_rows = rows.values, len(rows.values)
        if values.is_cuda and len(values) < _MIN_INT8_ROWS:
            values = nn.functional.pad(values, (0, 0, 0, _MIN_INT8_ROWS - len(values)))
        sums = torch._int_mm(values, self.weight.t())[:num_rows]
        return (sums * rows.scale * self.weight_scale).to(rows.dtype)


class Fp8Linear(ScaledLinear):
    """FP8 (E4M3) weights and inputs."""

    unit_scale: torch.Tensor

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(weight, weight_scale, input_scale, bias)
        self.register_buffer("unit_scale", torch.ones((), dtype=torch.float32, device=weight.device))

    def scaled_product(self, rows: QuantizedRows) -> torch.Tensor:
        values, scale, dtype = rows
        if not values.is_cuda:  # torch multiplies FP8 on CPU twenty times slower than the converted values
            wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
            sums = linear(values.to(wide), self.weight.to(wide))
        elif dtype == torch.bfloat16 and _scales_rows(values.device):
            scales = scale.expand(len(values), 1).contiguous()
            return torch._scaled_mm(values, self.weight.t(), scales, self.weight_scale[None], out_dtype=dtype)
        else:  # torch scales rows and columns in products of bfloat16 only
            unit = self.unit_scale
            sums = torch._scaled_mm(values, self.weight.t(), unit, unit, out_dtype=torch.float32)
        return (sums * scale * self.weight_scale).to(dtype)


def _scales_rows(device: torch.device) -> bool:
    """Whether torch's FP8 product with a scale for each row works there.

    On compute capability 8.9, torch before 2.12 launches it on the default stream instead of the current one: it would
    run before its inputs are there, and graphs would not contain it.
    """
    version: Any = torch.__version__  # compares with tuples
    return torch.cuda.get_device_capability(device) != (8, 9) or version >= (2, 12)


class Int8WeightLinear(QuantizedLinear):
    """INT8 weights, inputs as they are (W8A16). weight: [out_features, in_features], INT8.

    weight_scale: [out_features, num_groups] in the model's dtype; groups of inputs have equal sizes.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self._max_unpacked_rows: float = _MAX_UNPACKED_ROWS

    def has_two_kernels(self, dtype: torch.dtype) -> bool:
        """Whether the kernel depends on the number of rows. dtype: of the rows."""
        return self.weight_scale.shape[1] == 1 and dtype != torch.float32

    def use_one_kernel(self) -> None:
        """Multiplies any number of rows by the kernel for few: a row then has the same bits in all batches."""
        self._max_unpacked_rows = float("inf")

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        if self.weight_scale.shape[1] > 1:
            return linear(rows, self.converted())
        if rows.dtype == torch.float32 or len(rows) > self._max_unpacked_rows:
            return linear(rows, self.weight.to(rows.dtype)) * self.weight_scale[:, 0]
        return torch._weight_int8pack_mm(rows, self.weight, self.weight_scale[:, 0])

    def converted(self) -> torch.Tensor:
        """Returns the weight in the model's dtype."""
        scale = self.weight_scale
        groups = self.weight.view(*scale.shape, -1).to(scale.dtype) * scale[..., None]
        return groups.view(self.weight.shape)


def quantized_rows(
    rows: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `rows` in `dtype` (INT8 or FP8), and the scale by which they must be multiplied, in float32.

    scale: [1], or None for one of each row [num_rows, 1], by its largest value.
    """
    limit = _LIMITS[dtype]
    if scale is None:
        largest = torch.linalg.vector_norm(rows, torch.inf, -1, keepdim=True, dtype=torch.float32)
        scale = largest.clamp(min=_SMALLEST_VALUE) / limit
        values = rows / scale
    else:
        values = (rows / scale).clamp(-limit, limit)
    return (values.round() if dtype == torch.int8 else values).to(dtype), scale
