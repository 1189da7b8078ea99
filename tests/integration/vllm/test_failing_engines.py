"""vLLM's engine fails or hangs in a step, and workers drain and join, under long streams: no token differs."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tandem.deploy.processes.runtime_dir import log_dir
from tandem.protocol.messages.membership import WorkerInfo
from tests.faults.leaks import shared_memory
from tests.faults.streams import Stream
from tests.integration.vllm.dozen_streams import begin, bodies, check, expected_tokens
from tests.integration.vllm.faulty_model import Faults
from tests.support.cluster import MODEL, Cluster, children_of, command_line, is_alive, is_copy, tandem
from tests.support.noise_model import ensure_noise_model
from tests.support.ports import free_port
from tests.support.processes import descendants
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments, kv_caches
from tests.support.vllm_python import vllm_python

pytestmark = pytest.mark.timeout(600)

NUM_STREAMS, NUM_TOKENS = 6, 600
"""With short prompts, so that all have begun long before the first one ends, also where other programs run."""
STEP_TIMEOUT_S, CHUNK = 8, 256
"""A step may take 8 s and 10 ms for each of 256 tokens."""
SIZE = ("--kv-cache-gib", "0.1", "--max-num-batched-tokens", str(CHUNK))
OWN = {"worker-0", "worker-1"}
JOINED = "worker-0-joined"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    faults = Faults(tmp_path_factory.mktemp("faults"), vllm_python())
    faults.environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(STEP_TIMEOUT_S)
    return faults


@pytest.fixture(scope="module")
def port() -> int:
    """Port at which workers join."""
    return free_port()


@pytest.fixture(scope="module")
def cluster(faults: Faults, port: int) -> Iterator[Cluster]:
    hosts = ("--cluster-host", "127.0.0.1", "--cluster-port", str(port), "--insecure-network")
    more = ("--workers", "2", "--worker-wait-s", "300", "--drain-timeout-s", "120", *SIZE, *hosts)
    arguments = (*cluster_arguments(str(faults.python)), *more)
    before = shared_memory()
    with Cluster(*arguments, env=faults.environment, start_timeout_s=START_TIMEOUT_S) as running:
        yield running
    running.wait_for(lambda: shared_memory() <= before)  # a new file may be another program's, not mapped yet


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[list[int]]:
    return expected_tokens(cluster, NUM_TOKENS, NUM_STREAMS)


def join(port: int, *arguments: str) -> list[str]:
    hosts = ("--join", f"tcp://127.0.0.1:{port}", "--cluster-host", "127.0.0.1", "--insecure-network")
    return tandem("worker", "any", "--model", str(ensure_noise_model()), *hosts, *SIZE, "--name", "joined", *arguments)


@pytest.fixture(scope="module")
def joining(faults: Faults, port: int) -> Iterator[subprocess.Popen[str]]:
    """A second launcher, whose worker has less time to drain than its streams take."""
    command = join(port, *cluster_arguments(str(faults.python)), "--drain-timeout-s", "0.6")
    env = {**os.environ, **faults.environment}
    launcher = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield launcher
    finally:
        launcher.kill()  # if the test that ends it has failed
        launcher.communicate()


def is_whole(cluster: Cluster, workers: set[str]) -> bool:
    """Whether these workers are there, each with pairs to all others, and no KV cache of another one is kept."""
    present = {each.worker.worker_id for each in cluster.status().workers}
    num_pairs = len(workers) * (len(workers) - 1)
    return present == workers and len(cluster.ready_pairs()) == num_pairs and len(kv_caches(cluster)) == len(workers)


def preloaded_of(launcher: int) -> int:
    [pid] = [each for each in children_of(launcher) if "tandem.vllm_worker.preload" in command_line(each)]
    return pid


def log_of(cluster: Cluster, worker_id: str) -> str:
    return (log_dir(cluster.port) / f"{worker_id}.log").read_text()


def launched(cluster: Cluster) -> set[tuple[str, str]]:
    """Returns the processes of workers that have become ready so far, by name and line of their log."""
    return {(each, line) for each in OWN for line in log_of(cluster, each).splitlines() if " ready: " in line}


def begin_on(cluster: Cluster, worker_id: str) -> list[Stream]:
    """Begins streams that this worker decodes, wherever the router would place them: the others are for prompts then.

    They take all requests again when all streams have begun.
    """
    others = [each.worker.worker_id for each in cluster.status().workers if each.worker.worker_id != worker_id]
    for each in others:
        assert not cluster.give_role(each, "prefill")
    streams = begin(cluster, "decode", NUM_TOKENS, NUM_STREAMS)
    for each in others:
        assert not cluster.give_role(each, "any")
    return streams


@pytest.mark.parametrize(
    ("worker_id", "hangs", "reason"),
    [
        ("worker-0", False, "vLLM's engine has failed: the model is broken"),
        ("worker-1", True, "a step has not ended in 11 s: vLLM's engine hangs; the worker ends"),
    ],
    ids=["fails", "hangs"],
)
def test_an_engine_that_fails_or_hangs_costs_no_token(
    cluster: Cluster, faults: Faults, expected: list[list[int]], worker_id: str, hangs: bool, reason: str
) -> None:
    worker = cluster.worker(worker_id).worker
    processes = [worker.pid, *descendants(worker.pid)]
    before = cluster.num_migrations()
    faults.slow(worker.pid)
    streams = begin_on(cluster, worker_id)
    (faults.hold if hangs else faults.fail)(worker.pid)
    check(cluster, streams, expected)
    assert cluster.num_migrations() > before
    assert reason in log_of(cluster, worker_id)
    cluster.wait_for(lambda: is_whole(cluster, OWN), START_TIMEOUT_S)
    assert cluster.worker(worker_id).worker.epoch != worker.epoch
    assert not [each for each in processes if is_alive(each)]


def test_a_prompt_that_ends_engines_costs_two_of_them(
    cluster: Cluster, faults: Faults, expected: list[list[int]]
) -> None:
    """It is refused then, also as one of several requests. Streams beside it go on, and short prompts are served."""
    used = {token for tokens in expected for token in tokens} | {t for b in bodies(NUM_TOKENS) for t in b["prompt"]}
    poison = next(token for token in range(10, 2000) if token not in used)
    for each in cluster.status().workers:
        faults.slow(each.worker.pid)
    started = launched(cluster)
    streams = begin(cluster, "decode", NUM_TOKENS, NUM_STREAMS)
    faults.poison(poison)
    body = {"model": MODEL, "prompt": [5, 6, poison, 7], "max_tokens": 4}
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(httpx.post, f"{cluster.url}/v1/completions", json=body, timeout=300) for _ in range(2)]
        while not all(each.done() for each in answers):
            short = {"model": MODEL, "prompt": [8, 9], "max_tokens": 1}
            assert httpx.post(f"{cluster.url}/v1/completions", json=short, timeout=120).status_code == 200
    for future in answers:
        answer = future.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_crashes_workers")
    check(cluster, streams, expected)
    faults.poison(None)
    cluster.wait_for(lambda: is_whole(cluster, OWN), START_TIMEOUT_S)
    assert len(launched(cluster) - started) == 2


def drain_under_streams(
    cluster: Cluster, worker: WorkerInfo, expected: list[list[int]], slow: Faults | None = None
) -> float:
    """Sends SIGTERM to a worker that decodes. slow: of a worker that shall not finish. Returns the migrations."""
    processes = [worker.pid, *descendants(worker.pid)]
    before = cluster.num_migrations()
    if slow:
        slow.slow(worker.pid)
    streams = begin_on(cluster, worker.worker_id)
    os.kill(worker.pid, signal.SIGTERM)
    check(cluster, streams, expected)
    cluster.wait_for(lambda: not any(map(is_alive, processes)))
    return cluster.num_migrations() - before


def test_sigterm_lets_streams_finish(
    cluster: Cluster, expected: list[list[int]], joining: subprocess.Popen[str]
) -> None:
    """Meanwhile the worker of the second launcher starts."""
    worker = cluster.worker("worker-1").worker
    assert drain_under_streams(cluster, worker, expected) == 0
    assert "drained; 0 requests in flight" in log_of(cluster, "worker-1")
    cluster.wait_for(lambda: is_whole(cluster, OWN | {JOINED}), START_TIMEOUT_S)
    assert cluster.worker("worker-1").worker.epoch != worker.epoch


def test_a_worker_of_a_second_launcher_serves_and_drains(
    cluster: Cluster, faults: Faults, expected: list[list[int]], joining: subprocess.Popen[str]
) -> None:
    worker = cluster.worker(JOINED).worker
    assert drain_under_streams(cluster, worker, expected, slow=faults) > 0
    preloaded = preloaded_of(joining.pid)
    known = {worker.pid, preloaded}
    cluster.wait_for(lambda: bool(set(children_of(joining.pid)) - known))
    assert all(is_copy(each, preloaded) for each in children_of(joining.pid)), "vLLM is imported once"
    joining.send_signal(signal.SIGTERM)
    output, _ = joining.communicate(timeout=60)
    assert joining.returncode == 0, output
    assert f"{JOINED} (process {worker.pid}) exited with 0; restarting it" in output
    cluster.wait_for(lambda: is_whole(cluster, OWN))


def test_a_worker_of_another_engine_does_not_join_unasked(cluster: Cluster, port: int) -> None:
    refused = subprocess.run(join(port, "--device", "cpu"), capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    reason = "runs vllm 0.32.0, not tandem; give --engine vllm, or --engine tandem to have both, between which no KV"
    assert reason in refused.stderr
    cluster.wait_for(lambda: is_whole(cluster, OWN))
