"""Invalid input on every socket of a real cluster: no crash, hang or leak, and every refusal is counted."""

from __future__ import annotations

from tests.security.fuzzing.fuzz_cluster import MAX_PROXY_GROWTH_MIB, MAX_WORKER_GROWTH_MIB, run
from tests.support.cluster import Cluster

NUM_INPUTS = 3000


def test_a_cluster_survives_invalid_input() -> None:
    with Cluster("--kv-cache-gib", "0.05", "--device", "cpu") as cluster:
        figures = run(cluster.port, cluster.admin_url, NUM_INPUTS, seed=0)
        assert "a message handler failed" not in cluster.logs()
    assert figures["num_inputs"] >= NUM_INPUTS
    assert not figures["internal_errors"], "\n".join(figures["internal_errors"])
    assert figures["replay_outcomes"]["length"] > 0, "no replayed request completed"
    refused = figures["refusals"]
    assert {label.split('"')[-2] for label in refused} >= {"bad_handshake", "not_a_message", "not_possible"}
    for process in ("prefill-0", "decode-0", "proxy-0"):
        assert any(label.startswith(process) for label in refused), f"{process} counted no refusal"
    growth = figures["memory_growth_mib"]
    assert growth.pop("proxy-0") < MAX_PROXY_GROWTH_MIB
    assert max(growth.values()) < MAX_WORKER_GROWTH_MIB
