"""What a report says of a host: the devices, and nothing that names or admits people."""

from __future__ import annotations

import getpass
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.deploy.cluster_config import load_config
from tandem.deploy.engine_check import host_facts
from tandem.deploy.engine_check.host_facts import (
    device_name,
    driver_version,
    engine_view,
    folder_name,
    host_hash,
    shown_environment,
    smi_text,
    uses_gpus,
    without_names,
)
from tandem.deploy.processes.gpu_environment import gpu_names

FAKE_TORCH = """
class Properties:
    name, major, minor, multi_processor_count, total_memory = "NVIDIA H200", 9, 0, 132, 150
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    get_device_properties = staticmethod(lambda number: Properties)
    can_device_access_peer = staticmethod(lambda one, other: one < other)
    class nccl:
        version = staticmethod(lambda: (2, 30, 7))
class distributed:
    is_nccl_available = staticmethod(lambda: True)
class version:
    cuda = "13.2"
__version__ = "2.15.0"
"""


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    yield
    for each in (device_name, driver_version, host_facts._names):
        each.cache_clear()


def driver(folder: Path, *models: str) -> Path:
    """Files as NVIDIA's driver shows them, of GPUs with these names."""
    for number, model in enumerate(models):
        gpu = folder / "gpus" / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 4\nGPU UUID: \t GPU-{number}\n")
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: gcc 13.3.0\n"
    )
    (folder / "version").write_text(text)
    return folder


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Makes an nvidia-smi that prints its arguments and the answer."""
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$*" in *--query-gpu=*|*topo*) echo "{answer}";; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_devices_are_counted_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = driver(tmp_path, "NVIDIA H200", "NVIDIA A100", "NVIDIA H200")
    monkeypatch.setattr(host_facts, "gpu_names", lambda: gpu_names(proc))
    monkeypatch.setattr(host_facts, "PROC", proc)
    assert device_name(False) == "CPU"
    assert device_name(True) == "1 x NVIDIA A100, 2 x NVIDIA H200"
    assert driver_version() == "570.86.15"


def test_nvidia_smi_names_what_the_driver_has_no_files_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, "NVIDIA L4")
    monkeypatch.setattr(host_facts, "PROC", tmp_path / "none")
    assert gpu_names(tmp_path / "none") == ["NVIDIA L4"]
    assert driver_version() == "NVIDIA L4", "what it answers to the question for the version"
    assert "NVIDIA L4" in smi_text()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert (gpu_names(tmp_path / "none"), smi_text()) == ([], "")


def test_whether_workers_use_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert uses_gpus(load_config(None, {})) and not uses_gpus(load_config(None, {"device": "cpu"}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not uses_gpus(load_config(None, {})) and uses_gpus(load_config(None, {"device": "cuda"}))


def test_torch_says_what_it_sees(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    view = engine_view(sys.executable, {"PYTHONPATH": str(tmp_path)})
    assert view["versions"]["python"] == platform.python_version()
    assert view["torch"] == {
        "version": "2.15.0",
        "cuda": "13.2",
        "is_available": True,
        "gpus": [["NVIDIA H200", 9, 0, 132, 150]] * 2,
        "peer_access": [[False, True], [False, False]],
        "nccl": [2, 30, 7],
    }


def test_an_engine_that_cannot_be_asked_has_an_error(tmp_path: Path) -> None:
    assert "No such file" in engine_view(str(tmp_path / "python"), {})["torch"]["error"]
    (tmp_path / "torch.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    view = engine_view(sys.executable, {"PYTHONPATH": str(tmp_path)})
    assert view["torch"] == {"error": "OSError: libcuda.so.1: cannot open shared object file"}


def test_variables_that_matter_are_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
        "VLLM_API_KEY": "secret-of-vllm",
        "HF_TOKEN": "hf_secretsecret",
        "TANDEM_API_KEY": "abc-key",
        "TOKENIZERS_PARALLELISM": "false",
        "LD_LIBRARY_PATH": "/opt/cuda",
        "NCCL_NET_SHARED_SECRET": "no",
        "SSH_CONNECTION": "10.1.2.3 22",
        "HTTPS_PROXY": "http://user:password@proxy",
    }
    assert shown_environment(given) == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "LD_LIBRARY_PATH": "/opt/cuda",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
    }


def test_texts_name_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("CLOUD_SECRET", "open-sesame")
    monkeypatch.setattr(platform, "node", lambda: "gpu7.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    host_facts._names.cache_clear()
    text = "/home/ada/models of ada on gpu7.example.org (gpu7, 10.1.2.3): open-sesame, hf_abcdefgh12345, 127.0.0.1:80"
    host = f"<host {host_hash()}>"
    assert without_names(text) == f"~/models of <user> on {host} ({host}, <address>): <secret>, <secret>, 127.0.0.1:80"
    assert without_names("adapters of canada: s3://key:secret@bucket") == "adapters of canada: s3://<secret>bucket"


def test_a_model_is_named_without_its_place() -> None:
    assert [folder_name(each) for each in ("/data/ada/llama", "org/model", "./mine", "~/mine", "")] == [
        "llama", "org/model", "mine", "mine", "the demo model",
    ]  # fmt: skip
