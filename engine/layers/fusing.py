"""Replaces decoder layers of the Llama shape by fused ones, because small steps cost more operators than arithmetic.

A layer is replaced only if it has exactly the expected submodules, and if the replacement gives the same result in
float32 on the inputs that the layer gets in a run of the whole model. All other layers stay as they are.

The products of quantised layers are not exact, and some of their kernels take bfloat16 only. So such a layer is
compared in float32 with dense random weights in the place of the quantised ones, and its products are compared in the
model's dtype, each on the same inputs. The layer's sum would not show them: the residual's rounding may be larger.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.layers.fused_layer import (
    FusedLayer,
    FusedNorm,
    LayerOperators,
    NormParameters,
    NotFusedError,
    check_shape,
)
from tandem.engine.quantization.linears import QuantizedLinear
from tandem.runtime.errors import first_line

log = logging.getLogger(__name__)

_TOLERANCE = 1e-4
"""Relative to the largest value that a layer adds, in float32."""
_RESIDUAL_TOLERANCE = 2e-6
"""Relative to each sum. In many models a few hidden values are thousands of times larger than what layers add to them,
and float32 has 24 bits."""
_QUANTIZED_TOLERANCE = 0.1
"""Relative to the norm of a product. Inputs that differ in the last bit may be quantised to the next value."""
_NUM_PROBE_TOKENS = 5


@dataclass
class MixingAttention:
    """A StepAttention that records each layer's options and returns a value that depends on all its inputs."""

    options: dict[int, AttentionOptions] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.options[layer] = options
        group = query.shape[1] // key.shape[1]
        mixed = torch.tanh(query + 2 * key.repeat_interleave(group, 1)) + value.repeat_interleave(group, 1)
        return mixed[0].transpose(0, 1).contiguous()


@torch.inference_mode()
def fuse_layers(model: Any, operators: LayerOperators) -> None:
    """Replaces every layer of `model` that can be fused, one by one, so that few weights exist twice at a time.

    Fused layers of an earlier call stay.
    """
    layers: nn.ModuleList | None = getattr(model.base_model, "layers", None)
    if layers is None or model.dtype not in operators.dtypes or any(isinstance(each, FusedLayer) for each in layers):
        return
    inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    hooks = []
    for i, layer in enumerate(layers):

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], i: int = i) -> None:
            inputs[i] = args, kwargs

        hooks.append(layer.register_forward_pre_hook(keep, with_kwargs=True))
    recording = MixingAttention()
    device = next(model.parameters()).device
    tokens = torch.arange(_NUM_PROBE_TOKENS, device=device)[None]
    try:
        # Positions are spread out, so that a wrong rotation shows.
        model(input_ids=tokens, position_ids=tokens * 7, use_cache=False, tandem=recording)
    finally:
        for hook in hooks:
            hook.remove()
    reasons: Counter[str] = Counter()
    for i in range(len(layers)):
        if i in inputs and i in recording.options:
            try:
                _check_equal(layers[i], recording.options[i], operators, *inputs[i])
                # Merged weights then get whole segments, not a piece of a larger one that the comparison has left.
                torch.cuda.empty_cache()
                fused = FusedLayer(layers[i], recording.options[i], operators)
                if any(isinstance(each, QuantizedLinear) for each in layers[i].modules()):
                    _check_products(layers[i], fused, *inputs[i])
                layers[i] = fused
            except NotFusedError as problem:
                reasons[str(problem)] += 1
            except Exception as problem:  # compilers and drivers raise various errors
                log.warning("layer %d is not fused, which is slower: %s", i, first_line(problem))
    for reason, number in reasons.items():
        log.info("%d of %d layers are not fused: %s", number, len(layers), reason)


class FinalNorm(nn.Module):
    """The RMSNorm behind the last layer, by the device's kernel. norm: see `FusedNorm`."""

    def __init__(self, norm: FusedNorm) -> None:
        super().__init__()
        self._norm = norm

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        output: torch.Tensor = self._norm(rows, None)
        return output.view_as(hidden)


@torch.inference_mode()
def fuse_final_norm(model: Any, operators: LayerOperators) -> None:
    """Replaces the norm behind the last layer, if the replacement gives the same result in float32."""
    norm = getattr(model.base_model, "norm", None)
    if norm is None or isinstance(norm, FinalNorm) or model.dtype not in operators.dtypes:
        return
    try:
        parameters = NormParameters.of(norm)
        if parameters.weight.dtype != model.dtype:
            raise NotFusedError("it has another dtype")
        weight = parameters.weight
        inputs = torch.randn((1, _NUM_PROBE_TOKENS, len(weight)), generator=torch.Generator().manual_seed(0))
        inputs = inputs.to(weight.device)
        reference = _float32_copy(norm, model.dtype)
        wanted, got = (each(inputs) for each in (reference, FinalNorm(operators.norm(NormParameters.of(reference)))))
        if not bool(((got - wanted).abs() <= _TOLERANCE * wanted.abs().max()).all()):
            raise NotFusedError("it computes something else")
        model.base_model.norm = FinalNorm(operators.norm(parameters))
    except NotFusedError as problem:
        log.info("the norm behind the last layer is not fused: %s", problem)
    except Exception as problem:  # compilers and drivers raise various errors
        log.warning("the norm behind the last layer is not fused, which is slower: %s", first_line(problem))


def _check_equal(
    layer: nn.Module,
    options: AttentionOptions,
    operators: LayerOperators,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Compares the fused layer with `layer` in float32. Raises NotFusedError if they differ."""
    hidden = args[0] if args else kwargs["hidden_states"]
    check_shape(layer, hidden.dtype, operators)
    reference = _float32_copy(layer, hidden.dtype)
    fused = FusedLayer(reference, options, operators)
    args, kwargs = _as_float32(args), _as_float32(kwargs)
    hidden = hidden.float()
    embeddings = kwargs.get("position_embeddings")
    if not isinstance(embeddings, tuple) or embeddings[0].shape != (*hidden.shape[:2], fused.head_dim):
        raise NotFusedError("it does not rotate whole heads")
    wanted, got = (
        module(*args, **kwargs | {"tandem": operators.trial(fused.head_parameters, hidden.shape[1], hidden.device)})
        for module in (reference, fused)
    )
    if not isinstance(wanted, torch.Tensor):
        raise NotFusedError("it returns more than hidden states")
    largest_error = _TOLERANCE * (wanted - hidden).abs().max() + _RESIDUAL_TOLERANCE * wanted.abs()
    if not bool(((got - wanted).abs() <= largest_error).all()):
        raise NotFusedError("it computes something else")


def _check_products(layer: nn.Module, fused: FusedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compares the quantised products of the fused layer with those of `layer`. Raises NotFusedError if they differ."""
    hidden = args[0] if args else kwargs["hidden_states"]
    for name, got, wanted in fused.products(layer, hidden[0]):
        got, wanted = got.float(), wanted.float()
        if not bool((got - wanted).norm() <= _QUANTIZED_TOLERANCE * wanted.norm()):
            raise NotFusedError(f"its quantised {name} differs")


def _float32_copy(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns a copy whose parameters are float32 where they were of the model's dtype.

    Quantised linear layers become dense ones with random weights.
    """
    copies: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().float(), requires_grad=False)
        for parameter in layer.parameters()
        if parameter.dtype == dtype
    }
    for module in layer.modules():
        if isinstance(module, QuantizedLinear):
            device = next(module.buffers()).device
            dense = nn.Linear(module.in_features, module.out_features, module.bias is not None, device, torch.float32)
            copies[id(module)] = dense.requires_grad_(False)
    return copy.deepcopy(layer, copies)


def _as_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_as_float32(v) for v in value)
    if isinstance(value, dict):
        return {k: _as_float32(v) for k, v in value.items()}
    return value
