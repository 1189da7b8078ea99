"""A worker on a real Ray node is forked from its actor's preloaded process, and again when it has crashed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from tandem.deploy.demo_model import DEMO_MODEL
from tests.integration.test_ray_gpus import one_node
from tests.support.cluster import is_alive
from tests.support.ports import free_port
from tests.support.settings import cluster_config
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


def preloaded_processes(actor: int) -> list[int]:
    children = psutil.Process(actor).children()
    return [child.pid for child in children if "tests.support.light_preload" in child.cmdline()]


def test_a_crashed_worker_keeps_its_actor_and_its_preloaded_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray_site = pytest.importorskip("tandem.deploy.sites.ray_site")
    from tandem.deploy.sites import ray_process

    monkeypatch.setattr(ray_site, "PRELOAD_MODULE", "tests.support.light_preload")
    exits: list[int] = []

    def on_exit(name: str, pid: int, returncode: int) -> bool:
        exits.append(returncode)
        return True

    async def main(address: str) -> None:
        config = cluster_config(
            model=str(DEMO_MODEL), ray=address, insecure_network=True, port=free_port(), device="cpu",
        )  # fmt: skip
        site = ray_site.RaySite(config, tmp_path, tmp_path)
        worker = site.make_worker("decode", "decode-0", on_exit)
        running = asyncio.create_task(worker.run())
        pids: list[int] = []

        async def kill_and_wait() -> int:
            """Kills the worker, if it runs; returns the actor of the next one."""
            if pids:
                os.kill(pids[-1], signal.SIGKILL)
            await until(lambda: worker.last_pid not in (0, *pids))
            pids.append(worker.last_pid)
            process = psutil.Process(pids[-1])
            await until(lambda: process.cmdline()[1:4] == ["-P", "-m", "tandem.worker"])  # set after the fork
            return process.ppid()

        try:
            actor = await kill_and_wait()
            [preloaded] = preloaded_processes(actor)
            monkeypatch.setattr(ray_process, "STABLE_AFTER_S", 0.0)
            assert await kill_and_wait() == actor
            assert preloaded_processes(actor) == [preloaded]
            monkeypatch.setattr(ray_process, "STABLE_AFTER_S", 300.0)  # as if it could not run here
            assert await kill_and_wait() != actor
            await until(lambda: not is_alive(preloaded) and not is_alive(actor))
            assert exits == [-signal.SIGKILL] * 2
        finally:
            worker.kill()
            await asyncio.wait([running], timeout=30.0)
            site.close()
        await until(lambda: not is_alive(pids[-1]))

    with one_node(monkeypatch) as address:
        asyncio.run(main(address))
