"""Workers of a `RaySite` on a real Ray node that says it has one GPU: what they share, keep and start again from."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.deploy.demo_model import DEMO_MODEL
from tandem.deploy.processes.process_configs import ProcessConfigs
from tandem.worker.tandem_worker_config import TandemWorkerConfig
from tests.integration.test_ray import HEAD, node_options, ray_environment
from tests.support.cluster import is_alive
from tests.support.ports import free_port
from tests.support.product import with_tests
from tests.support.settings import cluster_config
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

LIMIT_S = 300.0


@contextmanager
def one_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray cluster of one node with one GPU, which nothing computes on. Yields its address."""
    ray_environment(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", with_tests(os.environ)["PYTHONPATH"])
    cluster = pytest.importorskip("ray.cluster_utils").Cluster()
    try:
        cluster.add_node(num_cpus=4, num_gpus=1, node_ip_address=HEAD, include_dashboard=False, **node_options())
        yield cluster.address
    finally:
        cluster.shutdown()


def environment(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


class Site:
    """A site whose preloaded processes import little. configs: of the workers' processes."""

    def __init__(self, address: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        from tandem.deploy.sites import ray_site

        monkeypatch.setattr(ray_site, "PRELOAD_MODULE", "tests.support.light_preload")
        self.configs: list[TandemWorkerConfig] = []
        make = ProcessConfigs.worker

        def record(*arguments: Any) -> TandemWorkerConfig:
            self.configs.append(make(*arguments))
            return self.configs[-1]

        monkeypatch.setattr(ProcessConfigs, "worker", record)
        where: dict[str, Any] = {"ray": address, "insecure_network": True, "port": free_port()}
        self.site = ray_site.RaySite(cluster_config(model=str(DEMO_MODEL), **where, **settings), folder, folder)

    @asynccontextmanager
    async def workers(self, *roles: str, on_exit: Callable[..., bool] = lambda *_: True) -> AsyncIterator[list[Any]]:
        workers = [self.site.make_worker(role, f"{role}-0", on_exit) for role in roles]  # type: ignore[arg-type]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            yield workers
        finally:
            for worker in workers:
                worker.kill()
            await asyncio.wait(running, timeout=30.0)
            self.site.close()


@pytest.mark.exhaustive
def test_two_workers_share_one_gpu_and_divide_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(site: Site) -> list[dict[str, str]]:
        async with site.workers("prefill", "decode", on_exit=lambda *_: False) as workers:
            await until(
                lambda: all(each.last_pid and Path(f"/proc/{each.last_pid}").exists() for each in workers), LIMIT_S
            )
            return [environment(worker.last_pid) for worker in workers]

    with one_node(monkeypatch) as address:
        site = Site(address, tmp_path, monkeypatch, threads_per_worker=1)
        environments = asyncio.run(main(site))
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["0", "0"]
    assert [each.engine.ranks_per_gpu for each in site.configs] == [2, 2]
    assert {each.engine.max_num_seqs for each in site.configs} == {256}


@pytest.mark.exhaustive
def test_gpus_are_shared_only_by_workers_of_one_rank_and_only_if_there_are_too_few() -> None:
    ray_site = pytest.importorskip("tandem.deploy.sites.ray_site")
    share = ray_site.ranks_per_ray_gpu
    assert share(cluster_config(prefill=1, decode=1), 2) == share(cluster_config(prefill=1, decode=1), 0) == 1
    assert share(cluster_config(prefill=3, decode=3), 2) == 3
    assert share(cluster_config(prefill=1, decode=1, tensor_parallel_size=2), 2) == 1, "these wait for more GPUs"
    for num_ranks in range(1, 9):
        assert num_ranks * ray_site.gpu_share(num_ranks) <= 1
        assert (num_ranks + 1) * ray_site.gpu_share(num_ranks) > 1


@pytest.mark.exhaustive
def test_a_restarted_worker_finds_its_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives a killed worker with its actor, until the worker is removed."""

    async def main(site: Site) -> None:
        async with site.workers("prefill") as [worker]:
            await until(lambda: bool(worker.last_pid))
            killed = worker.last_pid
            tiers = site.configs[0].tiers
            files = [Path(file) for file in tiers.host_files]
            assert [file.stat().st_size for file in files] == [1 << 28] * 2 == [tiers.host_bytes(2)] * 2
            with files[1].open("r+b") as file:
                file.write(b"block")
            os.kill(killed, signal.SIGKILL)
            await until(lambda: worker.last_pid != killed)
            assert site.configs[1].tiers == tiers
            assert files[1].read_bytes()[:5] == b"block"
            worker.kill()
            await until(lambda: not is_alive(worker.last_pid))
            assert all(file.exists() for file in files)
            site.site.forget("prefill-0")
            await until(lambda: not any(file.exists() for file in files))

    with one_node(monkeypatch) as address:
        asyncio.run(main(Site(address, tmp_path, monkeypatch, device="cpu", tensor_parallel_size=2, kv_host_gib=0.5)))


def preloaded_processes(actor: int) -> list[int]:
    children = psutil.Process(actor).children()
    return [child.pid for child in children if "tests.support.light_preload" in child.cmdline()]


def test_a_crashed_worker_keeps_its_actor_and_its_preloaded_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is forked from that process, and again when it has crashed."""
    exits: list[int] = []

    def on_exit(name: str, pid: int, returncode: int) -> bool:
        exits.append(returncode)
        return True

    async def main(site: Site) -> None:
        from tandem.deploy.sites import ray_process

        pids: list[int] = []
        async with site.workers("decode", on_exit=on_exit) as [worker]:

            async def kill_and_wait() -> int:
                """Kills the worker, if it runs; returns the actor of the next one."""
                if pids:
                    os.kill(pids[-1], signal.SIGKILL)
                await until(lambda: worker.last_pid not in (0, *pids))
                pids.append(worker.last_pid)
                process = psutil.Process(pids[-1])
                await until(lambda: process.cmdline()[1:4] == ["-P", "-m", "tandem.worker"])  # set after the fork
                return process.ppid()

            actor = await kill_and_wait()
            [preloaded] = preloaded_processes(actor)
            monkeypatch.setattr(ray_process, "STABLE_AFTER_S", 0.0)
            assert await kill_and_wait() == actor
            assert preloaded_processes(actor) == [preloaded]
            monkeypatch.setattr(ray_process, "STABLE_AFTER_S", 300.0)  # as if it could not run here
            assert await kill_and_wait() != actor
            await until(lambda: not is_alive(preloaded) and not is_alive(actor))
            assert exits == [-signal.SIGKILL] * 2
        await until(lambda: not is_alive(pids[-1]))

    with one_node(monkeypatch) as address:
        asyncio.run(main(Site(address, tmp_path, monkeypatch, device="cpu")))
