"""A tiny model with a token of many markers of calls, so that one `logit_bias` fills an answer with them."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM

from tests.support.fake_workers import make_tokenizer
from tests.support.tiny_models import make_tiny_config
from tests.support.tokenizers import token_id

MARKERS_PER_TOKEN = 16
"""More than in real vocabularies, so that a long text takes few steps."""
MAX_MODEL_LEN = 2048


def make_marker_model(folder: Path, marker: str) -> int:
    """Writes the model to `folder`. Returns the id of the token of markers."""
    token = marker * MARKERS_PER_TOKEN
    tokenizer = make_tokenizer(folder)
    tokenizer.add_tokens([token])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = make_tiny_config("llama")
    config.num_hidden_layers = 1
    config.max_position_embeddings = MAX_MODEL_LEN
    config.eos_token_id = tokenizer.token_to_id("</s>")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return token_id(tokenizer, token)
