"""Whether the bits of a model's log-probabilities depend on nothing but its numerics and what they are given."""

from __future__ import annotations

from tandem.engine.engine_config import EngineConfig
from tandem.engine.loaded_model import LoadedModel


def exactness_problem(config: EngineConfig, loaded: LoadedModel) -> str:
    """Returns why the bits depend on more, such as the batch, as one sentence; empty if they do not."""
    if loaded.device.type != "cpu":
        return "products on GPUs depend on the number of rows in a step"
    return ""
