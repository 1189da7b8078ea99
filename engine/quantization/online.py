"""Quantises the weights of an unquantised model while it is loaded (`--quantization`): 8-bit weights and inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tandem.engine.engine_config import Quantization
from tandem.engine.quantization.checkpoint import check_no_experts, refusal
from tandem.engine.quantization.linears import FP8, Fp8Linear, Int8Linear, QuantizedLinear, quantized_rows
from tandem.engine.quantization.schemes import w8a8_problem


def quantize_linears(name: str, model: Any, quantization: Quantization, device: torch.device) -> None:
    """Replaces the decoder's linear layers, but not the head, by quantised ones on `device`, one after another.

    Weights get a scale for each output, inputs one for each token. name: of the model. Raises ConfigError.
    """
    check_no_experts(name, model)
    num_layers = 0
    dtype = FP8 if quantization == "fp8" else torch.int8
    for parent in list(model.get_decoder().modules()):
        for child_name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            if problem := w8a8_problem(dtype, child.in_features, child.out_features, device):
                raise refusal(name, f"{child_name}: {problem}; leave out --quantization {quantization}")
            setattr(parent, child_name, quantized_linear(child, dtype, device))
            num_layers += 1
    if not num_layers:
        raise refusal(name, f"it has no linear layers of the usual kind; leave out --quantization {quantization}")


def quantized_linear(linear: nn.Linear, dtype: torch.dtype, device: torch.device) -> QuantizedLinear:
    """Returns the layer with weights in `dtype` (INT8 or FP8)."""
    weight, scale = quantized_rows(linear.weight.detach().to(device), dtype)
    bias = None if linear.bias is None else linear.bias.detach().to(device)
    kind = Int8Linear if dtype == torch.int8 else Fp8Linear
    return kind(weight, scale[:, 0].contiguous(), None, bias)
