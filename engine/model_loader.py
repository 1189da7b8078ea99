"""Loads a decoder model with our attention, or says in one line why it cannot be served and how to mend it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.attention import ATTENTION_NAME
from engine.attention_check import why_not_served
from engine.config import EngineConfig
from engine.dummy_weights import make_dummy_model
from engine.sharding import check_shards, shard_arguments, unwrap_linears
from protocol.errors import ConfigError
from protocol.transfer import KVLayout

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what the rest of the worker must know of it."""

    model: Any
    max_model_len: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    layout: KVLayout


def load_model(config: EngineConfig) -> LoadedModel:
    """Raises ConfigError."""
    device = _resolve_device(config)
    model_config, text_config = check_model(config)
    max_model_len = _resolve_max_model_len(config, text_config)
    dtype = _DTYPES.get(config.dtype) or getattr(text_config, "dtype", None) or torch.float32
    options = {"attn_implementation": ATTENTION_NAME, "trust_remote_code": config.trust_remote_code}
    try:
        if config.load_format == "dummy":
            model = make_dummy_model(model_config, dtype, device, **options)
        else:
            options |= shard_arguments(config.tensor_parallel_size)
            model = AutoModelForCausalLM.from_pretrained(config.model, config=model_config, dtype=dtype, **options)
    except Exception as error:
        # Any of a dozen libraries may refuse a broken checkpoint, each with its own kind of error.
        raise ConfigError(f"the weights of {config.model} cannot be loaded: {_first_line(error)}") from error
    model = model.to(device).eval().requires_grad_(False)
    unwrap_linears(model)
    head_dim, num_kv_heads = _kv_shape(text_config)
    layout = KVLayout(
        model_id=_model_id(config.model, model_config),
        dtype=str(dtype).removeprefix("torch."),
        num_layers=text_config.num_hidden_layers,
        num_kv_heads=num_kv_heads // config.tensor_parallel_size,
        head_dim=head_dim,
        block_size=config.block_size,
        tensor_parallel_size=config.tensor_parallel_size,
    )
    if (reason := why_not_served(model, text_config, layout)) is not None:
        raise ConfigError(f"{config.model} ({model_config.model_type}) cannot be served: {reason}")
    return LoadedModel(model, max_model_len, text_config.vocab_size, dtype, device, layout)


def check_model(config: EngineConfig) -> tuple[Any, Any]:
    """The model's configuration and that of its decoder, when they can be served. Raises ConfigError."""
    model_config = _load_config(config)
    text_config = model_config.get_text_config(decoder=True)
    _check_supported(config.model, model_config, text_config)
    if config.load_format == "dummy" and config.tensor_parallel_size > 1:
        raise ConfigError("--load-format dummy makes whole models only; use --tensor-parallel-size 1")
    check_shards(config.model, text_config, _kv_shape(text_config)[1], config.tensor_parallel_size)
    return model_config, text_config


def _resolve_device(config: EngineConfig) -> torch.device:
    if config.tensor_parallel_size > 1 and config.device != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.distributed.get_rank())
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is visible; use --device cpu, or check the driver with nvidia-smi")
    return torch.device(config.device)


def _load_config(config: EngineConfig) -> Any:
    folder = Path(config.model)
    looks_like_path = config.model.startswith((".", "/", "~")) or config.model.count("/") != 1
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{config.model} has no config.json; --model takes a folder in Hugging Face's format")
    elif looks_like_path:
        raise ConfigError(f"the model folder {config.model} does not exist; check --model")
    try:
        return AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    except Exception as error:
        if folder.is_dir():
            raise ConfigError(f"the config of {config.model} cannot be used: {_first_line(error)}") from error
        raise ConfigError(
            f"{config.model} is no folder here and could not be fetched from the hub: {_first_line(error)}"
        ) from error


def _check_supported(name: str, model_config: Any, text_config: Any) -> None:
    """Refuse what the engine would get wrong."""
    kind = model_config.model_type

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"{name} ({kind}) cannot be served: {reason}")

    if getattr(model_config, "is_encoder_decoder", False):
        raise refuse("it is an encoder-decoder model; Tandem serves decoder-only models")
    if type(text_config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(model_config, "auto_map", None):
        raise refuse("transformers has no causal language model of this kind")
    layer_types = set(getattr(text_config, "layer_types", None) or [])
    other = layer_types - {"full_attention", "sliding_attention"}
    if other:
        raise refuse(f"its {', '.join(sorted(other))} layers keep other state than keys and values")
    if not getattr(text_config, "num_attention_heads", None) or any(
        hasattr(text_config, key) for key in ("ssm_state_size", "mamba_d_state", "state_size", "rwkv_version")
    ):
        raise refuse("it is a state-space or recurrent model, which has no KV cache to hand over")
    if getattr(text_config, "kv_lora_rank", None):
        raise refuse("its latent attention is not supported yet")
    for key in ("num_kv_shared_layers", "query_pre_attn_scalar_cap"):
        if getattr(text_config, key, None):
            raise refuse(f"attention with {key} is not supported yet")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
    if model_class is not None and not getattr(model_class, "_supports_attention_backend", False):
        raise refuse("its attention does not go through transformers' attention interface")


def _kv_shape(text_config: Any) -> tuple[int, int]:
    num_heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // num_heads
    return head_dim, getattr(text_config, "num_key_value_heads", None) or num_heads


def _resolve_max_model_len(config: EngineConfig, text_config: Any) -> int:
    limit: int = getattr(text_config, "max_position_embeddings", 0) or 0
    if config.max_model_len and limit and config.max_model_len > limit:
        raise ConfigError(f"--max-model-len {config.max_model_len} is over the model's own limit of {limit}")
    if not (config.max_model_len or limit):
        raise ConfigError(f"{config.model} does not say how long its sequences may be; give --max-model-len")
    return config.max_model_len or limit


def _model_id(name: str, model_config: Any) -> str:
    """Equal for equal checkpoints: the config, and for a folder the names and sizes of its weight files."""
    folder = Path(name)
    if not folder.is_dir():
        return f"{name}@{getattr(model_config, '_commit_hash', None) or 'main'}"
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
