"""Code that comes with a checkpoint runs only with --trust-remote-code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.engine.engine_config import EngineConfig
from tandem.engine.loading.model_loader import load_model
from tandem.runtime.errors import ConfigError

CODE = """
from pathlib import Path
from transformers import LlamaConfig

Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "ran"


@pytest.fixture
def checkpoint(tmp_path: Path, marker: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "own_config.py").write_text(CODE.format(marker=str(marker)))
    fields = {"model_type": "own", "auto_map": {"AutoConfig": "own_config.OwnConfig"}, "vocab_size": 8}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("trusted", [False, True])
def test_remote_code_runs_only_with_trust_remote_code(checkpoint: Path, marker: Path, trusted: bool) -> None:
    """A trusted checkpoint fails only at its missing weights."""
    config = EngineConfig(str(checkpoint), device="cpu", trust_remote_code=trusted)
    with pytest.raises(ConfigError, match="weights|supported|AutoModel" if trusted else "custom code"):
        load_model(config)
    assert marker.exists() == trusted
