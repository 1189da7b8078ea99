"""Each process that computes one prompt is killed; the prompt is refused soon, and all others are served."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx
import pytest

from tandem.proxy.dispatch.crashes import MAX_DEATHS
from tests.faults.phases import Phases
from tests.faults.streams import Stream, wait_until
from tests.support.cluster import MODEL, Cluster

FLAGS = ("--prefill", "2", "--decode", "1", "--max-num-batched-tokens", "16", "--worker-wait-s", "120")
POISON = {"model": MODEL, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}


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
@pytest.mark.timeout(400)
def test_a_request_whose_workers_die_is_refused_and_no_other() -> None:
    with Cluster(*FLAGS) as cluster:
        phases = Phases(cluster)
        stop = threading.Event()
        statuses: list[int] = []

        def ask_others() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                body = {**POISON, "prompt": [8, number % 100, *range(10, 40)]}
                statuses.append(httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=200).status_code)

        long = Stream(cluster, {**POISON, "prompt": [9] * 8, "max_tokens": 1800})
        others = threading.Thread(target=ask_others)
        others.start()
        try:
            wait_until(lambda: len(long.token_ids) > 0, 60)
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
        finally:
            stop.set()
            others.join(200)
        assert not others.is_alive() and set(statuses) == {200}
        assert long.wait(120) and (long.outcome, len(long.token_ids)) == ("length", 1800)
        cluster.wait_for(cluster.all_blocks_free)
