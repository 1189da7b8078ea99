"""Sockets and environment that the launcher gives to the processes of one host."""

from __future__ import annotations

import socket
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.deploy.demo_model import DEMO_MODEL
from tandem.deploy.processes.process_configs import Place, ProcessConfigs
from tandem.deploy.sites.local import LocalSite, make_disk_folder
from tandem.kv_transfer.tiers.tier import TiersConfig
from tandem.proxy.proxy_config import ProxyConfig
from tandem.runtime.errors import ConfigError
from tandem.worker.tandem_worker_config import TandemWorkerConfig
from tests.support.ports import free_port
from tests.support.settings import cluster_config
from tests.unit.deploy.test_host_memory import held


def make_site(folder: Path, **settings: object) -> LocalSite:
    ports = {"port": free_port(), "admin_port": free_port()}
    config = cluster_config(**ports, model=str(DEMO_MODEL), **{"device": "cpu", **settings})
    return LocalSite(config, folder, folder)


def test_each_proxy_inherits_only_its_own_sockets_which_the_launcher_keeps_open(tmp_path: Path) -> None:
    site = make_site(tmp_path, proxies=2)
    try:
        fds: list[int] = []
        for name in ("proxy-0", "proxy-1"):
            site.make_proxy(name, lambda *_: True, lambda *_: None)
            config = msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=ProxyConfig)
            assert config.http.listen_fd is not None and config.http.admin_listen_fd is not None
            fds += [config.http.listen_fd, config.http.admin_listen_fd]
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


async def test_a_worker_gets_a_role_file_that_is_removed_with_it(tmp_path: Path) -> None:
    site = make_site(tmp_path, workers=1, itl_slo_ms=40)
    site.media_cache_endpoint = "ipc://media"
    site.make_worker("any", "worker-0", lambda *_: True)
    config = msgspec.json.decode((tmp_path / "worker-0.json").read_bytes(), type=TandemWorkerConfig)
    assert (config.role, config.itl_slo_ms) == ("any", 40)
    assert config.role_file == str(tmp_path / "worker-0.role")
    assert config.media_cache_endpoint == "ipc://media"
    Path(config.role_file).write_text("prefill")  # by the worker
    site.forget("worker-0")
    assert not [file for file in tmp_path.iterdir() if file.suffix == ".role"]
    site.close()


@pytest.mark.parametrize("value", ["", "1"])
async def test_kv_checksums_are_a_switch_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TANDEM_KV_CHECKSUMS", value)
    site = make_site(tmp_path, admin_host="127.0.0.2")
    site.make_worker("prefill", "prefill-0", lambda *_: True)
    site.close()
    config = msgspec.json.decode((tmp_path / "prefill-0.json").read_bytes(), type=TandemWorkerConfig)
    assert config.kv_checksums is (value == "1")
    assert config.metrics_host == "127.0.0.2"


async def test_workers_on_shared_gpus_divide_the_memory_and_none_joins_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    configs = {}
    site = make_site(tmp_path, device="cuda", prefill=1, decode=2, gpu_memory_fraction=0.8)
    assert site.on_gpus
    for role, name in (("prefill", "prefill-0"), ("decode", "decode-0"), ("decode", "decode-1")):
        site.make_worker(role, name, lambda *_: True)  # type: ignore[arg-type]
        configs[name] = msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=TandemWorkerConfig).engine
    site.make_worker("decode", "decode-2", lambda *_: True)  # one GPU has one rank
    with pytest.raises(ConfigError, match="decode-3 would share a GPU with 2 or more ranks"):
        site.make_worker("decode", "decode-3", lambda *_: True)
    site.forget("decode-0")
    site.make_worker("decode", "decode-4", lambda *_: True)
    site.close()
    assert {(each.ranks_per_gpu, each.gpu_memory_fraction, each.num_peers) for each in configs.values()} == {
        (2, 0.8, 0)
    }, "pairs of one host use CUDA IPC, which needs no buffers"
    assert {each.kv_cache_bytes for each in configs.values()} == {0}, "each measures its own"
    assert {each.max_num_seqs for each in configs.values()} == {256}


@pytest.mark.parametrize(
    ("settings", "num_peers"),
    [
        ({"kv_connector": "nccl"}, 3),
        ({"kv_connector": "ipc"}, 0),
        ({}, 0),
        ({"cluster_host": "10.0.0.1"}, 3),
        ({"cluster_host": "10.0.0.1", "kv_connector": "nixl"}, 0),
    ],
)
def test_memory_is_reserved_for_pairs_over_nccl_only(settings: dict[str, Any], num_peers: int) -> None:
    cluster = cluster_config(model="m", device="cuda", prefill=2, decode=2, **settings)
    assert ProcessConfigs(cluster).worker("decode", "decode-0", Place("ipc:///x")).engine.num_peers == num_peers


def test_the_proxies_of_a_cluster_sign_with_one_key() -> None:
    cluster = cluster_config(model="m")
    configs, others = ProcessConfigs(cluster), ProcessConfigs(cluster)
    first, second = (configs.proxy(name, Place("ipc:///x")) for name in ("proxy-0", "proxy-1"))
    assert first.signing_key == second.signing_key and len(first.signing_key) >= 32
    assert others.proxy("proxy-0", Place("ipc:///x")).signing_key != first.signing_key
    assert first.without_secrets().signing_key == "", "processes that read untrusted data do not have it"


async def test_with_an_explicit_cache_size_any_number_of_workers_share_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    site = make_site(tmp_path, device="cuda", kv_cache_gib=0.5)
    for number in range(5):
        site.make_worker("decode", f"decode-{number}", lambda *_: True)
    site.close()
    config = msgspec.json.decode((tmp_path / "decode-4.json").read_bytes(), type=TandemWorkerConfig)
    assert config.engine.kv_cache_bytes == 1 << 29


def tiers_of(folder: Path, name: str) -> TiersConfig:
    return msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=TandemWorkerConfig).tiers


async def test_without_settings_workers_have_no_tiers(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    site.make_worker("prefill", "prefill-0", lambda *_: True)
    site.close()
    assert tiers_of(tmp_path, "prefill-0") == TiersConfig()


async def test_host_memory_is_divided_among_ranks_and_lasts_as_long_as_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    settings = {"kv_host_gib": 0.5, "kv_disk_dir": "~/kv", "kv_disk_gib": 2.5, "kv_store": "mooncake://store:50051"}
    site = make_site(tmp_path, tensor_parallel_size=2, decode_tensor_parallel_size=1, **settings)
    for role, name in (("prefill", "prefill-0"), ("decode", "decode-0")):
        site.make_worker(role, name, lambda *_: True)  # type: ignore[arg-type]
    prefill, decode = (tiers_of(tmp_path, name) for name in ("prefill-0", "decode-0"))
    assert prefill == TiersConfig(0.5, str(tmp_path / "home" / "kv"), 2.5, "mooncake://store:50051", prefill.host_files)
    assert (len(prefill.host_files), len(decode.host_files)) == (2, 1)
    assert [Path(file).stat().st_size for file in (*prefill.host_files, *decode.host_files)] == [
        1 << 28, 1 << 28, 1 << 29,
    ]  # fmt: skip
    assert stat.S_IMODE((tmp_path / "home" / "kv").stat().st_mode) == 0o700
    site.set_role("decode-0", "any")
    site.forget("prefill-0")
    assert [Path(file).exists() for file in (*prefill.host_files, *decode.host_files)] == [False, False, True]
    site.close()
    assert not Path(decode.host_files[0]).exists()


async def test_a_worker_that_gets_no_gpu_leaves_no_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    site = make_site(tmp_path, device="cuda", kv_host_gib=0.1)
    for name in ("decode-0", "decode-1"):
        site.make_worker("decode", name, lambda *_: True)
    before = len(held())
    with pytest.raises(ConfigError, match="would share a GPU"):
        site.make_worker("decode", "decode-2", lambda *_: True)
    assert len(held()) == before == 2
    site.close()


def test_folders_that_other_users_could_change_are_refused(tmp_path: Path) -> None:
    made = tmp_path / "new" / "kv"
    make_disk_folder(made)
    make_disk_folder(made)
    shared, link, file = tmp_path / "shared", tmp_path / "link", tmp_path / "file"
    shared.mkdir()
    shared.chmod(0o777)
    link.symlink_to(made)
    file.touch()
    for folder, words in ((shared, "run chmod 700 on it"), (link, "symbolic link"), (file, "cannot make the folder")):
        with pytest.raises(ConfigError, match=f"kv_disk_dir: .*{words}"):
            make_disk_folder(folder)


def test_kernels_of_all_workers_find_as_many_threads_as_the_largest_has(tmp_path: Path) -> None:
    """numba reads the number when it is imported, which all workers share, and starts as many threads."""
    settings = {"threads_per_worker": 4, "prefill_tensor_parallel_size": 4, "tensor_parallel_size": 2}
    site = make_site(tmp_path, **settings)
    environments = [site._worker_environment(role) for role in ("prefill", "decode")]
    site.close()
    assert [each["OMP_NUM_THREADS"] for each in environments] == ["1", "2"]
    assert {each["NUMBA_NUM_THREADS"] for each in environments} == {"2"}
