"""Runs a model on a few tokens to check that the engine computes it correctly, and to find its KV cache layout.

The engine puts the tokens of all sequences in one row and replaces attention only. That is correct only if all
attention goes through transformers' attention interface, without unknown arguments, and if tokens do not interact in
any other way. A list of model names cannot tell; a few forward passes can:

1. The requested masks must be causal, with or without a window, and reach the attention unchanged.
2. With attention replaced by each token's own value, a token's result must not depend on other tokens. This detects
   convolutions, recurrent states, attention outside the interface, and positions that the model counts by itself.
3. Without positions the model must count its tokens from 0, as the engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tandem.engine.attention.interface import ATTENTION_NAME, NO_WINDOW, LayerPlan
from tandem.engine.loading.rope import scaling_problem
from tandem.engine.vision.models import takes_media
from tandem.runtime.errors import ConfigError, first_line

_STATEFUL_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2", "recurrent"}
_STATE_SPACE_KEYS = ("ssm_state_size", "mamba_d_state", "state_size", "rwkv_version", "lru_width")


def unsuitable(name: str, model_config: Any, reason: str) -> ConfigError:
    """Returns the error for a model that cannot be served."""
    return ConfigError(f"{name} ({model_config.model_type}) cannot be served: {reason}")


def check_config(name: str, model_config: Any, text_config: Any) -> None:
    """Raises ConfigError if the config shows that the model cannot be served."""
    if getattr(model_config, "is_encoder_decoder", False):
        raise unsuitable(name, model_config, "it is an encoder-decoder model; Tandem serves decoder-only models")
    is_known = type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING or takes_media(model_config)
    if not is_known and not getattr(model_config, "auto_map", None):
        raise unsuitable(name, model_config, "transformers has no causal language model of this kind")
    if problem := scaling_problem(text_config):
        raise unsuitable(name, model_config, problem)
    layer_types = getattr(text_config, "layer_types", None) or getattr(text_config, "layers_block_type", None) or []
    stateful = _STATEFUL_LAYERS & set(layer_types)
    if stateful:
        layers = ", ".join(sorted(stateful))
        raise unsuitable(name, model_config, f"its {layers} layers keep other state than keys and values")
    if not getattr(text_config, "num_attention_heads", None) or any(
        hasattr(text_config, key) for key in _STATE_SPACE_KEYS
    ):
        raise unsuitable(name, model_config, "it is a state-space or recurrent model, which has other state than KV")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    if model_class is not None and not getattr(model_class, "_supports_attention_backend", False):
        raise unsuitable(name, model_config, "its attention does not go through transformers' attention interface")


PROBE_NAME = "tandem_probe"

_USED = {"scaling", "softcap"}
_IGNORED = {"cache_position", "dropout", "is_causal", "position_ids", "sliding_window", "use_cache"}
"""Further attention arguments: those of `paged_attention`, and those that the mask expresses or that change nothing."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative to the largest value. Equal rows of a matrix product may differ slightly if a library splits it."""

_TOKENS = [4, 5, 4, 3, 5]  # no usual padding ids, which some models skip when they count positions
_POSITION = 3  # of the compared token

_MaskFunction = Callable[..., torch.Tensor]
"""Takes (batch, head, query position, key position), broadcast tensors; True where the query sees the key."""


class UnsuitableModelError(Exception):
    """The engine would compute the model wrongly; the message completes "it cannot be served: ..."."""


@dataclass(frozen=True)
class ProbedModel:
    """What the attention layers of a model need."""

    num_layers: int
    """Attention layers with a KV cache."""
    num_kv_heads: int
    """Maximum over the layers."""
    head_dim: int
    """Maximum over the layers."""


@dataclass(frozen=True)
class _Call:
    """One call of an attention module."""

    module: torch.nn.Module
    query: torch.Tensor
    """[num_heads, num_tokens, head_dim]"""
    key: torch.Tensor
    """[num_heads, num_tokens, head_dim]"""
    value: torch.Tensor
    """[num_heads, num_tokens, head_dim]"""
    window: int


@torch.inference_mode()
def probe_model(model: Any, max_model_len: int) -> ProbedModel:
    """Checks the model, attaches a `LayerPlan` to each attention module, and switches the model to `paged_attention`.

    The model must have been created with `attn_implementation=PROBE_NAME`. Raises UnsuitableModelError.
    """
    if max_model_len < _POSITION + 2:
        raise UnsuitableModelError(f"sequences of {max_model_len} tokens are too short")
    alone = _Probe(max_model_len, check_masks=True)
    expected = _forward(model, alone, _TOKENS, range(5))
    by_itself = _forward(model, _Probe(max_model_len, check_masks=False), _TOKENS, None)
    _check_alike(torch.cat((expected, by_itself), 1), "the positions of its tokens are not 0, 1, 2 and so on")
    # The compared token three times at the same position, with other tokens before, between and after.
    company = _Probe(max_model_len, check_masks=False)
    positions = [0, _POSITION, _POSITION, max_model_len - 1, _POSITION]
    logits = _forward(model, company, [4, 3, 3, 5, 3], positions, keep=[1, 2, 4])
    for call in company.calls:
        for states in (call.query, call.key, call.value):
            _check_alike(states[:, [1, 2, 4]], "tokens see each other, or count their positions, outside of attention")
    _check_alike(logits, "tokens see each other outside of attention")
    first, beside_longer = alone.calls[0], company.calls[0]
    for one, other in ((first.query, beside_longer.query), (first.key, beside_longer.key)):
        both = torch.stack((one[:, _POSITION], other[:, 1]), 1)
        _check_alike(both, "positions depend on the longest sequence in the batch (dynamic RoPE)")
    probed = _plan(alone.calls)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == PROBE_NAME:
            config._attn_implementation = ATTENTION_NAME
    return probed


def _forward(
    model: Any, probe: _Probe, token_ids: list[int], positions: Iterable[int] | None, keep: list[int] | None = None
) -> torch.Tensor:
    """Returns the logits of the rows `keep`: [1, num_rows, vocab_size]. positions: None lets the model count them."""
    device = next(model.parameters()).device
    keep = keep or [len(token_ids) - 1]
    try:
        output = model(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=None if positions is None else torch.tensor([list(positions)], device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, device=device),
            tandem=probe,
        )
    except UnsuitableModelError:
        raise
    except Exception as error:
        # The model's own code may raise anything.
        raise UnsuitableModelError(f"it does not run as the engine runs models: {first_line(error)}") from error
    if not probe.calls:
        raise UnsuitableModelError("its attention does not go through transformers' attention interface")
    logits: torch.Tensor = output.logits
    if logits.shape[1] != len(keep):
        raise UnsuitableModelError("it computes the logits of other tokens than are asked for (logits_to_keep)")
    return logits


@dataclass
class _Probe:
    """Collects the attention calls of one forward pass, in place of a `StepAttention`."""

    max_model_len: int
    check_masks: bool
    calls: list[_Call] = field(default_factory=list)


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    s_aux: torch.Tensor | None = None,
    tandem: _Probe | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Records a call, and refuses what `paged_attention` could not compute. Returns the tokens' own values."""
    if tandem is None:
        raise UnsuitableModelError("it does not hand our metadata on to its attention")
    given = [name for name, argument in kwargs.items() if argument is not None and not name.startswith("output_")]
    unknown = [name for name in given if name not in _USED | _IGNORED]
    if unknown:
        raise UnsuitableModelError(f"its attention asks for {', '.join(unknown)}, which Tandem does not know")
    if any(call.module is module for call in tandem.calls):
        raise UnsuitableModelError("one attention module is used several times in a forward")
    if query.ndim != 4 or key.shape[:3] != value.shape[:3] or query.shape[::2] != key.shape[::2]:
        raise UnsuitableModelError("its attention looks at other tokens than those of the step")
    if query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
        raise UnsuitableModelError("its query heads do not fit its key heads")
    if s_aux is not None and s_aux.shape != (query.shape[1],):
        raise UnsuitableModelError("its attention sinks are not one for each head")
    window = NO_WINDOW
    if tandem.check_masks:
        window = _window_of(getattr(attention_mask, "tandem_sees", None), tandem.max_model_len, query.device)
    tandem.calls.append(_Call(module, query[0], key[0], value[0], window))
    return value.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(1, 2).contiguous(), None


def _probe_mask(
    q_length: int, kv_length: int, mask_function: _MaskFunction, device: torch.device, **_: Any
) -> torch.Tensor:
    """Returns a mask with its mask function attached; the attribute is lost if the model computes with the mask."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.tandem_sees = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(PROBE_NAME, _probe_attention)
AttentionMaskInterface.register(PROBE_NAME, _probe_mask)


def _window_of(sees: _MaskFunction | None, max_model_len: int, device: torch.device) -> int:
    """Returns the window of a causal mask, or NO_WINDOW if it covers `max_model_len`. Raises UnsuitableModelError."""
    if sees is None:
        raise UnsuitableModelError("its attention does not get one of transformers' masks as it was made")
    keys = torch.arange(max_model_len, device=device)
    first = torch.zeros((), dtype=torch.long, device=device)

    def seen_from(query: int) -> torch.Tensor:
        return torch.as_tensor(sees(first, first, keys[query], keys)).expand(max_model_len)

    last = max_model_len - 1
    try:
        window = int(seen_from(last).sum())
        samples = {q for q in (0, 1, window - 1, window, window + 1, 2 * window, last // 2, last) if 0 <= q <= last}
        is_window = all(
            torch.equal(seen_from(query), (keys <= query) & (keys > query - window)) for query in sorted(samples)
        )
    except Exception as error:
        raise UnsuitableModelError(f"it masks attention by what is in the batch ({type(error).__name__})") from error
    if not is_window:
        raise UnsuitableModelError("it masks attention otherwise than causally or by a sliding window")
    return NO_WINDOW if window == max_model_len else window


def _check_alike(rows: torch.Tensor, reason: str) -> None:
    """Raises UnsuitableModelError(reason) unless all rows of [any, num_rows, any] equal the first."""
    difference = (rows - rows[:, :1]).abs().max()
    if not difference <= _TOLERANCE.get(rows.dtype, 2e-2) * rows.abs().max():
        raise UnsuitableModelError(reason)


def _plan(calls: list[_Call]) -> ProbedModel:
    """Attaches a LayerPlan to each called module. Raises UnsuitableModelError if their heads do not fit one pool."""
    num_kv_heads = max(call.key.shape[0] for call in calls)
    head_dim = max(max(call.key.shape[-1], call.value.shape[-1]) for call in calls)
    for layer, call in enumerate(calls):
        if num_kv_heads % call.key.shape[0] or call.query.shape[0] % num_kv_heads:
            raise UnsuitableModelError("the numbers of key heads of its layers do not divide each other")
        call.module.tandem_plan = LayerPlan(layer, call.window, num_kv_heads, head_dim)  # type: ignore[assignment]
    return ProbedModel(len(calls), num_kv_heads, head_dim)
