"""`tandem role` on a running cluster: workers exchange their roles under traffic, and keep them over a restart."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.cluster import OLDER_CPU, Cluster

pytestmark = pytest.mark.timeout(600)


def role(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return cluster.run("role", *arguments)


def complete(cluster: Cluster, number: int) -> list[int]:
    """number: of the prompt, which is long enough for more than one block."""
    return cluster.token_ids([7 + number] * 150, 12)


def roles(cluster: Cluster) -> dict[str, str]:
    return {report.worker.worker_id: report.worker.role for report in cluster.status().workers}


def test_two_workers_exchange_their_roles_while_they_serve() -> None:
    with Cluster("--threads-per-worker", "1", "--kv-cache-gib", "0.05", env=OLDER_CPU) as cluster:
        expected = [complete(cluster, number) for number in range(4)]
        done = threading.Event()

        def traffic(number: int) -> list[list[int]]:
            answers = []
            while not done.is_set():
                answers.append(complete(cluster, number))
            return answers

        with ThreadPoolExecutor(2) as threads:
            streams = [threads.submit(traffic, number) for number in range(2)]
            try:
                refused = role(cluster, "decode-0", "prefill")
                assert refused.returncode == 2
                assert refused.stderr.startswith("tandem: decode-0 is the last worker that may decode; give another")
                for worker, wanted in (("decode-0", "any"), ("prefill-0", "decode"), ("decode-0", "prefill")):
                    changed = role(cluster, worker, wanted)
                    assert changed.returncode == 0, changed.stderr
                    assert changed.stdout == f"{worker} has the role {wanted}\n"
                    assert complete(cluster, 2) == expected[2]
            finally:
                done.set()
            for number, stream in enumerate(streams):
                assert all(answer == expected[number] for answer in stream.result())

        assert roles(cluster) == {"prefill-0": "decode", "decode-0": "prefill"}
        assert role(cluster, "decode-7", "any").stderr.startswith(
            "tandem: no worker decode-7 is registered; registered"
        )
        assert "invalid choice: 'both'" in role(cluster, "decode-0", "both").stderr

        pid = cluster.worker("decode-0").worker.pid
        os.kill(pid, signal.SIGKILL)
        cluster.wait_for(
            lambda: any(
                each.worker.worker_id == "decode-0" and each.worker.pid != pid for each in cluster.status().workers
            )
        )
        cluster.wait_for(cluster.is_healthy)
        assert roles(cluster) == {"prefill-0": "decode", "decode-0": "prefill"}
        assert [complete(cluster, number) for number in range(4)] == expected

        changed_by_http = httpx.put(f"{cluster.admin_url}/workers/prefill-0/role", json={"role": "any"}, timeout=10)
        assert (changed_by_http.status_code, changed_by_http.json()["role"]) == (200, "any")
        cluster.wait_for(lambda: roles(cluster)["prefill-0"] == "any")
