"""Linear layers with 4-bit weights in groups, by torch's kernels: on GPUs in bfloat16, on CPU in every dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.engine.quantization.linears import QuantizedLinear

KERNEL_GROUP_SIZES = (256, 128, 64, 32)
_GPU_INPUT_TILES = ((8, 128), (4, 64), (2, 32))
"""Layouts of the kernel on GPUs, the fastest first: tiles, and the multiple that the number of inputs must be of."""
_MIDDLE = 8  # the kernels compute (value - 8) * scale + zero


@dataclass(frozen=True)
class Int4Groups:
    """Weights `(values - zeros) * scales`, groups of equal numbers of inputs."""

    values: torch.Tensor
    """[out_features, in_features], 0 to 15."""
    scales: torch.Tensor
    """[out_features, num_groups]."""
    zeros: torch.Tensor | None
    """[out_features, num_groups], or None for 8."""
    input_groups: torch.Tensor | None = None
    """[in_features], the group of each input; None if they are in order."""


class Int4Linear(QuantizedLinear):
    """INT4 weights, inputs as they are (W4A16)."""

    packed: torch.Tensor
    """Weights in the layout of the device's kernel."""
    scales_and_zeros: torch.Tensor
    """[num_groups, out_features, 2], of groups of `group_size` inputs, in the dtype of the inputs."""
    input_order: torch.Tensor | None
    """[in_features], or None if the kernel takes the inputs as they come."""

    def __init__(
        self,
        packed: torch.Tensor,
        scales_and_zeros: torch.Tensor,
        input_order: torch.Tensor | None,
        group_size: int,
        bias: torch.Tensor | None,
    ) -> None:
        num_groups, out_features, _ = scales_and_zeros.shape
        super().__init__(num_groups * group_size, out_features, bias)
        self.group_size = group_size
        self.register_buffer("packed", packed)
        self.register_buffer("scales_and_zeros", scales_and_zeros)
        self.register_buffer("input_order", input_order)

    @classmethod
    def of(cls, weights: Int4Groups, bias: torch.Tensor | None, dtype: torch.dtype) -> Int4Linear:
        """dtype: of the inputs."""
        group_size = weights.values.shape[1] // weights.scales.shape[1]
        # Inputs are sorted by group, because the kernels take groups of adjacent inputs.
        order = None if weights.input_groups is None else weights.input_groups.argsort(stable=True)
        values = weights.values if order is None else weights.values[:, order]
        scales = weights.scales.float()
        zeros = torch.zeros_like(scales) if weights.zeros is None else (_MIDDLE - weights.zeros.float()) * scales
        kernels_size = kernel_group_size(group_size)
        both = torch.stack((scales, zeros), -1).repeat_interleave(group_size // kernels_size, 1)
        return cls(packed_values(values), both.transpose(0, 1).to(dtype).contiguous(), order, kernels_size, bias)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        multiply = torch._weight_int4pack_mm if rows.is_cuda else torch._weight_int4pack_mm_for_cpu
        return multiply(self.ordered(rows), self.packed, self.group_size, self.scales_and_zeros)

    def ordered(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the inputs in the order of the packed weights."""
        return inputs if self.input_order is None else inputs.index_select(-1, self.input_order)


def kernel_group_size(group_size: int) -> int:
    """Returns the largest size of the kernels that divides `group_size`; 0 if none does."""
    return next((size for size in KERNEL_GROUP_SIZES if group_size % size == 0), 0)


def packed_values(values: torch.Tensor) -> torch.Tensor:
    """Returns the weights in the layout of the device's kernel. values: [out_features, in_features]."""
    if values.device.type == "cpu":
        return torch._convert_weight_to_int4pack_for_cpu(values.int(), 1)
    pairs = (values[:, ::2] << 4 | values[:, 1::2]).contiguous()
    tiles = next(tiles for tiles, multiple in _GPU_INPUT_TILES if values.shape[1] % multiple == 0)
    return torch._convert_weight_to_int4pack(pairs, tiles)


def nibbles_of_tile(size: int, device: torch.device) -> torch.Tensor:
    """Returns where a tile of 8 outputs and `size` inputs has each value, in the layout of torch's kernel for GPUs.

    The result is int32 [8 * size]: for each output and input the number of the four bits, from the lowest of the first
    word. The layout is found by packing numbers, so that it is written down in torch alone.
    """
    numbers = torch.arange(8 * size, device=device).view(8, size)
    stored = torch.zeros(8 * size, dtype=torch.int32, device=device)
    for shift in (0, 4, 8):  # four bits of a number at a time
        digits = packed_values((numbers >> shift & 15).to(torch.uint8))
        stored |= unpacked_nibbles(digits.flatten()).int() << shift
    return stored.argsort().int()


def unpacked_nibbles(words: torch.Tensor) -> torch.Tensor:
    """Returns the eight 4-bit values of each 32-bit word, from the lowest bits: [..., n] to uint8 [..., 8 * n]."""
    pairs = words.contiguous().view(torch.uint8)  # little-endian, as all platforms of torch with these kernels
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
