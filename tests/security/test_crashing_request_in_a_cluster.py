"""Each process that computes one prompt is killed; the prompt is refused soon, and all others are served."""

from __future__ import annotations

import os
import signal
import time

import httpx
import pytest

from tandem.proxy.dispatch.sequence import MAX_DEATHS
from tests.faults.phases import Phases
from tests.faults.streams import Stream
from tests.security.second_tenant import Plan, SecondTenant
from tests.support.cluster import MODEL, Cluster

FLAGS = ("--prefill", "2", "--decode", "1", "--max-num-batched-tokens", "16", "--worker-wait-s", "120")
POISON = {"model": MODEL, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
MAX_GAP_S = 5.0
MAX_LATENCY_S = 50.0
"""For prompts of the second tenant, which wait while a suspect is tried alone and when a worker starts again."""


def kill_each_worker_of(poison: Stream, phases: Phases, killed: set[int]) -> None:
    """Kills each prefill worker that computes the request, until it ends. Its prompt takes a hundred steps."""
    num_seen = 0
    deadline = time.monotonic() + 240
    while not poison.has_ended and time.monotonic() < deadline:
        dispatched = [each for each in phases.events(poison) if each["event"] == "dispatched"]
        if len(dispatched) > num_seen and not poison.has_ended:
            num_seen = len(dispatched)
            pid = phases.pid(dispatched[-1]["prefill"])
            if pid not in killed:  # else it was dispatched once more before the launcher reported the exit
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.01)


@pytest.mark.extended
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_request_whose_workers_die_is_refused_and_no_other() -> None:
    with Cluster(*FLAGS) as cluster:
        phases = Phases(cluster)
        with SecondTenant(Plan(cluster.url, large_prompt_bytes=20_000)) as tenant:
            for attempt in range(6):  # a fast machine may compute the prompt before its worker is killed
                poison_body = {**POISON, "prompt": [7, attempt] * 900}
                poison, killed = Stream(cluster, poison_body), set[int]()
                kill_each_worker_of(poison, phases, killed)
                if poison.outcome != "length":
                    break
            assert poison.outcome == "request_crashes_workers" and poison.token_ids == []
            # One more if the decode worker reports a death before the launcher, or another prompt is a suspect too.
            assert MAX_DEATHS <= len(killed) <= MAX_DEATHS + 1
            again = httpx.post(f"{cluster.url}/v1/completions", json=poison_body, timeout=60)
            assert (again.status_code, again.json()["error"]["code"]) == (400, "request_crashes_workers")
        print(f"\n{tenant.verdict}")
        tenant.verdict.check(MAX_GAP_S, MAX_LATENCY_S, 0)
        cluster.wait_for(cluster.all_blocks_free)
