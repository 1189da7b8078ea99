"""A second tenant is served while another client's answers are full of markers of tool calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.attacker import Attacker
from tests.security.second_tenant import Plan, SecondTenant
from tests.support.cluster import MODEL, Cluster
from tests.support.marker_model import MARKERS_PER_TOKEN, make_marker_model

pytestmark = pytest.mark.extended

NUM_CHOICES = 8
NUM_TOKENS = 500
"""Of each choice. Its 8,000 markers took a second of the event loop when the work was quadratic."""
MAX_GAP_S = 4.0
MAX_LATENCY_S = 10.0
MAX_GROWN_BYTES = 400 << 20


@pytest.mark.parametrize(("parser", "marker"), [("openai", "<|start|>"), ("hermes", "<tool_call>")])
def test_answers_full_of_markers_delay_no_other_client(parser: str, marker: str, tmp_path: Path) -> None:
    keys, model = tmp_path / "keys", tmp_path / "model"
    keys.write_text("key-of-the-attacker attacker\nkey-of-the-tenant tenant\n")
    model.mkdir()
    token_id = make_marker_model(model, marker)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "logit_bias": {str(token_id): 100},
        "ignore_eos": True,
        "max_tokens": NUM_TOKENS,
    }
    flags = ("--api-keys-file", str(keys), "--tool-call-parser", parser, "--kv-cache-gib", "0.25")
    with Cluster("--model", str(model), "--served-model-name", MODEL, *flags) as cluster:
        plan = Plan(cluster.url, "key-of-the-tenant", large_prompt_bytes=20_000)
        attacker = Attacker(cluster, "key-of-the-attacker", tmp_path)
        with SecondTenant(plan, cluster.launcher_pid) as tenant:
            answers = [
                attacker.send("/v1/chat/completions", body | {"n": NUM_CHOICES, "stream": stream})
                for stream in (False, True)
            ]
        print(f"\n{parser}: {tenant.verdict}")
        for answer in answers:
            assert answer is not None and answer.text.count(marker) == NUM_CHOICES * NUM_TOKENS * MARKERS_PER_TOKEN
        tenant.verdict.check(MAX_GAP_S, MAX_LATENCY_S, MAX_GROWN_BYTES)
