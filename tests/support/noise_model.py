"""A small Llama with random weights and its own tokeniser, for tests and benchmarks. Made on first use and cached.

Its output is noise of any length. `python -m tests.support.noise_model FOLDER` writes it to FOLDER/model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.deploy.processes.runtime_dir import cache_dir
from tandem.runtime.errors import InternalError
from tools.demo_model.tokenizer import CHAT_TEMPLATE, MAX_MODEL_LEN, SPECIAL_TOKENS, VOCAB_SIZE

VERSION = 2
"""Part of the name of the cache folder; increment it with every change to the model."""


def ensure_noise_model() -> Path:
    """Returns the model's folder and makes it if needed. Concurrent callers are safe: the folder appears complete."""
    folder = cache_dir() / f"noise-model-v{VERSION}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = subprocess.run(  # a subprocess, so that the caller does not import torch
            [sys.executable, "-m", "tests.support.noise_model", scratch], capture_output=True, text=True, timeout=300
        )
        if made.returncode != 0:
            raise InternalError(f"cannot make the noise model: {made.stderr.strip().splitlines()[-1:]}")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            (Path(scratch) / "model").replace(folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    return folder


def write_dummy_model(folder: Path, **shape: Any) -> Path:
    """Writes the config of a Llama of any shape and the noise model's tokeniser, for `--load-format dummy`."""
    from transformers import LlamaConfig

    # Tokens that the tokeniser does not know have no text, and clients would not see them.
    settings = {**shape, "vocab_size": VOCAB_SIZE, "eos_token_id": 0, "architectures": ["LlamaForCausalLM"]}
    LlamaConfig(**settings).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ensure_noise_model() / file, folder)
    return folder


def _sample_text() -> Iterator[str]:
    """Yields the tokeniser's training text: Python's own documentation, which needs no download."""
    import pydoc_data.topics

    yield from pydoc_data.topics.topics.values()


def make_noise_model(folder: Path) -> None:
    """Writes config, weights (safetensors), tokeniser and chat template to `folder`; reproducible."""
    # Written without transformers, whose import takes longer than everything here.
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    end_id = write_tokenizer(folder, VOCAB_SIZE, _sample_text(), MAX_MODEL_LEN)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
        **_SHAPE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,  # tied random weights only repeat the last token
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
    }
    _write_json(folder / "generation_config.json", {"eos_token_id": end_id, "pad_token_id": end_id})
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * _INITIAL_STD
        for name, shape in _weight_shapes()
    }
    halves = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)  # last: its presence marks the folder as complete


_INITIAL_STD = 0.08
"""Large enough for varied output in which the most likely token leads clearly."""

_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def _weight_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields names and shapes of a Llama's weights."""
    hidden, inner = _SHAPE["hidden_size"], _SHAPE["intermediate_size"]
    heads = _SHAPE["num_attention_heads"] * _SHAPE["head_dim"]
    kv_heads = _SHAPE["num_key_value_heads"] * _SHAPE["head_dim"]
    yield "model.embed_tokens.weight", (VOCAB_SIZE, hidden)
    for layer in range(_SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (heads, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_heads, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_heads, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCAB_SIZE, hidden)


def write_tokenizer(folder: Path, vocab_size: int, texts: Iterator[str], model_max_length: int) -> int:
    """Writes a byte-level BPE trained on `texts`, and a chat template. Returns the id of the end-of-turn token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "model_max_length": model_max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    end_id = bpe.token_to_id("<|end|>")
    assert isinstance(end_id, int)
    return end_id


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    make_noise_model(Path(sys.argv[1]) / "model")
