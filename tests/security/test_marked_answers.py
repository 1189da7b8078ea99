"""A second tenant is served while another client's answers are full of markers of tool calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.proxy.parsers.tool_parser import MAX_HEAD_CHARACTERS
from tests.security.attacker import Attacker
from tests.security.marked_answers import MARKED_ATTACKS, NUM_CHOICES, NUM_TOKENS, marked_answers, marker_model
from tests.security.second_tenant import Plan, SecondTenant
from tests.support.cluster import MODEL, Cluster
from tests.support.marker_model import MARKERS_PER_TOKEN

pytestmark = [pytest.mark.extended, pytest.mark.alone]

MAX_LATENCY_S = 10.0


@pytest.mark.parametrize(("parser", "marker"), [("openai", "<|start|>"), ("hermes", "<tool_call>")])
def test_answers_full_of_markers_delay_no_other_client(parser: str, marker: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-the-attacker attacker\nkey-of-the-tenant tenant\n")
    flags = ("--api-keys-file", str(keys), "--tool-call-parser", parser, "--kv-cache-gib", "0.25")
    with Cluster("--model", str(marker_model(tmp_path, marker)), "--served-model-name", MODEL, *flags) as cluster:
        plan = Plan(cluster.url, "key-of-the-tenant", large_prompt_bytes=20_000)
        with SecondTenant(plan, cluster.launcher_pid) as tenant:
            answers = marked_answers(Attacker(cluster, "key-of-the-attacker", tmp_path))
        print(f"\n{parser}: {tenant.verdict}")
        for answer in answers:
            assert answer is not None
            # What has begun as a call, up to the length of a head, is no content where a limit cuts it.
            num_cut = NUM_CHOICES * NUM_TOKENS * MARKERS_PER_TOKEN - answer.text.count(marker)
            assert 0 <= num_cut <= NUM_CHOICES * (1 + MAX_HEAD_CHARACTERS / len(marker))
        [attack] = MARKED_ATTACKS
        tenant.verdict.check(attack.max_gap_s, MAX_LATENCY_S, attack.max_grown_bytes)
