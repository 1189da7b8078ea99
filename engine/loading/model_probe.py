"""Finds out by running a model whether the engine would compute what the model means, and what its KV cache looks like.

The engine lays the tokens of all sequences in one row and takes care of attention alone. That is right only if every
attention goes through transformers' attention interface, asks there for nothing that we do not know, and if nothing
else lets one token see another. No list of names can say so; a few forwards of a few tokens can:

1. The masks that the model asks for must be causal, with or without a window, and reach the attention untouched.
2. Attention is replaced by each token's own value. A token must then come out the same in any company: convolutions,
   recurrent states, attention past the interface, and positions that the model counts itself, all show.
3. Without positions the model must count its tokens from 0, as the engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from tandem.engine.attention.interface import ATTENTION_NAME, NO_WINDOW, LayerPlan

PROBE_NAME = "tandem_probe"

_UNDERSTOOD = {"cache_position", "dropout", "is_causal", "position_ids", "sliding_window", "use_cache"}
"""Arguments of attention that say no more than the mask does, or nothing about the result."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Of the largest value. Equal rows of one product come out alike, or nearly so where a library splits them up."""

_TOKENS = [4, 5, 4, 3, 5]  # none that pads, which some models do not count
_POSITION = 3  # of the token that is compared

_MaskFunction = Callable[..., torch.Tensor]
"""(batch, head, query position, key position), tensors that broadcast: whether the query sees the key."""


class UnsuitableModelError(Exception):
    """The engine would get the model wrong; the message completes "it cannot be served: ..."."""


@dataclass(frozen=True)
class ProbedModel:
    """num_layers: attention layers, each with keys and values of its own. num_kv_heads, head_dim: the largest."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class _Call:
    """What one attention module was called with; the states are [num_heads, num_tokens, head_dim]."""

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    window: int


@torch.inference_mode()
def probe_model(model: Any, max_model_len: int) -> ProbedModel:
    """Leaves a `LayerPlan` on each attention module, and the model on `engine.attention.interface.paged_attention`.

    The model must have been made with `attn_implementation=PROBE_NAME`. Raises UnsuitableModelError.
    """
    if max_model_len < _POSITION + 2:
        raise UnsuitableModelError(f"sequences of {max_model_len} tokens are too short")
    alone = _Probe(max_model_len, check_masks=True)
    expected = _forward(model, alone, _TOKENS, range(5))
    by_itself = _forward(model, _Probe(max_model_len, check_masks=False), _TOKENS, None)
    _check_alike(torch.cat((expected, by_itself), 1), "the positions of its tokens are not 0, 1, 2 and so on")
    # One token at one position three times, with others before it, between and after.
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
        _check_alike(both, "positions mean something else beside longer sequences (dynamic RoPE)")
    probed = _plan(alone.calls)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == PROBE_NAME:
            config._attn_implementation = ATTENTION_NAME
    return probed


def _forward(
    model: Any, probe: _Probe, token_ids: list[int], positions: Iterable[int] | None, keep: list[int] | None = None
) -> torch.Tensor:
    """The logits of the rows to keep: [1, num_rows, vocab_size]. positions: None to let the model make them."""
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
        # Whatever a model's own code raises when it is called as the engine calls it.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsuitableModelError(f"it does not run as the engine runs models: {reason}") from error
    if not probe.calls:
        raise UnsuitableModelError("its attention does not go through transformers' attention interface")
    logits: torch.Tensor = output.logits
    if logits.shape[1] != len(keep):
        raise UnsuitableModelError("it computes the logits of other tokens than are asked for (logits_to_keep)")
    return logits


class _Probe:
    """Stands where a `StepAttention` stands, in one forward."""

    def __init__(self, max_model_len: int, check_masks: bool) -> None:
        self.calls: list[_Call] = []
        self._max_model_len = max_model_len
        self._check_masks = check_masks

    def record(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> None:
        if any(call.module is module for call in self.calls):
            raise UnsuitableModelError("one attention module is used several times in a forward")
        if query.ndim != 4 or key.shape[:3] != value.shape[:3] or query.shape[::2] != key.shape[::2]:
            raise UnsuitableModelError("its attention looks at other tokens than those of the step")
        if query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
            raise UnsuitableModelError("its query heads do not fit its key heads")
        if sinks is not None and sinks.shape != (query.shape[1],):
            raise UnsuitableModelError("its attention sinks are not one for each head")
        window = NO_WINDOW
        if self._check_masks:
            window = _window_of(getattr(mask, "tandem_sees", None), self._max_model_len, query.device)
        self.calls.append(_Call(module, query[0], key[0], value[0], window))


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    tandem: _Probe | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Takes what `paged_attention` takes, and refuses what that would pass over in silence."""
    if tandem is None:
        raise UnsuitableModelError("it does not hand our metadata on to its attention")
    given = [name for name, argument in kwargs.items() if argument is not None and not name.startswith("output_")]
    unknown = [name for name in given if name not in _UNDERSTOOD]
    if unknown:
        raise UnsuitableModelError(f"its attention asks for {', '.join(unknown)}, which Tandem does not know")
    tandem.record(module, query, key, value, attention_mask, s_aux)
    return value.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(1, 2).contiguous(), None


def _probe_mask(
    q_length: int, kv_length: int, mask_function: _MaskFunction, device: torch.device, **_: Any
) -> torch.Tensor:
    """A mask that remembers what it means, as long as nobody computes with it."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.tandem_sees = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(PROBE_NAME, _probe_attention)
AttentionMaskInterface.register(PROBE_NAME, _probe_mask)


def _window_of(sees: _MaskFunction | None, max_model_len: int, device: torch.device) -> int:
    """The window of a causal mask, NO_WINDOW where no sequence is longer than it."""
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
    """rows: [any, num_rows, any]; all rows must be as the first."""
    difference = (rows - rows[:, :1]).abs().max()
    if not difference <= _TOLERANCE.get(rows.dtype, 2e-2) * rows.abs().max():
        raise UnsuitableModelError(reason)


def _plan(calls: list[_Call]) -> ProbedModel:
    num_kv_heads = max(call.key.shape[0] for call in calls)
    head_dim = max(max(call.key.shape[-1], call.value.shape[-1]) for call in calls)
    for layer, call in enumerate(calls):
        if num_kv_heads % call.key.shape[0] or call.query.shape[0] % num_kv_heads:
            raise UnsuitableModelError("the numbers of key heads of its layers do not divide each other")
        call.module.tandem_plan = LayerPlan(layer, call.window, num_kv_heads, head_dim)  # type: ignore[assignment]
    return ProbedModel(len(calls), num_kv_heads, head_dim)
