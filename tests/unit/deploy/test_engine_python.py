"""Interpreters with vLLM: which are found and refused, and how workers are started in them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import uuid
import venv
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tandem.runtime
from tandem.deploy.demo_model import DEMO_MODEL
from tandem.deploy.processes.engine_python import (
    INCOMPLETE,
    REQUIREMENTS,
    EnginePython,
    default_folder,
    find_engine_python,
    vllm_environment,
)
from tandem.deploy.processes.process_configs import Place, ProcessConfigs
from tandem.deploy.processes.runtime_dir import MAX_FOLDER_BYTES, MAX_SOCKET_PATH_BYTES, VLLM_MAX_FOLDER_BYTES
from tandem.deploy.sites import local
from tandem.deploy.sites.ray_actor import ProcessActor
from tandem.runtime.errors import ConfigError
from tandem.runtime.processes.process import EXIT_BAD_CONFIG
from tandem.vllm_worker.versions import DEFAULT_VERSION, SUPPORTED_VERSIONS
from tandem.vllm_worker.vllm_worker_config import VllmEngineConfig, VllmWorkerConfig, batch_problem
from tests.support.settings import cluster_config
from tests.unit.deploy.test_local_site import make_site


def make_environment(folder: Path, version: str) -> Path:
    """A virtual environment with the metadata of one version of vLLM, and what workers import. Returns its Python."""
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    metadata = site / f"vllm-{version}.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n")
    for each in REQUIREMENTS:
        (site / f"{each}.py").touch()
    return folder / "bin/python"


def make_refusing(file: Path, version: str = DEFAULT_VERSION) -> Path:
    """An interpreter that cannot preload, and whose worker notes how it was started and refuses its configuration."""
    file.write_text(
        f"""#!{sys.executable}
import json, os, sys
if sys.argv[1:3] == ["-P", "-c"]:
    print(3, 11, "{version}")
elif sys.argv[3].endswith("preload"):
    open("{file}.preload", "w").write(sys.argv[3])
    sys.exit(1)
else:
    with open("{file}.start", "w") as started:
        json.dump([sys.argv[1:], dict(os.environ), open(sys.argv[4]).read()], started)
    print("error: vLLM cannot run this model: it has no layers", file=sys.stderr)
    sys.exit({EXIT_BAD_CONFIG})
"""
    )
    file.chmod(0o755)
    return file


@pytest.mark.parametrize("version", [*SUPPORTED_VERSIONS, f"{DEFAULT_VERSION}+cu130"])
def test_supported_versions_are_taken_and_import_these_packages(tmp_path: Path, version: str) -> None:
    python = find_engine_python(str(make_environment(tmp_path / "env", version)))
    environment = {**os.environ, **python.environment(tmp_path)}
    program = "import sys, tandem.runtime; print(sys.prefix, *tandem.runtime.__path__)"
    shadow = tmp_path / "shadow"
    (shadow / "tandem").mkdir(parents=True)  # the working folder does not count
    done = subprocess.run(
        [python.path, "-c", program], env=environment, cwd=shadow, capture_output=True, text=True, check=True
    )
    prefix, path = done.stdout.split()
    assert prefix == str(tmp_path / "env")
    assert Path(path).samefile(tandem.runtime.__path__[0])
    assert python.environment(tmp_path) == python.environment(tmp_path), "each worker may ask"


def test_packages_that_are_missing_are_named(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", DEFAULT_VERSION)
    for module in ("xxhash", "zmq"):
        next(tmp_path.rglob(f"{module}.py")).unlink()
    with pytest.raises(ConfigError, match=rf"{python} -m pip install 'xxhash>=3\.5' 'pyzmq>=27'"):
        find_engine_python(str(python))


def test_other_versions_are_refused_with_those_that_are_supported(tmp_path: Path) -> None:
    python, supported = make_environment(tmp_path / "env", "0.31.1"), r"vLLM 0\.31\.0 or 0\.32\.0"
    with pytest.raises(ConfigError, match=rf"{python} has vLLM 0\.31\.1, but .* {supported}; .*engine install vllm"):
        find_engine_python(str(python))
    with pytest.raises(ConfigError, match=rf"has no vLLM, but .* {supported}; install it with `tandem engine install"):
        find_engine_python(sys.executable)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is not a program; .*engine install vllm"),
        ("#!/bin/sh\nexit 3", "is not a Python interpreter: it ends with 3"),
        ("#!/no/such/program", "cannot run .*: No such file"),
        ("#!/bin/sh\necho 3 10 0.32.0", "is Python 3.10; Tandem needs 3.11 or newer"),
    ],
)
def test_what_is_no_interpreter_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "python"
    if content is not None:
        file.write_text(content)
        file.chmod(0o755)
    with pytest.raises(ConfigError, match=f"engine_python: .*{words}") as refused:
        find_engine_python(str(file))
    assert "\n" not in refused.value.message


def test_without_a_name_the_default_folder_is_used_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"engine: there is no vLLM .*`tandem engine install vllm`"):
        find_engine_python("")
    python = make_environment(default_folder(), DEFAULT_VERSION)
    (default_folder() / INCOMPLETE).touch()
    with pytest.raises(ConfigError, match="is not complete; install it again with `tandem engine install vllm`"):
        find_engine_python("")
    (default_folder() / INCOMPLETE).unlink()
    assert find_engine_python("").path == python


async def test_a_worker_is_started_in_the_environment_and_its_refusal_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/other/packages")
    python = make_refusing(tmp_path / "python")
    site = make_site(tmp_path, engine="vllm", engine_python=str(python), threads_per_worker=3, kv_cache_gib=0.5)
    exits: list[int] = []
    child = site.make_worker("prefill", "prefill-0", lambda name, pid, code: bool(exits.append(code)))
    await asyncio.wait_for(child.run(), 20)
    assert exits == [EXIT_BAD_CONFIG]
    assert child.last_error() == "vLLM cannot run this model: it has no layers"
    site.renew_preloaded()
    site.forget("prefill-0")
    site.close()
    assert Path(f"{python}.preload").read_text() == "tandem.vllm_worker.preload"
    arguments, environment, content = json.loads(Path(f"{python}.start").read_text())
    assert arguments == ["-P", "-m", "tandem.vllm_worker", str(tmp_path / "prefill-0.json")]
    assert Path(environment["PYTHONPATH"], "tandem/runtime").samefile(tandem.runtime.__path__[0])
    assert environment["PATH"].startswith(f"{tmp_path}:")
    expected = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "3",
        "NUMBA_NUM_THREADS": "3",
        "RAYON_NUM_THREADS": "3",
    }
    assert {key: environment.get(key) for key in expected} == expected
    config = msgspec.json.decode(content, type=VllmWorkerConfig)
    assert (config.worker_id, config.role) == ("prefill-0", "prefill")
    assert config.proxy_endpoints == [f"ipc://{tmp_path}/proxy-0.sock"]
    assert config.engine == VllmEngineConfig(
        str(DEMO_MODEL), kv_cache_bytes=1 << 29, gpu_memory_fraction=0.45, num_threads=3
    )


@pytest.mark.parametrize(("ranks", "is_warned"), [(2, True), (1, False)])
def test_more_ranks_than_cores_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, ranks: int, is_warned: bool
) -> None:
    """Workers of one rank do not spin."""
    monkeypatch.setattr(local, "num_cores", lambda: 2)
    python = make_refusing(tmp_path / "python")
    counts = {"prefill": 1, "decode": 2, "tensor_parallel_size": ranks}
    make_site(tmp_path, engine="vllm", engine_python=str(python), **counts).close()
    assert ("vLLM's 6 ranks spin while they wait, and may use 2 cores" in caplog.text) is is_warned
    assert is_warned or not caplog.text


def test_workers_on_gpus_are_not_forked(tmp_path: Path) -> None:
    python = make_refusing(tmp_path / "python")
    site = make_site(tmp_path, engine="vllm", engine_python=str(python), device="cuda")
    assert site.is_preloaded, "nothing is waited for"
    site.close()


async def test_on_a_node_of_ray_the_interpreter_is_found_there(tmp_path: Path) -> None:
    python = make_refusing(tmp_path / "python")
    actor = ProcessActor("decode-0")
    assert "has vLLM 0.30.0" in await actor.find_engine_python(str(make_refusing(tmp_path / "old", "0.30.0")))
    assert await actor.find_engine_python(str(python)) == ""
    await actor.start("tandem.vllm_worker", b"{}", {"OMP_NUM_THREADS": "1"}, [])
    end = await actor.wait()
    assert end.returncode == EXIT_BAD_CONFIG and "error: vLLM cannot run this model" in end.log
    _, environment, content = json.loads(Path(f"{python}.start").read_text())
    assert content == "{}"
    packages = Path(environment["PYTHONPATH"])
    assert Path(packages, "tandem/runtime").samefile(tandem.runtime.__path__[0])
    await actor.close()
    assert not packages.exists(), "the link is removed with the process"
    assert Path(tandem.runtime.__path__[0]).exists()


def engine_of(on_gpus: bool = False, **settings: Any) -> VllmEngineConfig:
    configs = ProcessConfigs(cluster_config(model="m", engine="vllm", **settings), ranks_per_gpu=2, on_gpus=on_gpus)
    return configs.vllm_worker("any", "worker-0", Place("ipc:///x")).engine


def test_workers_on_one_gpu_divide_its_memory() -> None:
    given = {"gpu_memory_fraction": 0.8, "tensor_parallel_size": 2, "quantization": "fp8", "max_num_seqs": 9}
    engine = engine_of(True, **given)
    assert (engine.device, engine.gpu_memory_fraction, engine.tensor_parallel_size) == ("cuda", 0.4, 2)
    assert (engine.quantization, engine.max_num_seqs, engine.kv_cache_bytes) == ("fp8", 9, 0)


def test_the_size_of_a_step_is_that_of_vllm_serve_unless_given(tmp_path: Path) -> None:
    python = str(make_refusing(tmp_path / "python"))
    for number, (given, expected) in enumerate([({}, 0), ({"max_num_batched_tokens": 4096}, 4096)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        site = make_site(folder, engine="vllm", engine_python=python, **given)
        site.make_worker("decode", "decode-0", lambda *_: True)
        site.close()
        config = msgspec.json.decode((folder / "decode-0.json").read_bytes(), type=VllmWorkerConfig)
        assert (config.engine.max_num_batched_tokens, config.engine.max_num_seqs) == (expected, 0)


def test_variables_of_vllm_reach_workers_that_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "250")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    environment = vllm_environment(on_gpus=False)
    assert environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "250"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "workers need it so"
    assert "PATH" not in environment


def test_vllm_computes_alike_in_every_batch_with_exact_on_gpus() -> None:
    """On CPUs its kernels for that do not run, and such a worker is refused."""
    assert vllm_environment(on_gpus=True, exact=True)["VLLM_BATCH_INVARIANT"] == "1"
    for on_gpus, exact in ((True, False), (False, True)):
        assert "VLLM_BATCH_INVARIANT" not in vllm_environment(on_gpus, exact)
    assert "on GPUs only" in batch_problem("cpu", is_batch_invariant=True)
    assert "without VLLM_BATCH_INVARIANT=1" in batch_problem("cuda", is_batch_invariant=False)
    assert batch_problem("cuda", is_batch_invariant=True) == ""


@pytest.mark.parametrize("num_bytes", [VLLM_MAX_FOLDER_BYTES, VLLM_MAX_FOLDER_BYTES + 1, MAX_FOLDER_BYTES])
def test_vllms_sockets_fit_into_any_folder(num_bytes: int) -> None:
    folder = Path(f"/tmp/{os.getpid()}-".ljust(num_bytes, "x"))
    folder.mkdir()
    base = EnginePython(Path(sys.executable)).environment(folder)["VLLM_RPC_BASE_PATH"]
    assert len(base) <= VLLM_MAX_FOLDER_BYTES and Path(base).samefile(folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{base}/{uuid.uuid4()}")
    assert len([file for file in folder.iterdir() if file.is_socket()]) == 1
    shutil.rmtree(folder)


@pytest.mark.parametrize("length", [20, 85])
def test_temporary_files_are_in_the_clusters_folder_and_sockets_fit_there(tmp_path: Path, length: int) -> None:
    """vLLM leaves some behind; the launcher removes the folder at the end."""
    folder = Path("/tmp") / f"tandem-test-{os.getpid()}-{length}".ljust(length - 5, "x")
    folder.mkdir(mode=0o700)
    try:
        temporary = EnginePython(Path(sys.executable)).environment(folder)["TMPDIR"]
        assert Path(temporary).samefile(folder / "tmp") and (folder / "tmp").stat().st_mode & 0o077 == 0
        assert len(f"{temporary}/pymp-12345678/listener-12345678") <= MAX_SOCKET_PATH_BYTES
    finally:
        shutil.rmtree(folder)


def test_workers_that_share_gpus_take_turns_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    turns = {}
    for name, num_decode in (("shared", 2), ("own", 1)):
        folder = tmp_path / name
        folder.mkdir()
        python = str(make_refusing(tmp_path / f"python-{name}"))
        site = make_site(folder, engine="vllm", engine_python=python, device="cuda", prefill=1, decode=num_decode)
        for worker in ("prefill-0", "decode-0", "decode-1")[: 1 + num_decode]:
            site.make_worker(worker.partition("-")[0], worker, lambda *_: True)  # type: ignore[arg-type]
            file = folder / f"{worker}.json"
            turns[name, worker] = msgspec.json.decode(file.read_bytes(), type=VllmWorkerConfig).load_turns
        site.close()
    assert turns["shared", "prefill-0"] == turns["shared", "decode-1"] != turns["shared", "decode-0"]
    assert [len(turns["shared", worker]) for worker in ("prefill-0", "decode-0")] == [1, 1]
    assert turns["own", "prefill-0"] == turns["own", "decode-0"] == [], "a worker that shares no GPU does not wait"
