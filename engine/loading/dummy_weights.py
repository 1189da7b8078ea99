"""Creates a model with random weights from its config alone (`--load-format dummy`), for benchmarks."""

from __future__ import annotations

from typing import Any

import torch

_SEED = 0


def make_dummy_model(auto_class: Any, config: Any, dtype: torch.dtype, device: torch.device, **options: Any) -> Any:
    """Initialises the model directly on the device in `dtype`. options: for the auto class's `from_config`.

    The weights are the same in every process on the same kind of device, as prefill and decode require.
    """
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=dtype, **options)
    model = model.to_empty(device=device)
    model.tie_weights()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(_SEED)
        model.initialize_weights()  # including buffers, such as rotary frequencies
    return model


def dummy_recipe(device: torch.device) -> str:
    """All that the random weights depend on besides the config, as part of the model's identity."""
    return f"seed {_SEED}, torch {torch.__version__}, {device.type}"
