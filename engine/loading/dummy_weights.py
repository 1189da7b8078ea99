"""A model with random weights from its config alone, for benchmarks of models whose weights are not at hand."""

from __future__ import annotations

from typing import Any

import torch

_SEED = 0


def make_dummy_model(auto_class: Any, config: Any, dtype: torch.dtype, device: torch.device, **options: Any) -> Any:
    """As the model's own initialisation would make it, straight on the device in `dtype`.

    The same weights in every process on the same kind of device, as prefill and decode need them. auto_class: of
    transformers; options: for its `from_config`.
    """
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=dtype, **options)
    model = model.to_empty(device=device)
    model.tie_weights()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(_SEED)
        model.initialize_weights()  # buffers, such as the frequencies of rotary embeddings, too
    return model
