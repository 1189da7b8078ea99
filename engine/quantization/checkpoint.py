"""Loads quantised checkpoints with transformers: it fills placeholders, which then become quantised layers.

Transformers finds and renames the tensors as for any other checkpoint. Its own quantisers are not used, because they
need packages that are large or that run on GPUs only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tandem.engine.quantization.checkpoint_config import CheckpointQuantization, read_quantization
from tandem.engine.quantization.linears import FP8
from tandem.engine.quantization.schemes import Scheme, UnsupportedLayerError
from tandem.runtime.errors import ConfigError

_METHOD = "tandem"
_OF_TRANSFORMERS = ("mxfp4",)
"""Methods that are left to transformers, which converts such weights to the model's dtype."""
_SUFFIXES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")


def quantization_of(model: str, model_config: Any) -> CheckpointQuantization | None:
    """Returns how the checkpoint is quantised, or None. Raises ConfigError for formats that are not supported."""
    fields = _fields(model_config)
    if fields is None or fields.get("quant_method") in _OF_TRANSFORMERS:
        return None
    return read_quantization(model, fields)


def has_quantized_weights(model_config: Any) -> bool:
    """Whether the checkpoint's weights are quantised in any format."""
    return _fields(model_config) is not None


def _fields(model_config: Any) -> Mapping[str, Any] | None:
    for config in (model_config, model_config.get_text_config(decoder=True)):
        fields = getattr(config, "quantization_config", None)
        if fields is not None:
            return fields if isinstance(fields, Mapping) else fields.to_dict()
    return None


def load_quantized(
    auto_class: Any,
    model: str,
    model_config: Any,
    quantization: CheckpointQuantization,
    device: torch.device,
    **options: Any,
) -> Any:
    """Loads the model as `auto_class.from_pretrained` does. device: where it runs. Raises ConfigError."""
    text_config = model_config.get_text_config(decoder=True)
    text_config.quantization_config = None
    model_config.quantization_config = {"quant_method": _METHOD, "reading": Reading(model, quantization, device)}
    loaded, info = auto_class.from_pretrained(model, config=model_config, output_loading_info=True, **options)
    loaded.hf_quantizer.remove_quantization_config(loaded)
    placeholders = {name: module for name, module in loaded.named_modules() if isinstance(module, _Placeholder)}
    for key in sorted(info["missing_keys"]):
        if key.rpartition(".")[0] in placeholders:
            raise refusal(model, f"its quantization_config implies a tensor {key}, which is not there")
    for key in sorted(info["unexpected_keys"]):
        if key.endswith(_SUFFIXES):
            raise refusal(model, f"its quantised tensor {key} belongs to none of the quantised linear layers")
    for name in list(placeholders):
        try:
            loaded.set_submodule(name, placeholders.pop(name).make_layer())
        except UnsupportedLayerError as error:
            raise refusal(model, f"{name}: {error}") from error
    return loaded


def refusal(model: str, reason: str) -> ConfigError:
    """Returns the error for quantised weights that cannot be served. model: its name."""
    return ConfigError(f"{model} cannot be served: {reason}")


@dataclass(frozen=True)
class Reading:
    """What to read. model: its name, for errors. device: where the layers will run."""

    model: str
    quantization: CheckpointQuantization
    device: torch.device


@register_quantization_config(_METHOD)
class _Config(QuantizationConfigMixin):  # type: ignore[misc]
    """Carries a `Reading` through transformers to `_Quantizer`."""

    def __init__(self, reading: Reading, quant_method: str = _METHOD) -> None:
        self.quant_method = quant_method
        self.reading = reading


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    """Puts placeholders in place of the quantised layers, before transformers loads the tensors."""

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        reading: Reading = self.quantization_config.reading
        schemes = _schemes(model, reading)
        if not schemes:
            raise refusal(reading.model, "its quantization_config covers none of the model's linear layers")
        for name, scheme in schemes.items():
            model.set_submodule(name, _Placeholder(model.get_submodule(name), scheme))

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Exempts the placeholders' tensors from transformers' check of shapes; they have their own."""
        return isinstance(model.get_submodule(param_name.rpartition(".")[0]), _Placeholder)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Converts nothing to 8-bit types: the scales would be left out. `_Placeholder` refuses other types instead."""
        return None if dtype in (FP8, torch.int8) else super().get_new_dtype(converter, param, dtype)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Placeholder(nn.Module):
    """Holds the tensors of a quantised layer as the checkpoint has them."""

    def __init__(self, linear: nn.Linear, scheme: Scheme) -> None:
        super().__init__()
        self._scheme = scheme
        self._dtype = linear.weight.dtype
        self._specs = scheme.tensors(linear.in_features, linear.out_features)
        for name, (shape, dtype) in self._specs.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))
        self.bias = linear.bias

    def make_layer(self) -> nn.Module:
        """Raises UnsupportedLayerError."""
        tensors = {name: self.get_buffer(name) for name in self._specs}
        for name, (shape, dtype) in self._specs.items():
            found, found_dtype = list(tensors[name].shape), tensors[name].dtype
            if found_dtype != dtype and dtype in (FP8, torch.int8, torch.int32):
                raise UnsupportedLayerError(f"{name} is stored as {found_dtype} instead of {dtype}")
            if _without_ones(found) != _without_ones(shape):  # a scale for all is written as [] or as [1]
                raise UnsupportedLayerError(f"{name} has the shape {found} instead of {list(shape)}")
        return self._scheme.make(tensors, self.bias, self._dtype)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _schemes(model: Any, reading: Reading) -> dict[str, Scheme]:
    """Returns the scheme of each quantised layer, by name. Raises ConfigError for a layer that cannot be computed."""
    check_no_experts(reading.model, model)
    quantization = reading.quantization
    inner = {id(module) for module in model.get_decoder().modules()}
    head = model.get_output_embeddings()
    is_tied = bool(getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False))
    schemes = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or (module is head and is_tied):
            continue
        if quantization.decoder_only and id(module) not in inner:
            continue
        if (scheme := quantization.scheme_of(name)) is not None:
            problem = scheme.problem(module.in_features, module.out_features, reading.device, module.weight.dtype)
            if problem:
                raise refusal(reading.model, f"{name}: {problem}")
            schemes[name] = scheme
    return schemes


def check_no_experts(name: str, model: nn.Module) -> None:
    """Raises ConfigError for a mixture of experts, whose experts are stacked weights and not linear layers."""
    if any(parameter.ndim == 3 and "expert" in key for key, parameter in model.named_parameters()):
        raise refusal(name, "mixtures of experts are not supported with quantised weights")
