"""Answers of the demo model stay correct while its workers are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.demo_model.exam import Question, exam
from bench.exam import GREEDY, ask_all, by_transformers
from tandem.deploy.demo_model import DEMO_MODEL
from tests.support.cluster import MODEL, Cluster

STORIES = [
    Question("story", [{"role": "user", "content": f"Tell me a story about a {hero}."}], "") for hero in ("fox", "owl")
]
QUESTIONS = [question for question in exam() if question.subject in ("list", "long context")][::2] + STORIES
WORKERS = ("decode-0", "prefill-0", "decode-1")


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    options = ("--prefill", "2", "--decode", "2", "--dtype", "float32", "--worker-wait-s", "240")
    with Cluster("--model", str(DEMO_MODEL), "--served-model-name", MODEL, *options, start_timeout_s=240) as cluster:
        yield cluster


@pytest.mark.timeout(600)
def test_answers_survive_killed_workers(running: Cluster) -> None:
    expected = list(by_transformers(DEMO_MODEL, QUESTIONS))
    assert all(story.endswith(" The end.") for story in expected[-len(STORIES) :])
    with ThreadPoolExecutor(1) as pool:
        for worker_id in WORKERS:
            before = running.worker(worker_id)
            pid, num_finished = before.worker.pid, before.load.num_finished
            answers = pool.submit(ask_all, running.url, QUESTIONS, GREEDY)
            running.wait_for(lambda: _num_finished(running, worker_id) > num_finished)  # noqa: B023 (called at once)
            os.kill(pid, signal.SIGKILL)
            assert answers.result(300) == expected
            running.wait_for(lambda gone=pid: _has_replaced(running, gone), 240)  # type: ignore[misc]
    running.wait_for(running.all_blocks_free)


def _num_finished(cluster: Cluster, worker_id: str) -> int:
    return cluster.worker(worker_id).load.num_finished


def _has_replaced(cluster: Cluster, pid: int) -> bool:
    workers = cluster.status().workers
    if pid in {worker.worker.pid for worker in workers}:
        return False
    num_pairs = sum(pair.state == "ready" for worker in workers for pair in worker.pairs)
    return len(workers) == 4 and num_pairs == 4
