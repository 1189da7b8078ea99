"""Writes the random-weight models of the benchmarks that compare with vLLM: `llama100m` and `tiny`, in bfloat16.

    python -m bench.support.models FOLDER

`llama100m` has 100 M parameters, so that the model is what costs; `tiny` has 4 M, so that everything else does. The
tokeniser of 32,000 tokens is learnt from Python's standard library, which takes half a minute and nothing to download.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tests.support.noise_model import write_tokenizer

VOCAB_SIZE = 32_000
SHAPES = {
    "llama100m": {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 40_960,
    },
}  # fmt: skip


def sources() -> Iterator[str]:
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield file.read_text(errors="replace")


def write_model(folder: Path, shape: dict[str, int]) -> None:
    """Writes the config, weights (the same each time), tokeniser and chat template to `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    end = 0
    config = LlamaConfig(vocab_size=VOCAB_SIZE, tie_word_embeddings=True, eos_token_id=end, bos_token_id=None, **shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    assert write_tokenizer(folder, VOCAB_SIZE, sources(), shape["max_position_embeddings"]) == end


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m bench.support.models FOLDER")
    for name, shape in SHAPES.items():
        write_model(Path(sys.argv[1]) / name, shape)
        print(Path(sys.argv[1]) / name)
