"""Roles change every second under load: no request fails, no token changes, nothing leaks."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import pytest

from tandem.protocol.messages.membership import Role
from tests.faults.leaks import Footprint, shared_memory
from tests.faults.streams import wait_until
from tests.faults.test_migration import REQUESTS, check_same, num_migrations, stream
from tests.support.cluster import Cluster

SECONDS = float(os.environ.get("TANDEM_FLIP_SECONDS", "20"))
WORKERS = ("prefill-0", "decode-0", "worker-0")
SHORT: list[dict[str, Any]] = [
    {"prompt": f"Short {number}", "temperature": 0, "max_tokens": 8, "return_token_ids": True} for number in range(4)
]


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    arguments = [
        "--prefill", "1", "--decode", "1", "--workers", "1", "--dtype", "float32", "--max-num-batched-tokens", "64",
    ]  # fmt: skip
    with Cluster(*arguments, start_timeout_s=240) as cluster:
        # Opens all pairs, which then stay open, and has each worker write the file that keeps its role.
        for worker_id, role in (("worker-0", "decode"), *((name, "any") for name in WORKERS)):
            assert not cluster.give_role(worker_id, role)
        cluster.wait_for(lambda: len(cluster.ready_pairs()) == len(WORKERS) * (len(WORKERS) - 1), 60)
        yield cluster


def use_all_workers(cluster: Cluster, bodies: list[dict[str, Any]]) -> None:
    """Has each worker compute and decode, so that the footprint counts the processes and threads of all grammars."""
    roles: list[tuple[Role, Role]] = [("decode", "prefill"), ("prefill", "decode")]
    for used in WORKERS:
        for role, role_of_others in roles:
            changes: list[tuple[Role, str]] = [
                ("any", used),
                *((role_of_others, name) for name in WORKERS if name != used),
                (role, used),
            ]
            for wanted, name in changes:
                assert not cluster.give_role(name, wanted)
            for body in bodies:
                stream(cluster, body)
        for name in WORKERS:
            assert not cluster.give_role(name, "any")


def _shortened(body: dict[str, Any]) -> dict[str, Any]:
    return body | {key: 4 for key in ("max_tokens", "max_output_tokens") if key in body}


def role_of(cluster: Cluster, worker_id: str) -> Role:
    return cluster.worker(worker_id).worker.role


@pytest.mark.timeout(240 + 3 * SECONDS)
def test_streams_do_not_notice_that_roles_change(running: Cluster) -> None:
    bodies = REQUESTS + SHORT
    with ThreadPoolExecutor(len(bodies)) as pool:
        before_load = shared_memory()
        use_all_workers(running, [REQUESTS[0], *map(_shortened, REQUESTS[4:])])
        undisturbed = list(pool.map(lambda body: stream(running, body), bodies))
        running.wait_for(running.all_blocks_free, 60)
        migrated = num_migrations(running)  # the first call starts the thread that renders metrics
        footprint = Footprint.of(running, before_load)
        epochs = {name: running.worker(name).worker.epoch for name in WORKERS}
        rng = random.Random(3)
        outcomes: Counter[str] = Counter()
        end = time.monotonic() + SECONDS
        rounds = 0
        while time.monotonic() < end:
            answers = [pool.submit(stream, running, body) for body in bodies]
            while not all(answer.done() for answer in answers):
                reason = running.give_role(rng.choice(WORKERS), rng.choice(get_args(Role)))
                outcomes["changed" if not reason else "refused"] += 1
                assert not reason or "last worker" in reason, reason
                time.sleep(1.0)
            results = [answer.result(240) for answer in answers]
            check_same(results[: len(REQUESTS)], undisturbed[: len(REQUESTS)])
            assert [answer[0]["ids"] for answer in results[len(REQUESTS) :]] == [
                answer[0]["ids"] for answer in undisturbed[len(REQUESTS) :]
            ]
            rounds += 1
    running.wait_for(running.all_blocks_free, 60)
    assert outcomes["changed"] >= SECONDS / 4, outcomes
    assert {name: running.worker(name).worker.epoch for name in WORKERS} == epochs, "no worker has restarted"
    assert num_migrations(running) == migrated, "no stream was interrupted"
    leaked: list[str] = []

    def is_clean() -> bool:
        leaked[:] = Footprint.of(running, before_load).leaked_since(footprint)
        return not leaked

    assert wait_until(is_clean, 30), leaked


def test_a_changed_role_decides_where_prompts_run(running: Cluster) -> None:
    for worker_id, role in (
        ("worker-0", "any"),
        ("prefill-0", "decode"),
        ("decode-0", "prefill"),
        ("worker-0", "decode"),
    ):
        assert not running.give_role(worker_id, role)
        running.wait_for(lambda worker_id=worker_id, role=role: role_of(running, worker_id) == role)
    assert "last worker that may prefill" in running.give_role("decode-0", "decode")
    assert "no worker nobody is registered" in running.give_role("nobody", "any")
    before = running.worker("decode-0").load.num_prompt_tokens
    answer = stream(running, {"prompt": list(range(5, 400)), "temperature": 0, "max_tokens": 8})
    assert answer[0]["ends"] == ["length"]
    running.wait_for(lambda: running.worker("decode-0").load.num_prompt_tokens == before + 395)
