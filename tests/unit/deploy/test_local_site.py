"""Sockets and environment that the launcher gives to the processes of one host."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest

from bench.ports import free_port
from tandem.deploy.config import ClusterConfig
from tandem.deploy.demo_model import DEMO_MODEL
from tandem.deploy.sites.local import LocalSite
from tandem.proxy.config import ProxyConfig
from tandem.worker.config import WorkerConfig


def make_site(folder: Path, **settings: object) -> LocalSite:
    ports = {"port": free_port(), "admin_port": free_port()}
    config = ClusterConfig(**ports, model=str(DEMO_MODEL), device="cpu", **settings)  # type: ignore[arg-type]
    return LocalSite(config, folder, folder)


def test_each_proxy_inherits_only_its_own_sockets_which_the_launcher_keeps_open(tmp_path: Path) -> None:
    site = make_site(tmp_path, proxies=2)
    try:
        fds: list[int] = []
        for name in ("proxy-0", "proxy-1"):
            site.make_proxy(name, lambda *_: True, lambda *_: None)
            config = msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=ProxyConfig)
            assert config.listen_fd is not None and config.admin_listen_fd is not None
            fds += [config.listen_fd, config.admin_listen_fd]
        assert len(set(fds)) == 4
        proxys_copy = socket.socket(fileno=socket.dup(fds[0]))
        proxys_copy.listen()
        address = proxys_copy.getsockname()
        client = socket.create_connection(address)
        proxys_copy.close()  # the proxy crashes
        successor = socket.socket(fileno=socket.dup(fds[0]))
        connection, peer = successor.accept()
        assert peer == client.getsockname()
        for each in (client, successor, connection):
            each.close()
    finally:
        site.close()


def test_a_worker_gets_a_role_file_that_is_removed_with_it(tmp_path: Path) -> None:
    async def main() -> None:
        site = make_site(tmp_path, workers=1, itl_slo_ms=40)
        site.media_cache_endpoint = "ipc://media"
        site.make_worker("any", "worker-0", lambda *_: True)
        config = msgspec.json.decode((tmp_path / "worker-0.json").read_bytes(), type=WorkerConfig)
        assert (config.role, config.itl_slo_ms) == ("any", 40)
        assert config.role_file == str(tmp_path / "worker-0.role")
        assert config.media_cache_endpoint == "ipc://media"
        Path(config.role_file).write_text("prefill")  # by the worker
        site.forget("worker-0")
        assert not [file for file in tmp_path.iterdir() if file.suffix == ".role"]
        site.close()

    asyncio.run(main())


@pytest.mark.parametrize("value", ["", "1"])
def test_kv_checksums_are_a_switch_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TANDEM_KV_CHECKSUMS", value)

    async def main() -> None:
        site = make_site(tmp_path, admin_host="127.0.0.2")
        site.make_worker("prefill", "prefill-0", lambda *_: True)
        site.close()

    asyncio.run(main())
    config = msgspec.json.decode((tmp_path / "prefill-0.json").read_bytes(), type=WorkerConfig)
    assert config.kv_checksums is (value == "1")
    assert config.metrics_host == "127.0.0.2"
