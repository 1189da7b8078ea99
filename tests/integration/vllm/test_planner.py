"""The planner gives a worker with vLLM's engine another role under load, and no token of the streams differs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.protocol.messages.membership import WorkerInfo, WorkerReport
from tests.faults.streams import Stream
from tests.integration.vllm.dozen_streams import LIMIT_S, bodies, check_answers, expected_tokens
from tests.support.cluster import Cluster
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments

pytestmark = pytest.mark.timeout(900)

NUM_STREAMS, NUM_TOKENS = 6, 150
MAX_NUM_SEQS = 5
"""Fewer than the clients, so that one decode worker is full on any machine; more than `expected_tokens` asks for."""
PLANNER = ("--autoscale", "--autoscale-max-workers", "3", "--autoscale-ttft-ms", "60000")
"""No further worker is started, and one prefill worker is enough for the prompts."""


def moved(cluster: Cluster, before: dict[str, WorkerInfo]) -> list[WorkerReport]:
    """Returns the workers whose role has changed."""
    return [each for each in cluster.status().workers if each.worker.role != before[each.worker.worker_id].role]


def test_a_prefill_worker_becomes_a_decode_worker() -> None:
    size = ("--prefill", "2", "--decode", "1", "--kv-cache-gib", "0.1", "--max-num-seqs", str(MAX_NUM_SEQS))
    with Cluster(*cluster_arguments(), *size, *PLANNER, start_timeout_s=START_TIMEOUT_S) as cluster:
        before = {each.worker.worker_id: each.worker for each in cluster.status().workers}
        expected = expected_tokens(cluster, NUM_TOKENS, NUM_STREAMS)
        assert not moved(cluster, before)
        done = threading.Event()

        def ask(number: int) -> None:
            while not done.is_set():
                body = bodies(NUM_TOKENS, NUM_STREAMS)[number]
                stream = Stream(cluster, body)
                assert stream.wait(LIMIT_S)
                check_answers([stream], [expected[number]])

        def serves_as_decode() -> bool:
            """Whether a worker that was a prefill worker decodes. Raises the error of a client that has ended."""
            for each in clients:
                if each.done():
                    each.result()
            return any(each.load.num_decoding for each in moved(cluster, before))

        with ThreadPoolExecutor(2 * NUM_STREAMS) as threads:
            clients = [threads.submit(ask, number % NUM_STREAMS) for number in range(2 * NUM_STREAMS)]
            try:
                cluster.wait_for(serves_as_decode, START_TIMEOUT_S)
            finally:
                done.set()
        for each in clients:
            each.result()
        after = {each.worker.worker_id: each.worker for each in cluster.status().workers}
        assert sorted(each.role for each in after.values()) == ["decode", "decode", "prefill"]
        assert {name: each.epoch for name, each in after.items()} == {name: each.epoch for name, each in before.items()}
        cluster.wait_for(cluster.all_blocks_free)
