"""Reads the `quantization_config` of a checkpoint, and refuses what Tandem cannot compute, by the name of the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tandem.engine.quantization.linears import FP8
from tandem.engine.quantization.schemes import GPTQ_V1_ZEROS, W8A8, Awq, Gptq, PackedInts, Scheme
from tandem.runtime.errors import ConfigError

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class LayerFormat:
    """The format of the layers for which `covers` holds. label: for people, such as "int4". covers: takes a name."""

    label: str
    scheme: Scheme
    covers: Callable[[str], bool]


@dataclass(frozen=True)
class CheckpointQuantization:
    """How a checkpoint is quantised."""

    label: str
    """Label for people, such as "gptq int4"."""
    formats: list[LayerFormat]
    """The first that covers a layer holds for it."""
    decoder_only: bool
    """Whether layers outside the decoder are left alone, whatever their names."""

    def scheme_of(self, name: str) -> Scheme | None:
        """Returns the format of a linear layer; None for one that is not quantised."""
        return next((each.scheme for each in self.formats if each.covers(name)), None)


class _FieldError(Exception):
    """Says which field has an unsupported value, and what is supported."""


def read_quantization(model: str, fields: Fields) -> CheckpointQuantization:
    """Raises ConfigError, in one line, for a format that is not supported. model: its name, for the error."""
    try:
        method = _one_of(fields, "quant_method", READERS)
        return READERS[method](fields)
    except _FieldError as error:
        raise ConfigError(f"{model} cannot be served: its quantization_config has {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise ConfigError(f"{model} cannot be served: its quantization_config is invalid: {error}") from error


def _gptq(fields: Fields) -> CheckpointQuantization:
    _one_of(fields, "bits", (4,))
    # GPTQModel writes both names, AutoGPTQ only the first, and older versions none.
    version = _one_of(
        fields, "checkpoint_format" if "checkpoint_format" in fields else "format", ("gptq", "gptq_v2"), "gptq"
    )
    _one_of(fields, "pack_dtype", ("int32",), "int32")
    for name in ("is_marlin_format", "rotation", "adapter"):
        _empty(fields, name)
    skipped = []
    for pattern in fields.get("dynamic") or {}:
        if not pattern.startswith("-:"):
            raise _FieldError(
                f"dynamic {pattern!r} with settings of its own; only -: patterns, which skip layers, are supported"
            )
        skipped.append(re.compile(pattern.removeprefix("-:")))
    skipped_names = list(fields.get("modules_to_not_convert") or [])
    if fields.get("lm_head"):
        raise _FieldError("lm_head true; only checkpoints whose head is not quantised are supported")

    def covers(name: str) -> bool:
        return not any(each.match(name) for each in skipped) and not any(each in name for each in skipped_names)

    group_size = _group_size(fields)
    has_order = bool(fields.get("desc_act")) and group_size > 0
    scheme = Gptq(group_size, GPTQ_V1_ZEROS if version == "gptq" else 0, has_order)
    return CheckpointQuantization("gptq int4", [LayerFormat("int4", scheme, covers)], decoder_only=True)


def _awq(fields: Fields) -> CheckpointQuantization:
    _one_of(fields, "bits" if "bits" in fields else "w_bit", (4,))
    # AutoAWQ writes version and zero_point, GPTQModel format and sym.
    version = "version" if "version" in fields else "format"
    _one_of({version: str(fields.get(version, "gemm")).lower()}, version, ("gemm",))
    _one_of(fields, "zero_point", (True,), True)
    _one_of(fields, "sym", (False,), False)
    skipped = list(fields.get("modules_to_not_convert") or [])
    scheme = Awq(_group_size(fields, "group_size" if "group_size" in fields else "q_group_size"))
    layers = LayerFormat("int4", scheme, lambda name: not any(each in name for each in skipped))
    return CheckpointQuantization("awq int4", [layers], decoder_only=True)


def _compressed_tensors(fields: Fields) -> CheckpointQuantization:
    _one_of(fields, "quantization_status", ("compressed", "frozen"), "compressed")
    for name in ("sparsity_config", "transform_config"):
        section = fields.get(name) or {}
        if name == "sparsity_config" and section.get("format") == "dense":
            continue
        _empty(fields, name)
    ignored = list(fields.get("ignore") or [])
    formats = []
    for key, group in fields["config_groups"].items():
        if not isinstance(group, Mapping):
            raise _FieldError(f"config_groups.{key} without settings; presets by name are not supported")
        try:
            label, scheme = _compressed_scheme(group, group.get("format") or fields.get("format"))
        except _FieldError as error:
            raise _FieldError(f"config_groups.{key}.{error}") from error
        targets = list(group["targets"])
        for pattern in (*targets, *ignored):
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")

        def covers(name: str, targets: list[str] = targets) -> bool:
            return any(_matches(name, each) for each in targets) and not any(_matches(name, each) for each in ignored)

        formats.append(LayerFormat(label, scheme, covers))
    if not formats:
        raise _FieldError("no config_groups")
    labels = " and ".join(dict.fromkeys(each.label for each in formats))
    return CheckpointQuantization(f"compressed-tensors {labels}", formats, decoder_only=False)


READERS: dict[str, Callable[[Fields], CheckpointQuantization]] = {
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
}
"""The supported values of `quant_method`."""


def _compressed_scheme(group: Fields, stored_as: Any) -> tuple[str, Scheme]:
    """Returns a label and the scheme of one of the config groups. Raises _FieldError, which begins with the field."""
    weights: Fields = group["weights"]
    inputs: Fields | None = group.get("input_activations")
    _empty(group, "output_activations")
    with_prefix = {f"weights.{name}": value for name, value in weights.items()}
    kind = _one_of(with_prefix, "weights.type", ("int", "float"), "int")
    num_bits = _one_of(with_prefix, "weights.num_bits", (4, 8) if kind == "int" else (8,))
    _one_of(with_prefix, "weights.dynamic", (False,), False)
    symmetric = bool(weights.get("symmetric", True))
    if inputs is None and kind == "float":
        raise _FieldError("input_activations null with FP8 weights; only FP8 inputs are supported with them")
    if inputs is not None:
        _one_of(with_prefix, "weights.num_bits", (8,))
        _one_of(with_prefix, "weights.symmetric", (True,), True)
        strategy = _one_of(with_prefix, "weights.strategy", ("tensor", "channel"))
        has_static_inputs = _inputs_are_static(
            {f"input_activations.{name}": value for name, value in inputs.items()}, kind
        )
        _one_of({"format": stored_as}, "format", (f"{kind}-quantized", "naive-quantized"))
        dtype = FP8 if kind == "float" else torch.int8
        return f"{'fp8' if kind == 'float' else 'int8'} W8A8", W8A8(dtype, strategy == "tensor", has_static_inputs)
    _one_of({"format": stored_as}, "format", ("pack-quantized",))
    if num_bits == 8:
        _one_of(with_prefix, "weights.symmetric", (True,), True)
    strategy = _one_of(with_prefix, "weights.strategy", ("group", "channel"))
    order = _one_of(with_prefix, "weights.actorder", (None, False, "weight", "static", "group", "dynamic"), None)
    has_order = order in ("group", "dynamic")
    if has_order and num_bits == 8:
        raise _FieldError(f"weights.actorder {order!r} with 8 bits; it is supported with 4 bits only")
    group_size = _group_size(with_prefix, "weights.group_size") if strategy == "group" else 0
    return f"int{num_bits} W{num_bits}A16", PackedInts(int(num_bits), group_size, not symmetric, has_order)


def _inputs_are_static(inputs: Fields, kind: str) -> bool:
    prefix = "input_activations"
    _one_of(inputs, f"{prefix}.type", (kind,), "int")
    _one_of(inputs, f"{prefix}.num_bits", (8,))
    _one_of(inputs, f"{prefix}.symmetric", (True,), True)
    # A dynamic scale per tensor would depend on the other sequences of the step: each token gets its own instead.
    is_static = not _one_of(inputs, f"{prefix}.dynamic", (True, False), False)
    _one_of(inputs, f"{prefix}.strategy", ("tensor",) if is_static else ("tensor", "token"))
    return is_static


def _matches(name: str, pattern: str) -> bool:
    """Whether compressed-tensors' target or ignored entry names the linear layer: its class, its name, or a regex."""
    if pattern.startswith("re:"):
        regex = pattern.removeprefix("re:")
        return any(re.match(regex, each) is not None for each in (name, name.removeprefix("model.")))
    return pattern in ("Linear", name) or name.endswith(f".{pattern}")


def _group_size(fields: Fields, name: str = "group_size") -> int:
    """Returns the size, or 0 for one group per output, which is written as -1."""
    size = fields[name]
    if not isinstance(size, int) or (size != -1 and (size <= 0 or size % 32)):
        raise _FieldError(f"{name} {size!r}; supported are -1 and multiples of 32")
    return max(size, 0)


def _one_of(fields: Fields, name: str, supported: Collection[Any], default: Any = ...) -> Any:
    """Returns the field. Raises _FieldError unless it has a supported value. Without a default it must be there."""
    value = fields.get(name, default) if default is not ... else fields.get(name)
    if value not in supported:
        shown = " or ".join(str(each) for each in supported)
        raise _FieldError(f"{name} {value!r}; Tandem supports {shown}")
    return value


def _empty(fields: Fields, name: str) -> None:
    if fields.get(name):
        raise _FieldError(f"{name}, which Tandem does not support")
