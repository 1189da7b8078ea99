"""A small Llama with random weights and a tokeniser of its own, made on first use and kept.

It answers with noise for as long as it is asked to: for benchmarks, and for tests where any answer will do.
`python -m bench.noise_model FOLDER` makes one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.demo_model.tokenizer import CHAT_TEMPLATE, MAX_MODEL_LEN, SPECIAL_TOKENS, VOCAB_SIZE
from tandem.deploy.processes.runtime_dir import cache_dir
from tandem.runtime.errors import InternalError

VERSION = 2
"""Part of the cache folder's name: raise it with every change to what is made."""


def ensure_noise_model() -> Path:
    """The model's folder, made now if it is not there. Processes may race: it appears whole or not at all."""
    folder = cache_dir() / f"noise-model-v{VERSION}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = subprocess.run(  # in a process of its own: the caller stays free of torch
            [sys.executable, "-m", "bench.noise_model", scratch], capture_output=True, text=True, timeout=300
        )
        if made.returncode != 0:
            raise InternalError(f"the noise model could not be made: {made.stderr.strip().splitlines()[-1:]}")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            (Path(scratch) / "model").replace(folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    return folder


def _sample_text() -> Iterator[str]:
    """What the tokeniser learns its pieces from: the words of Python's own documentation, always at hand."""
    import pydoc_data.topics

    yield from pydoc_data.topics.topics.values()


def make_noise_model(folder: Path) -> None:
    """Write config, weights (safetensors), tokeniser and chat template to `folder`. The same bytes every time."""
    # transformers would write the same files, but importing it takes longer than all of this.
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    end_id = _write_tokenizer(folder)
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
        "tie_word_embeddings": False,  # tied random weights would only ever repeat the last token
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
    _write_json(folder / "config.json", config)  # last: its presence says that the folder is whole


_INITIAL_STD = 0.08
"""Large enough that the noise varies and its most likely token is well ahead of the next."""

_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def _weight_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama's weights."""
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


def _write_tokenizer(folder: Path) -> int:
    """A byte-level BPE and its chat template; returns the id of the token that ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_sample_text(), trainer)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "model_max_length": MAX_MODEL_LEN,
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
