"""The models of `tests.faults.exact_soak` with random weights, and the requests that are sent to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.noise_model import ensure_noise_model, write_dummy_model
from tools.demo_model.tokenizer import MAX_MODEL_LEN, VOCAB_SIZE

NUM_QUESTIONS = 16
ADAPTER = "adapted"
_SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": MAX_MODEL_LEN, "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.2, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_WINDOW = 40


def _save(folder: Path, config: Any) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    write_dummy_model(folder)  # for its tokeniser
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _dense(folder: Path) -> Path:
    return ensure_noise_model()


def _mixture(folder: Path) -> Path:
    from transformers import MixtralConfig

    return _save(folder, MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None))


def _window(folder: Path) -> Path:
    from transformers import MistralConfig

    return _save(folder, MistralConfig(**_SHAPE, sliding_window=_WINDOW))


def _vision(folder: Path) -> Path:
    from tests.support.served_vision_models import save_served_model

    return save_served_model("qwen2_5_vl", folder)


MODELS: dict[str, Callable[[Path], Path]] = {
    "dense": _dense, "mixture": _mixture, "window": _window, "vision": _vision,
}  # fmt: skip


def make_adapter_of(model: Path, folder: Path) -> Path:
    """Writes a LoRA adapter of the dense model."""
    from transformers import AutoModelForCausalLM

    from tests.support.lora import make_adapter

    return make_adapter(folder, AutoModelForCausalLM.from_pretrained(model), ("q_proj", "v_proj", "down_proj"), seed=2)


def make_questions(rng: random.Random, name: str, model: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns (path, body) of requests. model: the served name."""
    if name == "vision":
        return [("/v1/chat/completions", _seen(rng)) for _ in range(NUM_QUESTIONS)]
    prefix = [rng.randrange(4, 2000) for _ in range(400)]
    return [("/v1/completions", _text(rng, prefix, model, name == "dense")) for _ in range(NUM_QUESTIONS)]


def _sampling(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "temperature": rng.choice([0, 0.8, 1.2]), "seed": rng.randrange(1 << 32), "n": rng.choice([1, 1, 3]),
        "max_tokens": rng.choice([1, 30, 120, 250]), "stream": True,
    }  # fmt: skip
    if rng.random() < 0.3:
        fields |= {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    if rng.random() < 0.3:
        fields |= {"top_p": 0.9, "top_k": 50}
    if rng.random() < 0.2:
        fields |= {"min_tokens": min(20, fields["max_tokens"]), "logit_bias": {"7": 5}}
    return fields


def _text(rng: random.Random, prefix: list[int], model: str, has_adapter: bool) -> dict[str, Any]:
    shared = prefix[: rng.choice([0, 0, 64, 400])]
    prompt = shared + [rng.randrange(4, 2000) for _ in range(rng.choice([3, 17, 90, 350]))]
    body = {"model": model, "prompt": prompt, "ignore_eos": True, **_sampling(rng)}
    if has_adapter and rng.random() < 0.3:
        body["model"] = ADAPTER
    if rng.random() < 0.2:
        body |= {"structured_outputs": {"regex": "[a-z ]{10,80}"}, "ignore_eos": False}
    return body


def _seen(rng: random.Random) -> dict[str, Any]:
    from tests.support.served_vision_models import parts_of
    from tests.support.vision_model import clip, picture

    text = "".join(rng.choice("abcdefgh ") for _ in range(rng.choice([3, 40, 200])))
    parts: list[Any] = [
        picture(rng.choice([40, 64, 96]), 48, seed) for seed in rng.sample(range(6), rng.choice([1, 2]))
    ]
    if rng.random() < 0.25:
        parts.append(clip(num_frames=6, width=48, height=32))
    rng.shuffle(parts)
    return {"messages": [{"role": "user", "content": parts_of([*parts, text])}], "ignore_eos": True, **_sampling(rng)}
