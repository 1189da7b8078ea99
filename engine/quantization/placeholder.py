"""Modules that stand in for quantised layers while transformers loads their tensors, and then become these layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tandem.engine.loading.sharding import GATHERED_STYLES, GatheredLinear, SummedLinear, local_tensor
from tandem.engine.quantization.layer_share import LayerShare
from tandem.engine.quantization.linears import FP8
from tandem.engine.quantization.schemes import Scheme, TensorSpec, UnsupportedLayerError


@dataclass(frozen=True)
class PlaceholderPlan:
    """How a layer is stored and shared. style: of transformers' plan, such as "rowwise"; "" if it is not shared."""

    scheme: Scheme
    share: LayerShare
    style: str = ""

    @classmethod
    def of(cls, linear: nn.Linear, scheme: Scheme, style: str, rank: int, num_ranks: int) -> PlaceholderPlan:
        """Raises UnsupportedLayerError for a style that quantised layers do not have."""
        sizes = linear.in_features, linear.out_features
        if not style or num_ranks == 1:
            return cls(scheme, LayerShare(*sizes))
        if style == "rowwise" and not scheme.has_order:
            return cls(scheme, LayerShare(*sizes, "inputs", rank, num_ranks), style)
        if style in ("rowwise", "colwise", *GATHERED_STYLES):
            return cls(scheme, LayerShare(*sizes, "outputs", rank, num_ranks), style)
        raise UnsupportedLayerError(f"transformers' plan shares it as {style!r}, which quantised layers do not support")

    def problem(self, device: torch.device, dtype: torch.dtype) -> str:
        """Returns why this rank's share cannot be computed there, or an empty string. The whole layer can."""
        return self.share.uneven() or self.scheme.problem(self.share, device, dtype)


class Placeholder(nn.Module):
    """Holds the tensors of a quantised layer as the checkpoint has them, or this rank's slices of them.

    Sharded tensors are DTensors, of which transformers reads only the slices. mesh: of all ranks; None for one rank.
    """

    def __init__(self, linear: nn.Linear, plan: PlaceholderPlan, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features  # transformers' plan reads them
        self._plan = plan
        self._dtype = linear.weight.dtype
        self._specs = plan.scheme.tensors(linear.in_features, linear.out_features)
        for name, spec in self._specs.items():
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            if (dim := self._shared_dim(spec)) is not None:
                tensor = distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)
            self.register_buffer(name, tensor)
        self.bias = linear.bias

    def _shared_dim(self, spec: TensorSpec) -> int | None:
        return {"outputs": spec.output_dim, "inputs": spec.input_dim, "": None}[self._plan.share.split]

    def make_layer(self) -> nn.Module:
        """Returns the layer that takes and returns what the unquantised one would. Raises UnsupportedLayerError."""
        tensors = {name: local_tensor(getattr(self, name)).detach() for name in self._specs}
        for name, spec in self._specs.items():
            self._check(name, tensors[name], spec)
        plan, share = self._plan, self._plan.share
        bias = None if self.bias is None else local_tensor(self.bias).detach()
        if bias is not None and list(bias.shape) not in (
            [num_rows := self.out_features],
            [num_rows // share.num_ranks],
        ):
            # One value would be added to all outputs.
            raise UnsupportedLayerError(f"bias has the shape {list(bias.shape)} instead of [{num_rows}]")
        if share.split == "inputs":
            return SummedLinear(plan.scheme.make(tensors, share, None, self._dtype), bias)
        has_split_inputs = plan.style == "rowwise"
        if has_split_inputs and bias is not None:  # transformers' plan leaves it whole
            bias = bias[share.outputs.start : share.outputs.stop]
        layer = plan.scheme.make(tensors, share, bias, self._dtype)
        return GatheredLinear(layer, has_split_inputs) if plan.style not in ("", "colwise") else layer

    def _check(self, name: str, tensor: torch.Tensor, spec: TensorSpec) -> None:
        """Raises UnsupportedLayerError if the checkpoint's tensor is another than expected."""
        if tensor.dtype != spec.dtype and spec.dtype in (FP8, torch.int8, torch.int32):
            raise UnsupportedLayerError(f"{name} is stored as {tensor.dtype} instead of {spec.dtype}")
        shape = list(spec.shape)
        if (dim := self._shared_dim(spec)) is not None:
            shape[dim] //= self._plan.share.num_ranks
        if _without_ones(tensor.shape) != _without_ones(shape):  # a scale for all is written as [] or as [1]
            raise UnsupportedLayerError(f"{name} has the shape {list(tensor.shape)} instead of {shape}")


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
