"""Workers with vLLM's engine are killed and frozen, replaced and moved, under a dozen streams: no token differs.

KV travels through mapped memory, and in the exhaustive run through NIXL as between hosts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tandem.protocol.messages.membership import WorkerInfo
from tests.faults.leaks import shared_memory
from tests.faults.streams import Stream
from tests.integration.vllm.dozen_streams import LIMIT_S, begin, check, check_answers, expected_tokens
from tests.integration.vllm.faulty_model import Faults
from tests.integration.vllm.held_phases import CHUNK, NUMBERS, PHASES, RESUMED_CHUNK, HeldPhases
from tests.support.cluster import Cluster, is_alive, tandem
from tests.support.processes import descendants
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments, kv_caches, nixl_environment_of_vllm
from tests.support.vllm_python import vllm_python

pytestmark = pytest.mark.timeout(900)

KILLED = [
    ("prefill", "computing"),
    ("prefill", "shipping"),
    ("decode", "shipping"),
    ("decode", "shipped"),
    ("decode", "decoding"),
    pytest.param("prefill", "shipped", marks=pytest.mark.exhaustive),
    pytest.param("prefill", "decoding", marks=pytest.mark.exhaustive),
    pytest.param("decode", "computing", marks=pytest.mark.exhaustive),
]
SECOND = [
    ("decode", "shipped", "SIGKILL"),
    pytest.param("decode", "shipped", "SIGSTOP", marks=pytest.mark.exhaustive),
    *(
        pytest.param(side, "shipping", fault, marks=pytest.mark.exhaustive)
        for side in ("prefill", "decode")
        for fault in ("SIGKILL", "SIGSTOP")
    ),
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"), vllm_python())


@pytest.fixture(scope="module", params=["auto", pytest.param("nixl", marks=pytest.mark.exhaustive)])
def cluster(request: pytest.FixtureRequest, faults: Faults) -> Iterator[Cluster]:
    size = ("--prefill", "1", "--decode", "2", "--kv-cache-gib", "0.1", "--worker-wait-s", "300")
    layout = (*size, "--max-num-batched-tokens", str(CHUNK), "--kv-connector", request.param)
    environment = {**faults.environment, **(nixl_environment_of_vllm() if request.param == "nixl" else {})}
    arguments = (*cluster_arguments(str(faults.python)), *layout)
    before = shared_memory()
    with Cluster(*arguments, start_timeout_s=START_TIMEOUT_S, env=environment) as running:
        yield running
    running.wait_for(lambda: shared_memory() <= before)  # a new file may be another program's, not mapped yet


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[list[int]]:
    return expected_tokens(cluster)


@pytest.fixture(scope="module")
def phases(cluster: Cluster, faults: Faults) -> HeldPhases:
    return HeldPhases(cluster, faults)


def is_whole(cluster: Cluster) -> bool:
    """Whether all workers are there with their pairs, and no KV cache is kept of one that has ended."""
    present = {report.worker.worker_id for report in cluster.status().workers}
    has_all = present == {"prefill-0", "decode-0", "decode-1"} and len(cluster.ready_pairs()) >= 2
    return has_all and len(kv_caches(cluster)) == 3


def check_held(cluster: Cluster, streams: list[Stream], expected: list[list[int]]) -> None:
    check(cluster, streams, [expected[number] for number in NUMBERS])


def kill(cluster: Cluster, worker: WorkerInfo) -> list[int]:
    """Returns the processes that must be gone."""
    processes = [worker.pid, *descendants(worker.pid)]
    os.kill(worker.pid, signal.SIGKILL)
    return processes


def check_replaced(cluster: Cluster, *gone: tuple[WorkerInfo, list[int]]) -> None:
    cluster.wait_for(lambda: is_whole(cluster), START_TIMEOUT_S)
    for worker, processes in gone:
        assert cluster.worker(worker.worker_id).worker.epoch != worker.epoch
        assert not [each for each in processes if is_alive(each)]


@contextmanager
def frozen(cluster: Cluster, worker: WorkerInfo) -> Iterator[None]:
    """Begins when the worker has been given up. It wakes up at the end, and serves again."""
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        cluster.wait_for(lambda: worker.worker_id not in {each.worker.worker_id for each in cluster.status().workers})
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    cluster.wait_for(lambda: is_whole(cluster), START_TIMEOUT_S)
    assert cluster.worker(worker.worker_id).worker.epoch == worker.epoch


@pytest.mark.parametrize(("side", "phase"), KILLED)
def test_killed_workers_cost_no_token(
    cluster: Cluster, phases: HeldPhases, expected: list[list[int]], side: str, phase: str
) -> None:
    with phases.held(phase) as held:
        worker = held.prefill if side == "prefill" else held.decode
        processes = kill(cluster, worker)
        phases.release()
        check_held(cluster, held.streams, expected)
    check_replaced(cluster, (worker, processes))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_frozen_workers_cost_no_token(
    cluster: Cluster, phases: HeldPhases, expected: list[list[int]], side: str, phase: str
) -> None:
    """All streams end while the worker is frozen. It wakes up in the step in which it was held; its blocks are free."""
    with phases.held(phase) as held:
        worker = held.prefill if side == "prefill" else held.decode
        with frozen(cluster, worker):
            phases.release()
            if side == "prefill":
                assert not cluster.give_role(held.other.worker_id, "any")
            check_answers(held.streams, [expected[number] for number in NUMBERS])
    if side == "prefill":
        assert not cluster.give_role(held.other.worker_id, "decode")
    cluster.wait_for(cluster.all_blocks_free)


@pytest.mark.parametrize(("side", "phase", "fault"), SECOND)
def test_a_second_fault_while_sequences_resume_costs_no_token(
    cluster: Cluster, phases: HeldPhases, expected: list[list[int]], side: str, phase: str, fault: str
) -> None:
    """The first one kills the worker that decodes. phase: of the sequence that resumes, when the second one strikes."""
    with phases.held("decoding") as held:
        if phase == "shipping":
            phases.hold(held.prefill, RESUMED_CHUNK)
        first = kill(cluster, held.decode)
        phases.wait_until_held(held.prefill if phase == "shipping" else held.other)
        worker = held.prefill if side == "prefill" else held.other
        if fault == "SIGKILL":
            second = kill(cluster, worker)
            phases.release()
            check_held(cluster, held.streams, expected)
            check_replaced(cluster, (held.decode, first), (worker, second))
            return
        with frozen(cluster, worker):
            phases.release()
        check_held(cluster, held.streams, expected)
        check_replaced(cluster, (held.decode, first))


def test_a_worker_that_is_killed_while_frozen_is_replaced(cluster: Cluster, expected: list[list[int]]) -> None:
    worker = cluster.worker("decode-0").worker
    streams = begin(cluster, "prompt")
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(worker.pid, signal.SIGKILL)
    check(cluster, streams, expected)
    cluster.wait_for(lambda: is_whole(cluster), START_TIMEOUT_S)


@pytest.mark.parametrize("phase", PHASES)
def test_abandoned_requests_leave_nothing(
    cluster: Cluster, phases: HeldPhases, expected: list[list[int]], phase: str
) -> None:
    """The proxy ends them while a worker is held, which hears of it from its next step on."""
    with phases.held(phase) as held:
        for each in held.streams:
            with suppress(OSError):  # it has ended
                each.abandon()
        cluster.wait_for(lambda: cluster.status().num_requests == 0)
    assert all(each.wait(LIMIT_S) for each in held.streams)
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
