"""Programs and clusters that run with vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.deploy.processes.engine_python import EnginePython, vllm_environment
from tests.support.cluster import Cluster
from tests.support.nixl import OVER_TCP
from tests.support.vllm_python import vllm_python

START_TIMEOUT_S = 400.0
"""Limit on the start of a cluster. A worker imports vLLM in 10 s, and in a minute on a machine that is busy."""


def cluster_arguments(python: str = "") -> tuple[str, ...]:
    """Of `tests.support.cluster.Cluster`, for workers that compute exactly. python: interpreter with vLLM."""
    python = python or vllm_python()
    return ("--engine", "vllm", "--engine-python", python, "--dtype", "float32", "--threads-per-worker", "1")


def run_with_vllm(program: Path, *arguments: str, python: str = "", timeout_s: float = 500.0) -> Any:
    """Returns what a program with vLLM wrote as JSON to the file that its last argument names. python: see above."""
    engine_python = EnginePython(Path(python or vllm_python()))
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        environment = {**os.environ, **vllm_environment(on_gpus=False), **engine_python.environment(Path(folder))}
        environment |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
        ended = subprocess.run(
            [engine_python.path, program, *arguments, answer],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert ended.returncode == 0, ended.stdout[-1500:]
        return json.loads(answer.read_text())


def complete(cluster: Cluster, body: dict[str, Any]) -> list[list[int]]:
    """Returns the token ids of each choice."""
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def kv_caches(cluster: Cluster) -> set[str]:
    """Returns the KV caches that the workers have mapped, their own and each other's, by inode."""
    mapped: set[str] = set()
    for each in cluster.status().workers:
        with suppress(FileNotFoundError):  # it has ended
            lines = Path(f"/proc/{each.worker.pid}/maps").read_text().splitlines()
            mapped |= {line.split()[4] for line in lines if "/memfd:tandem-kv" in line}
    return mapped


def nixl_environment_of_vllm() -> dict[str, str]:
    """Returns variables with which vLLM's workers move KV through NIXL as between hosts.

    Skips the test where the environment with vLLM lacks NIXL. `tandem engine install vllm` installs it there.
    """
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('nixl') is None)"
    if subprocess.run([vllm_python(), "-c", question], timeout=60).returncode:
        pytest.skip(f"{vllm_python()} has no NIXL (tandem engine install vllm FOLDER installs it)")
    return OVER_TCP
