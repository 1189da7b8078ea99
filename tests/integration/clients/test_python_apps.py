"""LiteLLM, LangChain, LlamaIndex and llm against a real cluster, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.cluster import MODEL, Cluster

SCRIPT = Path(__file__).with_name("python_apps.py")


def test_applications_in_python(tmp_path: Path) -> None:
    python = os.environ.get("PYTHON_CLIENTS")
    if not python:
        pytest.skip(
            "PYTHON_CLIENTS is not set: name a python with tests/integration/clients/requirements.txt installed"
        )
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with Cluster("--api-key", "secret", "--dtype", "float32") as cluster:
        command = [python, str(SCRIPT), cluster.url, "secret", MODEL]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert len({text for answers in got.values() for text in answers["texts"]}) == 1, "all clients get the same text"
    assert got["litellm_answers"]["embedding"] > 0
    answers = got["langchain_answers"]
    assert answers["call"].keys() == {"a", "b"} and all(isinstance(value, int) for value in answers["point"])
