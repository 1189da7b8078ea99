"""The built-in demo model: a small Llama with random weights and its own tokeniser, made on first use, no download.

It answers with noise, fast: it is there to see the cluster work. `python -m deploy.demo_model FOLDER` makes one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from deploy.runtime_dir import cache_dir
from protocol.errors import InternalError

VERSION = 1
"""Part of the cache folder's name: raise it with every change to what is made."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL_TOKENS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
_VOCAB_SIZE = 2048
_MAX_MODEL_LEN = 2048


def ensure_demo_model(on_progress: Callable[[str], None]) -> Path:
    """The model's folder, made now if it is not there. Two launchers may race: the folder appears whole or not at all."""
    folder = cache_dir() / f"demo-model-v{VERSION}"
    if (folder / "config.json").exists():
        return folder
    on_progress("Making the demo model (once)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = subprocess.run(  # in a process of its own: the launcher stays free of torch
            [sys.executable, "-m", "deploy.demo_model", scratch], capture_output=True, text=True, timeout=300
        )
        if made.returncode != 0:
            raise InternalError(f"the demo model could not be made: {made.stderr.strip().splitlines()[-1:]}")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.replace(Path(scratch) / "model", folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    return folder


def _sample_text() -> Iterator[str]:
    """What the tokeniser learns its pieces from: the words of Python's own documentation, always at hand."""
    import pydoc_data.topics

    yield from pydoc_data.topics.topics.values()


def make_demo_model(folder: Path) -> None:
    """Write config, weights (safetensors), tokeniser and chat template to `folder`. The same bytes every time."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_sample_text(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>", model_max_length=_MAX_MODEL_LEN
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    end = bpe.token_to_id("<|end|>")
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=_MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make_demo_model(Path(sys.argv[1]) / "model")
