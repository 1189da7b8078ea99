"""Loads quantised checkpoints with transformers: it fills placeholders, which then become quantised layers.

Transformers finds and renames the tensors as for any other checkpoint. Its own quantisers are not used, because they
need packages that are large or that run on GPUs only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tandem.engine.loading.checkpoint_tensors import check_tensors, load_checkpoint
from tandem.engine.loading.sharding import GATHERED_STYLES, GatheredLinear, SummedLinear, local_tensor, style_of
from tandem.engine.quantization.checkpoint_config import CheckpointQuantization, read_quantization
from tandem.engine.quantization.linears import FP8, QuantizedLinear
from tandem.engine.quantization.schemes import LayerShare, Scheme, TensorSpec, UnsupportedLayerError
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
