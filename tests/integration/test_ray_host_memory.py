"""Host memory for KV blocks on a real Ray node: it outlives a killed worker with its actor, until it is removed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.demo_model import DEMO_MODEL
from tandem.worker.tandem_worker_config import TandemWorkerConfig
from tests.integration.test_ray_gpus import one_node
from tests.support.ports import free_port
from tests.support.settings import cluster_config
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


def test_a_restarted_worker_finds_its_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray_site = pytest.importorskip("tandem.deploy.sites.ray_site")
    monkeypatch.setattr(ray_site, "PRELOAD_MODULE", "tests.support.light_preload")
    configs: list[TandemWorkerConfig] = []
    make = ray_site.ProcessConfigs.worker

    def record(*arguments: Any) -> TandemWorkerConfig:
        configs.append(make(*arguments))
        return configs[-1]

    monkeypatch.setattr(ray_site.ProcessConfigs, "worker", record)

    async def main(address: str) -> None:
        config = cluster_config(
            model=str(DEMO_MODEL), ray=address, insecure_network=True, port=free_port(), device="cpu",
            tensor_parallel_size=2, kv_host_gib=0.5,
        )  # fmt: skip
        site = ray_site.RaySite(config, tmp_path, tmp_path)
        worker = site.make_worker("prefill", "prefill-0", lambda *_: True)
        running = asyncio.create_task(worker.run())
        try:
            await until(lambda: bool(worker.last_pid))
            killed = worker.last_pid
            files = [Path(file) for file in configs[0].tiers.host_files]
            assert [file.stat().st_size for file in files] == [1 << 28] * 2 == [configs[0].tiers.host_bytes(2)] * 2
            with files[1].open("r+b") as file:
                file.write(b"block")
            os.kill(killed, signal.SIGKILL)
            await until(lambda: worker.last_pid != killed)
            assert configs[1].tiers == configs[0].tiers
            assert files[1].read_bytes()[:5] == b"block"
            worker.kill()
            await asyncio.wait([running], timeout=30.0)
            assert all(file.exists() for file in files)
            site.forget("prefill-0")
            await until(lambda: not any(file.exists() for file in files))
        finally:
            worker.kill()
            await asyncio.wait([running], timeout=30.0)
            site.close()

    with one_node(monkeypatch) as address:
        asyncio.run(main(address))
