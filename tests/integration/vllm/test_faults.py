"""Workers with vLLM's engine are killed and frozen, replaced and moved, under a dozen streams: no token differs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.faults.leaks import shared_memory
from tests.faults.streams import Stream
from tests.support.cluster import MODEL, Cluster, is_alive, tandem
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments, complete

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 120
LIMIT_S = 200.0
PAUSE_LIMIT_S = 40.0
"""A frozen worker is noticed after 3.5 s. The rest is for a busy machine, on which another worker starts meanwhile."""
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 5},
    {"temperature": 0.9, "seed": 6, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.8, "seed": 7, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]


def bodies() -> list[dict[str, Any]]:
    """A dozen requests with prompts of 3 to 1,500 tokens."""
    draw = random.Random(8)
    lengths = [3, 31, 64, 100, 200, 333, 400, 512, 640, 900, 1200, 1500]
    return [
        {
            "model": MODEL,
            "prompt": [draw.randrange(4, 2000) for _ in range(length)],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            **SAMPLING[number % len(SAMPLING)],
        }
        for number, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    size = ("--prefill", "1", "--decode", "2", "--kv-cache-gib", "0.1", "--worker-wait-s", "300")
    before = shared_memory()
    with Cluster(*cluster_arguments(), *size, start_timeout_s=START_TIMEOUT_S) as running:
        yield running
    assert shared_memory() <= before


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[list[int]]:
    with ThreadPoolExecutor(4) as pool:
        return [tokens for [tokens] in pool.map(lambda body: complete(cluster, body), bodies())]


def is_whole(cluster: Cluster) -> bool:
    present = {report.worker.worker_id for report in cluster.status().workers}
    return present == {"prefill-0", "decode-0", "decode-1"} and len(cluster.ready_pairs()) >= 2


def begin(cluster: Cluster, phase: str) -> list[Stream]:
    """Starts a dozen streams and waits for a phase: that of the prompts, or of the answers."""
    streams = [Stream(cluster, {**body, "cache_salt": str(time.monotonic())}) for body in bodies()]
    if phase == "decode":
        cluster.wait_for(lambda: all(len(each.token_ids) > 8 or each.has_ended for each in streams))
    else:
        cluster.wait_for(lambda: any(each.token_ids for each in streams))
    return streams


def check(cluster: Cluster, streams: list[Stream], expected: list[list[int]]) -> None:
    """Asserts that all streams end with the tokens that they have without a fault, and that no block is taken."""
    check_answers(streams, expected)
    cluster.wait_for(cluster.all_blocks_free)


def check_answers(streams: list[Stream], expected: list[list[int]]) -> None:
    deadline = time.monotonic() + LIMIT_S
    assert all(each.wait(max(1.0, deadline - time.monotonic())) for each in streams)
    assert [each.outcome for each in streams] == ["length"] * len(streams)
    wrong = [number for number, each in enumerate(streams) if each.token_ids != expected[number]]
    assert not wrong, f"other tokens: {wrong}"


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
