"""How a checkpoint stores one quantised linear layer: the names, shapes and types of its tensors, and their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Literal, NamedTuple, Protocol

import torch
from torch import nn

from tandem.engine.loading.sharding import plain_linear
from tandem.engine.quantization.int4_linear import (
    KERNEL_GROUP_SIZES,
    Int4Groups,
    Int4Linear,
    kernel_group_size,
    unpacked_nibbles,
)
from tandem.engine.quantization.linears import FP8, Fp8Linear, Int8Linear, Int8WeightLinear, QuantizedLinear

Split = Literal["", "outputs", "inputs"]


@dataclass(frozen=True)
class LayerShare:
    """A rank's share of a layer that is split evenly by its outputs or by its inputs; "" is the whole layer.

    in_features, out_features: of the whole layer.
    """

    in_features: int
    out_features: int
    split: Split = ""
    rank: int = 0
    num_ranks: int = 1

    @property
    def inputs(self) -> range:
        """This rank's inputs."""
        return self._of_rank(self.in_features) if self.split == "inputs" else range(self.in_features)

    @property
    def outputs(self) -> range:
        """This rank's outputs."""
        return self._of_rank(self.out_features) if self.split == "outputs" else range(self.out_features)

    def _of_rank(self, size: int) -> range:
        per_rank = size // self.num_ranks
        return range(self.rank * per_rank, (self.rank + 1) * per_rank)

    def uneven(self) -> str:
        """Returns why the ranks cannot share the layer evenly, or an empty string."""
        size = self.in_features if self.split == "inputs" else self.out_features
        is_uneven = self.split and size % self.num_ranks
        return f"its {size} {self.split} are not a multiple of {self.num_ranks}" if is_uneven else ""

    def groups(self, group_size: int) -> list[int]:
        """Returns the whole layer's groups of this rank's inputs: one for each run of equal numbers of inputs.

        A run is a group, or a part of one where ranks share groups. group_size: 0 if all inputs are one group.
        """
        if not group_size:
            return [0]
        return [first // group_size for first in self.inputs[:: gcd(group_size, len(self.inputs))]]

    def take_groups(self, values: torch.Tensor, group_size: int) -> torch.Tensor:
        """Returns the values of the runs of `groups`. values: [num_outputs, num_groups] of the whole layer's groups."""
        return values[:, self.groups(group_size)] if self.split == "inputs" else values


Tensors = Mapping[str, torch.Tensor]

_AWQ_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place of each of eight adjacent outputs in an AWQ word, from the lowest bits."""
GPTQ_V1_ZEROS = 0x11111111
"""One for each zero point of a word. GPTQModel subtracts it from whole words, with carries, so it is added likewise."""
_MIN_FP8_CAPABILITY = (8, 9)


class UnsupportedLayerError(Exception):
    """The layer cannot be computed; the message completes "LAYER: ..."."""


class TensorSpec(NamedTuple):
    """A tensor of a layer in the checkpoint.

    output_dim, input_dim: the dimension along which ranks share it when they share the layer's outputs or inputs; None
    if each rank needs all of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    output_dim: int | None = None
    input_dim: int | None = None


TensorSpecs = dict[str, TensorSpec]


class Scheme(Protocol):
    """The format of a quantised layer's tensors."""

    @property
    def has_order(self) -> bool:
        """Whether groups consist of inputs from anywhere in the layer, so that ranks cannot share it by its inputs."""

    def tensors(self, in_features: int, out_features: int) -> TensorSpecs:
        """Returns each tensor that the checkpoint has for a layer, by its name in the layer."""

    def problem(self, share: LayerShare, device: torch.device, dtype: torch.dtype) -> str:
        """Returns why an even share cannot be computed there, or an empty string."""

    def make(self, tensors: Tensors, share: LayerShare, bias: torch.Tensor | None, dtype: torch.dtype) -> nn.Module:
        """Returns the share as a quantised layer, or as a plain one if that is faster on the tensors' device.

        tensors: as in the checkpoint, but split. Raises UnsupportedLayerError.
        """


@dataclass(frozen=True)
class W8A8:
    """8-bit weights and inputs. dtype: torch.int8 or FP8. per_tensor: the weight has one scale, else one per output."""

    dtype: torch.dtype
    per_tensor: bool
    has_static_inputs: bool
    has_order = False

    def tensors(self, in_features: int, out_features: int) -> TensorSpecs:
        per_tensor, per_output = TensorSpec((1,), torch.float32), TensorSpec((out_features, 1), torch.float32, 0)
        specs = {
            "weight": TensorSpec((out_features, in_features), self.dtype, 0, 1),
            "weight_scale": per_tensor if self.per_tensor else per_output,
        }
        if self.has_static_inputs:
            specs["input_scale"] = per_tensor
        return specs

    def problem(self, share: LayerShare, device: torch.device, dtype: torch.dtype) -> str:
        return w8a8_problem(self.dtype, len(share.inputs), len(share.outputs), device)

    def make(
        self, tensors: Tensors, share: LayerShare, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> QuantizedLinear:
        weight = tensors["weight"]
        weight_scale = tensors["weight_scale"].flatten().expand(len(weight)).contiguous()
        input_scale = tensors["input_scale"].reshape(1) if self.has_static_inputs else None
        kind = Int8Linear if self.dtype == torch.int8 else Fp8Linear
        return kind(weight, weight_scale, input_scale, bias)


def w8a8_problem(kind: torch.dtype, in_features: int, out_features: int, device: torch.device) -> str:
    """Returns why products of `kind` (INT8 or FP8) cannot be computed on the device, or an empty string."""
    if device.type != "cuda":
        return ""
    if kind == FP8 and (capability := torch.cuda.get_device_capability(device)) < _MIN_FP8_CAPABILITY:
        return "FP8 needs a GPU of compute capability 8.9 or newer, and this one has {}.{}".format(*capability)
    multiple = 16 if kind == FP8 else 8
    if in_features % multiple or out_features % multiple:
        return f"its {in_features} inputs and {out_features} outputs are not multiples of {multiple}"
    return ""


@dataclass(frozen=True)
class PackedInts:
    """The pack-quantized format of compressed-tensors: 4- or 8-bit weights in 32-bit words, inputs as they are."""

    num_bits: int
    group_size: int
    """0 for one group per output."""
    has_zeros: bool
    """Whether the quantisation is asymmetric."""
    has_order: bool
    """Whether inputs may be in groups of any order."""

    def tensors(self, in_features: int, out_features: int) -> TensorSpecs:
        per_word = 32 // self.num_bits
        num_groups = _num_groups(in_features, self.group_size)
        specs = {
            "weight_packed": TensorSpec((out_features, -(-in_features // per_word)), torch.int32, 0, 1),
            "weight_scale": TensorSpec((out_features, num_groups), torch.float32, 0),
            "weight_shape": TensorSpec((2,), torch.int64),
        }
        if self.has_zeros:
            specs["weight_zero_point"] = TensorSpec((-(-out_features // per_word), num_groups), torch.int32, 0)
        if self.has_order:
            specs["weight_g_idx"] = TensorSpec((in_features,), torch.int32)
        return specs

    def problem(self, share: LayerShare, device: torch.device, dtype: torch.dtype) -> str:
        if self.num_bits == 4:
            return int4_problem(share, self.group_size, device, dtype)
        per_group = self.group_size or share.in_features
        if share.in_features % per_group:
            return f"group_size {per_group} does not divide its {share.in_features} inputs"
        if share.split == "inputs" and len(share.inputs) % 4:
            return f"the {len(share.inputs)} inputs of a rank are not a multiple of 4"
        return ""

    def make(self, tensors: Tensors, share: LayerShare, bias: torch.Tensor | None, dtype: torch.dtype) -> nn.Module:
        packed = tensors["weight_packed"]
        scale = share.take_groups(tensors["weight_scale"], self.group_size)
        if self.num_bits == 8:  # stored as unsigned values
            weight = (packed.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)
            layer = Int8WeightLinear(weight, scale.to(dtype), bias)
            return plain_linear(layer.converted(), bias) if converts_int8_weights(weight.device) else layer
        zeros = None
        if self.has_zeros:
            zeros = share.take_groups(unpacked_nibbles(tensors["weight_zero_point"].t()).t(), self.group_size)
        order = _checked_groups(tensors["weight_g_idx"], scale.shape[1]) if self.has_order else None
        return Int4Linear.of(Int4Groups(unpacked_nibbles(packed), scale, zeros, order), bias, dtype)


@dataclass(frozen=True)
class Gptq:
    """4-bit weights of GPTQ, packed along the inputs."""

    group_size: int
    """0 for one group."""
    zero_offset: int
    """Added to each word of zero points; `GPTQ_V1_ZEROS` in the format "gptq", 0 in "gptq_v2"."""
    has_order: bool
    """Whether inputs may be in groups of any order (`desc_act`)."""

    def tensors(self, in_features: int, out_features: int) -> TensorSpecs:
        num_groups = _num_groups(in_features, self.group_size)
        return {
            "qweight": TensorSpec((in_features // 8, out_features), torch.int32, 1, 0),
            "qzeros": TensorSpec((num_groups, out_features // 8), torch.int32, 1),
            "scales": TensorSpec((num_groups, out_features), torch.float32, 1),
            "g_idx": TensorSpec((in_features,), torch.int32),
        }

    def problem(self, share: LayerShare, device: torch.device, dtype: torch.dtype) -> str:
        return int4_problem(share, self.group_size, device, dtype)

    def make(
        self, tensors: Tensors, share: LayerShare, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> QuantizedLinear:
        values = unpacked_nibbles(tensors["qweight"].t())
        scales = tensors["scales"].t()
        zeros = unpacked_nibbles(tensors["qzeros"] + self.zero_offset).t()
        order = _checked_groups(tensors["g_idx"], scales.shape[1])
        if order is not None and share.split == "inputs":
            reason = "g_idx is out of order, although desc_act is false; use --tensor-parallel-size 1"
            raise UnsupportedLayerError(reason)
        scales, zeros = (share.take_groups(each, self.group_size) for each in (scales, zeros))
        return Int4Linear.of(Int4Groups(values, scales, zeros, order), bias, dtype)


@dataclass(frozen=True)
class Awq:
    """4-bit weights of AutoAWQ's format "gemm", packed along the outputs. group_size: 0 for one group."""

    group_size: int
    has_order = False

    def tensors(self, in_features: int, out_features: int) -> TensorSpecs:
        num_groups = _num_groups(in_features, self.group_size)
        return {
            "qweight": TensorSpec((in_features, out_features // 8), torch.int32, 1, 0),
            "qzeros": TensorSpec((num_groups, out_features // 8), torch.int32, 1),
            "scales": TensorSpec((num_groups, out_features), torch.float32, 1),
        }

    def problem(self, share: LayerShare, device: torch.device, dtype: torch.dtype) -> str:
        return int4_problem(share, self.group_size, device, dtype)

    def make(
        self, tensors: Tensors, share: LayerShare, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> QuantizedLinear:
        values, zeros = (_awq_ordered(unpacked_nibbles(tensors[name])).t() for name in ("qweight", "qzeros"))
        scales, zeros = (share.take_groups(each, self.group_size) for each in (tensors["scales"].t(), zeros))
        return Int4Linear.of(Int4Groups(values, scales, zeros), bias, dtype)


def converts_int8_weights(device: torch.device) -> bool:
    """Whether layers with INT8 weights alone are converted to the model's dtype when they are loaded.

    On GPUs torch's product of INT8 weights and other inputs is five to six times slower than that of converted weights.
    """
    return device.type == "cuda"


def int4_problem(share: LayerShare, group_size: int, device: torch.device, dtype: torch.dtype) -> str:
    """Returns why a layer with 4-bit weights cannot be computed on the device, or an empty string."""
    in_features, out_features = share.in_features, len(share.outputs)
    per_group = group_size or in_features
    if in_features % per_group or not kernel_group_size(per_group):
        what = f"group_size {group_size} with {in_features} inputs" if group_size else f"one group of {in_features}"
        return f"{what} is not supported; groups must be a multiple of 32 that divides the inputs"
    if len(share.inputs) % KERNEL_GROUP_SIZES[-1]:
        return f"the {len(share.inputs)} inputs of a rank are not a multiple of {KERNEL_GROUP_SIZES[-1]}"
    if out_features % 16:
        return f"its {out_features} outputs are not a multiple of 16"
    if device.type == "cuda" and dtype != torch.bfloat16:
        shown = str(dtype).removeprefix("torch.")
        return f"torch's kernel for 4-bit weights computes in bfloat16, not in {shown}; give --dtype bfloat16"
    return ""


def _awq_ordered(values: torch.Tensor) -> torch.Tensor:
    """values: [num_rows, out_features], in the order of AWQ's words."""
    return values.view(len(values), -1, 8)[:, :, _AWQ_NIBBLES].flatten(1)


def _num_groups(in_features: int, group_size: int) -> int:
    return -(-in_features // group_size) if group_size else 1


def _checked_groups(input_groups: torch.Tensor, num_groups: int) -> torch.Tensor | None:
    """Returns the group of each input, or None if they are in order. Raises UnsupportedLayerError."""
    groups = input_groups.long()
    group_size = len(groups) // num_groups
    in_order = torch.arange(num_groups, device=groups.device).repeat_interleave(group_size)
    if torch.equal(groups, in_order):
        return None
    if not torch.equal(groups.sort().values, in_order):
        raise UnsupportedLayerError(f"g_idx does not give {group_size} inputs to each of its {num_groups} groups")
    return groups
