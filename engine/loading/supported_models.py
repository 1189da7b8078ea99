"""Refuses unsupported models from their config, before gigabytes of weights are loaded.

`engine.loading.model_probe` makes the final decision by running the model.
"""

from __future__ import annotations

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tandem.engine.loading.rope import scaling_problem
from tandem.engine.vision.models import takes_media
from tandem.runtime.errors import ConfigError

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
