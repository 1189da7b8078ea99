"""The HTTP dispatch that `bench.dispatch` compares with: it stands in for parts of the product, which change."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from bench.dispatch import MODEL, cluster, smallest_model


@pytest.mark.parametrize("variant", ["http pooled", "http fresh"])
def test_it_serves_what_zmq_serves(variant: str, tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": [5, 6, 7] * 50, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    model = smallest_model(tmp_path / "model")
    told = []
    for each in ("zmq", variant):
        with cluster(each, model) as port:
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            told.append((answer.json()["choices"][0]["text"], answer.json()["usage"]))
    assert told[0] == told[1]
