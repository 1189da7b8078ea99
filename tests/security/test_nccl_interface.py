"""NCCL uses only the network that --cluster-host names. Without a GPU, this asserts what NCCL is told."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.deploy.demo_model import DEMO_MODEL
from tandem.deploy.processes.child_process import Program
from tandem.deploy.processes.gpu_environment import gpu_environment
from tandem.deploy.sites import local
from tandem.deploy.sites.ray_actor import ProcessActor
from tandem.runtime.errors import ConfigError
from tests.support.ports import free_port
from tests.support.settings import cluster_config

SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Two workers on one GPU may form a group, and up to 32 streams have a hardware queue each."""


def test_the_interface_is_that_of_the_address() -> None:
    tried = 0
    for interface, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                tried += 1
                expected = {"NCCL_SOCKET_IFNAME": f"={interface}", "NCCL_SOCKET_FAMILY": each.family.name, **SHARED}
                assert gpu_environment(each.address, {}) == expected
    assert tried > 0


def test_a_loopback_address_that_is_not_listed_is_on_the_loopback_interface() -> None:
    assert gpu_environment("127.0.0.3", {}) == gpu_environment("127.0.0.1", {})


def test_variables_of_the_operator_win() -> None:
    assert gpu_environment("127.0.0.1", {"NCCL_SOCKET_IFNAME": "ib0"}) == SHARED
    own = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_MULTI_RANK_GPU_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert gpu_environment("127.0.0.1", own) == {}
    found = gpu_environment("127.0.0.1", {"NCCL_SOCKET_FAMILY": "AF_INET"})
    assert found.keys() == {"NCCL_SOCKET_IFNAME", *SHARED}


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="no network interface of this host has the address"):
        gpu_environment("198.51.100.7", {})


@pytest.mark.parametrize(
    ("settings", "interface_of"),
    [({}, "127.0.0.1"), ({"cluster_host": "localhost", "insecure_network": True}, "localhost")],
    ids=["one host", "--cluster-host"],
)
def test_workers_on_gpus_are_started_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], interface_of: str
) -> None:
    environment = start_worker(tmp_path, monkeypatch, gpus="0", **settings)
    assert environment.items() >= gpu_environment(interface_of, {}).items()


def test_exact_workers_on_gpus_have_products_that_are_not_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
    for exact, gpus, expected in ((True, "0", (":16:8", "1")), (False, "0", (None,) * 2), (True, "", (None,) * 2)):
        folder = tmp_path / f"{exact}{gpus}"
        folder.mkdir()
        environment = start_worker(folder, monkeypatch, gpus=gpus, exact=exact)
        assert tuple(map(environment.get, names)) == expected, (exact, gpus)


def test_workers_without_gpus_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = start_worker(tmp_path, monkeypatch, gpus="", cluster_host="198.51.100.7", insecure_network=True)
    assert "NCCL_SOCKET_IFNAME" not in environment


@pytest.mark.extended
@pytest.mark.filterwarnings("default")  # Ray's own
def test_a_ray_node_uses_the_interface_of_its_address_in_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.4")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_FAMILY", raising=False)

    async def ask() -> dict[str, str]:
        actor = ProcessActor("decode-0")
        try:
            return await actor.gpu_environment()
        finally:
            await actor.close()

    assert asyncio.run(ask()) == gpu_environment("127.0.0.1", {})


def start_worker(folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, **settings: Any) -> dict[str, str]:
    """Returns the variables that the launcher adds to a worker's environment."""
    added: list[dict[str, str]] = []

    def record(name: str, program: Program, *_: object) -> None:
        added.append(program.env)

    monkeypatch.setattr(local, "ChildProcess", record)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_FAMILY", raising=False)
    config = cluster_config(model=str(DEMO_MODEL), port=free_port(), admin_port=free_port(), **settings)
    site = local.LocalSite(config, folder, folder)
    try:
        site.make_worker("decode", "decode-0", lambda *_: True)
    finally:
        site.close()
    [environment] = added
    return environment
