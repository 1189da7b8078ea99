"""One end of a KV pair fails with two prefill and two decode workers: other pairs stay ready, no block leaks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.protocol.messages.membership import WorkerReport
from tandem.worker.tandem_worker_config import TandemWorkerConfig
from tests.faults.leaks import Footprint
from tests.support.cluster import MODEL, Cluster
from tests.support.waiting import comes_true

RNG = random.Random(3)
KV_CACHE_BYTES = 2**30 // 50


ENVIRONMENT = {"TANDEM_KV_CHECKSUMS": "1"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Short chunks make transfers last; a small pool makes decode run out of blocks.
    arguments = [
        "--max-num-batched-tokens", "16", "--kv-cache-gib", f"{KV_CACHE_BYTES / 2**30}", "--kv-connector", "ipc",
        "--prefill", "2", "--decode", "2", "--threads-per-worker", "1",
    ]  # fmt: skip
    with Cluster(*arguments, env=ENVIRONMENT) as running:
        assert len(running.ready_pairs()) == 4, "pairs are ready before the first request"
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    """Asserts after each test that every pair is ready, every block is free, nothing leaked, and requests succeed."""
    assert [f.result(120) for f in ask(cluster, 4, 100)] == [200] * 4
    before = Footprint.of(cluster, set())
    yield
    cluster.wait_for(lambda: len(cluster.ready_pairs()) == 4, 60)
    cluster.wait_for(cluster.all_blocks_free)
    assert [f.result(120) for f in ask(cluster, 4, 100)] == [200] * 4
    leaks: list[str] = []

    def is_clean() -> bool:
        leaks[:] = Footprint.of(cluster, before.shared_memory).leaked_since(before)
        return not leaks

    assert comes_true(is_clean, 30), leaks
    assert "Traceback" not in cluster.logs()


def ask(cluster: Cluster, count: int, num_prompt_tokens: int) -> list[Future[int]]:
    """Sends requests whose prompts share no prefix; returns futures of their HTTP status codes."""
    pool = ThreadPoolExecutor(count)
    futures = [pool.submit(complete, cluster, new_prompt(num_prompt_tokens)) for _ in range(count)]
    pool.shutdown(wait=False)
    return futures


def new_prompt(num_tokens: int) -> list[int]:
    return [RNG.randrange(4, 2048) for _ in range(num_tokens)]


def complete(cluster: Cluster, prompt: list[int]) -> int:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120).status_code


def interrupt_while_shipping(cluster: Cluster, worker_id: str, interrupt: Callable[[], None]) -> list[Future[set[int]]]:
    """Calls `interrupt` while this prefill worker transfers long prompts, of which eight are in flight all the time.

    Returns futures of the HTTP status codes of each of the eight clients.
    """
    is_over = threading.Event()

    def ask_on() -> set[int]:
        statuses = set()
        while not is_over.is_set():
            statuses.add(complete(cluster, new_prompt(1590)))
        return statuses

    pool = ThreadPoolExecutor(8)
    load = cluster.worker(worker_id).load
    answers = [pool.submit(ask_on) for _ in range(8)]
    pool.shutdown(wait=False)
    # Load reports lag: the short prompts of the previous test, two blocks each, may still be missing.
    wanted = load.num_transferred_bytes + 10 * KV_CACHE_BYTES // load.num_blocks
    try:
        cluster.wait_for(lambda: cluster.worker(worker_id).load.num_transferred_bytes > wanted)
        interrupt()
    finally:
        is_over.set()
    return answers


def pair_failures(cluster: Cluster) -> int:
    return len(failed_pairs(cluster))


def failed_pairs(cluster: Cluster) -> list[str]:
    return [line for line in cluster.logs().splitlines() if " failed: " in line]


def test_blocks_of_a_frozen_prefill_worker_stay_quarantined(cluster: Cluster) -> None:
    """The worker leaves the cluster, and rejoins with its pairs when it wakes. Its blocks are freed only then."""
    before, failures = cluster.ready_pairs(), pair_failures(cluster)
    frozen = cluster.worker("prefill-0").worker
    answers = interrupt_while_shipping(cluster, "prefill-0", lambda: os.kill(frozen.pid, signal.SIGSTOP))
    try:
        cluster.wait_for(lambda: frozen.epoch not in {r.worker.epoch for r in cluster.status().workers})
        # Its requests are retried on the other prefill worker.
        assert [answer.result(120) for answer in answers] == [{200}] * 8
        assert [answer.result(120) for answer in ask(cluster, 4, 300)] == [200] * 4

        def only_quarantined() -> bool:
            loads = [cluster.worker(worker_id).load for worker_id in ("decode-0", "decode-1")]
            held = [load.num_blocks - load.num_free_blocks for load in loads]
            return held == [load.num_quarantined_blocks for load in loads] and sum(held) > 0

        cluster.wait_for(only_quarantined)
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    cluster.wait_for(lambda: len(cluster.ready_pairs()) == 4)
    cluster.wait_for(cluster.all_blocks_free)
    assert cluster.ready_pairs() == before
    assert cluster.worker("prefill-0").worker == frozen
    assert pair_failures(cluster) - failures <= 4, f"more than its own two pairs failed: {failed_pairs(cluster)}"


def test_a_worker_with_another_kv_layout_is_refused(cluster: Cluster) -> None:
    """A decode worker with another block size is started by hand; its pairs are refused with the differing field."""
    folder = runtime_dir(cluster.port)
    config = msgspec.json.decode((folder / "decode-0.json").read_bytes(), type=TandemWorkerConfig)
    engine = msgspec.structs.replace(config.engine, block_size=32)
    other = msgspec.structs.replace(
        config, worker_id="decode-9", endpoint=f"ipc://{folder}/decode-9.sock", engine=engine
    )
    file = folder / "decode-9.json"
    file.write_bytes(msgspec.json.encode(other))
    before, failures = cluster.ready_pairs(), pair_failures(cluster)
    command = [sys.executable, "-m", "tandem.worker", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | ENVIRONMENT)
    try:

        def reasons() -> list[str]:
            reports = cluster.status().workers
            return [pair.reason for report in reports for pair in report.pairs if pair.state == "refused"]

        cluster.wait_for(lambda: len(reasons()) == 2, 100)
        assert set(reasons()) == {"KV layout differs in block_size: prefill has 64, decode has 32"}
        shown = cluster.run("status", COLUMNS="200")
        assert "refused" in shown.stdout and "block_size: prefill has 64, decode has 32" in shown.stdout
        assert [answer.result(120) for answer in ask(cluster, 6, 300)] == [200] * 6
    finally:
        process.kill()
        process.wait()
        file.unlink()
        (folder / "decode-9.sock").unlink()
    cluster.wait_for(lambda: len(cluster.status().workers) == 4)
    assert cluster.ready_pairs() == before and pair_failures(cluster) == failures


def pool_file(pid: int) -> Path:
    links = Path(f"/proc/{pid}/fd").iterdir()
    return next(link for link in links if "tandem-kv-pool" in str(link.readlink()))


def change_every_block(worker: WorkerReport) -> None:
    """Flips one bit of every block of the worker's pool."""
    with pool_file(worker.worker.pid).open("r+b") as pool:
        block_bytes = os.fstat(pool.fileno()).st_size // worker.load.num_blocks
        for block_id in range(worker.load.num_blocks):
            at = block_id * block_bytes
            byte = os.pread(pool.fileno(), 1, at)[0]
            os.pwrite(pool.fileno(), bytes([byte ^ 1]), at)


def test_checksums_detect_corrupt_blocks(cluster: Cluster) -> None:
    """Corrupts every block of the decode pools while decode is stopped, until a checksum fails."""
    decodes = [cluster.worker(worker_id) for worker_id in ("decode-0", "decode-1")]

    def is_noticed() -> bool:
        for report in decodes:
            os.kill(report.worker.pid, signal.SIGSTOP)
        try:
            cluster.status()  # gives prefill time to write
            for report in decodes:
                change_every_block(report)
        finally:
            for report in decodes:
                os.kill(report.worker.pid, signal.SIGCONT)
        return any(cluster.worker(report.worker.worker_id).load.num_corrupt_blocks for report in decodes)

    answers = interrupt_while_shipping(cluster, "prefill-0", lambda: cluster.wait_for(is_noticed))
    assert [answer.result(120) for answer in answers] == [{200}] * 8, "requests with corrupt blocks are prefilled again"
    assert "differ from what was sent" in cluster.logs()
    assert len(cluster.ready_pairs()) == 4, "the pairs stay ready"
