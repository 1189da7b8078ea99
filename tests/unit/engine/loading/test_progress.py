"""Progress of loading weights, as the launcher receives it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.deploy.launch.start import fraction_loaded
from tandem.engine.engine_config import EngineConfig
from tandem.engine.loading.model_loader import load_model


def test_loading_reports_progress_to_the_end(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    files = [tmp_path / "a", tmp_path / "b"]
    assert fraction_loaded(files) is None
    load_model(EngineConfig(str(tmp_path / "model"), device="cpu", progress_file=str(files[0])))
    assert fraction_loaded(files) == 0.5
    files[1].write_text("0.25")
    assert fraction_loaded(files) == 0.625
    files[1].write_text("")  # a download in progress
    assert fraction_loaded(files) == 0.5
