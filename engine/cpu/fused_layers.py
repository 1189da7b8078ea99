"""Replaces decoder layers of the Llama shape by fused ones, because operator overhead dominates small CPU steps.

A layer is replaced only if it has exactly the expected submodules, and if the replacement gives the same result in
float32 on the inputs that the layer gets in a run of the whole model. All other layers stay as they are.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tandem.engine.attention.interface import AttentionOptions, LayerPlan, StepAttention
from tandem.engine.cpu.compiler import DTYPES, as_array
from tandem.engine.cpu.layer_kernels import rms_norm, rotation
from tandem.engine.cpu.packed_linear import merge
from tandem.engine.loading.sharding import plain_linear
from tandem.engine.lora.layers import AdaptedLinear, LoraSlice, StepAdapters

_SUBMODULES = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_TOLERANCE = 1e-4  # relative to the largest value, in float32
_NUM_PROBE_TOKENS = 5


class NotFusedError(Exception):
    """The layer cannot be fused; the message says why."""


class FusedLayer(nn.Module):
    """Computes `h + attention(norm(h))`, then `h + down(silu(gate(norm(h))) * up(norm(h)))`, with q, k and v merged.

    Accepts the arguments of the transformers layer that it replaces, but uses only `hidden_states`
    [1, num_tokens, hidden_size], `position_embeddings` (cosines and sines, [1, num_tokens, head_dim]) and `tandem`.
    options: the replaced layer's attention options. Raises NotFusedError.
    """

    def __init__(self, layer: Any, options: AttentionOptions) -> None:
        super().__init__()
        attention, mlp = _attention_and_mlp(layer)
        self.attention_type = getattr(layer, "attention_type", None)  # read by some models
        self._plan: LayerPlan = attention.tandem_plan
        self._options = options
        self._head_dim: int = attention.head_dim
        if hasattr(attention, "qkv_proj"):
            projections = [attention.qkv_proj]
            num_kv_heads = attention.num_key_value_heads
        else:
            projections = [attention.q_proj, attention.k_proj, attention.v_proj]
            num_kv_heads = attention.k_proj.out_features // self._head_dim
        num_outputs = sum(linear.out_features for linear in projections)
        self._num_kv_heads: int = num_kv_heads
        if (num_kv_heads, self._head_dim) != (self._plan.num_kv_heads, self._plan.head_dim):
            raise NotFusedError("its heads are padded to the KV pool's")
        self._num_heads: int = num_outputs // self._head_dim - 2 * num_kv_heads
        self._input_norm = FusedRMSNorm(layer.input_layernorm)
        self._qkv: Any = merge(projections)
        self._query_norm = FusedRMSNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._key_norm = FusedRMSNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._output: Any = merge([attention.o_proj])
        self._mlp_norm = FusedRMSNorm(layer.post_attention_layernorm)
        if hasattr(mlp, "gate_up_proj"):
            gate, up = _halves(mlp.gate_up_proj)
        else:
            gate, up = mlp.gate_proj, mlp.up_proj
        self._gate: Any = merge([gate], "swish")
        self._up: Any = merge([up])
        self._down: Any = merge([mlp.down_proj])
        self._has_merged_qkv = hasattr(attention, "qkv_proj")
        self._has_merged_gate = hasattr(mlp, "gate_up_proj")

    def adapt(self, name: str, step: StepAdapters) -> None:
        """Wraps the linear layers for LoRA adapters. name: of this layer in the model."""
        num_query, num_key = self._num_heads * self._head_dim, self._num_kv_heads * self._head_dim
        inner, hidden = self._gate.out_features, self._down.out_features
        qkv = [
            LoraSlice(f"{name}.self_attn.q_proj", 0, num_query),
            LoraSlice(f"{name}.self_attn.k_proj", num_query, num_key),
            LoraSlice(f"{name}.self_attn.v_proj", num_query + num_key, num_key),
        ]
        gate, up = LoraSlice(f"{name}.mlp.gate_proj", 0, inner), LoraSlice(f"{name}.mlp.up_proj", 0, inner)
        if self._has_merged_qkv:
            qkv = [LoraSlice(f"{name}.self_attn.qkv_proj", 0, num_query + 2 * num_key)]
        if self._has_merged_gate:
            merged = f"{name}.mlp.gate_up_proj"
            gate, up = LoraSlice(merged, 0, inner), LoraSlice(merged, 0, inner, first_row=inner)
        self._qkv = AdaptedLinear(self._qkv, qkv, step)
        self._output = AdaptedLinear(self._output, [LoraSlice(f"{name}.self_attn.o_proj", 0, hidden)], step)
        self._gate = AdaptedLinear(self._gate, [gate], step)
        self._up = AdaptedLinear(self._up, [up], step)
        self._down = AdaptedLinear(self._down, [LoraSlice(f"{name}.mlp.down_proj", 0, hidden)], step)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        tandem: StepAttention,
        **__: Any,
    ) -> torch.Tensor:
        residual = hidden_states[0]
        num_tokens, num_heads, num_rotated = len(residual), self._num_heads, self._num_heads + self._num_kv_heads
        # [num_tokens, heads, head_dim]: query, then key, then value heads
        heads = self._qkv(self._input_norm(residual)).view(num_tokens, -1, self._head_dim)
        rotated = heads
        if self._query_norm is not None and self._key_norm is not None:
            rotated = torch.cat(
                (self._query_norm(heads[:, :num_heads]), self._key_norm(heads[:, num_heads:num_rotated])), 1
            )
        rotated = _rotated(rotated, num_rotated, *position_embeddings)
        attended = tandem.attend(
            self._plan.layer,
            rotated[:, :num_heads].transpose(0, 1)[None],
            rotated[:, num_heads:].transpose(0, 1)[None],
            heads[:, num_rotated:].transpose(0, 1)[None],
            self._options,
        )
        residual = self._output.combined(attended.reshape(num_tokens, -1), residual, "add")
        normed = self._mlp_norm(residual)
        gated = self._up.combined(normed, self._gate(normed), "mul")
        output: torch.Tensor = self._down.combined(gated, residual, "add")[None]
        return output


class FusedRMSNorm(nn.Module):
    """RMSNorm with the compiled kernel `layer_kernels.rms_norm`. Raises NotFusedError for other norms."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if epsilon is None or [name for name, _ in norm.named_parameters()] != ["weight"]:
            raise NotFusedError(f"{type(norm).__name__} is not an RMSNorm")
        self.weight: torch.Tensor = norm.weight
        self._epsilon = float(epsilon)
        self._weight_array = as_array(norm.weight.detach())
        self._normalise = rms_norm(norm.weight.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, len(self.weight))
        output = torch.empty(rows.shape, dtype=rows.dtype)
        self._normalise(as_array(rows), self._weight_array, self._epsilon, as_array(output))
        return output.view(inputs.shape)


def _rotated(heads: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first `num_heads` of heads [num_tokens, any, head_dim]. cos, sin: [1, num_tokens, head_dim]."""
    output = torch.empty(len(heads), num_heads, heads.shape[2], dtype=heads.dtype)
    rotation(heads.dtype)(as_array(heads), as_array(cos[0]), as_array(sin[0]), as_array(output))
    return output


def _attention_and_mlp(layer: Any) -> tuple[Any, Any]:
    """Returns both modules of a layer of the Llama shape. Raises NotFusedError for any other layer."""
    if set(_children_with_weights(layer)) != _SUBMODULES or list(layer.parameters(recurse=False)):
        raise NotFusedError("its submodules are not attention, MLP and two norms")
    attention, mlp = layer.self_attn, layer.mlp
    merged = {"qkv_proj", "o_proj"}, {"gate_up_proj", "down_proj"}
    apart = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    for module, shapes in ((attention, (merged[0], apart[0])), (mlp, (merged[1], apart[1]))):
        children = _children_with_weights(module)
        if set(children) - {"q_norm", "k_norm"} not in shapes or ("q_norm" in children) != ("k_norm" in children):
            raise NotFusedError(f"{type(module).__name__} has other submodules")
        if list(module.parameters(recurse=False)):
            raise NotFusedError(f"{type(module).__name__} has parameters of its own")
        for name, child in children.items():
            if not name.endswith("_norm") and (type(child) is not nn.Linear or not _is_plain(child)):
                raise NotFusedError(f"{name} is not a plain linear layer")
    return attention, mlp


def _children_with_weights(module: Any) -> dict[str, nn.Module]:
    return {name: child for name, child in module.named_children() if list(child.parameters())}


def _is_plain(linear: nn.Linear) -> bool:
    """Whether the layer has no hooks and an ordinary weight (neither sharded nor quantised)."""
    return not linear._forward_hooks and not linear._forward_pre_hooks and type(linear.weight.data) is torch.Tensor


def _halves(linear: nn.Linear) -> tuple[nn.Linear, nn.Linear]:
    """Splits a layer by its outputs."""
    biases = (None, None) if linear.bias is None else linear.bias.chunk(2)
    first, second = (plain_linear(w, b) for w, b in zip(linear.weight.chunk(2), biases, strict=True))
    return first, second


@dataclass
class _RecordingAttention:
    """A StepAttention that records each layer's options and returns a value that depends on all its inputs."""

    options: dict[int, AttentionOptions] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.options[layer] = options
        group = query.shape[1] // key.shape[1]
        mixed = torch.tanh(query + 2 * key.repeat_interleave(group, 1)) + value.repeat_interleave(group, 1)
        return mixed[0].transpose(0, 1).contiguous()


def fuse_layers(model: Any) -> None:
    """Replaces every layer of `model` that can be fused."""
    layers: nn.ModuleList | None = getattr(model.base_model, "layers", None)
    if layers is None or model.dtype not in DTYPES:
        return
    inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    hooks = []
    for i, layer in enumerate(layers):

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], i: int = i) -> None:
            inputs[i] = args, kwargs

        hooks.append(layer.register_forward_pre_hook(keep, with_kwargs=True))
    recording = _RecordingAttention()
    device = next(model.parameters()).device
    tokens = torch.arange(_NUM_PROBE_TOKENS, device=device)[None]
    try:
        # Positions are spread out, so that a wrong rotation shows.
        model(input_ids=tokens, position_ids=tokens * 7, use_cache=False, tandem=recording)
    finally:
        for hook in hooks:
            hook.remove()
    for i, layer in enumerate(layers):
        if i in inputs and i in recording.options:
            with suppress(NotFusedError):
                _check_equal(layer, recording.options[i], *inputs[i])
                layers[i] = FusedLayer(layer, recording.options[i])


def _check_equal(layer: nn.Module, options: AttentionOptions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compares the fused layer with `layer` in float32. Raises NotFusedError if they differ."""
    _attention_and_mlp(layer)
    reference = copy.deepcopy(layer).float()
    fused = FusedLayer(reference, options)
    args, kwargs = _as_float32(args), _as_float32({**kwargs, "tandem": _RecordingAttention()})
    embeddings = kwargs.get("position_embeddings")
    if not isinstance(embeddings, tuple) or embeddings[0].shape[-1] != fused._head_dim:
        raise NotFusedError("it does not rotate whole heads")
    wanted = reference(*args, **kwargs)
    if not isinstance(wanted, torch.Tensor):
        raise NotFusedError("it returns more than hidden states")
    hidden = args[0] if args else kwargs["hidden_states"]
    change, wanted_change = fused(*args, **kwargs) - hidden, wanted - hidden
    if not torch.allclose(change, wanted_change, rtol=0, atol=_TOLERANCE * float(wanted_change.abs().max())):
        raise NotFusedError("it computes something else")


def _as_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_as_float32(v) for v in value)
    if isinstance(value, dict):
        return {k: _as_float32(v) for k, v in value.items()}
    return value
