"""A KV cache too small for the model's context: every part of the cluster tells the same, shorter limit."""

from __future__ import annotations

import httpx

from tandem.deploy.demo_model import DEMO_MODEL
from tandem.deploy.processes.runtime_dir import log_dir
from tandem.runtime.version import own_version
from tests.support.cluster import Cluster, refused_start

SMALL = ("--model", str(DEMO_MODEL), "--device", "cpu", "--dtype", "float32", "--threads-per-worker", "1")
TOKENS_1500 = "0.00716"  # GiB for about 1,500 tokens; the limit of the model is 2,048


def test_a_context_that_does_not_fit_is_lowered_for_clients_and_operators() -> None:
    with Cluster(*SMALL, "--kv-cache-gib", TOKENS_1500, "--served-model-name", "m") as cluster:
        [card] = httpx.get(f"{cluster.url}/v1/models").json()["data"]
        assert card["max_model_len"] == 1024
        fields = {"model": "m", "prompt": [5] * 1000, "ignore_eos": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=fields | {"max_tokens": 24}, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 24
        answer = httpx.post(f"{cluster.url}/v1/completions", json=fields | {"max_tokens": 25}, timeout=60)
        assert answer.status_code == 400 and "context length is 1024 tokens" in answer.text
        shown = cluster.run("status")
        assert "sequences of up to 1024 tokens, KV blocks of 64 tokens" in shown.stdout
        assert f"engine: tandem {own_version()}" in shown.stdout
        for name in ("prefill-0", "decode-0"):
            log = (log_dir(cluster.port) / f"{name}.log").read_text()
            assert "the model's limit is 2048: --max-model-len is lowered to 1024" in log


def test_an_explicit_context_that_does_not_fit_is_refused_with_what_fits() -> None:
    error = refused_start(*SMALL, "--kv-cache-gib", TOKENS_1500, "--max-model-len", "2048")
    assert "too few for --max-model-len 2048: raise --kv-cache-gib to at least" in error
    assert "or lower --max-model-len to at most" in error
