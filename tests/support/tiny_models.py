"""Tiny configs of any transformers family: the family's defaults with every size made small."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

NUM_LAYERS = 4
WINDOW = 16

_SIZES: dict[str, Any] = {
    "vocab_size": 320, "vocab_size_per_layer_input": 320, "n_vocab": 320,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "embedding_size": 64, "embed_dim": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "ffn_hidden_size": 96, "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96, "intermediate_size_mlp": 96, "intermediate_size_dense": 96, "dff": 96,
    "num_hidden_layers": NUM_LAYERS, "n_layer": NUM_LAYERS, "n_layers": NUM_LAYERS, "num_layers": NUM_LAYERS,
    "decoder_layers": NUM_LAYERS, "encoder_layers": NUM_LAYERS,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "multi_query_group_num": 2,
    "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 2, "rotary_dim": 8, "kv_channels": 16,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256, "seq_length": 256,
    "max_target_positions": 256, "max_source_positions": 256,
    "sliding_window": WINDOW, "attention_chunk_size": WINDOW, "window_size": WINDOW, "local_attention": WINDOW,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 32, "expert_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32, "shared_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_head_dim": 24, "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8,
    "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "laurel_rank": 8, "altup_num_inputs": 2,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_ssm": 128, "ssm_state_size": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_n_groups": 1, "n_groups": 1, "state_size": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "conv_dim": 64, "lru_width": 64, "attention_window_size": WINDOW, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "is_decoder": True, "tie_word_embeddings": False,
}  # fmt: skip
_EVEN_IF_NONE = ("bos_token_id", "eos_token_id", "pad_token_id", "head_dim", "num_key_value_heads")


def make_tiny_config(family: str, **sizes: Any) -> Any:
    """Returns a config of the transformers family with all sizes small.

    sizes: other ones, for fields that the family has.
    """
    config_class = CONFIG_MAPPING[family]
    return config_class(**_tiny_arguments(config_class, sizes))


def _tiny_arguments(config_class: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    default = config_class()
    arguments: dict[str, Any] = {}
    for name, value in {**_SIZES, **sizes}.items():
        old = getattr(default, name, None)
        if isinstance(getattr(config_class, name, None), property):
            continue
        if old is not None or (name in _EVEN_IF_NONE and hasattr(default, name)):
            arguments[name] = type(value)(value) if not isinstance(old, list) else [value] * NUM_LAYERS
    if hasattr(default, "kv_lora_rank"):  # latent attention: head_dim is the rotary dimension, every head has keys
        arguments |= {
            "head_dim": sizes.get("qk_rope_head_dim", _SIZES["qk_rope_head_dim"]),
            "num_key_value_heads": _SIZES["num_attention_heads"],
        }
    num_layers = getattr(default, "num_hidden_layers", None)
    for name, value in vars(default).items():
        if isinstance(value, list | tuple) and len(value) == num_layers and num_layers:
            arguments[name] = _shortened(list(value))
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if hasattr(default, name) and getattr(default, name) is not None and hasattr(part, "model_type"):
            arguments[name] = _tiny_arguments(type(getattr(default, name)), sizes)
    return arguments


def _shortened(per_layer: list[Any]) -> list[Any]:
    """Cuts a per-layer list to NUM_LAYERS entries and keeps at least one of each kind."""
    kinds = list(dict.fromkeys(map(repr, per_layer)))
    firsts = [per_layer[[repr(v) for v in per_layer].index(kind)] for kind in kinds]
    return (firsts * NUM_LAYERS)[:NUM_LAYERS] if len(kinds) <= NUM_LAYERS else per_layer[:NUM_LAYERS]
