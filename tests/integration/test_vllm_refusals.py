"""A model that vLLM refuses, and a missing vLLM, end `tandem up` with the reason in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.deploy.demo_model import DEMO_MODEL
from tests.support.ports import free_port
from tests.support.vllm_python import vllm_python


def up(*arguments: str) -> tuple[int, str]:
    """Runs `tandem up` with vLLM's engine; returns its exit code and the last line that it prints."""
    command = [sys.executable, "-m", "tandem.deploy.cli", "up", "--engine", "vllm", "--port", str(free_port())]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=500)
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_a_model_that_vllm_does_not_know_is_refused_with_vllms_reason(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    code, line = up("--engine-python", vllm_python(), "--workers", "1", "--model", str(model))
    assert (code, line[:46]) == (2, "tandem: vLLM refused the model or its settings")
    assert "['NoSuchForCausalLM'] are not supported" in line and len(line) < 500


def test_without_vllm_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    code, line = up()
    assert code == 2 and line.startswith(f"tandem: engine: there is no vLLM 0.32.0 in {tmp_path}")
    assert "`tandem engine install vllm`" in line
