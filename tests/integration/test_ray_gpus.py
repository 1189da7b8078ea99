"""Workers on a real Ray node that says it has one GPU: they share it, and each gets a part of its memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.demo_model import DEMO_MODEL
from tandem.worker.tandem_worker_config import TandemWorkerConfig
from tests.integration.test_ray import HEAD, node_options
from tests.support.ports import free_port
from tests.support.product import with_tests
from tests.support.settings import cluster_config

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

LIMIT_S = 300.0


@contextmanager
def one_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray cluster of one node with one GPU, which nothing computes on. Yields its address."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", with_tests(os.environ)["PYTHONPATH"])
    for limit, value in (("raylet_start_wait_time_s", "300"), ("agent_register_timeout_ms", "300000")):
        monkeypatch.setenv(f"RAY_{limit}", value)  # Ray's default is too short for a busy machine
    cluster = pytest.importorskip("ray.cluster_utils").Cluster()
    try:
        cluster.add_node(num_cpus=4, num_gpus=1, node_ip_address=HEAD, include_dashboard=False, **node_options())
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with one_node(monkeypatch) as address:
        yield address


def environment(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_two_workers_share_one_gpu_and_divide_its_memory(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.deploy.processes.process_configs import ProcessConfigs
    from tandem.deploy.sites import ray_site

    monkeypatch.setattr(ray_site, "PRELOAD_MODULE", "tests.support.light_preload")
    configs: list[TandemWorkerConfig] = []
    make = ProcessConfigs.worker

    def record(*arguments: Any) -> TandemWorkerConfig:
        configs.append(make(*arguments))
        return configs[-1]

    monkeypatch.setattr(ProcessConfigs, "worker", record)
    config = cluster_config(
        model=str(DEMO_MODEL), ray=address, insecure_network=True, port=free_port(), threads_per_worker=1
    )

    async def main() -> list[dict[str, str]]:
        site = ray_site.RaySite(config, tmp_path, tmp_path)
        workers = [
            site.make_worker("prefill", "prefill-0", _stays_down),
            site.make_worker("decode", "decode-0", _stays_down),
        ]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            for _ in range(int(LIMIT_S / 0.1)):
                if all(worker.last_pid and Path(f"/proc/{worker.last_pid}").exists() for worker in workers):
                    break
                await asyncio.sleep(0.1)
            return [environment(worker.last_pid) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
            await asyncio.wait(running, timeout=30.0)
            site.close()

    environments = asyncio.run(main())
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["0", "0"]
    assert [each.engine.ranks_per_gpu for each in configs] == [2, 2]
    assert {each.engine.max_num_seqs for each in configs} == {256}


def _stays_down(name: str, pid: int, returncode: int) -> bool:
    return False


def test_gpus_are_shared_only_by_workers_of_one_rank_and_only_if_there_are_too_few() -> None:
    ray_site = pytest.importorskip("tandem.deploy.sites.ray_site")
    share = ray_site.ranks_per_ray_gpu
    assert share(cluster_config(prefill=1, decode=1), 2) == share(cluster_config(prefill=1, decode=1), 0) == 1
    assert share(cluster_config(prefill=3, decode=3), 2) == 3
    assert share(cluster_config(prefill=1, decode=1, tensor_parallel_size=2), 2) == 1, "these wait for more GPUs"
    for num_ranks in range(1, 9):
        assert num_ranks * ray_site.gpu_share(num_ranks) <= 1
        assert (num_ranks + 1) * ray_site.gpu_share(num_ranks) > 1
