"""Load generators of others against a real cluster: guidellm, aiperf and genai-bench, each unchanged.

`.ci/run` installs each in an environment of its own below the folder that LOAD_GENERATORS names. `bench.side_by_side`
runs `vllm bench serve`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import MODEL, Cluster
from tests.support.noise_model import ensure_noise_model

NUM_REQUESTS = 8
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("--dtype", "float32") as running:
        yield running


def run(folder: Path, name: str, *arguments: str) -> None:
    installed = os.environ.get("LOAD_GENERATORS")
    if not installed:
        pytest.skip("LOAD_GENERATORS is not set: name a folder with an environment for each load generator")
    command = str(Path(installed) / name / "bin" / name)
    env = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    done = subprocess.run(
        [command, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def test_guidellm(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    run(
        tmp_path, "guidellm", "run", "--disable-console", "--output", f"kind=json,path={file}",
        "--backend", f"kind=openai_http,target={cluster.url},model={MODEL}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={ensure_noise_model()}",
        "--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={NUM_TOKENS}",
    )  # fmt: skip
    [benchmark] = read(file)["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)


def test_aiperf(cluster: Cluster, tmp_path: Path) -> None:
    run(
        tmp_path, "aiperf", "profile", "--model-names", MODEL, "--url", cluster.url, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", str(ensure_noise_model()), "--concurrency", "2", "--ui", "none",
        "--request-count", str(NUM_REQUESTS), "--synthetic-input-tokens-mean", "16",
        "--output-tokens-mean", str(NUM_TOKENS), "--output-artifact-dir", str(tmp_path / "out"),
    )  # fmt: skip
    report = read(tmp_path / "out" / "profile_export_aiperf.json")
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert report["time_to_first_token"]["avg"] > 0 and report["inter_token_latency"]["avg"] > 0


def test_genai_bench(cluster: Cluster, tmp_path: Path) -> None:
    run(
        tmp_path, "genai-bench", "benchmark", "--api-backend", "openai", "--api-base", cluster.url, "--api-key", "none",
        "--api-model-name", MODEL, "--model-tokenizer", str(ensure_noise_model()), "--task", "text-to-text",
        "--traffic-scenario", f"D(16,{NUM_TOKENS})", "--num-concurrency", "2", "--max-time-per-run", "1",
        "--max-requests-per-run", str(NUM_REQUESTS), "--experiment-base-dir", str(tmp_path),
        "--experiment-folder-name", "out",
    )  # fmt: skip
    [file] = (tmp_path / "out").glob("D16_*.json")
    figures = read(file)["aggregated_metrics"]
    assert figures["num_completed_requests"] >= NUM_REQUESTS and figures["num_error_requests"] == 0
