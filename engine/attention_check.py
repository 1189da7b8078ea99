"""Whether a loaded model does what paged attention relies on, found out by a run of three tokens.

Each layer must call our attention once, with the heads that the KV pool has room for; tokens must be told apart by
their ids and positions alone, since a step lays many sequences in one row; windows must reach the attention. A model
that breaks one of these would give wrong text, not an error, so it is refused by what it does and not by its name.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from engine.attention import AttentionOptions
from protocol.transfer import KVLayout


class _Recorder:
    """A step's attention that keeps what it is asked and mixes no rows."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.windows: dict[int, int] = {}
        self.mixes_rows = False

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.calls[layer] += 1
        self.shapes[layer] = key.shape[1], key.shape[-1], value.shape[-1]
        self.windows[layer] = options.window
        for states in (query, key, value):
            self.mixes_rows |= not torch.allclose(states[:, :, 0], states[:, :, 2], rtol=1e-3, atol=1e-3)
        group = query.shape[1] // key.shape[1]
        width = min(query.shape[-1], value.shape[-1])
        mixed = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
        mixed[..., :width] = query[..., :width].tanh() + value.repeat_interleave(group, 1)[..., :width]
        return mixed[0].transpose(0, 1)


@torch.inference_mode()
def why_not_served(model: Any, text_config: Any, layout: KVLayout) -> str | None:
    """What of a model's ways cannot be served, in words that follow on "it cannot be served:", or None."""
    device = next(model.parameters()).device
    recorder = _Recorder()
    try:
        hidden = model.base_model(
            # The first and the last are one token at one position, and so must be computed alike.
            input_ids=torch.tensor([[1, 2, 1]], device=device),
            position_ids=torch.tensor([[3, 1, 3]], device=device),
            use_cache=False,
            tandem=recorder,
        ).last_hidden_state
    except Exception as error:
        return f"it does not run as Tandem calls it: {(str(error).splitlines() or [type(error).__name__])[0]}"
    expected = list(range(layout.num_layers))
    if sorted(recorder.calls) != expected or set(recorder.calls.values()) != {1}:
        return (
            f"its attention was called for layers {dict(sorted(recorder.calls.items()))}, not once for each of "
            f"{layout.num_layers}"
        )
    wanted = layout.num_kv_heads, layout.head_dim, layout.head_dim
    for layer, shape in sorted(recorder.shapes.items()):
        if shape != wanted:
            return (
                f"layer {layer} has {shape[0]} key heads of {shape[1]} with values of {shape[2]}, the KV cache holds "
                f"{wanted[0]} of {wanted[1]}"
            )
    if recorder.mixes_rows or not torch.allclose(hidden[0, 0], hidden[0, 2], rtol=1e-2, atol=1e-2):
        return "it computes a token from the place in its batch, or from its neighbours, outside of attention"
    window = getattr(text_config, "sliding_window", None)
    for layer, kind in enumerate(getattr(text_config, "layer_types", None) or []):
        if kind == "sliding_attention" and window and recorder.windows.get(layer) != window:
            return f"layer {layer} has a sliding window of {window} that it does not hand on to its attention"
    return None
