"""Loads quantised checkpoints with transformers: it fills placeholders, which then become quantised layers.

Transformers finds and renames the tensors as for any other checkpoint. Its own quantisers are not used, because they
need packages that are large or that run on GPUs only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tandem.engine.loading.checkpoint_tensors import check_tensors, load_checkpoint
from tandem.engine.loading.sharding import style_of
from tandem.engine.quantization.checkpoint_config import CheckpointQuantization, read_quantization
from tandem.engine.quantization.linears import FP8, QuantizedLinear
from tandem.engine.quantization.placeholder import Placeholder, PlaceholderPlan
from tandem.engine.quantization.schemes import Scheme, UnsupportedLayerError
from tandem.runtime.errors import ConfigError

log = logging.getLogger(__name__)

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
    num_ranks: int,
    **options: Any,
) -> tuple[Any, bool]:
    """Loads the model, or this rank's share, as `auto_class.from_pretrained` does. Raises ConfigError.

    Returns the model, and whether the checkpoint has its output head.
    device: where it runs. num_ranks: more than 1 needs the default process group, and a plan of transformers.
    """
    text_config = model_config.get_text_config(decoder=True)
    text_config.quantization_config = None
    reading = Reading(model, quantization, device, num_ranks)
    model_config.quantization_config = {"quant_method": _METHOD, "reading": reading}
    loaded, info = load_checkpoint(auto_class, model, model_config, **options)
    loaded.hf_quantizer.remove_quantization_config(loaded)
    placeholders = {name: module for name, module in loaded.named_modules() if isinstance(module, Placeholder)}
    for key in sorted(info["missing_keys"]):
        if key.rpartition(".")[0] in placeholders:
            raise refusal(model, f"its quantization_config implies a tensor {key}, which is not there")
    for key in sorted(info["unexpected_keys"]):
        if key.endswith(_SUFFIXES):
            raise refusal(model, f"its quantised tensor {key} belongs to none of the quantised linear layers")
    has_head = check_tensors(model, loaded, info)
    num_converted = 0
    for name in list(placeholders):
        try:
            layer = placeholders.pop(name).make_layer()
        except UnsupportedLayerError as error:
            raise refusal(model, f"{name}: {error}") from error
        loaded.set_submodule(name, layer)
        num_converted += not any(isinstance(each, QuantizedLinear) for each in layer.modules())
    if num_converted:
        log.warning(
            "the weights of %d quantised layers are converted to %s, and take its memory: products with INT8 weights "
            "alone are slower on GPUs", num_converted, str(loaded.dtype).removeprefix("torch.")
        )  # fmt: skip
    return loaded, has_head


def refusal(model: str, reason: str) -> ConfigError:
    """Returns the error for quantised weights that cannot be served. model: its name."""
    return ConfigError(f"{model} cannot be served: {reason}")


@dataclass(frozen=True)
class Reading:
    """Parameters of one load."""

    model: str
    """Name of the model, for errors."""
    quantization: CheckpointQuantization
    device: torch.device
    """Where the layers run."""
    num_ranks: int
    """Ranks that share the layers."""


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
        plans = _layer_plans(model, reading)
        if not plans:
            raise refusal(reading.model, "its quantization_config covers none of the model's linear layers")
        ranks = init_device_mesh(reading.device.type, (reading.num_ranks,)) if reading.num_ranks > 1 else None
        for name, plan in plans.items():
            model.set_submodule(name, Placeholder(model.get_submodule(name), plan, ranks))

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Exempts the placeholders' tensors from transformers' check of shapes; they have their own."""
        return isinstance(model.get_submodule(param_name.rpartition(".")[0]), Placeholder)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Converts nothing to 8-bit types: the scales would be left out. `Placeholder` refuses other types instead."""
        return None if dtype in (FP8, torch.int8) else super().get_new_dtype(converter, param, dtype)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _layer_plans(model: Any, reading: Reading) -> dict[str, PlaceholderPlan]:
    """Returns the plan of each quantised layer, by name. Raises ConfigError for a layer that cannot be computed."""
    check_no_experts(reading.model, model)
    quantization = reading.quantization
    inner = {id(module) for module in model.get_decoder().modules()}
    head = model.get_output_embeddings()
    is_tied = bool(getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False))
    schemes: dict[str, Scheme] = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or (module is head and is_tied):
            continue
        if quantization.decoder_only and id(module) not in inner:
            continue
        if (scheme := quantization.scheme_of(name)) is not None:
            problem = _problem(model, name, scheme, reading.device, 1)
            if problem:
                raise refusal(reading.model, f"{name}: {problem}")
            schemes[name] = scheme
    size = reading.num_ranks
    for name, scheme in schemes.items():
        if problem := _problem(model, name, scheme, reading.device, size):
            fitting = [
                str(n)
                for n in range(1, size)
                if size % n == 0
                and not any(_problem(model, other, each, reading.device, n) for other, each in schemes.items())
            ]
            reason = f"{name}, shared by {size} ranks: {problem}; --tensor-parallel-size may be {' or '.join(fitting)}"
            raise refusal(reading.model, reason)
    rank = dist.get_rank() if size > 1 else 0
    return {
        name: PlaceholderPlan.of(model.get_submodule(name), scheme, style_of(model, name), rank, size)
        for name, scheme in schemes.items()
    }


def _problem(model: Any, name: str, scheme: Scheme, device: torch.device, num_ranks: int) -> str:
    """Returns why a layer cannot be shared by so many ranks, or an empty string."""
    linear = model.get_submodule(name)
    try:
        return PlaceholderPlan.of(linear, scheme, style_of(model, name), 0, num_ranks).problem(
            device, linear.weight.dtype
        )
    except UnsupportedLayerError as error:
        return str(error)


def check_no_experts(name: str, model: nn.Module) -> None:
    """Raises ConfigError for a mixture of experts, whose experts are stacked weights and not linear layers."""
    if any(parameter.ndim == 3 and "expert" in key for key, parameter in model.named_parameters()):
        raise refusal(name, "mixtures of experts are not supported with quantised weights")
