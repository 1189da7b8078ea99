"""`tandem scale` on a running cluster: workers join and leave while it serves, and the planner logs proposals."""

from __future__ import annotations

import subprocess

import httpx
import pytest

from tests.support.cluster import MODEL, Cluster

pytestmark = pytest.mark.timeout(600)

PROMPT = list(range(20, 60))


def scale(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return cluster.run("scale", "--timeout-s", "280", *arguments)


def restart(cluster: Cluster, *names: str) -> subprocess.CompletedProcess[str]:
    return cluster.run("restart", "--timeout-s", "120", *names)


def test_roles_are_scaled_up_and_down_while_it_serves() -> None:
    with Cluster("--threads-per-worker", "1", "--kv-cache-gib", "0.05") as cluster:
        expected = cluster.token_ids(PROMPT, 8)
        up = scale(cluster, "decode=2")
        assert up.returncode == 0 and up.stdout == "prefill=1 decode=2\n", up.stderr
        assert {report.worker.worker_id for report in cluster.status().workers} == {"prefill-0", "decode-0", "decode-1"}
        assert cluster.token_ids(PROMPT, 8) == expected

        left = cluster.run("drain", "decode-0")
        assert left.returncode == 0, left.stderr
        again = scale(cluster, "prefill=1")  # decode keeps its count, so the drained worker is not replaced
        assert again.returncode == 0 and again.stdout == "prefill=1 decode=1\n", again.stderr
        again = scale(cluster, "decode=2")
        assert again.returncode == 0, again.stderr
        assert {report.worker.worker_id for report in cluster.status().workers} == {"prefill-0", "decode-0", "decode-1"}

        down = scale(cluster, "prefill=1", "decode=1")
        assert down.returncode == 0, down.stderr
        assert {report.worker.worker_id for report in cluster.status().workers} == {"prefill-0", "decode-0"}
        assert cluster.token_ids(PROMPT, 8) == expected

        wrong = scale(cluster, "prefill=0")
        assert (wrong.returncode, wrong.stderr) == (
            2,
            "tandem: no worker could prefill any more; keep one of role prefill or any\n",
        )

        assert "autoscaling (dry run): prefill=1 decode=1 is enough" in cluster.run("status").stdout


def test_decode_workers_serve_alone_until_a_prefill_worker_is_added() -> None:
    alone = ("--prefill", "0", "--decode-prefill-threshold", "64")
    with Cluster(*alone, "--threads-per-worker", "1", "--kv-cache-gib", "0.05") as cluster:
        assert {report.worker.worker_id for report in cluster.status().workers} == {"decode-0"}
        expected = cluster.token_ids(PROMPT, 8)
        prompt = {"model": MODEL, "prompt": [5] * 300, "max_tokens": 4, "ignore_eos": True}  # beyond the threshold
        url = f"{cluster.url}/v1/completions"
        assert httpx.post(url, json=prompt, timeout=60).json()["usage"]["completion_tokens"] == 4

        up = scale(cluster, "prefill=1")
        assert up.returncode == 0 and up.stdout == "prefill=1 decode=1\n", up.stderr
        assert cluster.token_ids(PROMPT, 8) == expected
        assert httpx.post(url, json=prompt | {"prompt": [6] * 300}, timeout=60).status_code == 200
        cluster.wait_for(lambda: cluster.worker("prefill-0").load.num_finished > 0, 10)

        unknown = restart(cluster, "nobody")
        assert unknown.stderr == "tandem: no process is called nobody; the cluster runs proxy-0, decode-0, prefill-0\n"
        before = {report.worker.worker_id: report.worker.pid for report in cluster.status().workers}
        anew = restart(cluster, "prefill-0", "proxy-0")
        assert anew.returncode == 0, anew.stderr
        after = {report.worker.worker_id: report.worker.pid for report in cluster.status().workers}
        assert after["prefill-0"] != before["prefill-0"] and after["decode-0"] == before["decode-0"]
        assert cluster.token_ids(PROMPT, 8) == expected
