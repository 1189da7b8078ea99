"""A decoder layer of the Llama shape in few operations. The device decides which kernels compute them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from tandem.engine.attention.interface import AttentionOptions, LayerPlan, StepAttention
from tandem.engine.layers.linear import is_plain
from tandem.engine.lora.layers import AdaptedLinear, LoraSlice, StepAdapters

_SUBMODULES = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class NotFusedError(Exception):
    """The layer cannot be fused; the message says why."""


@dataclass(frozen=True)
class NormParameters:
    """RMSNorm: `x / sqrt(mean(x^2) + epsilon) * weight` (Zhang and Sennrich, NeurIPS 2019)."""

    weight: nn.Parameter
    epsilon: float

    @classmethod
    def of(cls, norm: Any) -> NormParameters:
        """Raises NotFusedError if `norm` is no RMSNorm."""
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if epsilon is None or [name for name, _ in norm.named_parameters()] != ["weight"]:
            raise NotFusedError(f"{type(norm).__name__} is not an RMSNorm")
        return cls(norm.weight, float(epsilon))


@dataclass(frozen=True)
class HeadParameters:
    """The attention heads of a layer. query_norm, key_norm: of each head, before it is rotated; both or none."""

    plan: LayerPlan
    options: AttentionOptions
    num_heads: int
    query_norm: NormParameters | None
    key_norm: NormParameters | None


class FusedNorm(Protocol):
    """RMSNorm, alone and after a residual connection.

    reader: the layer that takes the norm. It gets quantised rows if it wants them (`engine.quantization.linears`).
    """

    def __call__(self, inputs: torch.Tensor, reader: Any) -> Any: ...

    def after(self, linear: Any, inputs: torch.Tensor, residual: torch.Tensor, reader: Any) -> tuple[torch.Tensor, Any]:
        """Returns `linear(inputs) + residual`, and its norm."""


class FusedHeads(Protocol):
    """Attention with everything between the projections."""

    def attend(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Normalises and rotates queries and keys, and attends. Returns [num_tokens, num_heads, head_dim].

        heads: [num_tokens, heads, head_dim], query, then key, then value heads. cos, sin: [num_tokens, head_dim].
        """


class FusedGate(Protocol):
    """The layers gate and up."""

    def gated(self, inputs: Any, reader: Any) -> Any:
        """Returns `silu(gate(inputs)) * up(inputs)`. inputs: as a `FusedNorm` returns them. reader: see there."""

    def adapt_linears(self, names: Sequence[str], step: StepAdapters) -> None:
        """Wraps the linear layers for LoRA adapters. names: of gate and up, or of the layer that is both."""


class LayerOperators(Protocol):
    """Makes the modules of a fused layer for one kind of device.

    dtypes: those that it has kernels for. merges_only: whether all linear layers must be plain ones.
    """

    dtypes: Collection[torch.dtype]
    merges_only: bool

    def norm(self, parameters: NormParameters) -> FusedNorm: ...

    def linear(self, linears: Sequence[Any]) -> Any:
        """Returns one layer that computes the concatenated outputs of `linears` (see `engine.layers.linear`)."""

    def heads(self, parameters: HeadParameters) -> FusedHeads: ...

    def gate(self, linears: Sequence[Any]) -> FusedGate:
        """linears: gate and up, or one layer that computes both."""

    def trial(self, parameters: HeadParameters, num_tokens: int, device: torch.device) -> StepAttention:
        """Returns an attention of one float32 prompt, with which a layer is compared with its replacement."""


class FusedLayer(nn.Module):
    """Computes `h + attention(norm(h))`, then `h + down(silu(gate(norm(h))) * up(norm(h)))`, with q, k and v merged.

    Accepts the arguments of the transformers layer that it replaces, but uses only `hidden_states`
    [1, num_tokens, hidden_size], `position_embeddings` (cosines and sines, [1, num_tokens, head_dim]) and `tandem`.
    options: the replaced layer's attention options. Raises NotFusedError.
    """

    def __init__(self, layer: Any, options: AttentionOptions, operators: LayerOperators) -> None:
        super().__init__()
        attention, mlp = _attention_and_mlp(layer, operators)
        self.attention_type = getattr(layer, "attention_type", None)  # read by some models
        plan: LayerPlan = attention.tandem_plan
        self.head_dim: int = attention.head_dim
        is_merged = hasattr(attention, "qkv_proj")
        self._qkv_names = ["qkv_proj"] if is_merged else ["q_proj", "k_proj", "v_proj"]
        projections = [getattr(attention, name) for name in self._qkv_names]
        self._qkv_sizes: list[int] = [linear.out_features for linear in projections]
        num_kv_heads = attention.num_key_value_heads if is_merged else self._qkv_sizes[1] // self.head_dim
        if (num_kv_heads, self.head_dim) != (plan.num_kv_heads, plan.head_dim):
            raise NotFusedError("its heads are padded to the KV pool's")
        norms = [
            NormParameters.of(getattr(attention, name)) if hasattr(attention, name) else None
            for name in ("q_norm", "k_norm")
        ]
        num_heads = sum(self._qkv_sizes) // self.head_dim - 2 * num_kv_heads
        self.head_parameters = HeadParameters(plan, options, num_heads, *norms)
        self._input_norm = operators.norm(NormParameters.of(layer.input_layernorm))
        self._qkv: Any = operators.linear(projections)
        self._heads = operators.heads(self.head_parameters)
        self._output: Any = operators.linear([attention.o_proj])
        self._mlp_norm = operators.norm(NormParameters.of(layer.post_attention_layernorm))
        self._gate_names = ["gate_up_proj"] if hasattr(mlp, "gate_up_proj") else ["gate_proj", "up_proj"]
        self._gate = operators.gate([getattr(mlp, name) for name in self._gate_names])
        self._down: Any = operators.linear([mlp.down_proj])

    def adapt(self, name: str, step: StepAdapters) -> None:
        """Wraps the linear layers for LoRA adapters. name: of this layer in the model."""
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        hidden = self._down.out_features
        qkv = lora_slices([f"{attention}.{each}" for each in self._qkv_names], self._qkv_sizes)
        self._qkv = AdaptedLinear(self._qkv, qkv, step)
        self._output = AdaptedLinear(self._output, [LoraSlice(f"{attention}.o_proj", 0, hidden)], step)
        self._gate.adapt_linears([f"{mlp}.{each}" for each in self._gate_names], step)
        self._down = AdaptedLinear(self._down, [LoraSlice(f"{mlp}.down_proj", 0, hidden)], step)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        tandem: StepAttention,
        **__: Any,
    ) -> torch.Tensor:
        residual = hidden_states[0]
        num_tokens = len(residual)
        cos, sin = position_embeddings
        heads = self._qkv(self._input_norm(residual, self._qkv)).view(num_tokens, -1, self.head_dim)
        attended = self._heads.attend(heads, cos[0], sin[0], tandem)
        attended = attended.reshape(num_tokens, -1)
        residual, normed = self._mlp_norm.after(self._output, attended, residual, self._gate)
        output: torch.Tensor = self._down.combined(self._gate.gated(normed, self._down), residual, "add")[None]
        return output

    def products(self, layer: Any, rows: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yields a name, this layer's product of weights and `rows`, and that of `layer`, the replaced one.

        rows: [num_tokens, hidden_size].
        """
        attention = layer.self_attn
        normed = self._input_norm(rows, None)
        heads = self._qkv(self._input_norm(rows, self._qkv))
        yield "query, key and value", heads, torch.cat([getattr(attention, n)(normed) for n in self._qkv_names], -1)
        queries = heads[:, : self.head_parameters.num_heads * self.head_dim].contiguous()
        yield "output", self._output(queries), attention.o_proj(queries)
        gated = self._gate.gated(self._mlp_norm(rows, self._gate), self._down)
        yield "MLP", self._down(gated), layer.mlp(self._mlp_norm(rows, None))


def lora_slices(names: Sequence[str], sizes: Sequence[int]) -> list[LoraSlice]:
    """Returns the slices of a layer that computes the outputs of these layers, one after the other."""
    return [LoraSlice(name, sum(sizes[:i]), size) for i, (name, size) in enumerate(zip(names, sizes, strict=True))]


def check_shape(layer: Any, dtype: torch.dtype, operators: LayerOperators) -> None:
    """Raises NotFusedError unless the layer has the Llama shape, with norms of the hidden states' dtype."""
    attention, _ = _attention_and_mlp(layer, operators)
    norms = [child for name, child in (*layer.named_children(), *attention.named_children()) if name.endswith("norm")]
    if any(NormParameters.of(norm).weight.dtype != dtype for norm in norms):
        raise NotFusedError("its norms have another dtype")


def _attention_and_mlp(layer: Any, operators: LayerOperators) -> tuple[Any, Any]:
    """Returns both modules of a layer of the Llama shape. Raises NotFusedError for any other layer."""
    if set(_children_with_weights(layer)) != _SUBMODULES or list(layer.parameters(recurse=False)):
        raise NotFusedError("its submodules are not attention, MLP and two norms")
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise NotFusedError("it has hooks")
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
            is_linear = is_plain(child) or (hasattr(child, "out_features") and not operators.merges_only)
            if not name.endswith("_norm") and not is_linear:
                raise NotFusedError(f"{name} is not a plain linear layer")
    return attention, mlp


def _children_with_weights(module: Any) -> dict[str, nn.Module]:
    """Returns the children with parameters or linear layers; the weights of quantised ones are buffers."""
    return {
        name: child
        for name, child in module.named_children()
        if list(child.parameters()) or any(hasattr(each, "out_features") for each in child.modules())
    }
