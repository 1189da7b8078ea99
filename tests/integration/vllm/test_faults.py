"""Workers with vLLM's engine are killed and frozen, replaced and moved, under a dozen streams: no token differs.

KV travels through mapped memory, and in the exhaustive run through NIXL as between hosts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.faults.leaks import shared_memory
from tests.faults.streams import Stream
from tests.integration.vllm.dozen_streams import LIMIT_S, begin, bodies, check, check_answers, expected_tokens
from tests.support.cluster import Cluster, is_alive, tandem
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments, nixl_environment_of_vllm

pytestmark = pytest.mark.timeout(900)

PAUSE_LIMIT_S = 40.0
"""A frozen worker is noticed after 3.5 s. The rest is for a busy machine, on which another worker starts meanwhile."""


@pytest.fixture(scope="module", params=["auto", pytest.param("nixl", marks=pytest.mark.exhaustive)])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    size = ("--prefill", "1", "--decode", "2", "--kv-cache-gib", "0.1", "--worker-wait-s", "300")
    layout = (*size, "--kv-connector", request.param)
    environment = nixl_environment_of_vllm() if request.param == "nixl" else {}
    before = shared_memory()
    with Cluster(*cluster_arguments(), *layout, start_timeout_s=START_TIMEOUT_S, env=environment) as running:
        yield running
    assert shared_memory() <= before


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[list[int]]:
    return expected_tokens(cluster)


def is_whole(cluster: Cluster) -> bool:
    present = {report.worker.worker_id for report in cluster.status().workers}
    return present == {"prefill-0", "decode-0", "decode-1"} and len(cluster.ready_pairs()) >= 2


@pytest.mark.parametrize("phase", ["prompt", "decode"])
@pytest.mark.parametrize("worker_id", ["decode-0", "prefill-0"])
def test_killed_workers_cost_no_token(cluster: Cluster, expected: list[list[int]], worker_id: str, phase: str) -> None:
    worker = cluster.worker(worker_id).worker
    streams = begin(cluster, phase)
    struck_at = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)
    check(cluster, streams, expected)
    if worker_id == "decode-0":  # another worker decodes, so that nothing waits for the successor
        assert max(each.longest_pause_s(struck_at, time.monotonic()) for each in streams) < PAUSE_LIMIT_S
    assert not is_alive(worker.pid)
    cluster.wait_for(lambda: is_whole(cluster), START_TIMEOUT_S)
    assert cluster.worker(worker_id).worker.epoch != worker.epoch


@pytest.mark.parametrize("worker_id", ["decode-1", "prefill-0"])
def test_frozen_workers_cost_no_token(cluster: Cluster, expected: list[list[int]], worker_id: str) -> None:
    """The worker wakes up after it was given up, and serves again; its blocks are free then."""
    worker = cluster.worker(worker_id).worker
    streams = begin(cluster, "prompt" if worker_id == "prefill-0" else "decode")
    struck_at = time.monotonic()
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        cluster.wait_for(lambda: worker_id not in {each.worker.worker_id for each in cluster.status().workers})
        if worker_id == "decode-1":
            deadline = time.monotonic() + LIMIT_S
            assert all(each.wait(max(1.0, deadline - time.monotonic())) for each in streams)
            assert max(each.longest_pause_s(struck_at, time.monotonic()) for each in streams) < PAUSE_LIMIT_S
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    cluster.wait_for(lambda: is_whole(cluster))
    check(cluster, streams, expected)
    assert cluster.worker(worker_id).worker.epoch == worker.epoch


def test_a_worker_that_is_killed_while_frozen_is_replaced(cluster: Cluster, expected: list[list[int]]) -> None:
    worker = cluster.worker("decode-0").worker
    streams = begin(cluster, "prompt")
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(worker.pid, signal.SIGKILL)
    check(cluster, streams, expected)
    cluster.wait_for(lambda: is_whole(cluster), START_TIMEOUT_S)


def test_abandoned_requests_leave_nothing(cluster: Cluster, expected: list[list[int]]) -> None:
    """In all phases: waiting, computed, shipped, received and decoded prompts."""
    for delay_s in (0.0, 0.05, 0.2, 0.5, 1.0):
        streams = [Stream(cluster, {**body, "cache_salt": str(time.monotonic())}) for body in bodies()]
        time.sleep(delay_s)
        for each in streams:
            with suppress(OSError):  # it has ended
                each.abandon()
        assert all(each.wait(LIMIT_S) for each in streams)
        cluster.wait_for(cluster.all_blocks_free)
    check(cluster, begin(cluster, "prompt"), expected)


def test_roles_change_under_load(cluster: Cluster, expected: list[list[int]]) -> None:
    for worker_id, role in (("decode-1", "any"), ("decode-1", "prefill"), ("prefill-0", "decode")):
        streams = begin(cluster, "decode")
        assert not cluster.give_role(worker_id, role)  # type: ignore[arg-type]
        check(cluster, streams, expected)
    for worker_id, role in (("prefill-0", "any"), ("decode-1", "decode"), ("prefill-0", "prefill")):
        assert not cluster.give_role(worker_id, role)  # type: ignore[arg-type]
    cluster.wait_for(lambda: is_whole(cluster))
    check(cluster, begin(cluster, "prompt"), expected)


def test_a_rolling_restart_costs_no_token(cluster: Cluster, expected: list[list[int]]) -> None:
    before = {each.worker.worker_id: each.worker for each in cluster.status().workers}
    command = tandem("restart", "--port", str(cluster.port), "--timeout-s", "400")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as restart:
        while restart.poll() is None:
            check_answers(begin(cluster, "prompt"), expected)
        assert restart.stdout is not None
        assert restart.returncode == 0, restart.stdout.read()
    after = {each.worker.worker_id: each.worker for each in cluster.status().workers}
    assert after.keys() == before.keys()
    assert all(after[each].epoch != before[each].epoch for each in before)
    assert not [each.pid for each in before.values() if is_alive(each.pid)]
    cluster.wait_for(cluster.all_blocks_free)
