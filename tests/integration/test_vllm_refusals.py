"""A model that vLLM refuses, and a missing vLLM, end `tandem up` with the reason in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tandem.deploy.demo_model import DEMO_MODEL
from tests.support.cluster import refused_start
from tests.support.vllm_python import vllm_python


def refusal(*arguments: str) -> str:
    """Returns the last line that `tandem up` prints with vLLM's engine."""
    return refused_start("--engine", "vllm", *arguments).splitlines()[-1]


def test_a_model_that_vllm_does_not_know_is_refused_with_vllms_reason(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    line = refusal("--engine-python", vllm_python(), "--workers", "1", "--model", str(model))
    assert line.startswith("tandem: vLLM refused the model or its settings")
    assert "['NoSuchForCausalLM'] are not supported" in line and len(line) < 500


def test_without_vllm_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    line = refusal()
    assert line.startswith(f"tandem: engine: there is no vLLM 0.32.0 in {tmp_path}")
    assert "`tandem engine install vllm`" in line
