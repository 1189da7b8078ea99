"""Prefill and decode workers of two ranks each answer as vLLM alone with two ranks, also when ranks are killed.

KV travels through mapped memory, and in the exhaustive run encrypted over TCP and through NIXL as between hosts.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tandem.protocol.network_keys import make_keys
from tests.faults.leaks import shared_memory
from tests.faults.streams import Stream
from tests.integration.vllm.dozen_streams import LIMIT_S, begin, bodies, check, check_answers
from tests.support.cluster import Cluster, is_alive
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments, nixl_environment_of_vllm, run_with_vllm

# Ranks that wait for each other spin: four of them on two cores may end a request.
pytestmark = [pytest.mark.timeout(900), pytest.mark.alone, pytest.mark.exhaustive]

NUM_TOKENS, NUMBER = 60, 6
"""Of each answer, and of the streams."""
NUM_RANKS = 2
SIZE = ("--prefill", "1", "--decode", "1", "--tensor-parallel-size", str(NUM_RANKS), "--kv-cache-gib", "0.1")


@pytest.fixture(
    scope="module", params=["ipc", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("tcp", "nixl"))]
)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    layout: tuple[str, ...] = (*SIZE, "--kv-connector", request.param, "--worker-wait-s", "300")
    if request.param == "tcp":
        folder = tmp_path_factory.mktemp("keys") / "keys"
        make_keys(folder)
        layout += ("--network-keys", str(folder))
    environment = nixl_environment_of_vllm() if request.param == "nixl" else {}
    before = shared_memory()
    with Cluster(*cluster_arguments(), *layout, start_timeout_s=START_TIMEOUT_S, env=environment) as running:
        yield running
        ranks = [pid for pid in running.pids() for pid in ranks_of(pid)]
    running.wait_for(lambda: not any(map(is_alive, ranks)))
    running.wait_for(lambda: shared_memory() <= before)  # Python's resource trackers end after the ranks


@pytest.fixture(scope="module")
def expected(noise_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers of vLLM alone."""
    own = ("model", "prompt", "return_token_ids")
    asked = [
        {
            "prompt": body["prompt"],
            "sampling": {name: value for name, value in body.items() if name not in own},
            "uses_adapter": False,
        }
        for body in bodies(NUM_TOKENS, NUMBER)
    ]
    file = tmp_path_factory.mktemp("requests") / "requests.json"
    file.write_text(json.dumps(asked))
    program = Path(__file__).with_name("answers_of_vllm_alone.py")
    answers = run_with_vllm(program, str(noise_model), str(NUM_RANKS), "", str(file))
    return [choice["token_ids"] for [choice] in answers]


def ranks_of(pid: int) -> list[int]:
    """Process ids of a worker's ranks, in order."""
    found = {each.name(): each.pid for each in psutil.Process(pid).children() if each.name().startswith("VLLM::")}
    return [found[name] for name in sorted(found)]


def begin_all(cluster: Cluster, number: int) -> list[Stream]:
    """Starts streams and waits for none."""
    salted = [{**body, "cache_salt": str(time.monotonic())} for body in bodies(NUM_TOKENS, number)]
    return [Stream(cluster, body) for body in salted]


def is_whole(cluster: Cluster) -> bool:
    present = {report.worker.worker_id for report in cluster.status().workers}
    return present == {"prefill-0", "decode-0"} and len(cluster.ready_pairs()) == 1


@pytest.mark.exhaustive
def test_a_frozen_rank_costs_no_token(expected: list[list[int]]) -> None:
    """Its worker ends by the limit that vLLM has for a step. Then no process can write to decode's blocks any more."""
    environment = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "40"}  # the first step of a rank takes seconds
    layout = (*cluster_arguments(), *SIZE, "--worker-wait-s", "300")
    with Cluster(*layout, start_timeout_s=START_TIMEOUT_S, env=environment) as cluster:
        worker = cluster.worker("prefill-0").worker
        ranks = ranks_of(worker.pid)
        os.kill(ranks[1], signal.SIGSTOP)
        check_answers(begin_all(cluster, NUMBER), expected)
        assert not [pid for pid in (worker.pid, *ranks) if is_alive(pid)]
        cluster.wait_for(lambda: is_whole(cluster), START_TIMEOUT_S)
        cluster.wait_for(cluster.all_blocks_free)


def test_answers_are_those_of_vllm_alone(
    cluster: Cluster, expected: list[list[int]], request: pytest.FixtureRequest
) -> None:
    check(cluster, begin(cluster, "prompt", NUM_TOKENS, NUMBER), expected)
    workers = cluster.status().workers
    assert [each.worker.num_ranks for each in workers] == [NUM_RANKS] * 2
    assert all(each.load.num_transferred_bytes for each in workers)
    [pair] = [pair for each in workers for pair in each.pairs]
    assert pair.connector == request.node.callspec.params["cluster"]


def test_abandoned_requests_leave_nothing(cluster: Cluster, expected: list[list[int]]) -> None:
    for delay_s in (0.0, 0.2):
        streams = begin_all(cluster, 10)
        time.sleep(delay_s)
        for each in streams:
            with suppress(OSError):  # it has ended
                each.abandon()
        assert all(each.wait(LIMIT_S) for each in streams)
        cluster.wait_for(cluster.all_blocks_free)
    check(cluster, begin(cluster, "prompt", NUM_TOKENS, NUMBER), expected)


@pytest.mark.parametrize(
    "victims",
    [
        ["decode-0", "prefill-0"],  # both at once, which takes one start's time
        pytest.param(["decode-0"], marks=pytest.mark.exhaustive),
        pytest.param(["prefill-0"], marks=pytest.mark.exhaustive),
    ],
    ids="+".join,
)
def test_killed_ranks_cost_no_token(cluster: Cluster, expected: list[list[int]], victims: list[str]) -> None:
    workers = {worker_id: cluster.worker(worker_id).worker for worker_id in victims}
    ranks = {worker_id: ranks_of(worker.pid) for worker_id, worker in workers.items()}
    assert all(len(each) == NUM_RANKS for each in ranks.values())
    streams = begin(cluster, "decode", NUM_TOKENS, NUMBER)
    if "prefill-0" in victims:  # some streams compute their prompts, others decode
        streams += begin(cluster, "prompt", NUM_TOKENS, NUMBER)
    for number, worker_id in enumerate(victims):
        os.kill(ranks[worker_id][1 - number], signal.SIGKILL)
    check_answers(streams, expected + expected if len(streams) > NUMBER else expected)
    for worker_id in victims:
        left = [pid for pid in (workers[worker_id].pid, *ranks[worker_id]) if is_alive(pid)]
        assert not left, f"{worker_id}: {left}"
    cluster.wait_for(lambda: is_whole(cluster), START_TIMEOUT_S)
    cluster.wait_for(cluster.all_blocks_free)


def test_ranks_end_with_their_worker(cluster: Cluster) -> None:
    """Also one that is stopped, and one that computes with it. Last in this file: nothing waits for the successor."""
    worker = cluster.worker("decode-0").worker
    ranks = ranks_of(worker.pid)
    streams = begin(cluster, "decode", NUM_TOKENS, NUMBER)
    os.kill(ranks[0], signal.SIGSTOP)
    os.kill(worker.pid, signal.SIGKILL)
    cluster.wait_for(lambda: not any(map(is_alive, ranks)))
    for each in streams:
        with suppress(OSError):  # it has ended
            each.abandon()
