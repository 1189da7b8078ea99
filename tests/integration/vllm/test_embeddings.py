"""Embeddings beside vLLM: its engine cannot both generate and embed, and Tandem's engine gives the same vectors."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import Cluster
from tests.support.vllm_clusters import run_with_vllm

pytestmark = pytest.mark.timeout(600)

LARGEST_DIFFERENCE = 1e-5
"""Of a value of a vector of length 1."""


def test_tandems_engine_embeds_as_vllms_pooling_engine(noise_model: Path, tmp_path: Path) -> None:
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 2000) for _ in range(length)] for length in (1, 2, 31, 32, 33, *[250] * 40)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    program = Path(__file__).with_name("embeddings_of_vllm_alone.py")
    alone = run_with_vllm(program, str(noise_model), str(tmp_path / "prompts.json"))
    options = ("--workers", "1", "--device", "cpu", "--dtype", "float32", "--threads-per-worker", "1")
    with Cluster(*options) as cluster:
        httpx.post(f"{cluster.url}/v1/embeddings", json={"input": prompts[0]}, timeout=60).raise_for_status()
        begun = time.monotonic()
        answer = httpx.post(f"{cluster.url}/v1/embeddings", json={"input": prompts}, timeout=300)
        seconds = time.monotonic() - begun
    vectors = [each["embedding"] for each in answer.json()["data"]]
    pairs = zip(vectors, alone["vectors"], strict=True)
    difference = max(abs(one - other) for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True))
    print(f"largest difference {difference:.1e}; {seconds:.2f} s, vLLM's engine alone {alone['seconds']:.2f} s")
    assert difference < LARGEST_DIFFERENCE
